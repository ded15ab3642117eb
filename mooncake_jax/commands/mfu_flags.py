"""The prefill pool's MFU by flags (report figure 1; sched/mfu.py): --prefill_mfu_floor and --peak_tflops of `replay`
and `simulate`, and what a simulated pool reached of its nodes' peak.
"""

from collections.abc import Mapping
from typing import Any

from absl import flags

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.mfu import PrefillWork, prefill_mfu
from mooncake_jax.sched.profiles import NODE_PEAK_FLOPS, PROFILES
from mooncake_jax.sched.roofline import RooflineCost

_MOST_TFLOPS = 1e9


def define_mfu_flags(values: flags.FlagValues, peak: str) -> None:
    """peak: whose --peak_tflops is, and where it is from without the flag."""
    kwargs = {"flag_values": values}
    flags.DEFINE_float(
        "prefill_mfu_floor", None, "report whether the prefill pool's MFU reaches this share, up to 1", **kwargs
    )
    flags.DEFINE_float(
        "peak_tflops", None, f"peak of each prefill {peak}, in 1e12 FLOPs a second, which MFU is a share of", **kwargs
    )


def check_mfu_flags(values: flags.FlagValues) -> None:
    """Raises UsageError."""
    floor, peak = values.prefill_mfu_floor, values.peak_tflops
    if floor is not None and not 0 < floor <= 1:
        raise UsageError(f"--prefill_mfu_floor={floor}: a share of the peak is above 0, at most 1")
    if peak is not None and not 0 < peak <= _MOST_TFLOPS:
        raise UsageError(f"--peak_tflops={peak}: use more than 0, at most {_MOST_TFLOPS:g}, or leave it out")


def node_peak_flops(values: flags.FlagValues, cost: CostModel) -> float | None:
    """FLOPs a second of a simulated node: as --peak_tflops has it, or of the accelerators that its cost model is of;
    None where nobody knows. Raises UsageError for a floor then.
    """
    if values.peak_tflops is not None:
        return values.peak_tflops * 1e12
    if values.cost in PROFILES:
        return NODE_PEAK_FLOPS
    if isinstance(cost, RooflineCost):
        return cost.peak_flops
    if values.prefill_mfu_floor is not None:
        raise UsageError(
            f"--prefill_mfu_floor={values.prefill_mfu_floor} is a share of a peak, which --cost={values.cost} does not "
            "say: give --peak_tflops too"
        )
    return None


def simulated_mfu(
    work: Mapping[str, PrefillWork], model: LlamaConfig, peak_flops: float, duration_s: float, floor: float | None
) -> dict[str, Any]:
    """For summary.json. work: by prefill instance; peak_flops: of each of them."""
    flops = {node: done.flops(model) for node, done in work.items()}
    return prefill_mfu(flops, dict.fromkeys(flops, peak_flops), duration_s, floor)
