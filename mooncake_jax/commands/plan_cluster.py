"""mooncake-jax plan: what a model costs on a cluster's devices, without its weights and without the devices.

Compiles the engine's prefill and a decoding step for virtual CPU devices (parallel/plan.py) and prints bytes and FLOPs
of one device, and all devices' FLOPs beside the paper's formula.
"""

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from rich.console import Console
from rich.table import Table

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import DTYPE_BYTES, LlamaConfig
from mooncake_jax.model.dummy import PREFIX, DummyModel
from mooncake_jax.model.files import read_json
from mooncake_jax.model.sources import open_source
from mooncake_jax.parallel.mesh import MeshShape

if TYPE_CHECKING:
    from mooncake_jax.parallel.pipeline import PipelineModel
    from mooncake_jax.parallel.plan import StepPlan

FLAGS = flags.FlagValues()
_CHUNK = 8192  # tokens, unless --prefill_chunk says otherwise
_WIDTH = 120  # where there is no terminal to ask


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    known = ", ".join(ARCHITECTURES)
    models = f"one of {known}, also as {PREFIX}NAME[:SEED]; a folder with a config.json; a .gguf file"
    flags.DEFINE_string("model", "llama2-70b", models, **kwargs)
    flags.DEFINE_integer("pp", 1, "pipeline stages", **kwargs)
    flags.DEFINE_integer("tp", 1, "devices of a stage, which share every layer by tensor parallelism", **kwargs)
    flags.DEFINE_integer("prompt", 8192, "tokens to prefill", **kwargs)
    flags.DEFINE_integer(
        "prefill_chunk", None, f"tokens that prefill computes at once (default: all, up to {_CHUNK})", **kwargs
    )
    flags.DEFINE_integer("batch", 16, "requests of a decoding step", **kwargs)
    flags.DEFINE_integer("context", 8192, "tokens of context of each request in decoding", **kwargs)
    flags.DEFINE_enum("dtype", "bfloat16", list(DTYPE_BYTES), "type of weights and KVCache", **kwargs)


_define()


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["plan", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    config, shape = _config(FLAGS.model), MeshShape(FLAGS.pp, FLAGS.tp)
    shape.check(config)
    _check_positive()
    # Only now: JAX takes seconds to load.
    import jax
    import jax.numpy as jnp

    from mooncake_jax.parallel import plan
    from mooncake_jax.parallel.pipeline import abstract_pipeline

    _check_largest()
    chunk = FLAGS.prefill_chunk or min(FLAGS.prompt, _CHUNK)
    # Only now: JAX must start with this many devices.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", shape.devices)
    model = abstract_pipeline(config, jnp.dtype(FLAGS.dtype), shape)
    prefill = plan.plan_prefill(model, FLAGS.prompt, chunk)
    _print_plan(model, prefill, plan.plan_decoding(model, FLAGS.batch, FLAGS.context), chunk)
    return 0


def _config(name: str) -> LlamaConfig:
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name.startswith(PREFIX):
        return DummyModel.parse(name).config()
    path = Path(name)
    # os.path, because Path's own tests raise for a name that is too long for the file system.
    if os.path.isfile(path / "config.json"):
        return LlamaConfig.from_hf(read_json(path / "config.json"), str(path / "config.json"))
    if os.path.isfile(path) and path.suffix == ".gguf":
        return open_source(path).config()
    raise UsageError(
        f"--model={name}: neither a folder with a config.json, nor a .gguf file, nor one of {', '.join(ARCHITECTURES)}"
    )


def _check_positive() -> None:
    for name in ("prompt", "prefill_chunk", "batch", "context"):
        value = FLAGS[name].value
        if value is not None and value < 1:
            raise UsageError(f"--{name}={value}: it must be at least 1")


def _check_largest() -> None:
    """Raises UsageError where a request would have too many tokens, or a chunk, or a decoding step too many pages."""
    from mooncake_jax.parallel.plan import MOST_CHUNK, MOST_PAGES, MOST_TOKENS, pages_for

    for name in ("prompt", "context"):
        if FLAGS[name].value > MOST_TOKENS:
            raise UsageError(f"--{name}={FLAGS[name].value}: positions are int32; use at most {MOST_TOKENS} tokens")
    if FLAGS.prefill_chunk is not None and FLAGS.prefill_chunk > MOST_CHUNK:
        raise UsageError(
            f"--prefill_chunk={FLAGS.prefill_chunk}: it takes too long to compile; use at most {MOST_CHUNK} tokens"
        )
    most = MOST_PAGES // pages_for(FLAGS.context)
    if FLAGS.batch > most:
        raise UsageError(
            f"--batch={FLAGS.batch}: the ids of its pages are int32; use at most {most} with --context={FLAGS.context}"
        )


def _print_plan(model: "PipelineModel", prefill: "StepPlan", decoding: "StepPlan", chunk: int) -> None:
    from mooncake_jax.parallel.plan import PAPER_B, linear_factor

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    config, steps = model.held[0].config, (prefill, decoding)
    layers = sorted({len(stage) for stage in model.layers})
    heads = config.num_heads * config.head_dim / config.hidden_size
    lines = [
        f"{FLAGS.model}: {config.parameters:,} parameters in {FLAGS.dtype}, {config.num_layers} layers",
        f"pp={FLAGS.pp} ({' or '.join(map(str, layers))} layers a stage), tp={FLAGS.tp}; "
        f"prefill of {FLAGS.prompt} tokens in chunks of {chunk}; "
        f"decoding of {FLAGS.batch} requests at {FLAGS.context} tokens",
    ]
    table = Table("", "prefill", "decoding step", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    _add_device_rows(table, model, steps)
    table.add_section()
    _add_total_rows(table, steps, linear_factor(config), PAPER_B)
    lines += [
        f"--{name}={FLAGS[name].value} is beyond the model's context of {config.max_context} tokens; it is planned for "
        "all the same"
        for name in ("prompt", "context")
        if FLAGS[name].value > config.max_context
    ]
    notes = [
        f"l (a n^2 d + b n d^2): b = {linear_factor(config):g} by the configuration; in decoding n^2 is batch x "
        f"context and a = {4 * heads:g}. The head is apart.",
        f"In prefill a = {2 * heads:g}, as the engine skips what is masked; it computes tiles that are masked in part, "
        "and what pads the last chunk, whole. Its KVCache is the buffer it is computed in, a power of two and a chunk.",
        "The engine decodes on one device so far; several are planned as prefill's are.",
        "FLOPs are products in the compiled programs, loops counted as often as they turn. Temporaries and collectives "
        "are those of XLA's CPU compiler, which widens much of bfloat16 to float32, and so doubles what it sends.",
        f"lowered in {sum(step.lower_s for step in steps):.1f} s, compiled in "
        f"{sum(step.compile_s for step in steps):.1f} s, peak memory of this process {_peak_mib():.0f} MiB",
    ]
    console.print(*lines, sep="\n", markup=False, highlight=False)
    console.print(table, *notes, sep="\n")


def _add_device_rows(table: Table, model: "PipelineModel", steps: "tuple[StepPlan, StepPlan]") -> None:
    from mooncake_jax.parallel.sharding import device_bytes

    parameters = _size(max(device_bytes((stage.embedder, stage.layers)) for stage in model.held.values()))
    table.add_row("one device" + (" (of the longest stages)" if len(set(map(len, model.layers))) > 1 else ""))
    table.add_row("  parameters", parameters, parameters)
    table.add_row("  KVCache", *(_size(step.kv_bytes) for step in steps))
    table.add_row("  temporaries", *(_size(step.temporary_bytes) for step in steps))
    table.add_row("  FLOPs of layers", *(f"{step.flops:.5g}" for step in steps))
    table.add_row("  FLOPs of the head", *(f"{step.head_flops:.5g}" for step in steps))
    for kind in sorted({*steps[0].sent_bytes, *steps[1].sent_bytes}):
        table.add_row(f"  into {kind}", *(_size(step.sent_bytes.get(kind, 0)) for step in steps))


def _add_total_rows(table: Table, steps: "tuple[StepPlan, StepPlan]", b: float, paper_b: float) -> None:
    table.add_row("all devices")
    table.add_row("  FLOPs of layers", *(f"{step.total_flops:.5g}" for step in steps))
    table.add_row(f"  formula, b = {b:g}", *(f"{step.formula_flops:.5g}" for step in steps))
    table.add_row("  compiled / formula", *(f"{step.total_flops / step.formula_flops:.4f}" for step in steps))
    table.add_row(f"  formula, the paper's b = {paper_b:g}", *(f"{step.paper_flops:.5g}" for step in steps))
    table.add_row(f"  against b = {b:g}", *(f"{step.paper_flops / step.formula_flops - 1:+.1%}" for step in steps))


def _size(count: int) -> str:
    """A number of bytes in the largest unit that leaves at least 1."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count} B"


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
