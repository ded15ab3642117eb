"""mooncake-jax profile: measure how long the engine and the links of this machine take, and fit a cost model to it.

Outside MPI it checks its flags and starts two ranks of its own; under mpiexec it is one of two, which may be on two
machines. Rank 0 computes and sends, rank 1 receives (profile_rank.py).
"""

import importlib
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mpi4py
from absl import flags

from mooncake_jax.cluster.launch import RanksDied, run_ranks, under_mpi
from mooncake_jax.commands.profile_points import MOST_BATCH, SHORTEST
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.config import DTYPE_BYTES
from mooncake_jax.model.sources import Location, open_source

FLAGS = flags.FlagValues()
MPI_START_DEADLINE_S = 60
ROOM = 16  # tokens that measuring adds to a context
_LEAST_LONGEST, _LONGEST = 4 * SHORTEST, 2048  # shorter has too few lengths to fit; longer takes minutes


def _define() -> None:
    kwargs = {"flag_values": FLAGS}
    flags.DEFINE_string("model", "smollm2-135m", "a model's name or path, or dummy:NAME", **kwargs)
    flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", **kwargs)
    flags.DEFINE_string("out", "cost.json", "file for the cost model; its picture lies beside it", **kwargs)
    flags.DEFINE_enum("dtype", "float32", list(DTYPE_BYTES), "type of weights and KVCache", **kwargs)
    flags.DEFINE_integer("prefill_chunk", 512, "most tokens that a prefill computes at once", **kwargs)
    flags.DEFINE_integer("block_size", 16, "tokens of a KVCache block, and of a page of decoding", **kwargs)
    flags.DEFINE_integer("max_batch", 16, "most requests of a decoding step", **kwargs)
    flags.DEFINE_integer(
        "longest", None, f"tokens of the longest prompt (default: the model's context, {_LONGEST} at most)", **kwargs
    )
    flags.DEFINE_integer("repeats", 3, "rounds of measurements, of which the median counts", **kwargs)


_define()


@dataclass(frozen=True)
class ProfileJob:
    """What to measure, all flags checked."""

    model: str
    location: Location
    model_dir: Path
    out: Path
    dtype: str
    prefill_chunk: int
    block_size: int
    max_batch: int
    longest: int
    repeats: int


def main(arguments: list[str]) -> int:
    unknown = FLAGS(["profile", *arguments])[1:]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag: flags are written --name=value")
    if under_mpi():
        mpi4py.rc.finalize = False  # ranks leave MPI under a deadline of their own
        signal.alarm(MPI_START_DEADLINE_S)  # MPI_Init waits for ever for a rank that died before it
        run_rank = importlib.import_module("mooncake_jax.commands.profile_rank").run_rank  # importing it starts MPI
        return run_rank(make_job)
    make_job()
    try:
        return run_ranks(2, ["profile", *arguments])
    except RanksDied:
        print("mooncake-jax profile: the rank that measured died", file=sys.stderr)
        return 1


def make_job() -> ProfileJob:
    """Raises UsageError. Creates nothing."""
    for name in ("prefill_chunk", "block_size", "max_batch", "repeats"):
        if FLAGS[name].value < 1:
            raise UsageError(f"--{name}={FLAGS[name].value}: it must be at least 1")
    if FLAGS.max_batch > MOST_BATCH:
        raise UsageError(
            f"--max_batch={FLAGS.max_batch}: steps of at most {MOST_BATCH} requests are measured; lower it"
        )
    location = resolve(FLAGS.model, Path(FLAGS.model_dir))
    most = open_source(location).config().max_context - ROOM
    if most < _LEAST_LONGEST:
        raise UsageError(
            f"--model={FLAGS.model}: its context is {most + ROOM} tokens; use a model with {_LEAST_LONGEST + ROOM}"
        )
    longest = min(_LONGEST, most) if FLAGS.longest is None else FLAGS.longest
    if not _LEAST_LONGEST <= longest <= most:
        raise UsageError(f"--longest={longest}: use {_LEAST_LONGEST} to {most} tokens with this model")
    out = Path(FLAGS.out)
    _check_writable(out)
    return ProfileJob(
        model=FLAGS.model,
        location=location,
        model_dir=Path(FLAGS.model_dir),
        out=out,
        dtype=FLAGS.dtype,
        prefill_chunk=FLAGS.prefill_chunk,
        block_size=FLAGS.block_size,
        max_batch=FLAGS.max_batch,
        longest=longest,
        repeats=FLAGS.repeats,
    )


def _check_writable(out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out={out} is a folder; name a file, as in --out={out / 'cost.json'}")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise UsageError(f"--out={out}: {error.strerror}; name a file in a folder that can be written to") from None
