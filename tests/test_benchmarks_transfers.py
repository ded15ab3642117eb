"""benchmarks/pool_transfers.py: what its rows mean, and that the ranks run. Never how fast they are."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
FIGURES = {
    "raw 20971520": 10e9, "ours 20971520": 9e9, "raw 1310720": 5e9, "ours 1310720": 2e9,
    "control rate": 12_000.0, "control latency": 0.6e-3, "control worst": 5e-3, "control bulk": 8e9, "idle": 0.015,
    "read resting": 1e-3, "read computing": 1.2e-3,
}  # fmt: skip


@pytest.fixture
def transfers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("pool_transfers")


def test_rows_compare_with_mpi_of_the_same_run(transfers):
    rows = [*transfers.bulk_rows(FIGURES), *transfers.control_rows(FIGURES), *transfers.read_rows(FIGURES)]
    met = {row.name: row.ok for row in rows if row.target is not None}
    assert met == {
        "messenger, 20 MiB, of MPI's": True,
        "messenger, 1.25 MiB, of MPI's": False,
        "messages while blocks flow": True,
        "their median latency": False,
        "an idle messenger's share of a core": True,
        "remote read while its owner computes, of idle's": True,
    }


def test_what_is_not_there_is_said(transfers, monkeypatch):
    monkeypatch.setattr(transfers.pool_mooncake, "installed", lambda: False)
    assert [row.name for row in transfers.mooncake_rows(1)] == ["Mooncake's store is not installed"]
    assert [row.name for row in transfers.read_rows({})] == ["this MPI reads no memory one-sided"]


@pytest.mark.parametrize("what", [pytest.param("messenger", marks=pytest.mark.slow), "stores"])
def test_the_ranks_measure_all(transfers, what):
    figures = transfers.measured(what, 1)
    stored = {f"{operation} {size}" for operation in ("put", "get") for size in transfers.NAMES}
    expected = set(FIGURES) if what == "messenger" else stored
    assert set(figures) | {"read resting", "read computing"} == expected | {"read resting", "read computing"}
    assert all(value > 0 for value in figures.values())
