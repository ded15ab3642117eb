"""The arrays of a checkpoint folder (checkpoint.py), read block by block: host memory holds what is placed on this
process's devices and a few blocks more, however large the largest array is.

A part is an Orbax checkpoint: an OCDBT database in which the array at a/b has the name a.b. TensorStore reads it, as it
does below Orbax. Orbax's own restore has a whole part underway at once, on threads whose allocators keep what they once
had. OCDBT protects its index with checksums but not what is stored, so checksums of the blocks lie beside it. Knows
nothing of Orbax.
"""

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts
import xxhash

from mooncake_jax.errors import UsageError
from mooncake_jax.model.checkpoint import CheckpointFolder, part_folder
from mooncake_jax.model.files import Index
from mooncake_jax.model.llama import Params
from mooncake_jax.model.placement import Part, aligned, leaf_name, place

# Arrays are stored in chunks of at most this size, so that a device's slice costs little more than its own bytes, and
# what is underway stays small: 1 MiB loads as fast as 16.
BLOCK_BYTES = 1 << 20
_CHECKSUMS = "mooncake_checksums.json"  # of each array's blocks, in order
_UNDERWAY = 2  # blocks that TensorStore reads and decodes at once


class CheckpointReader:
    """Reads parts of one model. Raises UsageError naming arrays that are missing, extra, misshapen or damaged, or the
    part that is.
    """

    def __init__(self, source: CheckpointFolder):
        self._folder = source.folder

    def read(self, part: Part, abstract: Params) -> Params:
        """The part's parameters, placed and in dtype as abstract says."""
        path = part_folder(self._folder, part)
        try:
            checksums = json.loads((path / _CHECKSUMS).read_text())
            arrays = {name: _Array(path, name, checksums[name]) for name in checksums}
            _check(path, arrays, abstract)
            return jax.tree_util.tree_map_with_path(lambda keys, leaf: _place(arrays[leaf_name(keys)], leaf), abstract)
        except UsageError:
            raise
        except (OSError, TypeError, ValueError) as error:  # TensorStore reports all damage as ValueError
            detail = str(error).strip().partition("\n")[0][:200]
            raise UsageError(
                f"{path}: not a whole Orbax checkpoint ({type(error).__name__}: {detail}); convert the model again"
            ) from None


def write_checksums(path: Path, parameters: Params) -> None:
    """Puts the checksums of a part's parameters into its Orbax checkpoint at path, which lies there already."""
    checksums = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(parameters):
        name, array = leaf_name(keys), np.asarray(leaf)
        checksums[name] = [_checksum(array[block]) for block in _blocks(_open(path, name))]
    (path / _CHECKSUMS).write_text(json.dumps(checksums) + "\n")


class _Array:
    """One array of the checkpoint at path, with the checksums of its blocks."""

    def __init__(self, path: Path, name: str, checksums: list[str]):
        self._path, self._name, self._store = path, name, _open(path, name)
        self._blocks = list(zip(_blocks(self._store), checksums, strict=True))
        self.shape: tuple[int, ...] = self._store.shape

    def read(self, index: Index, dtype: np.dtype) -> np.ndarray:
        """A slice, in memory of its own. Raises UsageError for a damaged block, ValueError for an unreadable one."""
        window = tuple(slice(*one.indices(size)) for one, size in zip(index, self.shape, strict=True))
        out = aligned(tuple(one.stop - one.start for one in window), dtype)
        needed = [(block, checksum) for block, checksum in self._blocks if _overlap(block, window)]
        for (block, checksum), content in zip(needed, self._contents(block for block, _ in needed), strict=True):
            if _checksum(content) != checksum:
                where = ", ".join(f"{one.start}:{one.stop}" for one in block)
                raise UsageError(
                    f"{self._path}: {self._name}[{where}] is damaged: not what was written there; "
                    "convert the model again"
                )
            shared = _overlap(block, window)
            out[_within(shared, window)] = content[_within(shared, block)]
        return out

    def _contents(self, blocks: Iterable[Index]) -> Iterator[np.ndarray]:
        underway: deque[ts.Future] = deque()
        for block in blocks:
            underway.append(self._store[block].read())
            if len(underway) == _UNDERWAY:
                yield underway.popleft().result()
        while underway:
            yield underway.popleft().result()


def _open(path: Path, name: str) -> ts.TensorStore:
    base = {"driver": "file", "path": f"{path.absolute()}/"}
    database = {"driver": "ocdbt", "base": base, "path": name.replace("/", ".") + "/"}
    return ts.open({"driver": "auto", "kvstore": database}, read=True).result()


def _blocks(store: ts.TensorStore) -> Iterator[Index]:
    """The pieces in which an array is read and checked: its chunks, or many at once where its sizes have so few
    divisors that Orbax cut it far smaller than it was asked to.
    """
    steps = list(store.chunk_layout.read_chunk.shape)
    for axis, size in enumerate(store.shape):
        room = BLOCK_BYTES // (math.prod(steps) * store.dtype.numpy_dtype.itemsize)
        steps[axis] *= max(1, min(room, math.ceil(size / steps[axis])))
    for start in itertools.product(*(range(0, size, step) for size, step in zip(store.shape, steps, strict=True))):
        yield tuple(slice(a, min(a + step, size)) for a, step, size in zip(start, steps, store.shape, strict=True))


def _checksum(block: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(block).view(np.uint8))


def _overlap(a: Index, b: Index) -> Index | None:
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return both if all(one.start < one.stop for one in both) else None


def _within(inner: Index, outer: Index) -> Index:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def _place(array: _Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    return place(wanted, lambda index: array.read(index, wanted.dtype))


def _check(path: Path, found: dict[str, _Array], abstract: Params) -> None:
    wanted = {leaf_name(keys): tuple(leaf.shape) for keys, leaf in jax.tree_util.tree_leaves_with_path(abstract)}
    for what, names in (("missing", wanted.keys() - found.keys()), ("unknown", found.keys() - wanted.keys())):
        if names:
            raise UsageError(f"{path}: arrays {what}: {', '.join(sorted(names))}; convert the model again")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise UsageError(
                f"{path}: {name} has shape {list(found[name].shape)}, the config asks for {list(shape)}; "
                "convert the model again"
            )
