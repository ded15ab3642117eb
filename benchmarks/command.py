"""What every benchmark is as a command: flags checked before anything is measured, and one line for a bad one."""

import sys
from collections.abc import Callable
from pathlib import Path

from absl import flags

from mooncake_jax.errors import UsageError


def parse(values: flags.FlagValues, arguments: list[str]) -> None:
    """Raises UsageError for what is no flag, and for a --json file that cannot be written."""
    loose = values([sys.argv[0], *arguments])[1:]
    if loose:
        raise UsageError(f"{loose[0]!r} is no flag: flags are written --name=value")
    if values.json:
        try:
            Path(values.json).open("a").close()
        except OSError as error:
            raise UsageError(
                f"--json={values.json}: {error.strerror}; name a file in a folder that exists and can be written to"
            ) from None


def run(main: Callable[[list[str]], int]) -> None:
    """Ends the process with main's exit code, or with 2 and one line."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (UsageError, flags.Error) as error:
        print(f"benchmarks/{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
