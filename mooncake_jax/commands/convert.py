"""mooncake-jax convert: from GGUF or an HF folder to Orbax checkpoints, in the dtype that they will be served in."""

import signal
import sys
from pathlib import Path

from absl import flags

from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.config import DTYPE_BYTES

FLAGS = flags.FlagValues()
EXIT_INTERRUPTED = 130


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
        with _Interruption() as interruption, WorkProgress("converting", "converted") as progress:

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
