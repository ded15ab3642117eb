"""Predictions that every policy shares: the TTFT at a prefill instance, and the decoding instance (report 6.1).

Pure functions of the view.
"""

import math

from mooncake_jax.sched.decisions import Dispatch
from mooncake_jax.sched.view import ClusterView, RequestView


def dispatch_to(prefill: str, request: RequestView, view: ClusterView, now: float) -> Dispatch:
    """Prefill at this instance, with what it has of the prompt, and decode where the predicted TBT is least; a coupled
    instance does both.
    """
    queue = view.prefill[prefill]
    reused = view.reusable_tokens(view.pool.matched(prefill, request.block_keys), request.prompt_tokens)
    ttft = queue.seconds(now) + queue.pace.factor * view.cost.prefill(request.prompt_tokens, reused)
    decoding, tbt = _joining(prefill, request, view) if view.coupled else least_loaded(request, view)
    return Dispatch(prefill, decoding, ttft, tbt)


def _joining(node: str, request: RequestView, view: ClusterView) -> tuple[str, float]:
    """This decoding instance, and its predicted TBT in seconds once the request has joined it."""
    load = view.decoding[node]
    return node, view.cost.step(len(load.requests) + 1, load.context + request.prompt_tokens)


def least_loaded(request: RequestView, view: ClusterView) -> tuple[str, float]:
    """The decoding instance with the least predicted TBT once this request has joined it, among those with room for its
    KVCache; where none has room, the one with the least KVCache. Equals: less KVCache first, then fewer requests, then
    in the view's order. Returns its name and that TBT in seconds.
    """
    step, tokens = view.cost.step, request.prompt_tokens
    lightest = _lightest(view, math.inf if view.kv_tokens is None else view.kv_tokens - tokens)
    if not lightest:
        node, load = min(view.decoding.items(), key=lambda item: item[1].context)
        return node, step(len(load.requests) + 1, load.context + tokens)
    tbt, _, batch = min((step(batch + 1, context + tokens), context, batch) for batch, (context, _) in lightest.items())
    return lightest[batch][1], tbt


def _lightest(view: ClusterView, most_context: float) -> dict[int, tuple[int, str]]:
    """(context, node) of the instance with the least KVCache, at most so much, for each number of requests.

    A step costs no less for more context (sched/cost.py), so the others need no prediction of their own.
    """
    lightest: dict[int, tuple[int, str]] = {}
    for node, load in view.decoding.items():
        context, batch = load.context, len(load.requests)
        if context <= most_context and (batch not in lightest or context < lightest[batch][0]):
            lightest[batch] = context, node
    return lightest
