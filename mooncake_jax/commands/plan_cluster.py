"""mooncake-jax plan: what a model costs on a cluster's devices, without its weights and without the devices.

Compiles prefill and decoding for virtual CPU devices (parallel/plan.py) and prints bytes and FLOPs of one device, and
all devices' FLOPs beside the paper's formula.
"""

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
from mooncake_jax.model.files import read_json
from mooncake_jax.model.sources import open_source
from mooncake_jax.parallel.mesh import MeshShape, make_mesh

if TYPE_CHECKING:
    from mooncake_jax.parallel.plan import StepPlan
    from mooncake_jax.parallel.sharding import StagedModel

FLAGS = flags.FlagValues()
_WIDTH = 120  # where there is no terminal to ask


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    known = ", ".join(ARCHITECTURES)
    flags.DEFINE_string("model", "llama2-70b", f"one of {known}; a folder with a config.json; a .gguf file", **kwargs)
    flags.DEFINE_integer("pp", 1, "pipeline stages", **kwargs)
    flags.DEFINE_integer("tp", 1, "devices of a stage, which share every layer by tensor parallelism", **kwargs)
    flags.DEFINE_integer("prompt", 8192, "tokens to prefill", **kwargs)
    flags.DEFINE_integer("prefill_chunk", None, "tokens that prefill computes at once (default: all)", **kwargs)
    flags.DEFINE_integer("batch", 16, "requests of a decoding step", **kwargs)
    flags.DEFINE_integer("context", 8192, "tokens of context of each request in decoding", **kwargs)
    flags.DEFINE_enum("dtype", "bfloat16", list(DTYPE_BYTES), "type of weights and KVCache", **kwargs)


_define()


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["plan", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    config, shape, chunk = _config(FLAGS.model), MeshShape(FLAGS.pp, FLAGS.tp), _chunk()
    shape.check(config)
    # Only now: bad flags are told before JAX starts, and it must start with this many devices.
    import jax
    import jax.numpy as jnp

    from mooncake_jax.parallel import plan
    from mooncake_jax.parallel.sharding import abstract_staged_model

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", shape.devices)
    model = abstract_staged_model(config, jnp.dtype(FLAGS.dtype), make_mesh(shape))
    prefill = plan.plan_prefill(model, FLAGS.prompt, chunk)
    _print_plan(model, prefill, plan.plan_decoding(model, FLAGS.batch, FLAGS.context), FLAGS.prompt // chunk)
    return 0


def _config(name: str) -> LlamaConfig:
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    path = Path(name)
    if (path / "config.json").is_file():
        return LlamaConfig.from_hf(read_json(path / "config.json"), str(path / "config.json"))
    if path.is_file() and path.suffix == ".gguf":
        return open_source(path).config()
    raise UsageError(
        f"--model={name}: neither a folder with a config.json, nor a .gguf file, nor one of {', '.join(ARCHITECTURES)}"
    )


def _chunk() -> int:
    """Tokens of a chunk of prefill, all sizes checked."""
    for name in ("prompt", "prefill_chunk", "batch", "context"):
        if FLAGS[name].value is not None and FLAGS[name].value < 1:
            raise UsageError(f"--{name}={FLAGS[name].value}: it must be at least 1")
    prompt, chunk = FLAGS.prompt, FLAGS.prefill_chunk or FLAGS.prompt
    if prompt % chunk:
        nearest = max(size for size in range(1, min(chunk, prompt) + 1) if prompt % size == 0)
        raise UsageError(
            f"--prefill_chunk={chunk} does not divide --prompt={prompt}; use a divisor of it such as {nearest}"
        )
    return chunk


def _print_plan(model: "StagedModel", prefill: "StepPlan", decoding: "StepPlan", chunks: int) -> None:
    from mooncake_jax.parallel.plan import PAPER_B, linear_factor

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    config, steps = model.config, (prefill, decoding)
    layers = sorted({len(stage) for stage in model.stages})
    a = 2 * (1 + 1 / chunks) * config.num_heads * config.head_dim / config.hidden_size
    lines = [
        f"{FLAGS.model}: {config.parameters:,} parameters in {FLAGS.dtype}, {config.num_layers} layers",
        f"pp={FLAGS.pp} ({' or '.join(map(str, layers))} layers a stage), tp={FLAGS.tp}; "
        f"prefill of {FLAGS.prompt} tokens in chunks of {FLAGS.prompt // chunks}; "
        f"decoding of {FLAGS.batch} requests at {FLAGS.context} tokens",
    ]
    table = Table("", "prefill", "decoding step", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    _add_device_rows(table, model, steps)
    table.add_section()
    _add_total_rows(table, steps, linear_factor(config), PAPER_B)
    notes = [
        f"l (a n^2 d + b n d^2): a = {a:g} as computed (2 where masked blocks are skipped), b = "
        f"{linear_factor(config):g} by the configuration; in decoding n^2 is batch x context. The head is apart.",
        "FLOPs are products in the compiled programs, loops counted as often as they turn. Temporaries and collectives "
        "are those of XLA's CPU compiler, which widens much of bfloat16 to float32.",
        f"lowered in {sum(step.lower_s for step in steps):.1f} s, compiled in "
        f"{sum(step.compile_s for step in steps):.1f} s, peak memory of this process {_peak_mib():.0f} MiB",
    ]
    console.print(*lines, sep="\n", markup=False, highlight=False)
    console.print(table, *notes, sep="\n")


def _add_device_rows(table: Table, model: "StagedModel", steps: "tuple[StepPlan, StepPlan]") -> None:
    from mooncake_jax.parallel.sharding import device_bytes

    parameters = _size(device_bytes((model.embedder, model.slots)))
    table.add_row("one device" + (" (of the longest stages)" if len(set(map(len, model.stages))) > 1 else ""))
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
