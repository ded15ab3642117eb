"""Messages that actors handle: with the actions they ask for (actions.py), the whole protocol of the cluster.

Records (records.py), and picklable. Times are seconds since the start of the run, on the common clock. A *dispatch* is
one attempt to serve a request; it has a number, because a request whose instance died is dispatched again and late
messages of the old attempt must not be mistaken for the new one.
"""

from typing import TypeAlias

from mooncake_jax.cache.pool import Block
from mooncake_jax.records import record
from mooncake_jax.request import Request, TokenLogprobs

CONDUCTOR = "conductor"

# --- handled by Conductor


@record
class Arrived:
    """A user's request reaches the cluster. invalid says why it cannot be served at all, None if it can."""

    request: Request
    invalid: str | None = None


@record
class SSDReported:
    """Before the first request: the blocks that an earlier run has left on the node's SSD, (key, parent's key), the
    least recent first.
    """

    node: str
    stored: tuple[tuple[bytes, bytes | None], ...]


@record
class PrefillStarted:
    """The prefix was matched again as the prefill began: reused_tokens is what is really reused."""

    dispatch: int
    node: str
    reused_tokens: int


@record
class PrefillDone:
    """All KVCache is computed, stored and sent. stored: blocks that landed. lost: blocks found damaged.

    top_logits: the ten highest (token id, logit) of the first output token, where the engine gives them.
    """

    dispatch: int
    node: str
    reused_tokens: int
    seconds: float
    stored: tuple[Block, ...]
    lost: tuple[Block, ...] = ()
    top_logits: tuple[tuple[int, float], ...] = ()


@record
class PrefillFailed:
    """again: a block that was to be reused turned out damaged only as it was loaded; without it the prefill can be
    done.
    """

    dispatch: int
    node: str
    reason: str
    again: bool = False


@record
class BlocksReplicated:
    """Blocks copied for a dispatch have landed in the DRAM of `node`, or, with a reason, have not."""

    dispatch: int
    node: str
    blocks: tuple[Block, ...]
    reason: str | None = None


@record
class BlocksPromoted:
    """These blocks have been read from the node's SSD into its DRAM; a reason says why not all that were asked for."""

    dispatch: int
    node: str
    blocks: tuple[Block, ...]
    reason: str | None = None


@record
class BlocksWritten:
    """Blocks with these keys are on the node's SSD in whole; a reason says why not all that were asked for."""

    number: int
    node: str
    keys: tuple[bytes, ...]
    reason: str | None = None


@record
class Token:
    dispatch: int
    token_id: int | None  # None in simulation
    last: bool
    logprobs: TokenLogprobs | None = None  # where the request asked for them


@record
class TokensDecoded:
    """One token for each of these requests, all at time `at`."""

    node: str
    at: float
    tokens: tuple[Token, ...]


@record
class StepsDecoded:
    """In simulation: at each of these times a token, which nobody knows, for each of these dispatches; with the last
    one, those in `ended` are done. As many TokensDecoded in one.
    """

    node: str
    times: tuple[float, ...]
    dispatches: tuple[int, ...]
    ended: tuple[int, ...]


@record
class DecodingFailed:
    dispatch: int
    node: str
    reason: str


@record
class DecodingRejected:
    """The instance will not decode a request whose KVCache has arrived: what it would make of the TBT, in seconds, is
    above the limit. The prefill is wasted.
    """

    dispatch: int
    node: str
    reason: str
    estimate: float
    limit: float


@record
class NodeLost:
    node: str


@record
class Expired:
    """The request's time is up, whatever has become of it."""

    request_id: str


@record
class Interrupted:
    """The run is being stopped: everything still open ends now."""


@record
class ReviewRoles:
    """It is time to look at the loads of both pools again (elastic.py)."""


# --- handled by a prefill instance


@record
class Replication:
    """Copy these blocks of another instance's DRAM, slot by slot, into one's own (hot-spot migration, report 6.2)."""

    source: str
    source_blocks: tuple[Block, ...]
    target_blocks: tuple[Block, ...]


@record
class StartPrefill:
    """Prefill this request and stream its KVCache to `decoding`. Sent to a decoding instance, with itself as `decoding`
    and without blocks: the prefill is inlined there.

    blocks: where the leading full blocks of the prompt lie, or are to be stored, in this instance's DRAM. First read
    those in `promote` from this instance's SSD, and let `replicate` say which to copy from another instance.
    """

    dispatch: int
    request: Request
    decoding: str
    blocks: tuple[Block, ...]
    promote: tuple[Block, ...] = ()
    replicate: Replication | None = None


@record
class StoreOnSSD:
    """Forget the blocks with the keys in `dropped` on this instance's SSD, then write these blocks there. parents: keys
    of the blocks that they follow. Answered by BlocksWritten if there are any to write.
    """

    number: int
    blocks: tuple[Block, ...]
    parents: tuple[bytes | None, ...]
    dropped: tuple[bytes, ...]


@record
class CopyLost:
    """The instance that was copying blocks here for this dispatch is gone."""

    dispatch: int
    reason: str


# --- handled by a decoding instance, which handles StartPrefill, PrefillFailed too where prefills are inlined


@record
class KVCacheReceived:
    """All KVCache of the request lies in this instance's host memory; the first output token is known."""

    dispatch: int
    request: Request
    first_token: int | None
    logprobs: TokenLogprobs | None = None


@record
class KVCacheLoaded:
    """The request's KVCache is in device memory: it can join the next batch.

    stopped: its first token holds one of its stop strings already.
    """

    dispatch: int
    stopped: bool = False


@record
class PrefillInlined:
    """The prompt was computed on this instance's own device, in so many seconds: its KVCache is there, and it can join
    the next batch.

    stopped: as KVCacheLoaded has it; top_logits: as PrefillDone has them.
    """

    dispatch: int
    seconds: float
    first_token: int | None
    stopped: bool = False
    logprobs: TokenLogprobs | None = None
    top_logits: tuple[tuple[int, float], ...] = ()


@record
class StepDone:
    """One decoding step of the batch: (dispatch, token id) of each request.

    stopped: dispatches whose text now holds one of their stop strings. logprobs: of those that asked for them.
    """

    tokens: tuple[tuple[int, int | None], ...]
    seconds: float
    stopped: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()


@record
class StepsDone:
    """In simulation: steps of one batch that follow one another, and when each ended. None but the last one may end a
    request. As many StepDone in one, each but the last answered by RunStep with the same batch. With `more` the device
    is at the next step of this batch already: RunStep would change nothing, and that it is left out saves time.
    """

    batch: tuple[int, ...]
    ends: tuple[float, ...]
    more: bool = False


@record
class StepFailed:
    reason: str


# --- handled by instances of both kinds


@record
class Cancel:
    """Nobody waits for this dispatch any more."""

    dispatch: int


Message: TypeAlias = (
    Arrived | SSDReported | PrefillStarted | PrefillDone | PrefillFailed | BlocksReplicated | BlocksPromoted
    | BlocksWritten | TokensDecoded | StepsDecoded | DecodingFailed | DecodingRejected | NodeLost | Expired
    | Interrupted | ReviewRoles | StartPrefill | StoreOnSSD | CopyLost | KVCacheReceived | KVCacheLoaded
    | PrefillInlined | StepDone | StepsDone | StepFailed | Cancel
)  # fmt: skip
