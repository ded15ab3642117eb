"""What ranks tell one another beside the actors' messages: setting up, headers of raw buffers, the record, stopping.

Actors never see these.
"""

from dataclasses import dataclass

from mooncake_jax.cache.pool import Block
from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.request import Request, TokenLogprobs
from mooncake_jax.sched.actions import RunPrefill
from mooncake_jax.sched.cost import CostModel

# --- setting up and stopping


@dataclass(frozen=True, slots=True)
class Setup:
    """From rank 0 to every instance: become this.

    cost: what Conductor believes of the hardware; None: to be measured. longest_prompt: tokens of the longest that will
    come, to compile for; host: rank 0's machine, whose clock is the common one.
    """

    config: ClusterConfig
    cost: CostModel | None
    longest_prompt: int
    host: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs measured by an instance as it starts; empty where it does not do that kind of work, or costs are given."""

    prefill: tuple[tuple[int, int, float], ...] = ()  # (tokens, prefix, seconds)
    step: tuple[tuple[int, int, float], ...] = ()  # (batch, total context, seconds)
    transfer: tuple[tuple[int, float], ...] = ()  # (bytes, seconds)
    peak_flops: float = 0.0  # FLOPs a second of a prefill stage's devices, measured or given


@dataclass(frozen=True, slots=True)
class Ready:
    node: str
    fingerprint: bytes  # of the model it loaded
    slots: int  # of its DRAM; 0 for a decoding instance
    dram: str | None  # how it reads other instances' DRAM, as measured; None if it does not
    ssd_blocks: int  # that its SSD tier may hold; 0 without one
    ssd_stored: tuple[tuple[bytes, bytes | None], ...]  # (key, parent's key) of those there, the least recent first
    ssd_foreign: int  # bytes that other models' blocks take of its SSD
    measured: Measured
    step: tuple[float, float, float] | None  # step_coefficients of one that may decode, if it has measured itself
    compiled: int  # shapes its engine has compiled, or found compiled on disk
    warm_up_s: float  # what that took


@dataclass(frozen=True, slots=True)
class SetupFailed:
    node: str
    reason: str
    usage: bool  # the user's input is at fault


@dataclass(frozen=True, slots=True)
class Begin:
    """The run's time 0 on rank 0's monotonic clock."""

    zero: float


@dataclass(frozen=True, slots=True)
class Ping:
    node: str
    sent: float  # the asking rank's clock


@dataclass(frozen=True, slots=True)
class Pong:
    sent: float
    clock: float  # rank 0's, when it answered


@dataclass(frozen=True, slots=True)
class EventLines:
    """Lines of events.jsonl recorded by this rank."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over: send what is recorded, then Bye."""


@dataclass(frozen=True, slots=True)
class Bye:
    rank: int
    sent_bytes: int  # to other ranks, messages and buffers


# --- between the ranks of one prefill instance, whose first one speaks for it


@dataclass(frozen=True, slots=True)
class Join:
    """From the first stage to the others: share a JAX runtime."""

    coordinator: str  # "host:port"


@dataclass(frozen=True, slots=True)
class CheckBlocks:
    """Answered by BlocksChecked: how many leading blocks are sound in this stage's store."""

    dispatch: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class BlocksChecked:
    dispatch: int
    stage: int
    sound: int


@dataclass(frozen=True, slots=True)
class EnterPrompt:
    """The prompt's chunks enter the pipeline, one a tick; `reuse` leading blocks are reused. Answered by StageDone."""

    run: RunPrefill
    reuse: int


@dataclass(frozen=True, slots=True)
class EmptyTick:
    """One tick in which nothing enters, so that what is under way moves on."""


@dataclass(frozen=True, slots=True)
class StageDone:
    """This stage's layers are computed, stored and sent or, with a reason, are not.

    damaged: because a block that was to be reused is no longer sound.

    top_logits: of the first output token, from the last stage.
    """

    dispatch: int
    stage: int
    reason: str | None = None
    top_logits: tuple[tuple[int, float], ...] = ()
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class StageCopied:
    """What has landed of a copy in this stage's store or, with a reason, has not."""

    dispatch: int
    stage: int
    blocks: tuple[Block, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StagePromoted:
    """What has been read from this stage's SSD; a reason says why not all that was asked for."""

    dispatch: int
    stage: int
    blocks: tuple[Block, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class StageWritten:
    """Keys of what is on this stage's SSD now; a reason says why not all that was asked for."""

    number: int
    stage: int
    keys: tuple[bytes, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class ForgetBlocks:
    """From rank 0 before the run: the pool will not know of these blocks on this stage's SSD."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """From a stage to the same stage of another instance: send `to` these blocks of your DRAM. Answered by a
    BlocksLayer for each layer, or by CopyFailed.
    """

    dispatch: int
    to: str
    source: tuple[Block, ...]
    target: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class StageBroken:
    """This rank's engine cannot go on, and with it its instance."""

    reason: str


# --- headers of raw buffers


@dataclass(frozen=True, slots=True)
class Probe:
    """A buffer sent only to time it."""


@dataclass(frozen=True, slots=True)
class KVPiece:
    """Two buffers, keys and values, each [tokens, kv heads, head dim]: one layer, counted through the whole model, of a
    request's tokens from `start` on.
    """

    dispatch: int
    layer: int
    start: int
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class KVCacheSent:
    """The last stage's pieces of this dispatch have been sent, and this is the first output token."""

    dispatch: int
    request: Request
    first_token: int
    logprobs: TokenLogprobs | None  # of the first token, where the request asked for them


@dataclass(frozen=True, slots=True)
class BlocksLayer:
    """One buffer [2, blocks * block size, kv heads, head dim]: one layer, counted within the stage, of blocks copied to
    the receiver's store.
    """

    dispatch: int
    layer: int
    target: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class CopyFailed:
    dispatch: int
    reason: str
