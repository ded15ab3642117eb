"""`mooncake-jax replay` with prefill instances of several stages, each stage a rank, on a tiny model."""

import sys
import time

import pytest
from cluster_run import (
    REPLAY,
    TINY,
    finish,
    kill,
    left_behind,
    needs_ulfm,
    prompt,
    ranks,
    replay,
    replayed_differences,
    start,
    wait_for_message,
    wait_for_rows,
    write_prompts,
)

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.request import COMPLETED, REJECTED

CHUNK = "--prefill_chunk=64"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Lengths below and above a chunk, a burst, repeated prompts, one foreign id."""
    rows = [prompt("first", 100, seed=1), prompt("again", 100, seed=1, arrival_s=2.0)]
    rows += [
        prompt(f"burst{i}", length, seed=10 + i, arrival_s=2.5) for i, length in enumerate((1, 2, 63, 64, 65, 700))
    ]
    rows += [prompt(f"shared{i}", 333, seed=40, arrival_s=4.0) for i in range(4)]
    rows += [prompt("foreign", 5, arrival_s=2.5) | {"prompt_ids": [1, 320, 2]}]
    rows += [prompt("drawn", 60, seed=5, temperature=0.8, max_tokens=20, arrival_s=4.5)]
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture(scope="module")
def single(prompts, tmp_path_factory):
    return replay(tmp_path_factory.mktemp("single") / "out", TINY, f"--prompts={prompts}", "--prefill=1", CHUNK)


@pytest.fixture(scope="module")
def staged(prompts, tmp_path_factory):
    """Two instances of two stages, on ranks that mpiexec has started."""
    command = [*mpiexec_command(6), *REPLAY]
    out = tmp_path_factory.mktemp("staged") / "out"
    return replay(out, TINY, f"--prompts={prompts}", "--prefill=2x2", "--decode=1", CHUNK, command=command)


def test_stages_give_the_tokens_of_one_rank(single, staged):
    assert staged.code == 0, staged.stderr
    expected, found = single.rows(), staged.rows()
    assert {name: row["token_ids"] for name, row in found.items()} == {n: r["token_ids"] for n, r in expected.items()}
    statuses = {name: row["status"] for name, row in found.items()}
    assert statuses == {name: REJECTED if name == "foreign" else COMPLETED for name in statuses}
    assert {row["prefill_instance"] for row in found.values()} == {"prefill0", "prefill1", None}
    assert found["again"]["reused_tokens"] == 96


def test_stages_give_the_logits_of_one_rank(single, staged):
    def logits(run):
        names = {m["dispatch"]: m["request"]["id"] for m in run.messages("StartPrefill")}
        return {names[m["dispatch"]]: dict(map(tuple, m["top_logits"])) for m in run.messages("PrefillDone")}

    expected = logits(single)
    assert len(expected) == 13
    assert logits(staged) == {name: pytest.approx(top, abs=1e-4) for name, top in expected.items()}


def test_a_pipeline_takes_the_next_prompt_before_the_last_one_is_done(staged):
    running, most = {"prefill0": set(), "prefill1": set()}, 0
    for event in staged.events():
        message, node = event["message"], event["node"]
        if node in running and message["type"] in ("PrefillStarted", "PrefillDone"):
            (running[node].add if message["type"] == "PrefillStarted" else running[node].discard)(message["dispatch"])
            most = max(most, len(running[node]))
    assert most > 1


def test_all_ranks_are_told_of(staged):
    assert set(staged.summary()["engine"]["compiled"]) == {
        "prefill0",
        "prefill0.1",
        "prefill1",
        "prefill1.1",
        "decode0",
    }
    for node in ("prefill0 ", "prefill1.1 "):
        assert f"{node}is ready" in staged.stdout


def test_fresh_actors_answer_the_recorded_messages_alike(staged):
    settings = ActorSettings.from_json(staged.summary()["settings"])
    assert settings.config.stages == 2
    assert {event["node"] for event in staged.events()} == {"conductor", "prefill0", "prefill1", "decode0"}
    assert replayed_differences(staged, settings.actors()) == []


@pytest.mark.slow
def test_tensor_parallel_stages_give_the_same_tokens(single, prompts, tmp_path):
    run = replay(tmp_path / "out", TINY, f"--prompts={prompts}", "--prefill=1x2", "--tp=2", CHUNK)
    assert run.code == 0, run.stderr
    expected = single.rows()
    assert {name: row["token_ids"] for name, row in run.rows().items()} == {
        n: r["token_ids"] for n, r in expected.items()
    }


@pytest.mark.slow
@needs_ulfm
@pytest.mark.parametrize("victim", [pytest.param(1, id="first stage"), pytest.param(2, id="last stage")])
def test_an_instance_ends_with_any_of_its_stages_and_the_other_serves_on(tmp_path, victim):
    rows = [prompt(f"r{i}", 500, seed=i, max_tokens=3, arrival_s=0.25 * i) for i in range(40)]
    path = write_prompts(tmp_path / "prompts.jsonl", rows)
    process = start(tmp_path / "out", TINY, f"--prompts={path}", "--prefill=2x2", "--prefill_chunk=16")
    wait_for_rows(process, tmp_path / "out", 3)
    kill(ranks(tmp_path / "out")[victim])
    killed = time.monotonic()
    wait_for_message(process, tmp_path / "out", "NodeLost")
    assert time.monotonic() - killed < 10
    run = finish(process, tmp_path / "out")
    assert len(run.rows()) == 40
    assert [m["node"] for m in run.messages("NodeLost")] == ["prefill0"]
    [lost_at] = [event["now"] for event in run.events() if event["message"]["type"] == "NodeLost"]
    late = [row for row in run.rows().values() if row["arrival_s"] > lost_at]
    assert late
    assert {(row["status"], row["prefill_instance"]) for row in late} == {(COMPLETED, "prefill1")}
    assert "prefill0 is lost" in run.stderr
    assert not ranks(tmp_path / "out")
    assert not left_behind(process)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--prefill=2x"], "--prefill=2x: write how many instances, or instances x stages of each, as in 2 or 2x4"),
        (["--prefill=1x0"], "--prefill=1x0: write how many instances"),
        (["--prefill=1x5"], "--prefill=1x5: a stage holds at least one of the model's 4 layers; use 1 to 4 stages"),
        (["--tp=3"], "--tp=3: it must divide the model's 2 KV heads"),
        (["--tp=0"], "--tp=0: it must be at least 1"),
        (["--prefill=2x2", "--prefill_chunk=4096"], "--prefill_chunk=4096 is above the model's context of 2048"),
    ],
)
def test_bad_meshes_end_with_one_line_and_code_2(tmp_path, flags, complaint):
    run = replay(tmp_path / "out", TINY, *flags)
    assert run.code == 2
    assert complaint in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_ranks_that_do_not_fit_the_stages_are_refused(tmp_path):
    run = replay(tmp_path / "out", TINY, "--prefill=2x2", command=[*mpiexec_command(4), *REPLAY])
    assert run.code == 2
    assert "mpiexec started 4 ranks, but Conductor, --prefill=2x2 and --decode=1 need 6" in run.stdout + run.stderr


def test_dram_holds_twice_as_many_blocks_on_two_stages(single, staged):
    slots = [run.summary()["settings"]["slots"]["prefill0"] for run in (single, staged)]
    assert 1.9 * slots[0] < slots[1] < 2 * slots[0], f"{slots}: a slot's header takes its share"


LATE = """
import os, runpy, sys, time
from mooncake_jax.parallel import prefill
together = prefill.wait_for_all

def late(what):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        time.sleep(40)
    together(what)

prefill.wait_for_all = late
sys.argv[:1] = ["mooncake_jax", "replay"]
runpy.run_module("mooncake_jax", run_name="__main__")
"""


@pytest.mark.slow
def test_a_stage_may_compile_much_longer_than_another(tmp_path):
    """Longer than JAX waits for all processes in their first exchange (30 s)."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"id": "a", "prompt_ids": [5, 6, 7], "max_tokens": 2}])
    command = [*mpiexec_command(4), sys.executable, "-c", LATE]
    flags = (TINY, f"--prompts={prompts}", "--prefill=1x2", "--decode=1")
    run = replay(tmp_path / "out", *flags, command=command)
    assert run.code == 0 and run.rows()["a"]["status"] == COMPLETED, run.stderr
