"""`mooncake-jax replay --cost`: Conductor and the instances believe what is given, and what does not fit is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from cluster_run import TINY, prompt, replay, replayed_differences, write_prompts
from test_commands_verify_replay import CONFIG
from test_sched_cost_table import table

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.commands.believed_cost import believed_cost
from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.sources import model_fingerprint
from mooncake_jax.request import COMPLETED, REJECTED
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.cost_file import CostFile, CostRange, write_cost_file
from mooncake_jax.sched.profiles import PROFILES

RANGE = CostRange(tokens=(1, 64), batch=(1, 4), context=(1, 64), nbytes=(1, 1024), flows=(1, 1))
TINY_PATH = Path(TINY.partition("=")[2])
FALLING = PolynomialCost((1.0, -1e-2, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0))


def cost_file(path, cost, fingerprint=None):
    ours = model_fingerprint(TINY_PATH, "float32") if fingerprint is None else fingerprint
    write_cost_file(path, CostFile("tiny-llama2", ours, RANGE, cost))
    return path


def test_what_is_given_decides_and_the_run_can_be_replayed(tmp_path):
    """By this table prompts of 100 tokens take an hour."""
    cost = dataclasses.replace(table(), prefill_rows=((0, ((40, 0.001), (60, 0.001), (100, 3600.0))),))
    prompts = [prompt("short", 40), prompt("long", 100, seed=1), prompt("again", 40, seed=2)]
    path = write_prompts(tmp_path / "prompts.jsonl", [row | {"arrival_s": 0} for row in prompts])
    given = f"--cost={cost_file(tmp_path / 'cost.json', cost)}"
    flags = ("--prefill=1", "--ttft_slo=60", "--tbt_slo=60", "--admission=slo")
    run = replay(tmp_path / "out", TINY, f"--prompts={path}", given, *flags)
    rows = run.rows()
    assert [rows[name]["status"] for name in ("short", "long", "again")] == [COMPLETED, REJECTED, COMPLETED]
    assert rows["long"]["estimate"] == pytest.approx(3600, rel=0.01)
    settings = ActorSettings.from_json(run.summary()["settings"])
    assert (settings.cost, settings.steps) == (cost, {}), "nothing was measured"
    assert replayed_differences(run, settings.actors()) == []


@pytest.mark.parametrize("fault", ["field", "model", "negative", "absent", "profile", "dtype", "auto"])
def test_what_does_not_fit_is_told_before_any_rank_starts(tmp_path, fault):
    """FALLING is negative from 100 tokens on: beyond its own range, and within the model's context."""
    flags, path = [], cost_file(tmp_path / "cost.json", table())
    match fault:
        case "field":
            data = json.loads(path.read_text())
            del data["cost"]["step_rows"]
            path.write_text(json.dumps(data))
            told = f"{path}: cost: lacks 'step_rows'; run `mooncake-jax profile` again, or add it"
        case "model":
            told = f"costs of tiny-llama2 (000000000000), not of {TINY_PATH} ("
            cost_file(path, table(), bytes(32))
        case "negative":
            told = f"--cost={path}: predicts -0.28 s for a prefill of 128 tokens, 0 of them reused; measure or fit it"
            cost_file(path, FALLING)
            flags = [f"--prompts={write_prompts(tmp_path / 'prompts.jsonl', [prompt('a', 40)])}"]
        case "absent":
            path = "absent.json"
            told = "cost 'absent.json' is neither a file nor one of micro, arxiv"
        case "profile":
            path = "micro"
            told = f"cost profile micro is of llama2-70b or llama3-70b or llama3.1-70b, not of {TINY_PATH}; measure it"
        case "dtype":
            flags, told = ["--dtype=bfloat16"], f"{path}: costs of tiny-llama2 ("
        case "auto":
            flags, told = ["--dtype=auto"], "was measured in one type: name that instead of --dtype=auto"
    run = replay(tmp_path / "out", TINY, f"--cost={path}", *flags)
    assert (run.code, run.stdout, len(run.stderr.splitlines())) == (2, "", 1)
    assert told in run.stderr
    assert not (tmp_path / "out").exists()


def test_a_profile_is_for_a_shape_whatever_its_weights_are_called():
    config = dataclasses.replace(CONFIG, model="dummy:llama2-70b:3", cost="fast25")
    assert believed_cost(config, ARCHITECTURES["llama2-70b"], bytes(32)) == PROFILES["fast25"]
    with pytest.raises(UsageError, match="cost profile fast25 is of llama2-70b .*, not of dummy:llama2-70b:3"):
        believed_cost(config, ARCHITECTURES["llama2-7b"], bytes(32))
