"""What an instance measures of itself as it starts: within the memory that it has, whatever that is."""

import pytest

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cluster.measure import measure_steps
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.sched.fitting import fit_step


@pytest.mark.parametrize(("pages", "batch"), [(2, 1), (2, 2), (1, 1), (40, 4)])
def test_steps_are_measured_in_any_memory(tiny2, pages, batch):
    config = tiny2.config
    layout = BlockLayout(config.num_layers, 16, config.num_kv_heads, config.head_dim, "float32")
    engine = DecodingEngine(tiny2, batch, 16, pages)
    points = measure_steps(engine, layout, batch, config.max_context)
    assert all(1 <= measured <= batch and measured <= context <= pages * 16 for measured, context, _ in points)
    assert max(measured for measured, _, _ in points) == batch
    assert all(coefficient >= 0 for coefficient in fit_step(points))
    assert engine.free_pages == pages
