"""Where a run may use a cost model: `replay` and `simulate` refuse one that predicts negative times there.

A cost file vouches for its own range only, and a fit may turn negative beyond.
"""

from collections.abc import Sequence
from typing import Protocol

from mooncake_jax.request import Request
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import CostRange, check_predictions


class Cluster(Protocol):
    """What the configurations of both kinds of cluster have."""

    max_batch: int
    block_size: int

    @property
    def prefill_nodes(self) -> tuple[str, ...]: ...

    @property
    def decoding_pages(self) -> int: ...


def check_used(
    cost: CostModel, flag: str, cluster: Cluster, bytes_per_token: int, requests: Sequence[Request], longest: int
) -> None:
    """longest: tokens that a prompt may have. Raises UsageError, which names the flag, for a prediction that is
    negative or no number.

    Conductor predicts for all that it has sent to an instance, which may be more than decodes there at once: at most
    all requests. As many copies may leave an instance at once.
    """
    most = max(1, len(requests))
    tokens = sum(request.prompt_tokens + request.output_length for request in requests)
    used = CostRange(
        tokens=(1, longest),
        batch=(1, max(cluster.max_batch, most)),
        context=(1, max(cluster.decoding_pages * cluster.block_size, tokens)),
        nbytes=(1, longest * bytes_per_token),
        flows=(1, max(len(cluster.prefill_nodes), most)),
    )
    check_predictions(cost, used, flag)
