"""mooncake-jax models: the models known by name, and what each takes."""

from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.catalog import CATALOG, DEFAULT_MODEL_DIR
from mooncake_jax.model.config import DTYPE_BYTES, LlamaConfig

FLAGS = flags.FlagValues()
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", flag_values=FLAGS)
_WIDTH = 120  # where there is no terminal to ask
_LEGEND = (
    "KVCache: of one token, all layers. Any of them runs with random weights as --model=dummy:NAME, and with real ones "
    "from your own files, --model=PATH; what can be fetched, `mooncake-jax fetch-model NAME` fetches."
)


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["models", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(_table(Path(FLAGS.model_dir)))
    console.print(_LEGEND, style="dim")
    return 0


def _table(model_dir: Path) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("model", no_wrap=True)
    sizes = [f"{what}\n{dtype}" for what in ("weights", "KVCache") for dtype in DTYPE_BYTES]
    for column in ("parameters", *sizes, "context"):
        table.add_column(column, justify="right")
    table.add_column("files")
    for name, config in ARCHITECTURES.items():
        table.add_row(name, *_sizes(config), _files(name, model_dir))
    return table


def _sizes(config: LlamaConfig) -> list[str]:
    weights = [f"{config.parameters * width / 2**30:.2f} GiB" for width in DTYPE_BYTES.values()]
    kvcache = [f"{config.kv_bytes_per_token(dtype) / 1024:g} KiB" for dtype in DTYPE_BYTES]
    return [f"{config.parameters:,}", *weights, *kvcache, f"{config.max_context:,}"]


def _files(name: str, model_dir: Path) -> str:
    if name not in CATALOG:
        return "yours"
    return "fetched" if (model_dir / CATALOG[name].file_name).is_file() else "can be fetched"
