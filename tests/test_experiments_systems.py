"""FAST25 figures 1, 6, 7, 8 and 10: that they run, what their models and measures do, numbers on the real traces."""

import csv
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.request import Request
from mooncake_jax.sched.profiles import profile
from mooncake_jax.simulate.traces import keyed_requests
from mooncake_jax.workload.poisson import poisson_rows
from mooncake_jax.workload.trace import read_trace, write_trace

FOLDER = Path(__file__).parent.parent / "experiments"
MODULES = ("capacity", "capacity_headlines", "capacity_measures", "capacity_variations", "clusters", "reference")


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return SimpleNamespace(
        figure=importlib.import_module,
        **{name: importlib.import_module(name) for name in (*MODULES, "systems", "weak_local")},
    )


@pytest.fixture
def generated(tmp_path):
    """A folder with three small traces."""
    for name, seed in (("conversation", 0), ("synthetic", 1), ("toolagent", 2)):
        write_trace(tmp_path / f"{name}_trace.jsonl", poisson_rows("l-eval", 60, 2.0, seed), "generated")
    return tmp_path


def published(figures, name, folder):
    """What a quick run leaves in its JSON and CSV."""
    out = folder / "out"
    assert figures.figure(name).main(["--quick", f"--traces={folder}", f"--out={out}"]) == 0
    about = json.loads((out / f"{name}.json").read_text())
    assert {row["ok"] for row in about["headlines"]} == {None}
    with (out / f"{name}.csv").open() as lines:
        return about, list(csv.DictReader(lines))


@pytest.mark.parametrize(
    ("name", "papers", "tolerance"),
    [
        ("fast25_fig01", [96.624, 16.148, 15.07, 9.422], "within 2"),
        ("fast25_fig06", [93.163, 43.094, 56.547, 18.651], "no target"),
        ("fast25_fig07", [99.618, 61.32, 60.964, 46.553], "within 1"),
    ],
)
def test_capacities_stand_beside_the_papers_for_both_calibrations(figures, generated, name, papers, tolerance):
    about, rows = published(figures, name, generated)
    systems, headlines = list(figures.systems.SYSTEMS), {}
    for row in about["headlines"]:
        headlines.setdefault(row["name"], []).append(row)
    for system, paper in zip(systems, papers, strict=True):
        named, micro = headlines[f"{system} within 100 ms, %"]
        assert (named["paper"], micro["paper"], micro["profile"]) == (paper, paper, "micro")
    assert headlines["Mooncake within 100 ms, %"][0]["tolerance"] == tolerance
    assert (
        headlines["vLLM Prefix Caching with hashing on the host within 300 ms, %"][0]["profile"] == "vllm051, hashing"
    )
    assert headlines["Mooncake within 100 ms, %"][0]["kind"] == ("fitted" if name == "fast25_fig01" else "predicted")
    assert len(about["headlines"]) == 3 * 9 + 2 * 6 + 2
    assert {row["source"] for row in rows} == {"named", "micro", "paper"}
    varied = {row["assumption"] for row in about["sensitivities"]}
    assert "host's time for prefix caching" in varied
    assert len(varied) == 2 + (0 if name == "fast25_fig06" else len(figures.capacity_variations.VARIATIONS))


def test_figure_8_compares_gpu_time_and_ratios(figures, generated):
    about, rows = published(figures, "fast25_fig08", generated)
    headlines = {(row["name"], row["profile"]): row for row in about["headlines"]}
    assert len(headlines) == 2 * 3 * 7
    plain = headlines["prefill of vLLM, Synthetic, over Mooncake's", "vllm051"]
    assert (round(plain["paper"], 2), plain["tolerance"]) == (2.76, "within 0.15")
    synthetic = [row for row in rows if (row["source"], row["workload"]) == ("named", "Synthetic")]
    ours = {row["system"]: float(row["gpu_s"]) for row in synthetic}
    assert plain["ours"] == pytest.approx(ours["vLLM"] / ours["Mooncake"])
    assert ours["Mooncake"] < ours["vLLM"] < ours["vLLM Chunked Prefill"]


def test_figure_10_shows_honest_and_weak_local_caches(figures, generated):
    about, _ = published(figures, "fast25_fig10", generated)
    rates = {row["name"]: row for row in about["headlines"] if row["name"].endswith("Conversation, hit rate, %")}
    shared, local, weak = rates.values()
    assert [row["paper"] for row in rates.values()] == [37.4747, 16.9139, 16.9139]
    assert [row["tolerance"] for row in rates.values()] == ["within 2.5", "no target", "no target"]
    assert shared["ours"] >= local["ours"] > weak["ours"] > 0


# --- models


def test_a_weak_router_takes_the_best_of_those_it_draws(figures):
    """Ten times the same prompt of four blocks, one after another."""
    keys = tuple(b"%032d" % place for place in range(4))
    requests = [Request(f"{i}", 100.0 * i, 2100, 1, block_keys=keys) for i in range(10)]

    def nodes(sampled, seed):
        policy = figures.weak_local.router(sampled, seed)
        served = figures.clusters.run(requests, policy=policy, admission="none", prefill=5, decode=1)
        return [outcome.prefill_instance for outcome in served.outcomes]

    assert len(set(nodes(5, 0))) == 1, "all that are there are looked at"
    assert len(set(nodes(9, 0))) == 1, "more than there are"
    assert len(set(nodes(1, 0))) > 2 and nodes(1, 0) != nodes(1, 1)
    assert nodes(2, 3) == nodes(2, 3)


def test_a_request_alone_takes_the_same_whatever_one_more_costs(figures):
    cost = profile("fast25")
    dearer = figures.systems.with_request_ms(cost, 5.0)
    assert dearer.step(1, 8192) == pytest.approx(cost.step(1, 8192))
    assert dearer.step(11, 8192) - dearer.step(10, 8192) == pytest.approx(5e-3)


def test_ms_a_request_are_those_of_the_profile(figures):
    assert [figures.systems.request_ms(name) for name in ("micro", "vllm051")] == [0.14, 4.75]
    varied = {one.assumption: one.values for one in figures.capacity_variations.VARIATIONS}
    steps = varied["ms a request in Mooncake's step"]
    assert steps[f"{figures.systems.request_ms('fast25'):g}"] == {} and len(steps) == 4
    assert list(steps) == sorted(steps, key=float)


def test_hashing_blocks_costs_a_prompt_its_square_and_a_step_its_context(figures):
    cost = profile("vllm051")
    hashed = figures.systems.BlockHashing(2e-10, 3e-9).added_to(cost)
    assert hashed.prefill_compute(10_000, 0) - cost.prefill_compute(10_000, 0) == pytest.approx(0.02)
    reusing = hashed.prefill_compute(10_000, 6_000) - cost.prefill_compute(10_000, 6_000)
    assert reusing == pytest.approx(0.02 - 0.0072)
    assert hashed.step(7, 1_000_000) - cost.step(7, 1_000_000) == pytest.approx(3e-3)
    nothing = figures.systems.HASHING["none"].added_to(cost)
    assert nothing == cost


def test_hosts_hashing_is_timed_again_in_the_units_of_its_constants(figures):
    """What is told is of the form that BlockHashing takes: the same for any length, within what timing is worth."""
    script = figures.figure("host_hashing")
    for loop, _ in script.LOOPS.values():
        short, long = (min(loop(tokens) for _ in range(3)) for tokens in (1024, 4096))
        assert 0 < long < 5 * short < 25 * long
    script.FLAGS(["host_hashing", "--tokens=15"])
    with pytest.raises(UsageError, match="--tokens=15: name integers from 16 on"):
        script.lengths()


def test_a_number_of_several_surrogates_names_their_seeds(figures):
    traces = [figures.clusters.Trace(f"surrogate of tool&agent, seed {seed}", ()) for seed in (0, 7)]
    assert figures.systems.label_of(traces) == "surrogate of tool&agent, seeds 0, 7"
    assert figures.systems.label_of(traces[:1]) == "surrogate of tool&agent, seed 0"
    assert figures.systems.label_of([figures.clusters.Trace("synthetic (real)", ())]) == "synthetic (real)"


def test_a_chunk_adds_its_cost_once_for_each_2048_tokens(figures):
    cost = figures.figure("fast25_fig08").with_chunk_ms(60)
    assert cost.prefill_compute(4096, 0) - profile("vllm051").prefill_compute(4096, 0) == pytest.approx(0.12)
    assert cost.prefill_coefficients == pytest.approx(profile("vllm051-chunked").prefill_coefficients)


def test_prompts_that_the_model_does_not_take_are_left_out(figures):
    requests = [Request(str(tokens), 0.0, tokens, 1) for tokens in (1, 131_072, 131_073)]
    assert [request.id for request in figures.systems.taken(requests)] == ["1", "131072"]


def test_vllm_is_simulated_with_the_budgets_and_profiles_that_are_named(figures):
    request = [Request("a", 0.0, 4096, 2)]
    chunked = figures.systems.serve("vLLM Chunked Prefill", request).outcomes[0]
    plain = figures.systems.serve("vLLM", request).outcomes[0]
    added = 4096 * 0.060 / 2048
    assert chunked.ttft_s - plain.ttft_s == pytest.approx(added)
    assert figures.systems.serve("vLLM Chunked Prefill", request, "micro").outcomes[0].ttft_s == plain.ttft_s


# --- measures


def test_capacity_counts_each_request_within_either_kind_of_tbt(figures):
    requests = [Request(str(i), 0.001 * i, 4096, 5) for i in range(20)]
    served = figures.clusters.run(requests, "fast25", prefill=4, decode=1, admission="none")
    one = figures.capacity_measures.measure(served)
    limit_ms = 1000 * sorted(outcome.tbt_top10_s for outcome in served.outcomes)[4]
    assert one.within(limit_ms + 1e-6) == figures.clusters.capacity(served.outcomes, limit_ms / 1000 + 1e-9, 30) >= 25
    assert one.within(1e6) == 100 and one.within_by_mean(limit_ms) >= one.within(limit_ms)
    assert (200, one.within(200)) in one.curve()


def test_gains_are_truncated_as_the_paper_prints_them(figures):
    rows = figures.reference.rows("fast25_fig01_06_07_thresholds")
    at = {(row["workload"], row["series"], row["x_tbt_threshold_ms"]): row for row in rows}
    printed = 0
    for (workload, _, limit), row in at.items():
        if row["printed_gain_percent"]:
            shares = (at[workload, "Mooncake", limit], row)
            ours, theirs = (float(of["y_request_capacity_percent"]) for of in shares)
            assert figures.capacity_headlines.gain(ours, theirs) == int(row["printed_gain_percent"])
            printed += 1
    assert printed == 9
    assert figures.capacity_headlines.gain(50.0, 0.0) is None


def test_whether_a_slower_host_reverses_the_order_is_told_of_each_figure(figures):
    fast, slow = (figures.capacity_measures.Measured([0.15, tbt], [], 2) for tbt in (0.16, 0.25))
    told = figures.capacity_headlines.slow_order(slow, fast)
    assert told == "it would be not below, below, not below: 0 / 50 / 100 % against plain vLLM's 0 / 100 / 100 %"


# --- the real traces


@pytest.mark.traces
def test_the_synthetic_trace_gives_the_papers_capacity_and_gpu_time(traces, figures):
    requests = figures.systems.taken(keyed_requests(read_trace(traces / "synthetic_trace.jsonl")))
    assert len(requests) == 3983
    for system, share, most, seconds in (("Mooncake", 99.618, 1, 0.732719), ("vLLM", 61.32, 10, 2.02165)):
        served = figures.systems.serve(system, requests)
        assert figures.capacity_measures.measure(served).within(100) == pytest.approx(share, abs=most)
        assert served.hardware["prefill_compute_s_mean"] == pytest.approx(seconds, rel=0.05)


@pytest.mark.traces
def test_a_shared_cache_of_the_synthetic_trace_has_the_papers_hits(traces, figures):
    requests = [replace(one, output_length=1) for one in keyed_requests(read_trace(traces / "synthetic_trace.jsonl"))]
    figure = figures.figure("fast25_fig10")
    figure.FLAGS(["fast25_fig10"])
    shared = figure.measure(requests, "kvcache-centric")
    assert shared.hit_rate == pytest.approx(62.1908, abs=2.5)
    assert shared.gpu_s == pytest.approx(0.782818, rel=0.05)
