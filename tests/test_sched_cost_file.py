"""Cost files: what is written is read back as the same model, and every fault is one line that names it."""

import json

import pytest
from test_sched_cost import TRUE
from test_sched_cost_table import table

from mooncake_jax.errors import UsageError
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.cost_file import (
    CostFile,
    CostRange,
    check_predictions,
    read_cost_file,
    resolve_cost,
    write_cost_file,
)
from mooncake_jax.sched.cost_padded import PaddedCost
from mooncake_jax.sched.profiles import A800_LLAMA2_70B, PROFILES

RANGE = CostRange(tokens=(16, 2048), batch=(1, 16), context=(16, 16384), nbytes=(1, 1 << 26), flows=(1, 4))
PADDED = PaddedCost((0.02, 1.5e-3, 2e-7), (0.03, 2e-3, 1e-6), (1e-4, 2e-10), chunk=512)
COSTS = {"polynomial": TRUE, "padded": PADDED, "table": table(), "roofline": A800_LLAMA2_70B}
OURS, OTHERS = bytes(range(32)), bytes(32)
MISSING = object()


def write(path, cost, model="some-model", fingerprint=OURS):
    write_cost_file(path, CostFile(model, fingerprint, RANGE, cost))
    return path


def changed(path, kind, value, *where):
    """A file of this kind with the field at `where` changed, or taken out."""
    data = json.loads(write(path, COSTS[kind]).read_text())
    inside = data
    for name in where[:-1]:
        inside = inside[name]
    if value is MISSING:
        del inside[where[-1]]
    else:
        inside[where[-1]] = value
    path.write_text(json.dumps(data))
    return path


def complaint(path, model="some-model", fingerprint=OURS):
    with pytest.raises(UsageError) as caught:
        read_cost_file(path, model, fingerprint)
    told = str(caught.value)
    assert "\n" not in told and str(path) in told and len(told) < 400
    return told.replace(str(path), "FILE")


@pytest.mark.parametrize("kind", COSTS)
def test_what_was_written_is_read(tmp_path, kind):
    path = write(tmp_path / "cost.json", COSTS[kind])
    assert read_cost_file(path, "some-model", OURS) == CostFile("some-model", OURS, RANGE, COSTS[kind])
    assert [file.name for file in tmp_path.iterdir()] == ["cost.json"]
    assert json.loads(path.read_text())["kind"] == kind


def test_busy_cores_are_kept_where_they_are_known(tmp_path):
    path = tmp_path / "cost.json"
    write_cost_file(path, CostFile("some-model", OURS, RANGE, TRUE, (1.5, 0.5)))
    assert read_cost_file(path, "some-model", OURS).busy_cores == (1.5, 0.5)
    for wrong, told in (([1.5], "a list of 2 numbers"), ([0, 1], "both must be above 0"), ("x", "a list of 2 numbers")):
        assert told in complaint(changed(path, "polynomial", wrong, "busy_cores"))


def test_predictions_survive_the_file_bit_for_bit(tmp_path):
    for kind, cost in COSTS.items():
        read = read_cost_file(write(tmp_path / kind, cost), "some-model", OURS).cost
        assert read.prefill(1234, 567).hex() == cost.prefill(1234, 567).hex()
        assert read.step(7, 4321).hex() == cost.step(7, 4321).hex()
        assert read.transfer(123456, 3).hex() == cost.transfer(123456, 3).hex()


@pytest.mark.parametrize("kind", COSTS)
def test_every_field_must_be_there(tmp_path, kind):
    data = json.loads(write(tmp_path / "whole.json", COSTS[kind]).read_text())
    nested = [(name,) for name in data] + [("range", n) for n in data["range"]] + [("cost", n) for n in data["cost"]]
    if kind == "roofline":
        nested += [("cost", "efficiency", name) for name in data["cost"]["efficiency"]]
        nested += [("cost", "model", "num_hidden_layers")]
    for where in nested:
        told = complaint(changed(tmp_path / "cost.json", kind, MISSING, *where))
        assert where[-1] in told, f"{where}: {told}"


@pytest.mark.parametrize(
    ("kind", "value", "where", "told"),
    [
        ("polynomial", "cubic", ("kind",), "FILE: kind is 'cubic'; use one of polynomial, padded, table, roofline"),
        ("polynomial", ["x"], ("kind",), "FILE: kind is ['x']; use one of"),
        ("polynomial", {"time": "ms"}, ("units",), "FILE: units are {'time': 'ms'}; convert the numbers to"),
        ("polynomial", 3, ("model",), "FILE: model is 3; it must be a text"),
        ("polynomial", "xyz", ("fingerprint",), "FILE: fingerprint is 'xyz'; it must be null or hex digits"),
        ("polynomial", [1], ("fingerprint",), "FILE: fingerprint is [1]; it must be null or hex digits"),
        ("polynomial", [], ("range",), "FILE: range is []; it must be an object"),
        ("polynomial", [2, 1], ("range", "tokens"), "FILE: range: tokens is [2, 1]; it must be two whole numbers"),
        ("polynomial", [0, 1], ("range", "batch"), "FILE: range: batch is [0, 1]; it must be two whole numbers"),
        ("polynomial", [1, 10**400], ("range", "batch"), "it must be two whole numbers"),
        ("polynomial", [1, 2], ("cost", "step_coefficients"), "step_coefficients is [1, 2]; it must be a list of 3"),
        ("polynomial", [1, 10**400], ("cost", "load_coefficients"), "it must be a list of 2 numbers"),
        ("polynomial", [1, float("nan")], ("cost", "load_coefficients"), "load_coefficients is [1, nan]; it must be"),
        ("polynomial", [1, True], ("cost", "load_coefficients"), "load_coefficients is [1, True]; it must be a list"),
        ("table", [], ("cost", "prefill_rows"), "FILE: prefill_rows has no points; measure some"),
        ("table", [[1, [[5, -2.0]]]], ("cost", "step_rows"), "FILE: step_rows says -2.0 s at 1, 5; it must be a time"),
        ("table", [[1, 2]], ("cost", "step_rows"), "step_rows is [[1, 2]]; it must be a list of [whole number"),
        ("table", {"a": 1}, ("cost", "step_rows"), "step_rows is {'a': 1}; it must be a list of [whole number"),
        ("roofline", "abacus", ("cost", "accelerator"), "FILE: accelerator is 'abacus'; use one of a800"),
        ("roofline", 0, ("cost", "tp"), "FILE: tp is 0; it must be at least 1"),
        ("roofline", 1.5, ("cost", "tp"), "FILE: cost: tp is 1.5; it must be a whole number, at least 0"),
        ("roofline", 2, ("cost", "efficiency", "memory"), "FILE: efficiency memory is 2.0; it must be above 0"),
        ("roofline", "gpt", ("cost", "model", "model_type"), "FILE: model: model_type is 'gpt'; only 'llama' models"),
    ],
)
def test_wrong_fields_are_told(tmp_path, kind, value, where, told):
    assert told in complaint(changed(tmp_path / "cost.json", kind, value, *where))


@pytest.mark.parametrize(
    ("field", "coefficients", "told"),
    [
        ("prefill_coefficients", [-1.0, 1e-3, 0.0], "FILE: predicts -0.984 s for a prefill of 16 tokens, 0 of them"),
        ("step_coefficients", [1.0, 0.0, -1e-3], "s for a step of 1 requests with 1024 tokens of context"),
        ("transfer_coefficients", [0.0, -1e-9], "FILE: predicts -1e-09 s for a transfer of 1 bytes, one of 1"),
        ("flow_coefficients", [-1.0, 0.0], "for a transfer of 1 bytes, one of 2"),
        ("load_coefficients", [-1.0, 0.0], "FILE: predicts -1 s for loading 1 bytes"),
        ("ssd_read_coefficients", [-1.0, 0.0], "FILE: predicts -1 s for reading 1 bytes"),
        ("ssd_write_coefficients", [0.0, -1.0], "for writing 1 bytes; measure or fit it again"),
    ],
)
def test_negative_predictions_in_the_range_are_refused(tmp_path, field, coefficients, told):
    assert told in complaint(changed(tmp_path / "cost.json", "polynomial", coefficients, "cost", field))


def test_what_is_negative_inside_the_range_only_is_refused():
    # Seconds of a prefill without reuse: 1 - 2e-3 n + 1e-6 n^2 * 0.99 = below 0 near n = 1000, above at 16 and 2048.
    cost = PolynomialCost((1.0, -2e-3, 1.98e-6), (0.0, 0.0, 0.0), (0.0, 0.0))
    assert cost.prefill(16, 0) > 0 and cost.prefill(2048, 0) > 0
    with pytest.raises(UsageError, match="here: predicts -0.0.* s for a prefill of .* tokens, 0 of them reused"):
        check_predictions(cost, RANGE, "here")


def test_beyond_its_range_a_model_may_predict_anything():
    cost = PolynomialCost((0.0, 0.0, 0.0), (1.0, 0.0, -1e-6), (0.0, 0.0))
    assert cost.step(1, 10**7) < 0
    check_predictions(cost, RANGE, "here")


@pytest.mark.parametrize(
    ("written", "model", "fingerprint", "told"),
    [
        (OURS, "some-model", OURS, None),
        (OURS, "a-path/of.gguf", OURS, None),  # the same weights under another name
        (None, "some-model", OURS, None),
        (OURS, "some-model", None, None),
        (OURS, "some-model", OTHERS, "costs of some-model (000102030405), not of some-model (000000000000)"),
        (None, "other", OURS, "costs of some-model, not of other; run `mooncake-jax profile --model=other`"),
        (OURS, "other", None, "costs of some-model, not of other"),
    ],
)
def test_another_models_file_is_refused(tmp_path, written, model, fingerprint, told):
    path = write(tmp_path / "cost.json", TRUE, fingerprint=written)
    if told is None:
        assert read_cost_file(path, model, fingerprint).cost == TRUE
    else:
        assert told in complaint(path, model, fingerprint)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "holds a list, not an object"),
        (None, "No such file or directory; name a cost file that can be read"),
    ],
)
def test_files_that_hold_no_costs_are_refused(tmp_path, content, told):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_bytes(content)
    assert told in complaint(path)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "cost.json").mkdir()
    with pytest.raises(OSError):
        write(tmp_path / "cost.json", TRUE)
    assert [file.name for file in tmp_path.iterdir()] == ["cost.json"]


def test_costs_by_name_or_path(tmp_path):
    path = write(tmp_path / "cost.json", TRUE)
    assert resolve_cost(str(path), "some-model", OURS) == TRUE
    assert resolve_cost("fast25", "llama2-70b") is PROFILES["fast25"]
    with pytest.raises(UsageError, match="cost profile fast25 is of llama2-70b or .*, not of smollm2-135m; measure"):
        resolve_cost("fast25", "smollm2-135m")
    with pytest.raises(UsageError, match="cost 'slow25' is neither a file nor one of micro, arxiv, fast25, vllm"):
        resolve_cost("slow25", "llama2-70b")
