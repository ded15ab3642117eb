"""From any model to a folder of Orbax checkpoints (checkpoint.py), one part in memory at a time."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from mooncake_jax.errors import UsageError
from mooncake_jax.model.checkpoint import describe
from mooncake_jax.model.config import DTYPE_BYTES
from mooncake_jax.model.loading import read_parts
from mooncake_jax.model.orbax_arrays import write_part
from mooncake_jax.model.sources import Location, open_source, source_fingerprint


def convert_model(location: Location, out: Path, dtype: str, progress: Callable[[int, int], None]) -> None:
    """Writes the model at location as dtype into the folder out, which must not exist.

    out appears only when it is complete: until then its content lies in a folder beside it whose name begins with a
    dot. progress(done, all) is called with numbers of parameters after every part. Raises UsageError.
    """
    _check_absent(out)
    source = open_source(location)
    config = source.config()
    identity = source_fingerprint(source, dtype)
    done = 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _check_space(out, config.parameters * DTYPE_BYTES[dtype])
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            describe(unfinished, config, identity, source.tokenizer())
            for part, parameters in read_parts(source, dtype):
                write_part(unfinished, part, parameters)
                done += sum(leaf.size for leaf in jax.tree.leaves(parameters))
                progress(done, config.parameters)
            unfinished.chmod(0o755)
            os.rename(unfinished, out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise UsageError(
            f"{out}: the weights take {needed / 2**30:.1f} GiB and its disk has {free / 2**30:.1f} left; "
            "choose another --out, or make room"
        )


def _check_absent(out: Path) -> None:
    if os.path.lexists(out):
        raise UsageError(f"{out}: exists already; choose another --out, or remove it")
