"""Every attention that this machine can run equals the reference; platforms choose among them.

The TPU's kernel runs in Pallas' TPU interpreter and is lowered for a TPU; neither needs one.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA
from jax.experimental.pallas import tpu as pltpu

from mooncake_jax import parallel
from mooncake_jax.model.attention import TILE, paged_attention, pages_per_tile, plain_attention, prefill_attention
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.dummy import DummyModel
from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel import tpu_attention
from mooncake_jax.parallel.attention import (
    attend_chunk,
    attend_pages,
    blocked_attention,
    fused_attention,
    merged_paged_attention,
)
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.tpu_attention import reads_in_place, tpu_paged_attention

FUSED = ["xla", pytest.param("cudnn", marks=pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU"))]
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_near(out, reference, dtype):
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float32), reference.astype(np.float32), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens, start", [(16, 0), (256, 100), (300, 77), (512, 0), (700, 60)])
def test_chunks_in_blocks_equal_the_reference(dtype, tokens, start):
    q, kv = normal(0, tokens, 6, 8, dtype=dtype), normal(1, 2, 8 * TILE, 2, 8, dtype=dtype)
    reference = prefill_attention(q, kv, start)
    assert_near(jax.jit(blocked_attention)(q, kv, start), reference, dtype)
    assert_near(jax.jit(attend_chunk)(q, kv, start), reference, dtype)


def test_blocks_leave_out_the_tiles_behind_them():
    q, kv = normal(0, 512, 6, 8), normal(1, 2, 8 * TILE, 2, 8)
    kv = kv.at[:, 256:].set(np.nan)
    out = jax.jit(blocked_attention)(q, kv, 0)
    assert np.isfinite(out[:256]).all() and np.isnan(out[300:]).all()


@pytest.mark.parametrize("implementation", FUSED)
def test_fused_attention_equals_the_reference(implementation):
    q, kv = normal(0, 128, 8, 64, dtype="bfloat16"), normal(1, 2, 256, 2, 64, dtype="bfloat16")
    for start in (0, 100):
        out = jax.jit(fused_attention, static_argnums=3)(q, kv, start, implementation)
        assert_near(out, plain_attention(q, kv, start), "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (3, 3), (4, 1), (8, 8)])
@pytest.mark.parametrize("bits", [False, True])
def test_paged_attentions_equal_the_reference(dtype, heads, kv_heads, bits):
    page, lengths = 16, np.array([1, 300, 129], np.int32)
    columns = -(-19 // pages_per_tile(page)) * pages_per_tile(page)
    pages, q = normal(0, 58, 2, page, kv_heads, 8, dtype=dtype), normal(1, 3, heads, 8, dtype=dtype)
    table = np.zeros((3, columns), np.int32)
    table[:, :19] = 1 + np.random.default_rng(2).permutation(57).reshape(3, 19)
    reference = paged_attention(q, pages, table, lengths)
    stored = jax.lax.bitcast_convert_type(pages, {"float32": "uint32", "bfloat16": "uint16"}[dtype]) if bits else pages
    for attention in (paged_attention, merged_paged_attention, attend_pages):
        assert_near(jax.jit(attention)(q, stored, table, lengths), reference, dtype)


@pytest.fixture
def steps():
    """Inside, Pallas' kernels are interpreted as on a TPU; the grid steps that they take are counted here."""
    taken = []

    def record(token, point, core):
        taken.append(point)
        return token

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(grid_point_recorder=record)):
        yield taken
    pltpu.reset_tpu_interpret_mode_state()


def paged_case(dtype, heads, kv_heads, page, lengths, bits=False, dim=128):
    """Queries, pages and an unsorted table for lengths; the table's entries behind them name no page at all."""
    needed = [-(-length // page) for length in lengths]
    columns = -(-(max(needed) + 1) // pages_per_tile(page)) * pages_per_tile(page)
    table, ids = np.full((len(lengths), columns), 10**6, np.int32), np.random.default_rng(2).permutation(sum(needed))
    for row, end, count in zip(table, np.cumsum(needed), needed, strict=True):
        row[:count] = 1 + ids[end - count : end]
    q, pages = (
        normal(1, len(lengths), heads, dim, dtype=dtype),
        normal(0, 1 + len(ids), 2, page, kv_heads, dim, dtype=dtype),
    )
    stored = jax.lax.bitcast_convert_type(pages, {"float32": "uint32", "bfloat16": "uint16"}[dtype]) if bits else pages
    return q, stored, table, np.asarray(lengths, np.int32)


def reference_of(q, pages, table, lengths):
    return paged_attention(q, pages, np.where(table < len(pages), table, 0), lengths)


@pytest.mark.parametrize("dtype, bits", [("float32", False), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize("heads, kv_heads, page", [(16, 8, 16), (8, 1, 64), (6, 2, 16), (4, 4, 64), (8, 8, 256)])
def test_tpu_kernel_equals_the_reference(steps, dtype, bits, heads, kv_heads, page):
    case = paged_case(dtype, heads, kv_heads, page, [1, 300, 129, 16, 128], bits)
    assert reads_in_place(case[1])
    assert_near(tpu_paged_attention(*case), reference_of(*case), dtype)


def test_tpu_kernel_visits_only_tiles_that_hold_tokens(steps):
    lengths = [1, 1000, TILE, TILE + 1]
    tpu_paged_attention(*paged_case("float32", 2, 1, 16, lengths)).block_until_ready()
    assert len(steps) == sum(-(-length // TILE) for length in lengths)


def test_tpu_kernel_looks_at_nothing_behind_a_length(steps):
    q, pages, table, lengths = paged_case("float32", 4, 2, 16, [5, 140])
    reference = reference_of(q, pages, table, lengths)
    for row, length in zip(table, lengths, strict=True):
        pages = pages.at[row[length // 16], :, length % 16 :].set(np.nan)
    assert_near(tpu_paged_attention(q, pages, table, lengths), reference, "float32")


def test_tpu_kernel_gives_zeros_for_rows_without_tokens(steps):
    q, pages, table, lengths = paged_case("float32", 4, 2, 16, [20, 200])
    table[0], lengths[0] = 0, 0
    out = tpu_paged_attention(q, pages, table, lengths)
    assert not out[0].any()
    assert_near(out[1:], reference_of(q, pages, table, lengths)[1:], "float32")


def test_tpu_kernel_takes_tables_larger_than_the_scalar_memory(steps, monkeypatch):
    monkeypatch.setattr(tpu_attention, "_TABLE_ENTRIES", 40)
    case = paged_case("float32", 4, 2, 16, [100, 17, 129, 140, 30])
    assert_near(tpu_paged_attention(*case), reference_of(*case), "float32")


def lowered_for_tpu(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("heads, kv_heads", [(64, 8), (8, 1), (32, 32)])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paged_attention_lowers_for_tpus_as_the_kernel(monkeypatch, heads, kv_heads, page, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    shapes = ((16, heads, 128), dtype), ((80 * 100, 2, page, kv_heads, 128), {"bfloat16": "uint16"}.get(dtype, dtype))
    shapes += ((16, 4096 // page), "int32"), ((16,), "int32")
    text = lowered_for_tpu(attend_pages, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert text.count("tpu_custom_call") == 1


def test_pages_that_lie_otherwise_in_a_tpu_are_left_to_the_scan(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for kv_heads, page, dim in [(3, 16, 64), (8, 16, 64), (20, 16, 128), (1, 1, 128), (32, 1024, 128)]:
        pages = jax.ShapeDtypeStruct((99, 2, page, kv_heads, dim), jnp.float32)
        table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 128), (4,)))
        assert not reads_in_place(pages)
        q = jax.ShapeDtypeStruct((4, kv_heads, dim), jnp.float32)
        assert "tpu_custom_call" not in lowered_for_tpu(attend_pages, q, pages, table, lengths)


def test_tpus_without_pallas_scan(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.delattr(parallel, "tpu_attention")
    monkeypatch.setitem(sys.modules, "mooncake_jax.parallel.tpu_attention", None)
    case = paged_case("float32", 4, 2, 16, [20, 200])
    assert_near(attend_pages(*case), reference_of(*case), "float32")


def test_other_platforms_do_not_import_pallas():
    code = f"""
import sys
from pathlib import Path
from mooncake_jax.model.loading import load_model
from mooncake_jax.parallel.decoding import DecodingEngine
DecodingEngine(load_model(Path({str(DATA / "tiny-llama2")!r}), "float32"), 1, 16, 8).warm_up()
assert "mooncake_jax.parallel.attention" in sys.modules
assert not [name for name in sys.modules if "jax.experimental.pallas" in name or "tpu_attention" in name]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def wide_heads():
    """A model whose pages the TPU's kernel reads in place."""
    shape = LlamaConfig(320, 64, 176, 2, 4, 2, 128, 10000.0, None, 1e-5, False, 512)
    return load_model(DummyModel(shape, 0), "float32")


def decode(model):
    """Tokens of two requests, one of which comes later."""
    engine, told = DecodingEngine(model, max_batch=2, page_size=16, num_pages=20), {}
    for request, length in ((0, 20), (1, 140)):
        engine.join(request, np.asarray(normal(request, 2, 2, length, 2, 128)), 5 + request, length + 20)
        for _ in range(3):
            for other, token in engine.step().items():
                told.setdefault(other, []).append(token)
    return told


def test_decoding_on_a_tpu_reads_the_pages_of_all_layers_with_the_kernel(wide_heads, monkeypatch, steps):
    expected, seen = decode(wide_heads), []
    assert not steps

    def spy(q, pages, table, lengths):
        seen.append(pages.shape)
        return tpu_paged_attention(q, pages, table, lengths)

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(tpu_attention, "tpu_paged_attention", spy)
    assert decode(wide_heads) == expected
    assert steps and set(seen) == {(2 * 21, 2, 16, 2, 128)}


def test_the_decoding_step_lowers_for_tpus(wide_heads, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    engine = DecodingEngine(wide_heads, max_batch=4, page_size=16, num_pages=60)
    step = engine._step.trace(engine._weights, engine._pages, engine._make_rows([], 4))
    text = step.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1, "all layers are one function"
