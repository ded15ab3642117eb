"""A node's SSD folder: one subfolder a model (ssd_array.py), and a lock that one process holds.

Knows what belongs to the tier and what does not, and how much space it takes; never touches anything else.
"""

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mooncake_jax.cache.ssd_format import METADATA, MODEL_NAME, READS, UNFINISHED
from mooncake_jax.errors import UsageError

LOCK_NAME = "mooncake-ssd.lock"
_SLOT = re.compile(r"c\.\d+\.0\.0")


def check_folder(folder: Path) -> None:
    """Raise UsageError if no tier can be kept here, as FolderLock would. Makes no folder."""
    try:
        if not (folder / LOCK_NAME).exists():
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            tempfile.TemporaryDirectory(dir=there).cleanup()  # asking for permissions is not enough: root has them all
            return
    except OSError as error:
        raise _unusable(folder, error) from None
    FolderLock(folder).close()


class FolderLock:
    """Makes the folder and holds it until close(), or until the process ends. Raises UsageError if another process
    holds it, or if it can be neither made nor read.
    """

    def __init__(self, folder: Path):
        path = folder / LOCK_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open_lock(path)
        except OSError as error:
            raise _unusable(folder, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise UsageError(f"{folder}: in use by process {holder}; stop it or name another folder") from None
        try:
            os.pwrite(self._file, f"{os.getpid():<31}\n".encode(), 0)
        except OSError:
            pass  # a full or read-only disk: the lock holds, only its holder stays unnamed

    def close(self) -> None:
        os.close(self._file)


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"{folder}: {error.strerror}; name another folder for the SSD tier")


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return os.open(path, os.O_RDONLY)  # a folder that cannot be written can still be read


def node_folders(folder: Path) -> list[Path]:
    """The SSD folders of nodes at this path: itself, or those right below it. Raises OSError."""
    if (folder / LOCK_NAME).is_file():
        return [folder]
    return sorted(path for path in folder.iterdir() if (path / LOCK_NAME).is_file())


def model_folders(folder: Path) -> list[Path]:
    """Subfolders that are models', by name, whoever's."""
    found = (path for path in folder.iterdir() if MODEL_NAME.fullmatch(path.name) and path.is_dir())
    return sorted(path for path in found if not path.is_symlink())


def remove_stale_locks(folder: Path) -> None:
    """Remove what killed writers left. Only for whoever holds the folder's lock."""
    for model in model_folders(folder):
        for path in _own_files(model):
            if path.name.endswith(UNFINISHED):
                _unlink(path)


def disk_bytes(folder: Path) -> int:
    """Space that a folder takes with all in it, as du counts."""
    total = allocated(folder)
    for parent, folders, files in os.walk(folder):
        total += sum(allocated(Path(parent, name)) for name in (*folders, *files))
    return total


def remove_model(folder: Path) -> None:
    """Remove a model's folder; a file in it that is not the tier's stays, and the folder with it. Only for whoever
    holds the lock. Raises OSError.
    """
    # The metadata last: until then it can be told whose blocks these are.
    for path in sorted(_own_files(folder), key=lambda path: path.name == METADATA):
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _own_files(folder: Path) -> Iterator[Path]:
    for path in list(folder.iterdir()):
        name = path.name.removesuffix(UNFINISHED)
        if (name in (METADATA, READS) or _SLOT.fullmatch(name)) and not path.is_dir():
            yield path


def allocated(path: Path) -> int:
    """Space that a file takes, or a folder without what is in it; 0 if it is gone."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # read-only: it takes space and does no harm
