"""How much KVCache a simulated cluster can hold: at least a block on each side, and no more than can be listed."""

from absl import flags

from mooncake_jax.errors import UsageError
from mooncake_jax.simulate.config import SimulationConfig

MOST_BLOCKS = 1 << 25  # of all nodes' DRAM and SSDs: their places alone take a GiB


def check_memory(values: flags.FlagValues, config: SimulationConfig) -> None:
    """Raises UsageError naming the flag of `values` that config cannot be simulated with."""
    if config.dram_blocks < 1 and not config.coupled:
        block = config.bytes_per_token * config.block_size // config.stages
        raise UsageError(f"--dram_mib={values.dram_mib} does not hold one block, {block / 2**20:.1f} MiB: raise it")
    for name, of_each in (("dram_mib", config.dram_blocks), ("ssd_mib", config.ssd_blocks)):
        if (blocks := config.prefill * of_each) > MOST_BLOCKS:
            raise UsageError(
                f"--{name}={values[name].value} on {config.prefill} prefill instances makes {blocks:,} blocks of "
                f"KVCache, and at most {MOST_BLOCKS:,} can be simulated: lower it"
            )
    if config.decoding_pages < 1:
        tokens = values.device_kv_tokens
        raise UsageError(f"--device_kv_tokens={tokens} is less than a block of {config.block_size}: raise it")
