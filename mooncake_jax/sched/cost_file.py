"""Cost models as JSON files: whose costs they are, in which units, where they hold, and the numbers.

What is read has been checked: every field is there, the file is of the model at hand, and within its range no
prediction is negative. Every fault is a UsageError of one line.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.files import shown
from mooncake_jax.sched.cost import CostModel, PolynomialCost
from mooncake_jax.sched.cost_padded import PaddedCost
from mooncake_jax.sched.cost_table import Rows, TableCost
from mooncake_jax.sched.profiles import PROFILED_MODELS, PROFILES
from mooncake_jax.sched.roofline import Efficiency, RooflineCost

UNITS = {"time": "s", "length": "tokens", "size": "bytes"}
_KINDS = {"polynomial": PolynomialCost, "padded": PaddedCost, "table": TableCost, "roofline": RooflineCost}
_TERMS = {"prefill_coefficients": 3, "step_coefficients": 3}  # of the others 2
_SHOWN = 12  # hex digits of a fingerprint
_MOST, _MOST_WHOLE = 1e100, 2**53  # beyond all times and sizes, and within what floats hold
_CHECKED = 16  # predictions are looked at in so many equal parts of a range, and at powers of two


@dataclass(frozen=True, slots=True)
class CostRange:
    """Where a cost model is meant to be used, (least, most) of each: what it was measured on, or known to fit.

    tokens: of prompts, of which 0 to all but one may be reused; context: of a whole batch; nbytes: of a move.
    """

    tokens: tuple[int, int]
    batch: tuple[int, int]
    context: tuple[int, int]
    nbytes: tuple[int, int]
    flows: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CostFile:
    """model: its name, fingerprint: that of its weights and dtype (sources.model_fingerprint), None where any weights
    do. busy_cores: how many cores a prefill and a decoding step kept busy, None where not the CPU computed or nobody
    looked.
    """

    model: str
    fingerprint: bytes | None
    range: CostRange
    cost: CostModel
    busy_cores: tuple[float, float] | None = None


def resolve_cost(name_or_path: str, model: str, fingerprint: bytes | None = None) -> CostModel:
    """A profile's cost model, or that of the file at this path, for this model. Raises UsageError."""
    if name_or_path not in PROFILES:
        if not os.path.isfile(name_or_path):  # Path's own test raises for a name too long for the file system
            raise UsageError(f"cost {name_or_path!r} is neither a file nor one of {', '.join(PROFILES)}")
        return read_cost_file(Path(name_or_path), model, fingerprint).cost
    if model not in PROFILED_MODELS:
        raise UsageError(
            f"cost profile {name_or_path} is of {' or '.join(PROFILED_MODELS)}, not of {model}; "
            f"measure it with `mooncake-jax profile --model={model}`"
        )
    return PROFILES[name_or_path]


def write_cost_file(path: Path, file: CostFile) -> None:
    """Whole or not at all. Raises OSError."""
    cost = cost_to_json(file.cost)
    data = {
        "kind": cost.pop("kind"),
        "model": file.model,
        "fingerprint": None if file.fingerprint is None else file.fingerprint.hex(),
        "units": UNITS,
        "range": asdict(file.range),
        "busy_cores": file.busy_cores,
        "cost": cost,
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def cost_to_json(cost: CostModel) -> dict[str, Any]:
    """Its kind and its fields, one of this module's kinds; cost_from_json takes them."""
    kind = next(name for name, kind in _KINDS.items() if type(cost) is kind)
    values = {"kind": kind} | {field.name: getattr(cost, field.name) for field in fields(cost)}
    if isinstance(cost, RooflineCost):
        return values | {"model": cost.model.to_hf(), "efficiency": asdict(cost.efficiency)}
    return values


def read_cost_file(path: Path, model: str, fingerprint: bytes | None = None) -> CostFile:
    """The cost model at path, which must be of this model: of this fingerprint where both are known, else of this name.

    Raises UsageError for a missing or wrong field, another model, or a negative prediction.
    """
    data = _Object(_read_json(path), str(path))
    kind = _kind(data)
    if data.get("units") != UNITS:
        raise UsageError(f"{path}: units are {shown(data.get('units'))}; convert the numbers to {UNITS}")
    spread = data.object("range")
    file = CostFile(
        model=data.text("model"),
        fingerprint=data.hex("fingerprint"),
        range=CostRange(**{field.name: spread.interval(field.name) for field in fields(CostRange)}),
        cost=_cost_from_json(kind, data.object("cost"), str(path)),
        busy_cores=_busy_cores(data),
    )
    _check_model(file, path, model, fingerprint)
    check_predictions(file.cost, file.range, str(path))
    return file


def _busy_cores(data: "_Object") -> tuple[float, float] | None:
    if data.get("busy_cores") is None:
        return None
    prefill, step = data.numbers("busy_cores", 2)
    if not (prefill > 0 and step > 0):
        raise UsageError(f"{data.origin}: busy_cores is {[prefill, step]}; both must be above 0")
    return prefill, step


def check_predictions(cost: CostModel, used: CostRange, origin: str) -> None:
    """Raises UsageError for a prediction within this range that is negative or no number."""
    for what, seconds in _predictions(cost, used):
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise UsageError(f"{origin}: predicts {seconds:.6g} s for {what}; measure or fit it again")


def _predictions(cost: CostModel, used: CostRange) -> Iterator[tuple[str, float]]:
    for tokens in _places(*used.tokens):
        for prefix in _places(0, tokens - 1):
            yield f"a prefill of {tokens} tokens, {prefix} of them reused", cost.prefill(tokens, prefix)
            yield f"computing {tokens} tokens, {prefix} of them reused", cost.prefill_compute(tokens, prefix)
    for batch in _places(*used.batch):
        for context in _places(*used.context):
            yield f"a step of {batch} requests with {context} tokens of context", cost.step(batch, context)
    for nbytes in _places(*used.nbytes):
        for flows in _places(*used.flows):
            yield f"a transfer of {nbytes} bytes, one of {flows}", cost.transfer(nbytes, flows)
        for move, predict in (("loading", cost.load), ("reading", cost.read_ssd), ("writing", cost.write_ssd)):
            yield f"{move} {nbytes} bytes", predict(nbytes)


def _places(least: int, most: int) -> list[int]:
    even = {least + (most - least) * i // _CHECKED for i in range(_CHECKED + 1)}
    powers = {1 << i for i in range(most.bit_length())}
    return sorted(even | {power for power in powers if least <= power <= most})


def _check_model(file: CostFile, path: Path, model: str, fingerprint: bytes | None) -> None:
    if fingerprint is None or file.fingerprint is None:
        same, whose, wanted = file.model == model, file.model, model
    else:
        same = file.fingerprint == fingerprint
        whose = f"{file.model} ({file.fingerprint.hex()[:_SHOWN]})"
        wanted = f"{model} ({fingerprint.hex()[:_SHOWN]})"
    if not same:
        raise UsageError(f"{path}: costs of {whose}, not of {wanted}; run `mooncake-jax profile --model={model}`")


def cost_from_json(values: dict[str, Any], origin: str) -> CostModel:
    """What cost_to_json told, once it has been through JSON. Raises UsageError, which names the origin, for a missing
    or wrong field.
    """
    data = _Object(values, origin)
    return _cost_from_json(_kind(data), data, origin)


def _kind(data: "_Object") -> type:
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UsageError(f"{data.origin}: kind is {shown(kind)}; use one of {', '.join(_KINDS)}")
    return _KINDS[kind]


def _cost_from_json(kind: type, data: "_Object", origin: str) -> CostModel:
    names = [field.name for field in fields(kind)]
    values: dict[str, Any] = {name: data.numbers(name, _TERMS.get(name, 2)) for name in names if "coefficients" in name}
    try:
        if kind is TableCost:
            return TableCost(**values, **{name: data.rows(name) for name in names if "rows" in name})
        if kind is RooflineCost:
            model = LlamaConfig.from_hf(data.object("model").values, f"{origin}: model")
            shares = data.object("efficiency")
            efficiency = Efficiency(**{field.name: shares.number(field.name) for field in fields(Efficiency)})
            return RooflineCost(model, data.text("accelerator"), data.whole("tp"), efficiency, **values)
        if kind is PaddedCost:
            return PaddedCost(**values, chunk=data.whole("chunk"))
    except UsageError as error:
        raise error if str(error).startswith(origin) else UsageError(f"{origin}: {error}") from None
    return PolynomialCost(**values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a cost file that can be read") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({shown(str(error))}); run `mooncake-jax profile` again") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds a {type(data).__name__}, not an object; run `mooncake-jax profile` again")
    return data


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object whose fields are taken by type; raises UsageError naming the field that is missing or wrong."""

    values: dict[str, Any]
    origin: str

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise UsageError(f"{self.origin}: lacks {name!r}; run `mooncake-jax profile` again, or add it")
        return self.values[name]

    def object(self, name: str) -> "_Object":
        value = self.get(name)
        return _Object(value, f"{self.origin}: {name}") if isinstance(value, dict) else self._wrong(name, "an object")

    def text(self, name: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else self._wrong(name, "a text")

    def hex(self, name: str) -> bytes | None:
        value = self.get(name)
        try:
            return None if value is None else bytes.fromhex(value)
        except (TypeError, ValueError):
            return self._wrong(name, "null or hex digits")

    def whole(self, name: str) -> int:
        value = self.get(name)
        return value if _is_whole(value) else self._wrong(name, "a whole number, at least 0")

    def number(self, name: str) -> float:
        value = self.get(name)
        return float(value) if _is_number(value) else self._wrong(name, "a number")

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_number, value)):
            return self._wrong(name, f"a list of {count} numbers")
        return tuple(map(float, value))

    def interval(self, name: str) -> tuple[int, int]:
        value = self.get(name)
        if isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value)) and 1 <= value[0] <= value[1]:
            return value[0], value[1]
        return self._wrong(name, "two whole numbers from 1 on, the least and the most")

    def rows(self, name: str) -> Rows:
        value = self.get(name)
        try:
            rows = tuple((place, tuple((x, s) for x, s in points)) for place, points in value)
        except (TypeError, ValueError):
            rows = None
        if rows is None or not all(
            _is_whole(place) and all(_is_whole(x) and _is_number(s) for x, s in points) for place, points in rows
        ):
            return self._wrong(name, "a list of [whole number, [[whole number, seconds], ...]]")
        return tuple((place, tuple((x, float(s)) for x, s in points)) for place, points in rows)

    def _wrong(self, name: str, wanted: str) -> Any:
        raise UsageError(f"{self.origin}: {name} is {shown(self.values[name])}; it must be {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_WHOLE
