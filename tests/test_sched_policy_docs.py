"""docs/write_a_policy.md: what it shows runs, and what it lists is there."""

import re
from pathlib import Path

import pytest
from virtual_cluster import BLOCK, make_actors, make_request, run

from mooncake_jax.request import COMPLETED
from mooncake_jax.sched.decoding import DecodingLimits
from mooncake_jax.sched.plugins import ADMISSIONS, POLICIES, load_admission, load_policy
from mooncake_jax.sched.scheduler import Scheduler

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


def test_every_name_is_listed():
    listed = PAGE[PAGE.index("## Those that are there") :]
    assert re.findall(r"^\| `([a-z][a-z-]*)` \|", listed, re.MULTILINE) == [*POLICIES, *ADMISSIONS]
