"""`mooncake-jax replay` on real ranks with a tiny model: outcomes, reuse, the record, bad input, interruption, dead
ranks.
"""

import dataclasses
import json
import signal
import subprocess
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
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, Outcome
from mooncake_jax.workload.multiturn import ideal_reuse, multi_turn
from mooncake_jax.workload.prompts import read_prompts
from mooncake_jax.workload.prompts import write_prompts as write_multi_turn


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Good requests, each kind that cannot be served, and repeated prompts."""
    folder = tmp_path_factory.mktemp("mixed")
    prompts = [
        prompt("first", 100, seed=1),
        prompt("empty", 0),
        prompt("foreign", 5) | {"prompt_ids": [1, 320, 2]},
        prompt("huge", 5) | {"prompt_ids": [2**63] * 20},
        prompt("long", 2048, seed=2),
        prompt("nothing", 9, max_tokens=0),
        prompt("again", 100, seed=1, arrival_s=6.0),
        prompt("one", 1, seed=3, arrival_s=6.1),
        prompt("single-token", 40, seed=4, max_tokens=1, arrival_s=6.2),
        prompt("warm", 60, seed=5, temperature=0.8, max_tokens=20, arrival_s=6.3),
        prompt("warm-again", 60, seed=5, temperature=0.8, max_tokens=20, arrival_s=9.0),
        prompt("to-the-end", 2040, seed=6, max_tokens=50, arrival_s=6.4),
    ]
    path = write_prompts(folder / "prompts.jsonl", prompts)
    return replay(folder / "out", TINY, f"--prompts={path}", "--prefill=1", "--prefill_chunk=64")


def test_every_request_has_one_row_with_the_documented_keys(mixed):
    assert mixed.code == 0, mixed.stderr
    lines = (mixed.out / "requests.jsonl").read_text().splitlines()
    assert len(lines) == len(mixed.rows()) == 12
    keys = [field.name for field in dataclasses.fields(Outcome)]
    assert all(list(json.loads(line)) == keys for line in lines)


def test_what_cannot_be_served_is_rejected_with_its_reason_and_the_rest_runs(mixed):
    rows = mixed.rows()
    reasons = {name: row["reason"] for name, row in rows.items() if row["status"] == REJECTED}
    assert reasons == {
        "empty": "the prompt is empty",
        "foreign": "token id 320 is out of the vocabulary of 320",
        "huge": f"token id {2**63} is out of the vocabulary of 320",
        "long": "the prompt has 2048 tokens: with an output it must fit the context of 2048",
        "nothing": "max_tokens is 0: it must be at least 1",
    }
    assert all(row["status"] == COMPLETED for name, row in rows.items() if name not in reasons)


def test_reuse_is_right_to_the_token_and_changes_nothing(mixed):
    rows = mixed.rows()
    assert (rows["first"]["reused_tokens"], rows["again"]["reused_tokens"]) == (0, 96)
    assert rows["first"]["token_ids"] == rows["again"]["token_ids"]


def test_outputs_have_their_lengths(mixed):
    lengths = {name: row["output_tokens"] for name, row in mixed.rows().items() if row["status"] == COMPLETED}
    assert lengths == {
        "first": 6, "again": 6, "one": 6, "single-token": 1, "warm": 20, "warm-again": 20, "to-the-end": 8,
    }  # fmt: skip


def test_latencies_are_those_of_the_tokens(mixed):
    rows = mixed.rows()
    for row in (rows["first"], rows["warm"]):
        assert 0 < row["tbt_mean_s"] <= row["tbt_top10_s"]
        assert row["ttft_s"] > 0
    assert rows["single-token"]["tbt_mean_s"] is None


def test_terminal_shows_rows_and_summary(mixed):
    for part in (
        "prefill0 is ready",
        "to-the-end",
        "rejected",
        "12 in",
        "7 completed, 5 rejected, 0 failed",
        "goodput",
    ):
        assert part in mixed.stdout
    assert "\x1b" not in mixed.stdout, "no escape codes where there is no terminal"


def test_what_was_compiled_is_told(mixed):
    engine = mixed.summary()["engine"]
    assert (engine["dtype"], engine["dtype_measured"]) == ("float32", None)
    # Prompts of up to 2048 tokens in chunks of 64: three chunk lengths and three buffers; batches of up to 16.
    assert engine["compiled"] == {"prefill0": 9, "decode0": 13}
    assert "9 shapes warmed up" in mixed.stdout and "22 shapes warmed up" in mixed.stdout


@pytest.mark.slow
def test_auto_takes_the_dtype_that_it_measures_as_faster(tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", [prompt("a", 20)])
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", "--prefill=1", "--dtype=auto")
    assert run.code == 0
    chosen = run.summary()["engine"]["dtype"]
    assert chosen in ("float32", "bfloat16") and run.summary()["settings"]["config"]["dtype"] == chosen
    assert f"--dtype=auto: {chosen} (float32: prefill" in run.stdout


def test_fresh_actors_answer_the_recorded_messages_alike(mixed):
    settings = ActorSettings.from_json(mixed.summary()["settings"])
    assert len(mixed.events()) > 50
    assert replayed_differences(mixed, settings.actors()) == []
    slower = dataclasses.replace(settings.cost, prefill_coefficients=(1e-9, 0.0, 0.0))
    other = dataclasses.replace(settings, cost=slower, config=dataclasses.replace(settings.config, ttft_slo=1e-12))
    assert replayed_differences(mixed, other.actors()), "other settings must show"


def test_multi_turn_reuse_equals_one_pool_of_full_blocks(tmp_path):
    prompts = multi_turn(
        conversations=8, turns=5, seed=3, vocab_size=320, system_tokens=70, turn_tokens=20, answer_tokens=12, gap_s=0.05
    )
    prompts = [dataclasses.replace(p, max_tokens=4) for p in prompts]
    write_multi_turn(tmp_path / "prompts.jsonl", prompts)
    # One prefill instance works in the order of arrival, so that reuse does not depend on how fast the machine is.
    run = replay(tmp_path / "out", TINY, f"--prompts={tmp_path / 'prompts.jsonl'}", "--prefill=1")
    rows = run.rows()
    assert [row["status"] for row in rows.values()] == [COMPLETED] * 40
    ideal = ideal_reuse(read_prompts(tmp_path / "prompts.jsonl", 1.0), 16)
    assert [rows[p.id]["reused_tokens"] for p in prompts] == ideal
    assert sum(rows[p.id]["reused_tokens"] / len(p.prompt_ids) for p in prompts) / 40 >= 0.5


@pytest.mark.parametrize("prefill", ["2", pytest.param("2x2", marks=pytest.mark.slow)])
def test_hot_blocks_are_copied_between_prefill_instances(tmp_path, prefill):
    """All at once: the shared prefix is computed once, and copied to the instance that has it not."""
    shared = prompt("x", 1000, seed=1)["prompt_ids"]
    prompts = [{"id": "seed", "prompt_ids": shared, "max_tokens": 2, "arrival_s": 0}]
    for i in range(12):
        ids = shared + prompt("x", 400, seed=10 + i)["prompt_ids"]
        prompts.append({"id": f"r{i}", "prompt_ids": ids, "max_tokens": 2, "arrival_s": 5})
    path = write_prompts(tmp_path / "prompts.jsonl", prompts)
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", f"--prefill={prefill}", "--prefill_chunk=64")
    rows = run.rows()
    assert all(row["status"] == COMPLETED for row in rows.values())
    assert {row["prefill_instance"] for row in rows.values()} == {"prefill0", "prefill1"}
    copies = run.messages("BlocksReplicated")
    assert copies and all(m["reason"] is None and m["blocks"] for m in copies)
    assert all(rows[f"r{i}"]["reused_tokens"] == 992 for i in range(12))
    assert replayed_differences(run, ActorSettings.from_json(run.summary()["settings"]).actors()) == []


@pytest.mark.slow
def test_a_slow_link_shows_in_what_transfers_are_measured_to_take(tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", [prompt("a", 1000, seed=1)])
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", "--prefill=1", "--link_gbps=0.1")
    assert run.summary()["sent_bytes"]["prefill0"] > 1000 * run.summary()["settings"]["bytes_per_token"]
    _, per_byte = run.summary()["settings"]["cost"]["transfer_coefficients"]
    assert per_byte > 0.9 / (0.1e9 / 8)
    assert run.rows()["a"]["status"] == COMPLETED


@pytest.mark.slow
def test_bfloat16_kvcache_travels_and_is_reused(tmp_path):
    prompts = [prompt("first", 100, seed=1), prompt("again", 100, seed=1)]
    path = write_prompts(tmp_path / "prompts.jsonl", prompts)
    rows = replay(tmp_path / "out", TINY, f"--prompts={path}", "--prefill=1", "--dtype=bfloat16").rows()
    assert (rows["first"]["reused_tokens"], rows["again"]["reused_tokens"]) == (0, 96)
    assert rows["first"]["token_ids"] == rows["again"]["token_ids"]
    assert len(rows["first"]["token_ids"]) == 6


def endless(folder, count=8):
    """Requests that decode for long."""
    return write_prompts(folder / "prompts.jsonl", [prompt(f"r{i}", 50, seed=i, max_tokens=1500) for i in range(count)])


def test_ctrl_c_stops_all_ranks_within_5_s_and_keeps_what_completed(tmp_path):
    path = endless(tmp_path, count=6)
    quick = write_prompts(tmp_path / "quick.jsonl", [prompt("quick", 30)])
    path.write_text(quick.read_text() + path.read_text())
    process = start(tmp_path / "out", TINY, f"--prompts={path}", "--interval_s=0.01", "--max_batch=4")
    wait_for_rows(process, tmp_path / "out", 1)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    run = finish(process, tmp_path / "out")
    assert time.monotonic() - begun < 5
    assert not ranks(tmp_path / "out")
    assert not left_behind(process)
    assert run.code == 130
    rows = run.rows()
    assert rows["quick"]["status"] == COMPLETED
    interrupted = {row["reason"] for name, row in rows.items() if name != "quick"}
    assert interrupted <= {"the run was interrupted", "the run was interrupted before it arrived"}
    assert run.summary()["interrupted"] is True
    assert "the run was interrupted" in run.stdout


@needs_ulfm
def test_requests_of_a_dead_prefill_instance_are_served_by_the_other(tmp_path):
    prompts = [prompt(f"r{i}", 500, seed=i, max_tokens=3, arrival_s=0.15 * i) for i in range(40)]
    path = write_prompts(tmp_path / "prompts.jsonl", prompts)
    process = start(tmp_path / "out", TINY, f"--prompts={path}", "--prefill_chunk=16")
    wait_for_rows(process, tmp_path / "out", 3)
    kill(ranks(tmp_path / "out")[1])
    run = finish(process, tmp_path / "out")
    rows = run.rows()
    assert len(rows) == 40
    assert [m["node"] for m in run.messages("NodeLost")] == ["prefill0"]
    [lost_at] = [event["now"] for event in run.events() if event["message"]["type"] == "NodeLost"]
    late = [row for row in rows.values() if row["arrival_s"] > lost_at]
    assert late
    assert {(row["status"], row["prefill_instance"]) for row in late} == {(COMPLETED, "prefill1")}
    assert not ranks(tmp_path / "out")
    assert not left_behind(process)


@needs_ulfm
def test_without_its_decoding_instance_the_run_ends_with_reasons(tmp_path):
    process = start(tmp_path / "out", TINY, f"--prompts={endless(tmp_path)}", "--interval_s=0.5", "--max_batch=2")
    wait_for_message(process, tmp_path / "out", "TokensDecoded")
    kill(ranks(tmp_path / "out")[3])
    run = finish(process, tmp_path / "out")
    rows = run.rows()
    assert len(rows) == 8
    assert {row["status"] for row in rows.values()} == {FAILED}
    known = {
        "decode0 is lost",
        "no decoding instance is alive",
        "prefill0: decode0 is lost",
        "prefill1: decode0 is lost",
    }
    assert {row["reason"] for row in rows.values()} <= known
    assert run.code == 1


@needs_ulfm
def test_ranks_do_not_outlive_conductor(tmp_path):
    process = start(tmp_path / "out", TINY, f"--prompts={endless(tmp_path)}")
    wait_for_message(process, tmp_path / "out", "TokensDecoded")
    kill(ranks(tmp_path / "out")[0])
    begun = time.monotonic()
    run = finish(process, tmp_path / "out")
    assert run.code not in (0, 2)
    assert time.monotonic() - begun < 15
    assert not ranks(tmp_path / "out")


def test_under_mpiexec_it_uses_the_ranks_it_is_given(tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", [prompt("a", 20)])
    command = [*mpiexec_command(3), *REPLAY]
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", "--prefill=1", command=command)
    assert run.code == 0
    assert run.rows()["a"]["status"] == COMPLETED


def test_ranks_that_do_not_fit_the_roles_are_refused(tmp_path):
    command = [*mpiexec_command(2), *REPLAY]
    run = replay(tmp_path / "out", TINY, command=command)
    assert run.code == 2
    assert "mpiexec started 2 ranks, but Conductor, --prefill=2 and --decode=1 need 4" in run.stdout + run.stderr
    assert not (tmp_path / "out").exists()


TRACE_LINE = '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model=gpt-5"], "model 'gpt-5' is neither a known name"),
        ([f"--model={'x' * 300}"], "is neither a known name"),
        (["--model=smollm2-135m", "--model_dir=/nowhere"], "run `mooncake-jax fetch-model smollm2-135m`"),
        (["--block_size=0"], "--block_size=0: it must be at least 1"),
        (["--prefill_chunk=0"], "--prefill_chunk=0: it must be at least 1"),
        (["--device_kv_tokens=15", "--max_batch=1", "--block_size=4"], "--device_kv_tokens=15: it must be at least 16"),
        (["--prefill=0"], "--prefill=0: write how many instances, or instances x stages"),
        (["--dtype=float16"], "float16"),
        (["--block_size=many"], "--block_size=many"),
        (["--prefill_mfu_floor=1.5"], "--prefill_mfu_floor=1.5: a share of the peak is above 0, at most 1"),
        (["--peak_tflops=0"], "--peak_tflops=0.0: use more than 0, at most 1e+09, or leave it out"),
        (["--ttft_slo=-1"], "--ttft_slo=-1.0: it must be above 0 seconds"),
        (["--bogus=1"], "Unknown command line flag 'bogus'"),
        (["extra"], "'extra' is no flag"),
        (["--dram_mib=1", "--block_size=4096"], "--dram_mib=1 does not hold one block of --block_size=4096"),
        (["--prompts=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--trace={trace}", "--prompts={trace}"], "exclude one another"),
        (["--trace={trace}", "--length_scale=3"], "--length_scale=3"),
        (["--limit=3"], "give --trace=FILE too"),
        (["--prompts="], ": cannot be read"),
        (["--prefill_chunk=4096"], "--prefill_chunk=4096 is above the model's context of 2048"),
        (["--max_batch=100000"], "--max_batch=100000 requests need a page each"),
        (["--request_timeout=inf"], "every request needs a deadline"),
        (["--link_gbps=0"], "--link_gbps=0.0: use 0.01 to 10000, or leave it out for no limit"),
        (["--link_gbps=1e15"], "--link_gbps=1000000000000000.0: use 0.01 to 10000"),
        (["--prefill=9000"], "--prefill=9000 and --decode=1 need 9002 ranks; this machine starts at most 256"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(tmp_path, flags, complaint):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE_LINE)
    run = replay(tmp_path / "out", TINY, *[flag.format(trace=trace) for flag in flags])
    assert run.code == 2
    assert complaint in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_results_are_not_written_to_no_name(tmp_path):
    command = [sys.executable, "-m", "mooncake_jax", "replay", f"--model={TINY}", "--trace=any.jsonl", "--out="]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "--out= is empty; name what" in done.stderr


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "line 2"),
        ('{"timestamp": 0, "input_length": 700, "output_length": 5}', "hash_ids"),
        (TRACE_LINE.replace("700", "-700"), "-700"),
        (TRACE_LINE.replace("700", "700.5"), "700.5"),
        (TRACE_LINE.replace("[1, 2]", "[1, 2, 3]"), "hash_ids"),
    ],
)
def test_a_bad_trace_line_is_named(tmp_path, line, complaint):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE_LINE + line)
    run = replay(tmp_path / "out", TINY, f"--trace={trace}")
    assert run.code == 2
    assert str(trace) in run.stderr and "line 2" in run.stderr and complaint in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    run = replay(tmp_path / "file" / "out", TINY)
    assert (run.code, len(run.stderr.splitlines())) == (2, 1)
    assert "is a file; name a folder" in run.stderr
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "requests.jsonl").write_text("")
    assert "already holds requests.jsonl" in replay(tmp_path / "used", TINY).stderr

    assert "File name too long" in replay(tmp_path / ("x" * 300), TINY).stderr
    assert "choose another folder" in replay("/proc/out", TINY).stderr


@needs_ulfm
@pytest.mark.parametrize("signum", [pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGKILL])
def test_ranks_do_not_outlive_the_launcher(tmp_path, signum):
    process = start(tmp_path / "out", TINY, f"--prompts={endless(tmp_path)}")
    wait_for_message(process, tmp_path / "out", "TokensDecoded")
    process.send_signal(signum)
    process.wait(60)
    deadline = time.monotonic() + 30
    while ranks(tmp_path / "out"):
        assert time.monotonic() < deadline, "ranks are left"
        time.sleep(0.1)
    if signum != signal.SIGKILL:
        assert not left_behind(process)


def test_an_unknown_command_is_refused():
    run = replay("unused", command=[sys.executable, "-m", "mooncake_jax", "serve"])
    assert run.code == 2
    assert "there is no command 'serve'" in run.stderr
