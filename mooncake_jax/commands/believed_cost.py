"""replay's --cost: what Conductor believes of the hardware, instead of what instances measure of themselves."""

from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.cost_file import resolve_cost
from mooncake_jax.sched.profiles import PROFILED_MODELS, PROFILES


def believed_cost(config: ClusterConfig, model: LlamaConfig, fingerprint: bytes) -> CostModel | None:
    """None where it is to be measured. Raises UsageError for a file of another model or dtype."""
    if config.cost is None:
        return None
    name = config.model
    if config.cost in PROFILES:  # which are for a shape, whatever its weights are called here
        name = next((known for known in PROFILED_MODELS if ARCHITECTURES[known] == model), name)
    return resolve_cost(config.cost, name, fingerprint)
