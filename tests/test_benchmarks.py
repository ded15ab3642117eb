"""benchmarks/: the whole run on a tiny model, what it refuses, and what its figures mean. Never how fast it is."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import DATA

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import RopeDivisors

FOLDER = Path(__file__).parent.parent / "benchmarks"
TINY = DATA / "tiny-llama2"
PEER = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
needs_peer = pytest.mark.skipif(not PEER, reason="torch and transformers are not installed")


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def run_engine(*arguments, script="engine.py"):
    """Exit code, lines of output, and errors."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    # One thread: torch's wait for each other by turning, which takes minutes where others use the machine.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture
def short(tmp_path):
    """tiny-llama2 with a context of 512 tokens, so that it is measured in seconds."""
    folder = tmp_path / "short"
    folder.mkdir()
    for path in TINY.iterdir():
        os.symlink(path, folder / path.name)
    config = json.loads((TINY / "config.json").read_text()) | {"max_position_embeddings": 512}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def figures():
    """The names of float32's rows on a model with a context of 512 tokens."""
    yield "prefill 512, of the product's rate"
    if PEER:
        yield "prefill 512, of transformers'"
    yield "prefill 512 by layers, of one scan's time"
    for batch in (1, 4, 16):
        yield f"decoding, batch {batch}, of one reading"
        if PEER and batch != 4:
            yield f"decoding, batch {batch}, of transformers'"
        yield f"decoding, batch {batch}, on the host"


def test_a_run_prints_each_row_and_writes_all(short, tmp_path):
    file = tmp_path / "rows.json"
    code, (title, heads, *lines), errors = run_engine(f"--model={short}", "--dtype=float32", f"--json={file}")
    assert code == 0, errors
    assert title.startswith(f"{short} on cpu, JAX {jax.__version__}, chunks of 512 tokens")
    assert heads.split() == ["figure", "value", "unit", "reference", "ratio", "target", "ok"]
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == [f"float32 {name}" for name in figures()]
    for row, line in zip(rows, lines, strict=True):
        assert line.startswith(row["name"])
        assert line.index(f"{row['unit']}") == heads.index("unit")
        assert row["value"] > 0
        if row["reference"] is not None:
            assert row["ratio"] == pytest.approx(row["value"] / row["reference"])
        assert (row["ok"] is None) == (row["target"] is None)


def test_a_printed_row_outlives_its_process():
    code = "import os, table; table.print_row(table.row('x', 1.0, 'ms')); os._exit(1)"  # flushes nothing
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=FOLDER)
    assert done.stdout.split() == ["x", "1", "ms"]


def test_a_run_that_breaks_off_keeps_its_rows(benchmark, monkeypatch, tmp_path):
    engine, file = fresh(benchmark), tmp_path / "rows.json"

    def broken_off(_):
        yield benchmark("table").row("first", 1.0, "ms")
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "measured", broken_off)
    with pytest.raises(KeyboardInterrupt):
        engine.main([f"--model={TINY}", f"--json={file}"])
    assert [row["name"] for row in json.loads(file.read_text())] == ["first"]


def fresh(benchmark):
    """engine.py, its flags at their defaults."""
    engine = benchmark("engine")
    for name in ("model", "dtype", "json"):
        engine.FLAGS[name].unparse()
    return engine


def refused(benchmark, *arguments):
    """The one line that a run in this process ends with."""
    engine = fresh(benchmark)
    with pytest.raises(UsageError) as caught:
        engine.main(list(arguments))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--dtype=float32,bogus", "--dtype=float32,bogus: use float32, bfloat16 or both with a comma"),
        ("--json=no/such/rows.json", "--json=no/such/rows.json: No such file or directory; name a file in a folder"),
        ("--nothing=1", "nothing"),
    ],
)
def test_bad_flags_end_with_one_line_before_anything_is_measured(argument, told):
    code, lines, errors = run_engine(f"--model={TINY}", argument)
    assert (code, lines, errors.count("\n")) == (2, [], 1)
    assert errors.startswith("benchmarks/engine.py: ") and told in errors


def test_other_bad_flags(benchmark, capsys):
    assert refused(benchmark, f"--model={TINY}", "--dtype=").startswith("--dtype=: use float32")
    assert refused(benchmark, f"--model={TINY}", "--json=.").startswith("--json=.: Is a directory; name a file")
    assert refused(benchmark, "--model=nothing").startswith("model 'nothing' is neither")
    assert refused(benchmark, "loose").startswith("'loose' is no flag")
    assert capsys.readouterr().out == ""


def test_a_context_too_short_to_measure_is_refused(benchmark, short):
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 32}
    (short / "config.json").write_text(json.dumps(config))
    assert "its context is 32 tokens; use a model with at least 42" in refused(benchmark, f"--model={short}")


def test_targets(benchmark):
    table = benchmark("table")
    assert [table.at_least(0.7).met_by(value) for value in (0.69, 0.7, 0.71)] == [False, True, True]
    assert [table.at_most(1.4).met_by(value) for value in (1.39, 1.4, 1.41)] == [True, True, False]
    assert (str(table.at_least(0.7)), str(table.at_most(2.0))) == (">= 0.7", "<= 2")


def test_a_target_is_for_the_ratio_or_where_there_is_no_reference_for_the_value(benchmark):
    table = benchmark("table")
    assert table.row("x", 6.0, "ms", 4.0, table.at_most(1.4)) == table.Row("x", 6.0, "ms", 4.0, 1.5, "<= 1.4", False)
    assert table.row("x", 0.5, "ms", None, table.at_most(1.0)) == table.Row("x", 0.5, "ms", None, None, "<= 1", True)
    assert table.row("x", 3.0, "ms", 2.0) == table.Row("x", 3.0, "ms", 2.0, 1.5, None, None)


def test_the_turns_of_interleaved_work(benchmark):
    calls = []
    work = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert benchmark("table").interleaved(work, 3).keys() == {"a", "b"}
    assert "".join(calls) == "abababab"  # one turn of each to warm up


def test_useful_flops_by_hand(benchmark):
    config = replace(
        ARCHITECTURES["smollm2-135m"],
        hidden_size=10,
        intermediate_size=7,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
    )
    projections = 10 * 24 + 2 * 10 * 12 + 24 * 10  # q, k and v, o
    mlp = 3 * 10 * 7
    pairs = 1 + 2 + 3 + 4 + 5  # of a query and the keys it sees
    attention = 4 * pairs * 6 * 2  # heads x pairs x head dim, for scores and for values
    by_hand = 3 * 2 * (5 * (projections + mlp) + attention)  # a product and a sum each
    assert benchmark("engine").useful_flops(config, 5) == by_hand


@needs_peer
@pytest.mark.parametrize("name", ["tiny2", "tiny3"])
def test_transformers_computes_the_same_model(benchmark, request, name):
    assert benchmark("engine_peers").transformers_peer(request.getfixturevalue(name)) is not None


def with_divisors(model, divisors):
    return replace(model, config=replace(model.config, rope_scaling=RopeDivisors(divisors)))


@needs_peer
def test_transformers_gets_the_divisors_of_a_gguf(benchmark, tiny3):
    assert benchmark("engine_peers").transformers_peer(with_divisors(tiny3, (1.0, 2.0, 4.0, 8.0))) is not None


@needs_peer
def test_another_model_in_transformers_is_refused(benchmark, tiny3):
    peers = benchmark("engine_peers")
    peer = peers.TransformersPeer(with_divisors(tiny3, (1.0, 1.0, 1.0, 1.0)))
    with pytest.raises(UsageError, match="transformers' logits differ from ours by .*, more than 0.01: .*; measure"):
        peers.check_logits(tiny3, peer)


@needs_peer
def test_weights_that_transformers_lacks_or_does_not_know_are_refused(benchmark, tiny3):
    with pytest.raises(RuntimeError, match="Missing key"):
        benchmark("engine_peers").TransformersPeer(replace(tiny3, layers=tiny3.layers[:-1]))


@needs_peer
def test_in_bfloat16_rotary_frequencies_stay_float32(benchmark, tiny3):
    peer = benchmark("engine_peers").TransformersPeer(tiny3)
    peer.set_dtype("bfloat16")
    frequencies = peer._model.model.rotary_emb.inv_freq.numpy()
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, tiny3.config.rope_frequencies(), rtol=1e-6)


@pytest.mark.slow
def test_a_pipeline_is_compared_with_one_stage_and_with_the_other_ways(tmp_path):
    file = tmp_path / "rows.json"
    models = (f"--model={TINY}", f"--links_model={TINY}")
    arguments = ("--lengths=40,600", "--links_length=600", "--prefill_chunk=64", "--repeats=1", f"--json={file}")
    code, lines, errors = run_engine(*models, *arguments, script="pipeline.py")
    assert code == 0, errors
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert len(lines) == len(rows) + 1
    assert rows["prompt 600, 10 chunks: ticks"]["value"] == 11
    assert rows["prompt 600, places without work"]["value"] == pytest.approx(100 * 2 / 22)
    assert 1 < rows["prompt 600, speed-up of two stages, of the ideal"]["reference"] <= 2
    # Nine chunks of float32 [64, 64] and one of [32, 64]; the others send each layer's sums or KV.
    ways = ("cpp", "tp", "sp")
    sent = {way: rows[f"600 tokens, {way}: sent, of cpp's"]["value"] * 1e6 for way in ways}
    assert (9 * 64 + 32) * 64 * 4 <= sent["cpp"] < min(sent["tp"], sent["sp"])
    slow = [name for name in rows if "Gbps" in name]
    assert [name.split(":")[0] for name in slow] == [
        f"600 tokens, {way} at {gbps} Gbps" for gbps in (10, 1) for way in ways
    ]


def test_a_pipeline_whose_rows_cannot_be_written_is_not_measured():
    code, _, errors = run_engine(f"--model={TINY}", "--json=no/such/rows.json", script="pipeline.py")
    assert code == 2 and errors.startswith("benchmarks/pipeline.py: --json=no/such/rows.json: No such file")


@pytest.mark.parametrize("lengths", ["x", "0", "40,", "5000"])
def test_lengths_that_cannot_be_are_refused(lengths):
    code, _, errors = run_engine(f"--model={TINY}", f"--lengths={lengths}", script="pipeline.py")
    assert code == 2 and f"--lengths={lengths}: name numbers of tokens from 1 to the model's context of 2048" in errors
    assert len(errors.splitlines()) == 1
