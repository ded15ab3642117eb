"""docs/write_a_policy.md: what it shows runs, and what it lists is there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_run import TINY
from virtual_cluster import BLOCK, make_actors, make_request, run

from mooncake_jax.request import COMPLETED
from mooncake_jax.sched.decoding import DecodingLimits
from mooncake_jax.sched.plugins import ADMISSIONS, POLICIES, load_admission, load_policy
from mooncake_jax.sched.scheduler import Scheduler
from mooncake_jax.workload.prompts import read_prompts

PAGE = (Path(__file__).parent.parent / "docs" / "write_a_policy.md").read_text(encoding="utf-8")


@pytest.fixture
def shown(tmp_path, monkeypatch):
    policy, admission = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "shown_policy.py").write_text(policy)
    (tmp_path / "shown_admission.py").write_text(admission)
    monkeypatch.syspath_prepend(str(tmp_path))
    return policy, admission


def test_the_policy_has_20_lines_and_keeps_conversations_where_their_blocks_are(shown):
    lines = [line for line in shown[0].splitlines() if line.strip()]
    assert len(lines) <= 20
    scheduler = Scheduler(load_policy("shown_policy:Warmest"), load_admission("shown_admission:ShortFirst"))
    actors = make_actors(prefill=3, slots=500, limits=DecodingLimits(8, 1000, BLOCK), scheduler=scheduler)
    first = [make_request(f"{talk}0", [talk] * 320, arrival=0.1 * talk) for talk in range(3)]
    second = [make_request(f"{talk}1", [talk] * 400, arrival=10.0 + 2 * talk) for talk in range(3)]
    outcomes = run(actors, first + second).outcomes
    assert not scheduler.faults
    for talk in range(3):
        assert outcomes[f"{talk}1"].status == COMPLETED and outcomes[f"{talk}1"].reused_tokens == 320
        assert outcomes[f"{talk}1"].prefill_instance == outcomes[f"{talk}0"].prefill_instance


def write_trace(path):
    """Ten conversations of two turns: the second has the blocks of the first, and one more."""
    lines = [
        {
            "timestamp": 1000 * turn,
            "input_length": 512 * (turn + 2) + 100,
            "output_length": 64,
            "hash_ids": list(range(100 * talk, 100 * talk + turn + 3)),
        }
        for turn in range(2)
        for talk in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_same_file_decides_in_simulation_and_on_real_ranks(shown, tmp_path):
    """With the page's commands, on a trace and a model that are at hand."""
    (tmp_path / "warmest.py").write_text(shown[0])
    write_trace(tmp_path / "conversation_trace.jsonl")
    commands = re.findall(r"^mooncake-jax (simulate|replay) (.*)$", PAGE, re.MULTILINE)
    assert [name for name, _ in commands] == ["simulate", "replay"]
    for name, flags in commands:
        model = [TINY] if name == "replay" else []
        command = [sys.executable, "-m", "mooncake_jax", name, *flags.split(), *model]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    for out in ("simulated", "real"):
        summary = json.loads((tmp_path / "results" / out / "summary.json").read_text())
        assert summary["requests"]["completed"] == 20 and summary["faults"] == {}
        assert summary["settings"]["config"]["policy"] == "warmest:Warmest"
    rows = map(json.loads, (tmp_path / "results" / "simulated" / "requests.jsonl").open())
    instances = {int(row["id"]): row["prefill_instance"] for row in rows}
    assert all(instances[talk] == instances[talk + 10] for talk in range(10))
    assert len(set(instances.values())) > 1


def test_prompts_with_classes_and_slos_of_their_own_are_read(tmp_path):
    [lines] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "prompts.jsonl").write_text(lines)
    batch, chat = read_prompts(tmp_path / "prompts.jsonl", 1.0)
    assert (batch.priority, batch.ttft_slo, batch.tbt_slo) == (0, 60, None)
    assert (chat.priority, chat.ttft_slo, chat.tbt_slo) == (9, 2, 0.1)


def test_every_name_is_listed():
    listed = PAGE[PAGE.index("## Those that are there") :]
    assert re.findall(r"^\| `([a-z][a-z-]*)` \|", listed, re.MULTILINE) == [*POLICIES, *ADMISSIONS]
