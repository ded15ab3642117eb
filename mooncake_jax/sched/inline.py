"""Inlining: a prefill that the decoding instance itself computes, between two of its steps (report 5).

The report keeps prefill and decoding apart, but for prompts that need no chunk: where the batch keeps its TBT SLO all
the same, such a prompt can be computed where it is decoded, which spares it a queue and the way of its KVCache. Its
KVCache does not enter the pool, since decoding instances lend it no memory; so nothing is reused, and nobody can reuse
it. What the report leaves open is when this pays: here, where the predicted TTFT is no later than that of the policy's
choice, which counts what that one reuses.

A stall is bearable if a step and the longest inlined prefill that is on its way, the one asked about included, fit into
the tightest TBT SLO of those who decode there or will: at most one is computed between two steps (decoding.py). Where
nobody names an SLO nothing says how long a stall may be: then only an instance that has nothing to decode inlines.
"""

import math

from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.view import ClusterView, RequestView


def inline_if_better(request: RequestView, chosen: Dispatch, view: ClusterView) -> Dispatch:
    """The policy's choice for a prompt that needs no chunk, or its decoding instance for both. Changes nothing."""
    load, cost = view.decoding[chosen.decoding], view.cost
    context = load.context + request.prompt_tokens
    if view.kv_tokens is not None and context > view.kv_tokens:  # it would wait for room before it is computed
        return chosen
    pace = load.inline_pace.factor
    prefills = [*load.inlining.values(), cost.prefill_compute(request.prompt_tokens, 0)]
    step = cost.step(len(load.requests) + 1, context)
    limit = min(load.tightest_tbt, view.slo_of(request).tbt)
    bearable = step + pace * max(prefills) <= limit if limit < math.inf else not load.requests
    steps = len(prefills) if load.requests else 0  # the one under way, and one after each prefill before its own
    ttft = steps * step + pace * math.fsum(prefills)
    if not bearable or ttft > chosen.ttft:
        return chosen
    return Dispatch(chosen.decoding, chosen.decoding, ttft, chosen.tbt, inlined=True)
