"""Files that appear under their name only when they are whole."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mooncake_jax.errors import UsageError


def write_whole(path: str | os.PathLike, lines: Iterable[str]) -> None:
    """Writes a UTF-8 file of these lines, in the place of one that was there. Raises UsageError where it cannot."""
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=path.absolute().parent) as folder:
            written = Path(folder) / "file"
            with written.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(lines)
            os.replace(written, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error}); name a file that can") from None
