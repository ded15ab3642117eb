"""A weak router for local caches: of a few instances drawn at random, the one that has most of the prompt.

What FAST25 figure 10's local cache looks like: algorithm 1 without copying keeps ten separate caches nearly as good as
one, and the paper's were not. How the paper chose an instance it does not say.
"""

import sys

from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.placement import dispatch_to
from mooncake_jax.sched.policies import RandomChoice
from mooncake_jax.sched.view import ClusterView, RequestView


class BestOfSampled(RandomChoice):
    """sampled: different instances, each equally likely; of equal matches the first one drawn. The same seed draws the
    same again.
    """

    sampled, seed = 2, 0

    def __init__(self):
        super().__init__(self.seed)

    def choose(self, request: RequestView, view: ClusterView, now: float) -> Dispatch:
        left, drawn = list(view.prefill), []
        while left and len(drawn) < self.sampled:
            drawn.append(left.pop(self._draw() % len(left)))
        matched = view.pool.match(request.block_keys)
        return dispatch_to(max(drawn, key=matched.__getitem__), request, view, now)


def router(sampled: int, seed: int) -> str:
    """What --policy names for so many sampled and this seed: a class of its own, since policies are made without
    arguments.
    """
    name = f"BestOf{sampled}Seed{seed}"
    setattr(sys.modules[__name__], name, type(name, (BestOfSampled,), {"sampled": sampled, "seed": seed}))
    return f"{__name__}:{name}"
