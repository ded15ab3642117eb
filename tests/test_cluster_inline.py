"""Prefills inlined at the decoding instance of a real cluster of MPI ranks: the same tokens, and a run to replay."""

import pytest
from cluster_run import TINY, prompt, replay, replayed_differences, write_prompts

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.request import COMPLETED

OPTIONS = ({"logprobs": 2}, {"temperature": 0.8}, {"stop_token_ids": [7]}, {"temperature": 0.9, "top_k": 5})


def pairs():
    """Of equal prompts that arrive together: while the first is computed where it is decoded, the second goes to the
    prefill instance.
    """
    for number, options in enumerate(OPTIONS):
        same = prompt("", 10 + 15 * number, seed=number, max_tokens=20, arrival_s=number) | options | {"seed": 3}
        yield from ({**same, "id": f"{number}{half}"} for half in ("first", "second"))


def logprobs(row):
    return [token["logprob"] for token in row["logprobs"] or ()]


def test_inlined_prefills_give_the_tokens_that_others_give(tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", [*pairs(), prompt("chunks", 200, arrival_s=0.5)])
    flags = ("--prefill=1", "--prefill_chunk=64", "--tbt_slo=9", "--inline_prefill")
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", *flags)
    rows, summary = run.rows(), run.summary()
    assert {row["status"] for row in rows.values()} == {COMPLETED}, run.stderr
    for number in range(len(OPTIONS)):
        first, second = rows[f"{number}first"], rows[f"{number}second"]
        assert first["token_ids"] == second["token_ids"]
        assert logprobs(first) == pytest.approx(logprobs(second), abs=1e-4)
    where = {name: row["prefill_instance"] for name, row in rows.items()}
    assert (where["0first"], where["chunks"]) == ("decode0", "prefill0")
    assert "prefill0" in [where[f"{number}second"] for number in range(len(OPTIONS))]
    assert summary["inlined_prefills"] == list(where.values()).count("decode0")
    assert list(summary["prefill_mfu"]["instances"]) == ["prefill0"]
    assert replayed_differences(run, ActorSettings.from_json(summary["settings"]).actors()) == []
