"""Policies and admissions by name, or anybody's own as package.module:Class (--policy, --admission).

A class is made without arguments. Its module is found as Python finds modules, and in the current folder.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.admission import Admission, Baseline, NoAdmission, SLOCheck
from mooncake_jax.sched.kvcache_centric import AdaptiveKVCacheCentric, CacheAware, KVCacheCentric
from mooncake_jax.sched.policies import LoadBalancing, Policy, RandomChoice, RoundRobin
from mooncake_jax.sched.predicted_admission import EarlyRejection, PredictedEarlyRejection, RequestLevelPrediction
from mooncake_jax.sched.texts import one_line, told

POLICIES: Mapping[str, Callable[[int, float], Policy]] = {  # of the seed and the kvcache_balancing_threshold
    "random": lambda seed, threshold: RandomChoice(seed),
    "round-robin": lambda seed, threshold: RoundRobin(),
    "load-balancing": lambda seed, threshold: LoadBalancing(),
    "cache-aware": lambda seed, threshold: CacheAware(),
    "kvcache-centric": lambda seed, threshold: KVCacheCentric(threshold),
    "adaptive": lambda seed, threshold: AdaptiveKVCacheCentric(threshold),
}
SERVING_ALL = "none"
ADMISSIONS: Mapping[str, Callable[[float | None], Admission]] = {  # of t_d
    SERVING_ALL: lambda decoding_seconds: NoAdmission(),
    "baseline": lambda decoding_seconds: Baseline(),
    "slo": lambda decoding_seconds: SLOCheck(),
    "early": lambda decoding_seconds: EarlyRejection(),
    "early-predicted": PredictedEarlyRejection,
    "request-level": lambda decoding_seconds: RequestLevelPrediction(),
}
# Those that make sense where instances are coupled: what these reuse is in no pool, and nobody knows of it.
COUPLED_POLICIES = ("random", "round-robin", "load-balancing")
DEFAULT_COUPLED_POLICY = "load-balancing"  # as vLLM's results in FAST25 have it
DEFAULT_POLICY, DEFAULT_ADMISSION = "kvcache-centric", "slo"

POLICY_METHODS = {"choose": ("request", "view", "now")}
ADMISSION_METHODS = {
    "on_arrival": ("request", "dispatch", "view", "now"),
    "on_prefilled": ("request", "decoding", "view", "now"),
    "on_completed": ("request", "output_tokens", "decoding_seconds"),
}


def load_policy(name: str, seed: int = 0, threshold: float = 2.0) -> Policy:
    """A fresh policy. seed is for random, threshold for the KVCache-centric ones: the adaptive one begins with it.
    Raises UsageError naming --policy.
    """
    if name in POLICIES:
        return POLICIES[name](seed, threshold)
    return _own("policy", name, POLICIES, POLICY_METHODS)


def load_admission(name: str, decoding_seconds: float | None = None) -> Admission:
    """A fresh admission. decoding_seconds: the t_d of early-predicted, None to learn it. Raises UsageError naming
    --admission.
    """
    if name in ADMISSIONS:
        return ADMISSIONS[name](decoding_seconds)
    return _own("admission", name, ADMISSIONS, ADMISSION_METHODS)


def _own(kind: str, path: str, known: Mapping[str, Any], methods: Mapping[str, tuple[str, ...]]) -> Any:
    flag = f"--{kind}={path}"
    module_name, colon, class_name = path.partition(":")
    if not (module_name and colon and class_name):
        raise UsageError(f"{flag}: no {kind} has this name; use {', '.join(known)}, or package.module:Class")
    module = _imported(flag, module_name)
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        there = f"it has {', '.join(classes)}" if classes else "it has no class at all"
        raise UsageError(f"{flag}: {module_name} has no class {class_name}; {there}")
    try:
        made = found()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it is anybody's code, which may call sys.exit()
        raise UsageError(
            f"{flag}: {class_name}() raised {one_line(told(error))}; it is made without arguments"
        ) from error
    for method, parameters in methods.items():
        if not _takes(made, method, parameters):
            signature = f"{method}({', '.join(parameters)})"
            raise UsageError(f"{flag}: {class_name} is no {kind}: it needs a method {signature}")
    return made


def _imported(flag: str, name: str) -> Any:
    if "" not in sys.path:  # an installed command does not search the current folder by itself
        sys.path.append("")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f"no module {name}" if _is_part(error.name, name) else f"{name} imports {error.name}, which is absent"
        raise UsageError(f"{flag}: {missing}; put its folder on PYTHONPATH, or start in it") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it is anybody's code, which may call sys.exit()
        raise UsageError(f"{flag}: importing {name} raised {one_line(told(error))}; mend it") from error


def _is_part(missing: str | None, name: str) -> bool:
    """Whether the module that was not found is the one asked for, or a package that it should be in."""
    return missing is not None and f"{name}.".startswith(f"{missing}.")


def _takes(made: object, method: str, parameters: tuple[str, ...]) -> bool:
    """Whether it can be called with so many arguments."""
    try:
        inspect.signature(getattr(made, method)).bind(*parameters)
    except Exception:  # it has none, or takes others; finding it may be anybody's code, too
        return False
    return True
