"""Actions that actors ask for; the cluster performs them, and answers with messages (messages.py).

Records (records.py), and picklable.
"""

from typing import TypeAlias

from mooncake_jax.cache.pool import Block
from mooncake_jax.records import record
from mooncake_jax.request import Outcome, Request
from mooncake_jax.sched.messages import Message, Replication, StoreOnSSD


@record
class Send:
    to: str
    message: Message


@record
class Later:
    """Handle this message oneself after so many seconds."""

    seconds: float
    message: Message


@record
class Report:
    """A request has ended."""

    outcome: Outcome


@record
class RunPrefill:
    """Reuse the leading `reuse` blocks, compute the rest chunk by chunk, store the blocks with index in `missing`,
    stream to `decoding`.

    Answered by PrefillStarted, then PrefillDone or PrefillFailed.
    """

    dispatch: int
    request: Request
    decoding: str
    blocks: tuple[Block, ...]
    reuse: int
    missing: tuple[int, ...]


@record
class PromoteBlocks:
    """Read these blocks from the SSD into their slots of DRAM. Answered by BlocksPromoted."""

    dispatch: int
    blocks: tuple[Block, ...]


@record
class FetchBlocks:
    """Copy blocks from another instance's DRAM into their slots here. Answered by BlocksReplicated."""

    dispatch: int
    replication: Replication


@record
class WriteBlocks:
    """Do on the SSD what StoreOnSSD says. Answered by BlocksWritten if there are blocks to write."""

    order: StoreOnSSD


@record
class AbandonCopy:
    """Wait no longer for blocks of this dispatch. Answered by BlocksReplicated with the reason."""

    dispatch: int
    reason: str


@record
class LoadKVCache:
    """Move the request's KVCache from host to device memory. Answered by KVCacheLoaded, or DecodingFailed."""

    dispatch: int
    request: Request
    first_token: int | None


@record
class RunStep:
    """One token for every request of the batch. Answered by StepDone or StepFailed.

    yields: after this step the device is wanted for something else; without it a simulation looks many steps ahead.
    """

    batch: tuple[int, ...]
    yields: bool = False


@record
class InlinePrefill:
    """Compute the whole prompt on the device of a decoding instance, which has nothing else to compute meanwhile.
    Answered by PrefillInlined or PrefillFailed.
    """

    dispatch: int
    request: Request


@record
class PrefillPart:
    """So many tokens of a prompt, from the one at `start` on; the KVCache of those before it is on the device."""

    dispatch: int
    request: Request
    start: int
    tokens: int


@record
class RunIteration:
    """At a coupled instance: compute these parts of prompts, and one token for every request of the batch. Answered by
    StepDone, with the tokens of the batch and the first ones of those prompts that are whole then, or StepFailed.
    """

    parts: tuple[PrefillPart, ...]
    batch: tuple[int, ...]


@record
class DropKVCache:
    """Free what this dispatch holds in host and device memory."""

    dispatch: int


Action: TypeAlias = (
    Send | Later | Report | RunPrefill | PromoteBlocks | FetchBlocks | AbandonCopy | WriteBlocks | LoadKVCache | RunStep
    | InlinePrefill | RunIteration | DropKVCache
)  # fmt: skip
