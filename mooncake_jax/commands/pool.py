"""mooncake-jax pool: the KVCache blocks that nodes keep on SSD (cache/ssd.py): list, count, verify, remove.

Works on files, beside running nodes too, whose latest hits are not yet counted there; only `purge` wants the folder
for itself.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from mooncake_jax.cache.ssd_array import SlotArray
from mooncake_jax.cache.ssd_folder import FolderLock, disk_bytes, model_folders, node_folders, remove_model
from mooncake_jax.cache.ssd_format import Header, SlotDamaged, SlotFailed, SlotMissing, StoredModel
from mooncake_jax.cache.ssd_reads import ReadCounts, Reads
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.errors import UsageError

FLAGS = flags.FlagValues()
_ACTIONS = ("ls", "stats", "verify", "purge")
_SHOWN = 12  # hex digits of a key or a model
_WIDTH = 120  # where there is no terminal to ask


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_string("ssd_dir", None, "a node's SSD folder, or the folder that holds those of all", **kwargs)
    flags.DEFINE_bool("damaged", False, "purge: remove the blocks that `verify` names", **kwargs)
    flags.DEFINE_string(
        "foreign_to",
        None,
        "purge: keep this model, as `stats` names it, with all its layers, and remove others",
        **kwargs,
    )
    flags.DEFINE_bool("all", False, "purge: remove all blocks of all models", **kwargs)
    flags.DEFINE_bool("yes", False, "purge: do it; without this flag it only says what it would remove", **kwargs)


_define()


@dataclass(frozen=True)
class _Folder:
    """A model's folder on one node; model: None if its metadata cannot be read."""

    node: Path
    path: Path
    model: StoredModel | None

    @property
    def name(self) -> str:
        return self.path.name[:_SHOWN]

    def open(self) -> SlotArray:
        return SlotArray(self.path, self.model)


@dataclass(frozen=True)
class _Stored:
    """A block on disk: its header, None if that is damaged, how often it was read, its file and that one's bytes."""

    header: Header | None
    reads: Reads
    path: Path
    size: int


def main(arguments: list[str]) -> int:
    actions = FLAGS(["pool", *arguments])[1:]
    if len(actions) != 1 or actions[0] not in _ACTIONS:
        raise UsageError(f"{' '.join(['pool', *actions])}: say what to do, one of {', '.join(_ACTIONS)}")
    if not FLAGS.ssd_dir:
        raise UsageError("--ssd_dir is missing; give --ssd_dir=FOLDER")
    folders = _folders(Path(FLAGS.ssd_dir))
    return {"ls": _ls, "stats": _stats, "verify": _verify, "purge": _purge}[actions[0]](folders)


def _folders(ssd_dir: Path) -> list[_Folder]:
    try:
        nodes = node_folders(ssd_dir)
        found = [_Folder(node, path, StoredModel.of_folder(path)) for node in nodes for path in model_folders(node)]
    except OSError as error:
        raise UsageError(f"--ssd_dir={ssd_dir}: {error.strerror}; give the folder of an SSD tier") from None
    if not nodes:
        raise UsageError(f"--ssd_dir={ssd_dir}: no SSD tier was ever there; give the folder of one")
    return found


def _ls(folders: list[_Folder]) -> int:
    now = time.time()
    names = f"{'block':<{_SHOWN}}  {'parent':<{_SHOWN}}  {'model':<{_SHOWN}}"
    print(f"{names}  {'bytes':>12}  {'age':>8}  {'hits':>8}  {'last hit':>8}  file")
    for folder in _readable(folders):
        for block in _blocks(folder):
            if block.header is None:
                key, parent, age = "damaged", "", ""
            else:
                key, parent = block.header.key.hex()[:_SHOWN], (block.header.parent or b"").hex()[:_SHOWN] or "-"
                age = _age(now - block.header.written_ns / 1e9)
            names = f"{key:<{_SHOWN}}  {parent:<{_SHOWN}}  {folder.name}"
            hits, last = f"{_hits([block], folder.model):.4g}", _last_hit([block], now)
            print(f"{names}  {block.size:>12}  {age:>8}  {hits:>8}  {last:>8}  {block.path}")
    return 0


def _stats(folders: list[_Folder]) -> int:
    now = time.time()
    table = Table(box=None, header_style="bold")
    for column in ("node", "model", "layout", "fingerprint"):
        table.add_column(column, overflow="fold")
    for column in ("blocks", "on disk", "oldest", "newest", "hits", "last hit"):
        table.add_column(column, justify="right", no_wrap=True)
    for folder in folders:
        whose = (folder.node.name, folder.name, *_whose(folder.model))
        if folder.model is None:
            table.add_row(*whose, "?", _size(disk_bytes(folder.path)))
            continue
        blocks = [block for block in _blocks(folder) if block.header is not None]
        ages = [now - block.header.written_ns / 1e9 for block in blocks]
        span = (_age(max(ages)), _age(min(ages))) if ages else ("", "")
        hits = (f"{_hits(blocks, folder.model):.4g}", _last_hit(blocks, now))
        table.add_row(*whose, str(len(blocks)), _size(disk_bytes(folder.path)), *span, *hits)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)
    return 0


def _hits(blocks: list[_Stored], model: StoredModel) -> float:
    """A read of some of a block's layers is so much of a hit."""
    return sum(block.reads.layers for block in blocks) / model.layout.layers


def _last_hit(blocks: list[_Stored], now: float) -> str:
    last_ns = max((block.reads.last_ns for block in blocks), default=0)
    return _age(now - last_ns / 1e9) if last_ns else "-"


def _verify(folders: list[_Folder]) -> int:
    damaged = 0
    for folder in folders:
        if folder.model is None:
            damaged += 1
            print(f"{folder.path}: cannot tell whose blocks these are")
    blocks = 0
    for array, index, problem in _verified(folders):
        blocks += 1
        if problem is not None:
            damaged += 1
            print(f"{array.path(index)}: {problem}")
    print(f"{blocks} blocks read, {damaged or 'none'} damaged")
    return 1 if damaged else 0


def _purge(folders: list[_Folder]) -> int:
    if [FLAGS.damaged, FLAGS.foreign_to is not None, FLAGS.all].count(True) != 1:
        raise UsageError("purge takes one of --damaged, --foreign_to=MODEL and --all")
    with ExitStack() as locks:
        for node in sorted({folder.node for folder in folders}):
            locks.callback(FolderLock(node).close)
        try:
            return _purge_damaged(folders) if FLAGS.damaged else _purge_models(folders)
        except (OSError, SlotFailed) as error:
            raise UsageError(f"--ssd_dir={FLAGS.ssd_dir}: cannot remove ({error}); see to its permissions") from None


def _purge_damaged(folders: list[_Folder]) -> int:
    damaged = [(array, index) for array, index, problem in _verified(folders) if problem is not None]
    for array, index in damaged:
        print(array.path(index))
        if FLAGS.yes:
            array.delete(index)
    return _told(f"{len(damaged)} damaged blocks")


def _purge_models(folders: list[_Folder]) -> int:
    going = folders
    if FLAGS.foreign_to is not None:
        kept = {f.model.whole for f in _readable(folders) if f.path.name.startswith(FLAGS.foreign_to or "-")}
        going = [folder for folder in folders if folder.model is None or folder.model.whole not in kept]
        if not kept:
            raise UsageError(f"--foreign_to={FLAGS.foreign_to}: no such model is there; see `mooncake-jax pool stats`")
    size = sum(disk_bytes(folder.path) for folder in going)
    for folder in going:
        print(folder.path)
        if FLAGS.yes:
            remove_model(folder.path)
    return _told(f"{len(going)} models' blocks, {_size(size)}")


def _told(what: str) -> int:
    print(f"{what}: removed" if FLAGS.yes else f"{what}: still there; add --yes to remove them")
    return 0


def _readable(folders: list[_Folder]) -> list[_Folder]:
    return [folder for folder in folders if folder.model is not None]


def _blocks(folder: _Folder) -> Iterator[_Stored]:
    array, counts = folder.open(), ReadCounts(folder.path)
    for index, status in array.scan():
        try:
            header = array.header(index)
            yield _Stored(header, counts.of(index, header), array.path(index), status.st_size)
        except (SlotDamaged, SlotFailed):
            yield _Stored(None, Reads(), array.path(index), status.st_size)
        except SlotMissing:
            continue  # a running node has deleted it


def _verified(folders: list[_Folder]) -> Iterator[tuple[SlotArray, int, str | None]]:
    """Reads everything: every slot, and what is wrong with it."""
    opened = [(array, dict(array.scan())) for array in (folder.open() for folder in _readable(folders))]
    total = sum(status.st_size for _, slots in opened for status in slots.values())
    done = 0
    with WorkProgress("reading", "read") as progress:
        for array, slots in opened:
            out = np.empty(array.model.layout.shape, array.model.layout.raw)
            for index, status in slots.items():
                try:
                    array.verify(index, status.st_size, out)
                    yield array, index, None
                except (SlotDamaged, SlotFailed) as error:
                    yield array, index, str(error)
                except SlotMissing:
                    pass  # a running node has deleted it
                done += status.st_size
                progress.update(done, total)


def _whose(model: StoredModel | None) -> tuple[str, str]:
    """Layout and fingerprint."""
    if model is None:
        return "cannot be told", ""
    one = model.layout
    layers = f"layers {model.first_layer} to {model.first_layer + one.layers - 1}"
    shape = f"{layers}, {one.tokens} tokens, {one.kv_heads} KV heads of {one.head_dim}, {one.dtype}"
    return shape, model.fingerprint.hex()[:_SHOWN]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"
