"""What a result was computed by: digests of the files, by which run_all.py tells whether they are still the same."""

import hashlib
import sys
from pathlib import Path

import reference

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parent


def digests(name: str, measured: bool = False) -> dict[str, str]:
    """Of the files of experiments/ and of the package that this process has loaded, all scripts that begin with the
    figure's name, and the paper's points that were read; by their path in the project. measured: ranks may have loaded
    any of the package, so all of it counts.
    """
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = {Path(file).resolve() for file in loaded if file}
    if measured:
        files |= set((PROJECT / "mooncake_jax").rglob("*.py"))
    files |= set(FOLDER.glob(f"{name}*.py")) | {file.resolve() for file in reference.opened()}
    ours = {place: file for file in files if (place := _place(file)) is not None}
    return {place: _digest(ours[place]) for place in sorted(ours)}


def unchanged(known: dict[str, str]) -> bool:
    """Whether these files are what they were."""
    return all((PROJECT / place).is_file() and _digest(PROJECT / place) == digest for place, digest in known.items())


def _place(file: Path) -> str | None:
    """None for what is not of this project."""
    parts = file.relative_to(PROJECT).parts if file.is_relative_to(PROJECT) else ()
    return "/".join(parts) if parts and parts[0] in (FOLDER.name, "mooncake_jax") else None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
