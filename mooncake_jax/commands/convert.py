"""mooncake-jax convert: from GGUF or an HF folder to Orbax checkpoints, in the dtype that they will be served in."""

import signal
import sys
import time
from pathlib import Path

from absl import flags
from rich import progress as bars
from rich.console import Console

from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.config import DTYPE_BYTES

FLAGS = flags.FlagValues()
EXIT_INTERRUPTED = 130
_LINE_INTERVAL_S = 10  # between lines where there is no terminal


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_string("model", None, "what to convert: a name, a .gguf file or a folder, as in replay", **kwargs)
    flags.DEFINE_string("out", None, "folder to make; it is a model for --model ever after", **kwargs)
    flags.DEFINE_enum("dtype", "bfloat16", list(DTYPE_BYTES), "type to store the weights in", **kwargs)
    flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", **kwargs)


_define()


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["convert", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    for name in ("model", "out"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} is missing; give --model=SOURCE and --out=FOLDER")
    out = Path(FLAGS.out)
    location = resolve(FLAGS.model, Path(FLAGS.model_dir))
    # Only now, so that bad flags are told at once: jax and Orbax take seconds to import.
    from mooncake_jax.model.conversion import convert_model

    try:
        with _Interruption() as interruption, _Progress() as progress:

            def after_part(done: int, total: int) -> None:
                progress.update(done, total)
                interruption.check()

            convert_model(location, out, FLAGS.dtype, after_part)
    except KeyboardInterrupt:
        print("mooncake-jax convert: interrupted; nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"{out} holds {FLAGS.model} in {FLAGS.dtype}: use it with --model={out}")
    return 0


class _Interruption:
    """A context manager: Ctrl-C takes effect at the next check, since Orbax does not end well in the middle of a write;
    a second one at once.
    """

    def __enter__(self) -> "_Interruption":
        self._asked = False
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *_: object) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        if self._asked:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)


class _Progress:
    """A context manager: a bar with the time left on a terminal; elsewhere a plain line now and then."""

    def __init__(self):
        console = Console(stderr=True)
        columns = (bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        self._bar = bars.Progress("converting", *columns, console=console) if console.is_terminal else None

    def __enter__(self) -> "_Progress":
        self._started = self._last_line = time.monotonic()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("")
        return self

    def update(self, done: int, total: int) -> None:
        """Parameters converted, of how many."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_INTERVAL_S:
            self._last_line, elapsed = now, now - self._started
            left = elapsed / done * (total - done)
            print(f"{done / total:.0%} converted in {elapsed:.0f} s, about {left:.0f} s left", file=sys.stderr)

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
