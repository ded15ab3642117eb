"""replay's --cost: what Conductor believes of the hardware, instead of what instances measure of themselves."""

from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import CostRange, check_predictions, resolve_cost
from mooncake_jax.sched.profiles import PROFILED_MODELS, PROFILES


def believed_cost(config: ClusterConfig, model: LlamaConfig, fingerprint: bytes) -> CostModel | None:
    """None where it is to be measured. Raises UsageError for a file of another model or dtype, and for predictions that
    are negative for anything that this cluster may do.
    """
    if config.cost is None:
        return None
    name = config.model
    if config.cost in PROFILES:  # which are for a shape, whatever its weights are called here
        name = next((known for known in PROFILED_MODELS if ARCHITECTURES[known] == model), name)
    cost = resolve_cost(config.cost, name, fingerprint)
    check_predictions(cost, _used(config, model), f"--cost={config.cost}")
    return cost


def _used(config: ClusterConfig, model: LlamaConfig) -> CostRange:
    """What a run with this configuration may ask of a cost model."""
    return CostRange(
        tokens=(1, model.max_context),
        batch=(1, config.max_batch),
        context=(1, config.decoding_pages * config.block_size),
        nbytes=(1, model.max_context * config.block_layout(model).bytes_per_token),
        flows=(1, config.prefill),
    )
