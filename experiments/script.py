"""What every experiment is as a script: bad flags end with one line, and results go into a folder."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from absl import flags

from mooncake_jax.errors import UsageError


def parse(values: flags.FlagValues, arguments: list[str]) -> None:
    """Raises UsageError for what is no flag."""
    loose = values([sys.argv[0], *arguments])[1:]
    if loose:
        raise UsageError(f"{loose[0]!r} is no flag: flags are written --name=value")


def make_folder(out: str) -> Path:
    """That of --out, made if need be. Raises UsageError, where no file can be made in it too."""
    path = Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"--out={out}: {error.strerror}; name a folder that can be written to") from None
    return path


def run_script(main: Callable[[list[str]], int]) -> None:
    """Ends the process with main's exit code, with 2 and one line, or with 130 where it was interrupted."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (UsageError, flags.Error) as error:
        print(f"experiments/{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
