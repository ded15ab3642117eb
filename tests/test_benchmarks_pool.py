"""benchmarks/pool.py: that all of it is measured, on small blocks, and what it refuses. Never how fast it is."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.errors import UsageError

FOLDER = Path(__file__).parent.parent / "benchmarks"
LAYOUT = BlockLayout(layers=4, tokens=8, kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def assert_measured(rows, names):
    assert [row.name for row in rows] == names
    for row in rows:
        assert row.value > 0
        assert row.reference is None or row.ratio == pytest.approx(row.value / row.reference)
        assert (row.target is None) == (row.ok is None)


def test_dram_is_compared_with_memcpy(benchmark):
    rows = list(benchmark("pool").dram_rows(LAYOUT, 1))
    layers = [f"DRAM {what}, a layer, of memcpy's" for what in ("put", "get", "get of half the heads")]
    assert_measured(rows, ["memcpy", "DRAM put, of memcpy's", "DRAM get, of memcpy's", *layers])
    assert [row.target for row in rows] == [None, ">= 0.8", ">= 0.8", None, None, None]


def test_the_ssd_is_compared_with_plain_files(benchmark, tmp_path):
    rows = list(benchmark("pool_ssd").ssd_rows(tmp_path, LAYOUT, 1))
    ours = [
        "SSD put, 4 in flight, of plain files'",
        "SSD cold get, 4 in flight, of plain files'",
        "SSD warm get, of plain files'",
        "SSD cold get of a layer, of a plain file's",
    ]
    disk = ["disk, direct write", "disk, direct read"] if len(rows) == 6 else []  # not every file system can
    assert_measured(rows, disk + ours)
    assert [row.target for row in rows[-4:]] == [">= 0.9", ">= 0.9", None, None]


def test_both_sides_move_the_same_bytes(benchmark, tmp_path):
    pool_ssd = benchmark("pool_ssd")
    blocks = [np.random.default_rng(number).integers(0, 256, LAYOUT.nbytes, np.uint8) for number in range(12)]
    plain = pool_ssd.PlainFiles(tmp_path / "plain", blocks, LAYOUT.layers)
    store = pool_ssd.SSDStore(tmp_path / "ours", LAYOUT, b"", 1 << 24)
    ours = pool_ssd.Tier(store, tmp_path / "ours", blocks)
    for files in (ours, plain):
        files.clear()
        files.put()
        files.chill()
        files.get()
        assert [out.tobytes() for out in files._outs] == [block.tobytes() for block in blocks]
        files._outs[0][:] = 0
        files.get_layer()
        middle = blocks[0][LAYOUT.nbytes // 2 :][: LAYOUT.nbytes // LAYOUT.layers]
        assert files._outs[0].tobytes()[: middle.size] == middle.tobytes()
        files.clear()
    ours.clear()
    with pytest.raises(RuntimeError, match="the SSD tier failed"):
        ours.get()
    store.close()


def test_a_match_of_a_pool_that_is_full(benchmark):
    pool = benchmark("pool")
    assert 0 < pool.match_seconds(4, 2000) < 1
    assert 0 < pool.match_seconds(10, 500) < 1  # instances that cannot hold the whole request


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--folder=no/such", "--folder=no/such: No such file or directory; name a folder that exists"),
        (f"--folder={__file__}", "Not a directory; name a folder that exists"),
        ("--json=no/such/rows.json", "--json=no/such/rows.json: No such file or directory; name a file in a folder"),
        ("loose", "'loose' is no flag"),
    ],
)
def test_bad_flags_are_told_before_anything_is_measured(benchmark, capsys, argument, told):
    pool = benchmark("pool")
    for name in ("folder", "repeats", "json"):
        pool.FLAGS[name].unparse()
    with pytest.raises(UsageError, match=told) as caught:
        pool.main([argument])
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
