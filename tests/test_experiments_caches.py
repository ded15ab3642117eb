"""experiments/ on lengths, caches, transfers and beyond the paper: that each runs, and what it computes, by hand."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from conftest import DATA

from mooncake_jax.cache.entry import Entry
from mooncake_jax.cache.hit_rates import hits_by_request
from mooncake_jax.cache.lru import LRU
from mooncake_jax.workload.poisson import poisson_rows
from mooncake_jax.workload.trace import TraceRow, read_trace, write_trace

FOLDER = Path(__file__).parent.parent / "experiments"
WITH_TRACES = (
    "fast25_fig09",
    "beyond_eviction",
    "beyond_prediction",
    "beyond_priorities",
    "beyond_ssd",
    "beyond_threshold",
)
WITHOUT = ("arxiv_fig02", "arxiv_fig05", "arxiv_fig06", "arxiv_table1", "fast25_fig12", "beyond_roles")


@pytest.fixture
def load(monkeypatch):
    """An experiment by name, freshly made: flags of an earlier run are forgotten."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def fresh(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return fresh


@pytest.fixture(scope="module")
def made_traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    for name, workload in (("conversation", "simulated-16k"), ("synthetic", "l-eval")):
        write_trace(folder / f"{name}_trace.jsonl", poisson_rows(workload, 40, 2.0, 0), "generated for a test")
    return folder


def published(load, name, out, *arguments):
    assert load(name).main([f"--out={out}", *arguments]) == 0
    about = json.loads((out / f"{name}.json").read_text())
    assert (out / f"{name}.csv").read_text().count("\n") > 1
    return about


@pytest.mark.parametrize("name", WITH_TRACES + WITHOUT)
def test_runs_on_a_few_requests(load, tmp_path, made_traces, name):
    arguments = ["--quick"] + ([f"--traces={made_traces}"] if name in WITH_TRACES else [])
    about = published(load, name, tmp_path, *arguments)
    assert about["headlines"] and about["lessons"]
    assert all(row["ours"] is not None for row in about["headlines"])
    assert {row["ok"] for row in about["headlines"]} == {None}


def test_hits_are_told_by_request():
    requests = [(1, 2), (1, 3), (2, 4), (1,)]
    # Two blocks of room; a head outlives its tail.
    assert [hits for _, hits in hits_by_request(requests, 2, LRU())] == [0, 1, 0, 0]
    assert [hits for _, hits in hits_by_request(requests, 4, LRU())] == [0, 1, 1, 1]


def test_figure_9_counts_tokens_of_blocks_that_are_not_full(load):
    figure = load("fast25_fig09")
    rows = [TraceRow(0.0, 700, 1, (0, 1), 0), TraceRow(1.0, 700, 1, (0, 1), 1)]
    assert figure.hit_rate(rows, 1e6) == 0.5
    rows[1] = TraceRow(1.0, 900, 1, (0, 2), 1)
    assert figure.hit_rate(rows, 1e6) == 512 / 1600
    assert figure.hit_rate(rows, 1e6, by_token=False) == 1 / 4
    assert figure.hit_rate(rows, 512) == 512 / 1600  # the head is what a cache of one block keeps


def test_figure_9_tells_each_traces_rates_for_every_capacity(load):
    """Also beyond what holds all of a trace, which one has more of than the other."""
    figure = load("fast25_fig09")
    few = [TraceRow(float(at), 512, 1, (0,), at) for at in range(4)]
    many = [TraceRow(float(at), 1024, 1, (0, at + 1), at) for at in range(4)]
    assert figure.hit_rates([few, many], [512.0, 1024.0, 1e6]) == {
        512.0: [0.75, 0.375], 1024.0: [0.75, 0.375], 1e6: [0.75, 0.375]
    }  # fmt: skip


def test_figure_9_takes_each_workload_once_for_each_seed_of_another(load):
    figure = load("fast25_fig09")
    assert figure.together({"one": ["a"], "four": ["b", "c"], "last": ["d"]}) == [["a", "b", "d"], ["a", "c", "d"]]


def test_merged_traces_share_no_block(load):
    figure = load("fast25_fig09")
    traces = [figure.Trace(name, [TraceRow(time, 512, 1, (7,), 0)]) for name, time in (("a", 2.0), ("b", 1.0))]
    assert [row.hash_ids for row in figure.merged(traces)] == [(15,), (14,)]


def test_figure_5_counts_all_requests_and_knows_how_far_two_cdfs_are_apart(load):
    figure = load("arxiv_fig05")
    bins = [((0.0, 10.0), 2), ((10.0, 20.0), 1), ((20.0, 30.0), 1)]
    assert figure.counts([5, 15, 99], [bin_ for bin_, _ in bins]) == [1, 1, 1]
    assert figure.distance([5, 15, 99], bins) == pytest.approx(1 / 2 - 1 / 3)


def test_table_1s_lfu_can_remember_what_it_evicted(load):
    lfu = load("arxiv_table1").RememberingLFU()
    often, once = Entry("often"), Entry("once")
    lfu.insert(often, 0)
    lfu.use(often)
    assert lfu.evict() is often
    lfu.insert(once, 0)
    lfu.insert(Entry("often"), 0)
    assert lfu.evict() is once


def test_figure_2s_error_is_of_the_shape_alone(load):
    figure = load("arxiv_fig02")
    theirs = [(1, 1.0), (2, 2.0), (3, 4.0)]
    assert figure.off_by([(x, 7 * y) for x, y in theirs], theirs) == pytest.approx(0)
    assert figure.off_by([(1, 1.0), (2, 2.2), (3, 4.0)], theirs) == pytest.approx(0.1 / 2.1)
    assert figure.as_drawn([(1, 1.0), (2, 2.2), (3, 4.0)], theirs) == pytest.approx(0.1)


def test_figure_12_moves_bytes_at_the_rate_of_all_nics(load):
    figure = load("fast25_fig12")
    rate = figure.nic_bytes_per_s(200, None)
    assert 4 * rate == pytest.approx(87.5e9)
    assert figure.nic_bytes_per_s(400, 25e9) == rate
    assert figure.transfer_s(64e9, 4, 200, None) == pytest.approx(64e9 / 87.5e9)
    # Of 64 streams that keep to one NIC each, the fullest of four has 16 at least.
    alone = figure.transfer_s(64e9, 4, 200, None, figure.random.Random(0))
    assert alone == pytest.approx(round(alone * rate / 1e9) * 1e9 / rate) and alone > 64e9 / 87.5e9


def test_figure_12_is_fitted_with_the_slots_that_were_brought_in_for_it(load):
    figure = load("fast25_fig12")
    ours = {(setup, slot): [(40, 1.0), (100, 2.0)] for setup in figure.SETUPS for slot in figure.SLOTS}
    rows = figure.headlines(ours, {setup: figure.paper_points(f"fast25_fig12_{setup}") for setup in figure.SETUPS})
    assert {row.kind for row in rows if "PCIe" in row.name} == {"fitted"}
    assert {row.kind for row in rows if "PCIe" not in row.name} == {"predicted"}


def test_the_messenger_is_measured_against_a_socket(load, tmp_path):
    about = published_real(load, "fast25_fig12", tmp_path, "--largest_mib=4", "--repeats=1")
    rates = {row["name"]: row["ours"] for row in about["headlines"] if row["name"].endswith("GB/s")}
    assert len(rates) == 3 and all(rate > 0 for rate in rates.values())


@pytest.mark.slow
def test_this_machines_engine_is_measured_by_length_and_batch(load, tmp_path):
    model = f"--model={DATA / 'tiny-llama2'}"
    about = published_real(load, "arxiv_fig02", tmp_path, model, "--longest=128", "--context=16", "--max_batch=2")
    assert all(row["ours"] > 0 for row in about["headlines"])


def published_real(load, name, out, *arguments):
    assert load(name).main([f"--out={out}", "--real", "--quick", *arguments]) == 0
    return json.loads((out / f"{name}_real.json").read_text())


def test_roles_meet_a_load_that_changes(load):
    trace = load("beyond_roles").changing_load(0, 30.0)
    prompts = [row.input_length for row in trace.rows]
    turns = [a for a, b in zip(prompts, [*prompts[1:], 0]) if a != b]
    assert turns == [12_288, 2_048, 12_288, 2_048]
    assert trace.rows[-1].timestamp < 120_000
    blocks = [block for row in trace.rows for block in row.hash_ids]
    assert len(set(blocks)) == len(blocks)


def test_classes_are_drawn_by_their_shares(load, made_traces):
    module = load("beyond_priorities")
    rows = [TraceRow(0.0, 1, 1, (), index) for index in range(2_000)]
    classes = list(module.drawn(module.Trace("many", rows), 0).values())
    for priority, part in module.CLASSES.items():
        assert classes.count(priority) / len(classes) == pytest.approx(part, abs=0.04)


def test_the_best_policy_is_told_by_capacity(load):
    module = load("beyond_eviction")
    rates = {name: dict.fromkeys(module.CAPACITIES, 0.2) for name in ("lru", "lfu", "sieve", module.OPTIMAL)}
    rates["lru"][6_000] = 0.3
    rates[module.OPTIMAL][6_000] = 0.9
    told = module.bests(rates)
    assert " 3,000 lru=lfu=sieve, 6,000 lru, 12,000 lru=lfu=sieve," in told and "lfu and sieve hit alike" in told
    rates["sieve"][6_000] = 0.1
    assert "alike" not in module.bests(rates)


def test_where_the_adaptive_threshold_is_worse_is_told(load):
    module = load("beyond_threshold")
    ours = {(name, gbps): (4.0, 0.5) for name in module.thresholds() for gbps in (24, 40)}
    assert module.where_it_is_off(ours, (24, 40)) == []
    ours["8", 40] = (3.0, 0.5)
    assert "longer than the best fixed one's by 33% with 40 Gbps." in module.where_it_is_off(ours, (24, 40))[0]


@pytest.mark.traces
def test_figure_9_on_the_released_traces(load, traces):
    figure = load("fast25_fig09")
    for label, most in (("Synthetic", figure.TOLERANCES["Synthetic"]), ("Conversation", figure.SHAPE)):
        rows = read_trace(traces / f"{label.lower()}_trace.jsonl")
        theirs = {tokens: dict(figure.paper_points("fast25_fig09", label)[label])[tokens] for tokens in (1e6, 5e6)}
        ours = {tokens: figure.hit_rate(rows, tokens) for tokens in theirs}
        apart = figure.offset(ours, theirs) if label == "Conversation" else 0.0
        assert {tokens: rate + apart for tokens, rate in ours.items()} == pytest.approx(theirs, abs=most)
        assert apart < 0.04
