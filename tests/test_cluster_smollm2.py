"""SmolLM2 through the MPI cluster: golden tokens and logits, whatever is reused."""

import json
from pathlib import Path

import pytest
from cluster_run import REPLAY, replay, replayed_differences, write_prompts

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.request import COMPLETED
from mooncake_jax.workload.prompts import builtin_prompts

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_golden.json").read_text())["cases"]
BY_NAME = {case["name"]: case for case in CASES}


@pytest.fixture(scope="module")
def golden_prompts(tmp_path_factory):
    """Every case as ids, then as text or messages, then once more, then extended by its own output."""
    prompts = []
    for case in CASES:
        plain = {"max_tokens": len(case["greedy"]), "ignore_eos": True}
        source = {"messages": case["messages"]} if "messages" in case else {"prompt": case["prompt"]}
        half = len(case["greedy"]) // 2
        prompts += [
            {"id": f"{case['name']} ids", "prompt_ids": case["prompt_ids"], **plain},
            {"id": f"{case['name']} text", **source, **plain},
            {"id": f"{case['name']} again", "prompt_ids": case["prompt_ids"], **plain},
            {
                "id": f"{case['name']} extended",
                "prompt_ids": case["prompt_ids"] + case["greedy"][:half],
                "max_tokens": len(case["greedy"]) - half,
                "ignore_eos": True,
            },
        ]
    return write_prompts(tmp_path_factory.mktemp("golden") / "prompts.jsonl", prompts)


@pytest.fixture(scope="module")
def in_order(golden_prompts, smollm2_path, tmp_path_factory):
    """One prefill instance works in the order of arrival, so that reuse does not depend on how fast the machine is."""
    flags = (f"--model={smollm2_path}", f"--prompts={golden_prompts}", "--prefill_chunk=64", "--interval_s=0.3")
    return replay(tmp_path_factory.mktemp("in_order") / "out", *flags, "--prefill=1")


@pytest.fixture(scope="module")
def staged(golden_prompts, smollm2_path, tmp_path_factory):
    """Two prefill instances of two stages, on ranks that mpiexec has started."""
    flags = (f"--model={smollm2_path}", f"--prompts={golden_prompts}", "--prefill_chunk=64", "--interval_s=0.3")
    command = [*mpiexec_command(6), *REPLAY]
    return replay(tmp_path_factory.mktemp("staged") / "out", *flags, "--prefill=2x2", "--decode=1", command=command)


@pytest.fixture(params=["in_order", "staged"])
def golden(request):
    return request.getfixturevalue(request.param)


def case_of(row):
    return BY_NAME[row["id"].split()[0]]


def test_greedy_tokens_are_the_golden_ones(golden):
    assert golden.code == 0, golden.stderr
    rows = golden.rows().values()
    assert len(rows) == 4 * len(CASES)
    for row in rows:
        expected = case_of(row)["greedy"]
        if row["id"].endswith("extended"):
            expected = expected[len(expected) // 2 :]
        assert row["status"] == COMPLETED
        assert row["token_ids"] == expected, row["id"]


def test_text_is_the_golden_text_without_special_tokens(golden):
    assert golden.rows()["plain4 ids"]["text"] == BY_NAME["plain4"]["text"]


def test_first_logits_agree_within_2e_3(golden):
    arrivals = [m["request"]["id"] for m in golden.messages("Arrived")]
    done = {m["dispatch"]: dict(map(tuple, m["top_logits"])) for m in golden.messages("PrefillDone")}
    checked = 0
    for number, name in enumerate(arrivals, 1):  # dispatches are numbered in the order of arrival
        if not name.endswith("extended"):
            expected = dict(map(tuple, BY_NAME[name.split()[0]]["first_logits_top10"]))
            assert done[number] == pytest.approx(expected, abs=2e-3), name
            checked += 1
    assert checked == 3 * len(CASES)


def test_repeated_and_extended_prompts_reuse_right_to_the_token(in_order):
    rows, seen = in_order.rows(), set()
    for row in sorted(rows.values(), key=lambda row: row["arrival_s"]):
        case = case_of(row)
        half = len(case["greedy"]) // 2
        ids = case["prompt_ids"] + (case["greedy"][:half] if row["id"].endswith("extended") else [])
        prefixes = [tuple(ids[: 16 * (i + 1)]) for i in range(len(ids) // 16)]
        hits = next((i for i, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
        assert row["reused_tokens"] == min(16 * hits, len(ids) - 1), row["id"]
        seen |= set(prefixes)
    assert rows["long again"]["reused_tokens"] == 1376


def test_the_record_replays_to_the_same_actions(golden):
    settings = ActorSettings.from_json(golden.summary()["settings"])
    assert settings.stop_ids
    assert replayed_differences(golden, settings.actors()) == []


@pytest.fixture(scope="module")
def sampled(tmp_path_factory, smollm2_path):
    """One golden prompt, asked for in every way that its tokens can be chosen and its answer can end."""
    case, folder = BY_NAME["plain4"], tmp_path_factory.mktemp("sampled")
    middle = case["text"][len(case["text"]) // 2 :][:6]
    asked = {
        "logprobs": {"logprobs": 2},
        "stop": {"stop": ["never there", middle]},
        "stop at once": {"stop": [case["text"].strip()[0]]},
        "stop id": {"stop_token_ids": [case["greedy"][4]]},
        "one of one": {"temperature": 2.0, "top_k": 1},
        "least share": {"temperature": 2.0, "top_p": 1e-6},
        "drawn": {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 5},
        "drawn again": {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 5},
        "drawn otherwise": {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 6},
    }
    common = {"prompt_ids": case["prompt_ids"], "max_tokens": len(case["greedy"]), "ignore_eos": True}
    prompts = [{"id": name, **common, **options} for name, options in asked.items()]
    path = write_prompts(folder / "prompts.jsonl", prompts)
    run = replay(folder / "out", f"--model={smollm2_path}", f"--prompts={path}", "--prefill=1", "--interval_s=0.05")
    assert run.code == 0, run.stderr
    return run


def test_sampling_options_reach_the_engines(sampled):
    greedy = BY_NAME["plain4"]["greedy"]
    tokens = {name: row["token_ids"] for name, row in sampled.rows().items()}
    assert tokens["one of one"] == tokens["least share"] == greedy
    assert tokens["drawn"] == tokens["drawn again"] != tokens["drawn otherwise"]
    assert greedy not in (tokens["drawn"], tokens["drawn otherwise"])


def test_logprobs_come_with_every_token_that_asked_for_them(sampled):
    rows = sampled.rows()
    told = rows.pop("logprobs")
    assert told["token_ids"] == BY_NAME["plain4"]["greedy"] == [token["top"][0][0] for token in told["logprobs"]]
    assert all(token["logprob"] == token["top"][0][1] > token["top"][1][1] for token in told["logprobs"])
    assert {len(token["top"]) for token in told["logprobs"]} == {2}
    assert all(row["logprobs"] is None for row in rows.values())


def test_answers_end_at_stop_strings_and_stop_ids(sampled):
    case, rows = BY_NAME["plain4"], sampled.rows()
    middle = case["text"][len(case["text"]) // 2 :][:6]
    stopped = rows["stop"]
    assert stopped["text"] == case["text"][: case["text"].find(middle)]
    assert stopped["token_ids"] == case["greedy"][: len(stopped["token_ids"])]
    assert 0 < len(stopped["token_ids"]) < len(case["greedy"])
    assert rows["stop at once"]["output_tokens"] == 1 and not rows["stop at once"]["text"].strip()
    assert rows["stop id"]["token_ids"] == case["greedy"][: case["greedy"].index(case["greedy"][4]) + 1]


def test_stops_replay_to_the_same_actions(sampled):
    settings = ActorSettings.from_json(sampled.summary()["settings"])
    assert replayed_differences(sampled, settings.actors()) == []


@pytest.mark.slow
def test_the_builtin_prompts_are_served(tmp_path, smollm2_path):
    run = replay(tmp_path / "out", f"--model={smollm2_path}")
    rows = run.rows()
    assert run.code == 0, run.stderr
    assert len(rows) == len(builtin_prompts(1.0)) == 16
    assert all(row["status"] == COMPLETED and row["text"] for row in rows.values())
    assert all(rows[name]["reused_tokens"] >= 16 for name in ("garden-3", "trip-3", "bread-3", "island-3"))
    assert run.summary()["reuse_share"] > 0.3
