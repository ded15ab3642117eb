"""The SSD tier against plain files on the same disk: rows for pool.py.

Plain files are what a careful programmer would write without the tier: put is write, fsync, rename and fsync of the
folder; get is one read of the whole into memory that is there. Neither lays out, hashes or verifies, which ours does
within its time. As many are under way at once as in the tier. Cold is what the page cache does not hold.
"""

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
from table import Row, at_least, row

from mooncake_jax.cache.layout import BlockLayout
from mooncake_jax.cache.ssd import IN_FLIGHT, SSDStore, Status

BLOCKS = 12  # of each turn: three rounds of what is under way at once
DIRECT_BYTES = 64 << 20
ROOM = 4  # times the blocks of a turn: what the tier may take

Work = Sequence[tuple[Callable[[], object], Callable[[], object]]]


def ssd_rows(folder: Path, layout: BlockLayout, repeats: int) -> Iterator[Row]:
    """On the disk of this folder."""
    blocks = [np.random.default_rng(number).integers(0, 256, layout.nbytes, np.uint8) for number in range(BLOCKS)]
    yield from direct_rows(folder, repeats)
    plain, size = PlainFiles(folder / "plain", blocks, layout.layers), BLOCKS * layout.nbytes / 1e9
    with closing(SSDStore(folder / "ours", layout, b"benchmark", ROOM * BLOCKS * layout.nbytes)) as store:
        ours = Tier(store, folder / "ours", blocks)
        for name, target, work in (
            (f"put, {IN_FLIGHT} in flight", at_least(0.9), [(files.clear, files.put) for files in (ours, plain)]),
            (f"cold get, {IN_FLIGHT} in flight", at_least(0.9), [(files.chill, files.get) for files in (ours, plain)]),
            ("warm get", None, [(nothing, files.get) for files in (ours, plain)]),
        ):
            seconds = in_turns(work, repeats)
            yield row(f"SSD {name}, of plain files'", size / seconds[0], "GB/s", size / seconds[1], target)
        one, its_part = in_turns([(files.chill, files.get_layer) for files in (ours, plain)], repeats)
        yield row("SSD cold get of a layer, of a plain file's", one * 1e3, "ms", its_part * 1e3)


def in_turns(work: Work, repeats: int) -> list[float]:
    """Median seconds of each piece of work, as table.interleaved(); what comes first of each pair only prepares."""
    seconds: list[list[float]] = [[] for _ in work]
    for turn in range(repeats + 1):
        for taken, (prepare, run) in zip(seconds, work):
            prepare()
            begun = time.perf_counter()
            run()
            if turn:
                taken.append(time.perf_counter() - begun)
    return [statistics.median(taken) for taken in seconds]


def nothing() -> None:
    pass


def drop_from_cache(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


class Tier:
    """Ours, with BLOCKS blocks of bytes. Every call waits for its end and sees to its success."""

    def __init__(self, store: SSDStore, folder: Path, blocks: list[np.ndarray]):
        layout = store.layout
        self._store, self._folder, self._layers = store, folder, range(layout.layers)
        self._blocks = {bytes([number]) * 32: block.view(layout.raw) for number, block in enumerate(blocks)}
        self._blocks = {key: block.reshape(layout.shape) for key, block in self._blocks.items()}
        self._outs = [np.ones(layout.shape, layout.raw) for _ in blocks]

    def clear(self) -> None:
        self._wait([self._store.delete(key) for key in self._store.keys()])

    def put(self) -> None:
        self._wait([self._store.put(key, block) for key, block in self._blocks.items()])

    def chill(self) -> None:
        for path in self._folder.glob("*/c.*"):
            drop_from_cache(path)

    def get(self) -> None:
        self._wait([self._store.read(key, self._layers, out) for key, out in zip(self._blocks, self._outs)])

    def get_layer(self) -> None:
        middle = len(self._layers) // 2
        self._wait([self._store.read(next(iter(self._blocks)), [middle], self._outs[0][:1])])

    def _wait(self, futures: list) -> None:
        for future in futures:
            if future.result().status is not Status.DONE:
                raise RuntimeError(f"the SSD tier failed: {future.result().reason}")


class PlainFiles:
    """The same with plain files."""

    def __init__(self, folder: Path, blocks: list[np.ndarray], layers: int):
        self._folder, self._blocks, self._part = folder, blocks, blocks[0].size // layers
        self._files = [folder / str(number) for number in range(len(blocks))]
        self._outs = [np.ones_like(block) for block in blocks]
        self._threads = ThreadPoolExecutor(IN_FLIGHT)
        folder.mkdir()

    def clear(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)

    def put(self) -> None:
        list(self._threads.map(self._write, self._files, self._blocks))

    def chill(self) -> None:
        for path in self._files:
            drop_from_cache(path)

    def get(self) -> None:
        list(self._threads.map(self._read, self._files, self._outs))

    def get_layer(self) -> None:
        """As many bytes as the tier's layer has, from the middle too."""
        part = self._outs[0][: self._part]
        self._read(self._files[0], part, self._outs[0].size // 2)

    def _write(self, path: Path, block: np.ndarray) -> None:
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb", buffering=0) as file:
            file.write(block)
            os.fsync(file.fileno())
        os.rename(unfinished, path)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def _read(self, path: Path, out: np.ndarray, offset: int = 0) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            if os.preadv(file, [out], offset) != out.nbytes:
                raise RuntimeError(f"{path} is short")
        finally:
            os.close(file)


def direct_rows(folder: Path, repeats: int) -> Iterator[Row]:
    """What the disk does without the page cache, one large piece at a time."""
    path, memory = folder / "direct", mmap.mmap(-1, DIRECT_BYTES)  # O_DIRECT wants memory on pages
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            # The warm-up finds room in the file system, which the other turns need not.
            work = [(nothing, lambda: os.pwritev(file, [memory], 0)), (nothing, lambda: os.preadv(file, [memory], 0))]
            seconds = in_turns(work, repeats)
        finally:
            os.close(file)
            path.unlink()
    except OSError as error:
        print(f"raw disk rate: {error.strerror}: this file system has no direct I/O", file=sys.stderr)
        return
    for name, taken in zip(("write", "read"), seconds):
        yield row(f"disk, direct {name}", DIRECT_BYTES / 1e9 / taken, "GB/s")
