"""Elastic roles on a real cluster of MPI ranks: an idle prefill instance moves to decoding, lends the blocks that it
keeps, and decodes the same tokens; the run can be replayed.
"""

import pytest
from cluster_run import TINY, prompt, replay, replayed_differences, write_prompts

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.request import COMPLETED

AGAIN_S = 12.0  # by then a role has changed, however slow this machine is
# Whoever decodes at all is busy, however fast this machine is; nobody is rejected for it.
SHORT_OF_DECODING = ("--admission=none", "--tbt_slo=1e-9", "--ttft_slo=1000")


def test_a_prefill_instance_moves_to_decoding_and_tokens_stay_the_same(tmp_path):
    first = [prompt(f"first{i}", 200, seed=i, max_tokens=200, arrival_s=0) for i in range(4)]
    again = [prompt(f"again{i}", 200, seed=i, max_tokens=200, arrival_s=AGAIN_S) for i in range(4)]
    path = write_prompts(tmp_path / "prompts.jsonl", first + again)
    flags = ("--elastic_roles", "--elastic_after_s=0.1", "--max_batch=4", *SHORT_OF_DECODING)
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", *flags)
    rows, summary = run.rows(), run.summary()
    assert run.code == 0, run.stderr
    assert {row["status"] for row in rows.values()} == {COMPLETED}
    [change] = summary["roles"]["changes"]
    moved, at = change["node"], change["at_s"]
    assert (change["role"], summary["roles"]["to_decoding"], summary["roles"]["to_prefill"]) == ("decoding", 1, 0)
    assert moved.startswith("prefill") and 0.1 < at < AGAIN_S
    decoders = {name: row["decoding_instance"] for name, row in rows.items()}
    assert {decoders[f"first{i}"] for i in range(4)} == {"decode0"}
    assert {decoders[f"again{i}"] for i in range(4)} == {"decode0", moved}
    for i in range(4):
        before, after = rows[f"first{i}"], rows[f"again{i}"]
        assert after["token_ids"] == before["token_ids"] and after["reused_tokens"] == 192
        assert after["prefill_instance"] != moved
    assert {row["prefill_instance"] for name, row in rows.items() if name.startswith("first")} > {moved}
    assert any(message["reason"] is None for message in run.messages("BlocksReplicated")), "copied from the moved one"
    settings = ActorSettings.from_json(summary["settings"])
    assert settings.steps.keys() == {"prefill0", "prefill1", "decode0"}
    assert replayed_differences(run, settings.actors()) == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--elastic_roles",), "--ttft_slo=inf: --elastic_roles measures load by it"),
        (("--elastic_roles", "--tp=2"), "--tp=2: with --elastic_roles an instance decodes too, on one device"),
    ],
)
def test_what_cannot_be_is_told_before_any_rank_starts(tmp_path, flags, told):
    run = replay(tmp_path / "out", TINY, *flags)
    assert run.code == 2 and told in run.stderr and len(run.stderr.splitlines()) == 1
    assert "starting" not in run.stdout
