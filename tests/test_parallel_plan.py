"""Meshes, sharding rules, and plans of models that no machine here could hold."""

import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, PlainModel, prefill
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.llama import abstract_parts
from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.parallel import hlo, plan
from mooncake_jax.parallel.mesh import MeshShape, make_mesh, stage_mesh, tensor_parallel_sizes
from mooncake_jax.parallel.pipeline import abstract_pipeline, load_pipeline
from mooncake_jax.parallel.prefill import PrefillEngine, chunk_buckets
from mooncake_jax.parallel.schedule import plan_chunks, ticks
from mooncake_jax.parallel.sharding import PAGES, PREFILL_KV, device_bytes, parameter_spec
from mooncake_jax.parallel.stage import stage_programs

LLAMA2_70B = ARCHITECTURES["llama2-70b"]
DEVICES = 8


def start_jax():
    jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.fixture(scope="module")
def on_devices():
    """Calls a function of this module in a process whose JAX has DEVICES devices; this one's may have one."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=start_jax) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def prefill_error(name, pp, tp):
    """The largest difference of KV and highest logits between plan's programs, for a chunk behind 40 tokens, and the
    engine.
    """
    model = load_pipeline(DATA / name, "float32", MeshShape(pp, tp))
    ids = np.random.default_rng(3).integers(0, 256, 100).astype(np.int32)
    first, kv = prefill(PrefillEngine(model, 64), load_model(DATA / name, "float32"), ids)
    buffers = np.zeros((*kv.shape[:2], 128, *kv.shape[3:]), kv.dtype)
    buffers[:, :, :40] = kv[:, :, :40]
    x, worst = None, 0.0
    for stage, held in model.held.items():
        mesh = stage_mesh(model.mesh, stage)
        programs = stage_programs(held, mesh)
        rotary, layer = programs.rotary(np.int32(40), 60), plan.prefill_layer(programs, 40)
        x = programs.embed(held.embedder, ids[40:]) if x is None else jax.device_put(x, NamedSharding(mesh, P()))
        for number, params in zip(model.layers[stage], held.layers, strict=True):
            buffer = jax.device_put(buffers[number], NamedSharding(mesh, PREFILL_KV))
            x, _, new = layer(params, x, buffer, rotary)
            worst = max(worst, np.abs(new - kv[number, :, 40:]).max())
    _, highest, _ = programs.finish(held.embedder, x, np.int32(59), SamplingRows.greedy(1))
    return float(max(worst, np.abs(highest - np.array([logit for _, logit in first.top_logits])).max()))


def decoding_error(name, pp, tp, dtype):
    """The largest difference of the logits of a prompt's last token, decoded twice in a batch, from a plain pass's."""
    model, cut = load_model(DATA / name, dtype), load_pipeline(DATA / name, dtype, MeshShape(pp, tp))
    ids = np.random.default_rng(3).integers(0, model.config.vocab_size, 100).astype(np.int32)
    logits, kv = PlainModel(model).forward(ids)
    pages = np.zeros((len(kv), 2, 128, *kv.shape[3:]), kv.dtype)
    pages[:, :, :99] = kv[:, :, :99]
    pages = np.moveaxis(pages.reshape(len(kv), 2, 8, plan.PAGE, *kv.shape[3:]), 1, 2)
    pages = np.concatenate([pages, pages], axis=1)
    if dtype == "bfloat16":
        pages = pages.view(np.uint16)
    x = np.asarray(model.embedder["embedding"])[np.repeat(ids[-1:], 2)]
    for stage, held in cut.held.items():
        mesh, layer = stage_mesh(cut.mesh, stage), jax.jit(plan.decoding_layer(held, 2, 100))
        x = jax.device_put(x, NamedSharding(mesh, P()))
        for number, params in zip(cut.layers[stage], held.layers, strict=True):
            x, _ = layer(params, x, jax.device_put(pages[number], NamedSharding(mesh, PAGES)))
    found = nnx.merge(model.embedder_def, model.embedder).decode(np.asarray(x))
    return float(np.abs(np.asarray(found) - logits[-1:]).max())


def plans(config, dtype, pp, tp, prompt, chunk):
    model = abstract_pipeline(config, jnp.dtype(dtype), MeshShape(pp, tp))
    return plan.plan_prefill(model, prompt, chunk), plan.plan_decoding(model, 4, 256)


def decoding_plan(config, batch):
    return plan.plan_decoding(abstract_pipeline(config, jnp.dtype("bfloat16"), MeshShape(1, 1)), batch, 256)


def parameter_bytes(config, pp, tp):
    """Of each stage: what one device holds of the embedder, and of the layers."""
    model = abstract_pipeline(config, jnp.dtype("bfloat16"), MeshShape(pp, tp))
    return [(device_bytes(held.embedder), device_bytes(held.layers)) for held in model.held.values()]


def too_few_devices():
    make_mesh(MeshShape(3, 3))


@given(st.integers(1, 100), st.integers(1, 100))
def test_stages_are_contiguous_cover_all_layers_and_differ_by_at_most_one(layers, pp):
    pp = min(pp, layers)
    stages = MeshShape(pp, 1).stages(layers)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert {len(stage) for stage in stages} <= {layers // pp, -(-layers // pp)}


def test_shapes_that_do_not_fit_the_model_name_the_flag_and_what_is_allowed():
    assert tensor_parallel_sizes(LLAMA2_70B) == (1, 2, 4, 8)
    assert tensor_parallel_sizes(ARCHITECTURES["smollm2-135m"]) == (1, 3)
    for pp in (0, 81):
        with pytest.raises(UsageError, match=f"--pp={pp}: .* 80 layers; use 1 to 80"):
            MeshShape(pp, 8).check(LLAMA2_70B)
    for tp in (0, 3, 16):
        with pytest.raises(UsageError, match=f"--tp={tp}: .* 8 KV heads.*use one of 1, 2, 4, 8$"):
            MeshShape(4, tp).check(LLAMA2_70B)
    MeshShape(80, 8).check(LLAMA2_70B)


def test_too_few_devices_are_told(on_devices):
    with pytest.raises(UsageError, match="--pp=3 --tp=3 needs 9 devices, JAX has 8"):
        on_devices(too_few_devices)


@pytest.mark.parametrize("name", ["llama2-7b", "smollm2-135m"])
def test_every_parameter_has_one_rule_of_its_rank(name):
    parts = abstract_parts(ARCHITECTURES[name], jnp.dtype("float32"))
    for root, params in (("embedder", parts.embedder), ("layer", parts.layer)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            assert len(parameter_spec("/".join([root, *(key.key for key in path)]))) == leaf.ndim


def test_a_parameter_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="0 sharding rules fit the parameter layer/attention/bias"):
        parameter_spec("layer/attention/bias")


def test_a_device_holds_its_share(on_devices):
    config = ARCHITECTURES["llama2-7b"]
    ends = 2 * config.vocab_size * config.hidden_size
    norms = (2 * config.num_layers + 1) * config.hidden_size
    kernels = config.parameters - ends - norms
    end, layers = 2 * (ends // 2 + config.hidden_size), 2 * (kernels // 8 + 2 * 8 * config.hidden_size)
    assert on_devices(parameter_bytes, config, 4, 2) == [(end, layers), (0, layers), (0, layers), (end, layers)]


def test_uneven_stages_count_as_the_longest(on_devices):
    config = replace(ARCHITECTURES["smollm2-135m"], num_layers=5)
    (_, shorter), (_, longer) = on_devices(parameter_bytes, config, 2, 1)
    assert longer / 3 == shorter / 2
    one, two = (on_devices(plans, config, "float32", pp, 1, 256, 256) for pp in (1, 2))
    for whole, cut in zip(one, two, strict=True):
        assert cut.total_flops == whole.total_flops == whole.flops
        assert cut.flops / 3 == whole.flops / 5
        assert cut.kv_bytes / 3 == whole.kv_bytes / 5


@pytest.mark.parametrize(("name", "pp", "tp"), [("tiny-llama2", 1, 1), ("tiny-llama2", 3, 2), ("tiny-llama3", 4, 2)])
def test_what_is_planned_computes_what_the_engine_does(on_devices, name, pp, tp):
    assert on_devices(prefill_error, name, pp, tp) < 1e-4
    assert on_devices(decoding_error, name, pp, tp, "float32") < 1e-4
    assert on_devices(decoding_error, name, pp, tp, "bfloat16") < 0.1


def computed_pairs(chunks):
    """Queries times keys: each block of 256 queries over whole tiles of 128 keys up to its own last one."""
    pairs, tile = 0, 128
    for start, tokens in chunks:
        for first in range(0, tokens, 256):
            block = min(256, tokens - first)
            pairs += block * -(-(start + first + block) // tile) * tile
    return pairs


@pytest.mark.parametrize(
    ("name", "layers", "prompt", "chunk", "chunks"),
    [
        ("llama2-7b", 4, 512, 512, [(0, 512)]),
        ("smollm2-135m", 7, 512, 128, [(0, 128), (128, 128), (256, 128), (384, 128)]),
        ("smollm2-135m", 2, 1100, 512, [(0, 512), (512, 512), (1024, 128)]),  # 76 tokens, padded to 128
        ("smollm2-135m", 2, 40, 512, [(0, 64)]),
    ],
)
def test_flops_are_those_of_what_the_engine_computes(on_devices, name, layers, prompt, chunk, chunks):
    config = replace(ARCHITECTURES[name], num_layers=layers)
    prefill, decoding = on_devices(plans, config, "bfloat16", 2, 1, prompt, chunk)
    tokens, b = sum(tokens for _, tokens in chunks), plan.linear_factor(config)
    expected = plan.formula_flops(config, tokens, computed_pairs(chunks), b)
    assert prefill.total_flops == pytest.approx(expected, rel=1e-9)
    assert decoding.total_flops == pytest.approx(decoding.formula_flops, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "prompt", "chunk"), [("llama2-7b", 1024, 512), ("llama3-8b", 2048, 2048), ("smollm2-135m", 8192, 2048)]
)
def test_flops_agree_with_the_formula(on_devices, name, prompt, chunk):
    config = replace(ARCHITECTURES[name], num_layers=2)
    for step in on_devices(plans, config, "bfloat16", 1, 1, prompt, chunk):
        assert step.total_flops == pytest.approx(step.formula_flops, rel=0.02)


def test_one_device_sends_nothing(on_devices):
    config = replace(ARCHITECTURES["smollm2-135m"], num_layers=2)
    assert [step.sent_bytes for step in on_devices(plans, config, "float32", 1, 1, 64, 64)] == [{}, {}]


@pytest.mark.parametrize(("prompt", "chunk", "computed", "buffer"), [(256, 256, 256, 768), (600, 256, 640, 1280)])
def test_kvcache_and_collectives_of_one_device(on_devices, prompt, chunk, computed, buffer):
    config = replace(ARCHITECTURES["smollm2-135m"], num_layers=6)
    prefill, decoding = on_devices(plans, config, "float32", 2, 3, prompt, chunk)
    layers, width, logits = config.num_layers // 2, config.hidden_size * 4, config.vocab_size * 4
    assert prefill.kv_bytes == config.kv_bytes_per_token("float32") * buffer // 6
    assert prefill.temporary_bytes >= 256 * config.intermediate_size // 3 * 4, "at least one of the MLP's results"
    assert decoding.kv_bytes == config.kv_bytes_per_token("float32") * 4 * 256 // 6
    # Each layer sums what attention and MLP give, the embedding sums once; a third of the width is passed on by each,
    # and put together again; every rank has a third of the logits. From them prefill's end finds the ten highest, the
    # log-probabilities' and, at most, those to draw from: it sums all logits once in a new order, and eight numbers.
    for step, tokens, summed, gathered in (
        (prefill, computed, logits + 8 * 4, 3 * logits // 3),
        (decoding, 4, 0, 4 * logits // 3),
    ):
        assert step.sent_bytes == {
            "all-reduce": (2 * layers + 1) * tokens * width + summed,
            "all-gather": gathered + tokens * width // 3,
            "collective-permute": tokens * width // 3,
        }
    # Prefill's end multiplies two rows, never one.
    assert prefill.head_flops == 2 * 2 * config.hidden_size * config.vocab_size / 3
    assert decoding.head_flops == 2 * 4 * config.hidden_size * config.vocab_size / 3


@pytest.mark.parametrize(
    ("prompt", "chunk", "stages"), [(256, 256, 4), (600, 256, 2), (600, 256, 4), (40, 256, 3), (1024, 256, 3)]
)
def test_stages_pass_on_as_often_as_in_the_engine(prompt, chunk, stages):
    buckets = [next(b for b in chunk_buckets(chunk) if b >= tokens) for _, tokens in plan_chunks(prompt, 0, chunk)]
    moving = [[b for b in tick[:-1] if b is not None] for tick in ticks(buckets, stages)]
    assert plan._passings(prompt, chunk, stages) == Counter(max(some) for some in moving if some)


def test_a_batch_of_one_in_bfloat16_is_computed_as_two_rows(on_devices):
    config = replace(ARCHITECTURES["smollm2-135m"], num_layers=2)
    one, two = (on_devices(decoding_plan, config, batch) for batch in (1, 2))
    attention = config.num_layers * 4 * 256 * config.num_heads * config.head_dim  # of a request's 256 tokens
    assert one.flops == two.flops - attention
    assert one.temporary_bytes < 2 * two.temporary_bytes


def test_b_of_the_paper_s_model():
    assert plan.linear_factor(LLAMA2_70B) == 25.5
    n, d = 8192, 8192
    assert plan.formula_flops(LLAMA2_70B, n, n * n, 22) == 80 * (4 * n * n * d + 22 * n * d * d)


def costs(function, *shapes):
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    return hlo.program_costs(compiled.as_text()), compiled


def test_products_are_counted_as_xla_counts_them():
    found, compiled = costs(lambda a, b: jnp.einsum("kij,kjl->kil", a, b), (3, 64, 32), (3, 32, 80))
    assert found == {hlo.FLOPS: 2 * 3 * 64 * 32 * 80}
    assert compiled.cost_analysis()["flops"] == pytest.approx(found[hlo.FLOPS], rel=0.01)


def test_loops_count_as_often_as_they_turn():
    def loops(a):
        def outer(_, x):
            return jax.lax.fori_loop(0, 5, lambda _, y: jnp.sin(y @ a), x)

        return jax.lax.fori_loop(0, 7, outer, a)

    assert costs(loops, (32, 32))[0] == {hlo.FLOPS: 35 * 2 * 32**3}


def test_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="how often it turns is not known"):
        costs(lambda a: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.sin(x @ a), a), (32, 32))


def test_of_a_branch_the_costliest_side_counts():
    def branch(a):
        return jax.lax.cond(a.sum() > 0, lambda x: jnp.sin(x @ x) @ x, lambda x: x @ x, a)

    assert costs(branch, (32, 32))[0] == {hlo.FLOPS: 2 * 2 * 32**3}


def run_plan(*arguments):
    """The command's exit code, output and errors, in a process of its own."""
    code = "import sys; from mooncake_jax.__main__ import run, COMMANDS\n"
    code += "COMMANDS['plan'] = ('mooncake_jax.commands.plan_cluster', '')\nsys.exit(run(['plan', *sys.argv[1:]]))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_llama2_70b_on_32_devices_without_its_weights():
    code, out, errors = run_plan("--model=llama2-70b", "--pp=4", "--tp=8")
    assert (code, errors) == (0, "")
    assert "68,976,648,192 parameters" in out
    assert re.search(r"parameters +4\.11 GiB", out)
    assert re.search(r"KVCache +160\.00 MiB +1\.25 GiB", out)
    ratios = re.search(r"compiled / formula +(\S+) +(\S+)", out)
    assert all(0.98 < float(ratio) < 1.02 for ratio in ratios.groups())
    assert re.search(r"against b = 25\.5 +-12\.7% +-11\.9%", out)
    assert "In prefill a = 2, as the engine skips what is masked" in out
    assert float(re.search(r"(\d+) MiB\n", out)[1]) < 1024  # the weights alone are 128 GiB


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--pp=81", "--pp=81: a stage holds at least one of the model's 80 layers; use 1 to 80"),
        ("--tp=5", "use one of 1, 2, 4, 8"),
        ("--prefill_chunk=0", "--prefill_chunk=0: it must be at least 1"),
        ("--prefill_chunk=32769", "--prefill_chunk=32769: it takes too long to compile; use at most 32768 tokens"),
        ("--context=0", "--context=0: it must be at least 1"),
        ("--prompt=1000000000007", "--prompt=1000000000007: positions are int32; use at most 2147450752 tokens"),
        (f"--context={10**30}", "positions are int32; use at most 2147450752 tokens"),
        (
            "--batch=4194304",
            "--batch=4194304: the ids of its pages are int32; use at most 4194303 with --context=8192",
        ),
        ("--model=dummy:llama2-71b", "no architecture 'llama2-71b' is known; use one of"),
        (f"--model={'x' * 300}", "neither a folder with a config.json"),
        ("--model=llama2-71b", "--model=llama2-71b: neither a folder with a config.json, nor a .gguf file, nor one of"),
        ("loose", "'loose' is no flag"),
    ],
)
def test_bad_flags_end_with_one_line(flag, told):
    code, out, errors = run_plan(flag)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert told in errors


def test_the_largest_sizes_need_no_more_memory():
    largest = plan.MOST_TOKENS
    arguments = [f"--prompt={largest}", "--context=2000000000", "--batch=15"]
    code, out, errors = run_plan("--model=dummy:smollm2-135m:7", *arguments)
    assert (code, errors) == (0, "")
    ratios = re.search(r"compiled / formula +(\S+) +(\S+)", out)
    assert all(float(ratio) == pytest.approx(1, abs=1e-3) for ratio in ratios.groups())
    assert f"--prompt={largest} is beyond the model's context of 8192 tokens" in out
    assert "--context=2000000000 is beyond the model's context of 8192 tokens" in out
    assert float(re.search(r"(\d+) MiB\n", out)[1]) < 4096  # the table of pages alone would be 7 GiB


def test_a_folder_needs_its_config_alone(tmp_path):
    (tmp_path / "config.json").write_text((DATA / "tiny-llama2" / "config.json").read_text())
    sizes = ["--pp=3", "--tp=2", "--prompt=256", "--context=2048", "--dtype=float32"]
    code, out, errors = run_plan(f"--model={tmp_path}", *sizes)
    assert (code, errors) == (0, "")
    assert "pp=3 (1 or 2 layers a stage), tp=2" in out
    assert "of the longest stages" in out
    assert "beyond the model's context" not in out
