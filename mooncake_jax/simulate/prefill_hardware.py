"""The hardware of a simulated prefill instance: its nodes' devices, DRAM and SSDs (report 3 and 5).

The KVCache of a request streams to its decoding instance while it is computed, layer by layer; that of the last layer
can only follow once all is computed. An SSD reads one order after another, and writes one after another. Knows nothing
of queues: its actor asks for one prefill at a time, as many as fill the pipeline, or a batch.
"""

from collections.abc import Callable
from functools import partial

from mooncake_jax.request import Request
from mooncake_jax.sched.actions import FetchBlocks, PromoteBlocks, RunPrefill, RunPrefillBatch, WriteBlocks
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.messages import BlocksPromoted, BlocksReplicated, BlocksWritten, PrefillDone, PrefillStarted
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.events import Events
from mooncake_jax.simulate.group import PrefillGroup, node_transfer
from mooncake_jax.simulate.network import Network
from mooncake_jax.simulate.senders import Both, PrefixSenders

# Called with decoding instance, dispatch, request and time.
Received = Callable[[str, int, Request, float], None]


class PrefillHardware:
    """received: told of every KVCache that has arrived at its decoding instance."""

    def __init__(
        self,
        node: str,
        config: SimulationConfig,
        cost: CostModel,
        events: Events,
        network: Network,
        received: Received,
    ):
        self.node, self._config, self._cost = node, config, cost
        self._events, self._network, self._received = events, network, received
        self.group = PrefillGroup(config, cost)
        self._senders = PrefixSenders(config)
        self._block_bytes = config.bytes_per_token * config.block_size
        self._reading_until = self._writing_until = 0.0

    # --- prefill

    def run(self, action: RunPrefill, now: float) -> None:
        reused = self._reused(action)
        begun, done = self.group.run(action.request.prompt_tokens, reused, now)
        self._follow(action, reused, begun, done, now)

    def run_batch(self, action: RunPrefillBatch, now: float) -> None:
        """One after another, but nothing is known to be done before the last one is."""
        reused = [self._reused(prefill) for prefill in action.prefills]
        done = now
        for prefill, tokens in zip(action.prefills, reused):
            _, done = self.group.run(prefill.request.prompt_tokens, tokens, now)
        for prefill, tokens in zip(action.prefills, reused):
            self._follow(prefill, tokens, now, done, now)

    def _follow(self, action: RunPrefill, reused: int, begun: float, done: float, now: float) -> None:
        """What a prefill that begins and ends then brings with it."""
        started = PrefillStarted(action.dispatch, self.node, reused)
        if begun <= now:
            self._events.soon.append((self.node, started))
        else:
            self._events.post(begun, self.node, started)
        stored = tuple([action.blocks[place] for place in action.missing])
        message = PrefillDone(action.dispatch, self.node, reused, done - begun, stored)
        self._events.post(done, self.node, message)
        streams_from = done if "overlap" in self._config.without else begun
        if streams_from <= now:
            self._stream((action, reused, done), now)
        else:
            self._events.at(streams_from, self._stream, (action, reused, done))

    def _reused(self, action: RunPrefill) -> int:
        """Tokens: the last one of a prompt is always computed."""
        return min(action.reuse * self._config.block_size, action.request.prompt_tokens - 1)

    def _stream(self, prefill: tuple[RunPrefill, int, float], now: float) -> None:
        """All KVCache of the prompt goes to the decoding instance."""
        action, reused, done = prefill
        nbytes = action.request.prompt_tokens * self._config.bytes_per_token
        if "network" in self._config.without:
            self._arrived(action, done, now)
            return
        last = done
        if "overlap" not in self._config.without:
            last += node_transfer(self._config, self._cost, nbytes // self._config.layers)
        arrived = partial(self._arrived, action, last)
        sender = self._senders.sender(action.dispatch, action.decoding) if reused else None
        if sender is not None:
            prefix, arrived = reused * self._config.bytes_per_token, Both(arrived)
            self._network.send(sender, action.decoding, prefix, now, arrived)
            nbytes -= prefix
        self._network.send(self.node, action.decoding, nbytes, now, arrived)

    def _arrived(self, action: RunPrefill, earliest: float, now: float) -> None:
        if now < earliest:
            self._events.at(earliest, partial(self._arrived, action), earliest)
            return
        self._received(action.decoding, action.dispatch, action.request, now)

    # --- blocks

    def fetch(self, action: FetchBlocks, now: float) -> None:
        copy = action.replication
        done = BlocksReplicated(action.dispatch, self.node, copy.target_blocks)
        if "network" in self._config.without:
            self._events.post(now, self.node, done)
            return
        nbytes = len(copy.target_blocks) * self._block_bytes
        self._network.send(copy.source, self.node, nbytes, now, partial(self._fetched, done))

    def _fetched(self, done: BlocksReplicated, now: float) -> None:
        self._events.post(now, self.node, done)

    def promote(self, action: PromoteBlocks, now: float) -> None:
        seconds = self._ssd_seconds(self._cost.read_ssd, len(action.blocks))
        self._reading_until = max(now, self._reading_until) + seconds
        self._events.post(self._reading_until, self.node, BlocksPromoted(action.dispatch, self.node, action.blocks))

    def write(self, action: WriteBlocks, now: float) -> None:
        order = action.order
        if not order.blocks:
            return
        seconds = self._ssd_seconds(self._cost.write_ssd, len(order.blocks))
        self._writing_until = max(now, self._writing_until) + seconds
        keys = tuple([block.key for block in order.blocks])
        self._events.post(self._writing_until, self.node, BlocksWritten(order.number, self.node, keys))

    def _ssd_seconds(self, cost: Callable[[int], float], blocks: int) -> float:
        """Each node has its own layers of them."""
        return 0.0 if "ssd" in self._config.without else cost(blocks * self._block_bytes // self._config.stages)
