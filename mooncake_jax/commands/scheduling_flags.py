"""Flags that `replay` and `simulate` share: where requests go, which are served, and what the pool evicts."""

import math
import re

from absl import flags

from mooncake_jax.cache.eviction import POLICIES
from mooncake_jax.errors import UsageError
from mooncake_jax.sched import plugins

LEAST_AFTER_S = 0.1  # roles are looked at ten times in this time: less, and looks are most of what Conductor does
# A flag, the one that says whether it means anything, and the values of that with which it does.
_ONLY_WITH = (
    ("kvcache_balancing_threshold", "policy", ("kvcache-centric", "adaptive")),
    ("decoding_time_s", "admission", ("early-predicted",)),
)

_LEAST_SPEED, _MOST_SPEED = 1e-3, 1e3
_MOST_INSTANCES = 9999


def define_scheduling_flags(values: flags.FlagValues) -> None:
    kwargs = {"flag_values": values}
    flags.DEFINE_enum("eviction", "lru", list(POLICIES), "which block of the KVCache pool leaves first", **kwargs)
    flags.DEFINE_float(
        "ttft_slo", math.inf, "reject what is predicted to take longer to its first token, seconds", **kwargs
    )
    flags.DEFINE_float("tbt_slo", math.inf, "reject what is predicted to take longer between tokens, seconds", **kwargs)
    flags.DEFINE_string(
        "policy",
        plugins.DEFAULT_POLICY,
        f"where requests go: {', '.join(plugins.POLICIES)}, or package.module:Class",
        **kwargs,
    )
    flags.DEFINE_float(
        "kvcache_balancing_threshold",
        2.0,
        "kvcache-centric copies blocks to an instance if the best match is more than so many times its own",
        **kwargs,
    )
    flags.DEFINE_string(
        "admission",
        plugins.DEFAULT_ADMISSION,
        f"which requests are served at all: {', '.join(plugins.ADMISSIONS)}, or package.module:Class",
        **kwargs,
    )
    flags.DEFINE_bool(
        "inline_prefill",
        False,
        "a decoding instance computes prompts of at most --prefill_chunk tokens itself, where the first token comes no "
        "later for it and those who decode there keep their TBT SLO",
        **kwargs,
    )
    flags.DEFINE_float(
        "decoding_time_s", None, "early-predicted takes every output to last so long (default: learned)", **kwargs
    )
    flags.DEFINE_bool(
        "elastic_roles", False, "idle prefill instances decode while decoding is short of instances", **kwargs
    )
    flags.DEFINE_float(
        "elastic_after_s", 30.0, "an instance changes its role once loads have diverged for so many seconds", **kwargs
    )


def check_scheduling_flags(values: flags.FlagValues) -> None:
    """Raises UsageError, also for a flag that would be ignored."""
    check_above_zero(values, "ttft_slo", "tbt_slo", "decoding_time_s", unit=" seconds")
    for name, chooser, choices in _ONLY_WITH:
        if values[name].present and values[chooser].value not in choices:
            raise UsageError(
                f"--{name}={values[name].value}: --{chooser}={values[chooser].value} has no use for it; leave it out, "
                f"or give --{chooser}={' or '.join(choices)}"
            )
    after_s = values["elastic_after_s"]
    if after_s.present and not values.elastic_roles:
        raise UsageError(f"--elastic_after_s={after_s.value} says when roles change: give --elastic_roles too")
    if not LEAST_AFTER_S <= after_s.value < math.inf:
        raise UsageError(f"--elastic_after_s={after_s.value}: use a number of seconds, at least {LEAST_AFTER_S}")


def as_written(values: flags.FlagValues, name: str) -> str:
    """A flag with its value, in one form of those that its user may have chosen."""
    value = values[name].value
    return f"--{name}={','.join(value) if isinstance(value, list) else value}"


def check_out(values: flags.FlagValues) -> None:
    """Raises UsageError for an --out without a name, which would be taken for none given."""
    if values.out == "":
        raise UsageError("--out= is empty; name what to write to, or leave it out")


def check_at_least(values: flags.FlagValues, least: int, *names: str) -> None:
    """Raises UsageError."""
    for name in names:
        if not least <= values[name].value < math.inf:
            raise UsageError(f"--{name}={values[name].value}: it must be at least {least}")


def check_instances(values: flags.FlagValues, least: int, name: str) -> None:
    """Raises UsageError."""
    if not least <= values[name].value <= _MOST_INSTANCES:
        raise UsageError(f"--{name}={values[name].value}: use {least} to {_MOST_INSTANCES} instances")


def check_speed(speed: float, asked_by: str) -> None:
    """asked_by: what the value follows in the error. Raises UsageError."""
    if not _LEAST_SPEED <= speed <= _MOST_SPEED:
        raise UsageError(f"{asked_by}{speed:g}: use {_LEAST_SPEED:g} to {_MOST_SPEED:g}")


def check_above_zero(values: flags.FlagValues, *names: str, unit: str = "") -> None:
    """Those that are given. Raises UsageError."""
    for name in names:
        if values[name].value is not None and not values[name].value > 0:
            raise UsageError(f"--{name}={values[name].value}: it must be above 0{unit}")


def instances_and_stages(text: str) -> tuple[int, int]:
    """What --prefill says. Raises UsageError."""
    found = re.fullmatch(r"([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?", text)
    if found is None:
        raise UsageError(
            f"--prefill={text}: write how many instances, or instances x stages of each, as in 2 or 2x4, to "
            f"{_MOST_INSTANCES}"
        )
    return int(found[1]), int(found[2] or 1)
