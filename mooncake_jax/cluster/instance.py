"""The rank of a prefill or decoding instance: becomes what Conductor's rank tells it to be, then serves until it is
told to stop.
"""

import platform
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mooncake_jax.cache.store import BlockLayout, BlockStore
from mooncake_jax.cluster.actors import decoding_instance
from mooncake_jax.cluster.config import ClusterConfig
from mooncake_jax.cluster.control import Begin, Bye, EventLines, Measured, Ping, Pong, Ready, Setup, SetupFailed, Stop
from mooncake_jax.cluster.decoding_hardware import DecodingHardware
from mooncake_jax.cluster.frontend import stop_ids
from mooncake_jax.cluster.measure import measure_prefill, measure_steps, measure_transfer, timed
from mooncake_jax.cluster.prefill_hardware import PrefillHardware
from mooncake_jax.cluster.rank import SETUP_DEADLINE_S, Interrupt, PeerGone, Rank
from mooncake_jax.cluster.record import Recorded
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import resolve
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.loading import LoadedModel, load_model
from mooncake_jax.model.sources import model_fingerprint
from mooncake_jax.parallel.compiling import enable_compile_cache
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.sched.messages import CONDUCTOR, Message
from mooncake_jax.sched.prefill import PrefillInstance
from mooncake_jax.sched.serve import Actor, serve

INTERRUPT_GRACE_S = 3.0  # for Conductor's rank to end the run in good order
PINGS = 8
FLUSH_LINES, FLUSH_S = 200, 1.0


class InstanceRank(Rank):
    def __init__(self, comm: MPI.Comm):
        super().__init__(comm)
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._orphaned = False  # rank 0 is gone

    def run(self) -> int:
        """Exit code: 0 after Stop, whatever led to it: rank 0 says what went wrong. 1 if rank 0 is gone."""
        setup = self._expect(Setup)
        if setup is None:
            return self._early_end()
        self.nodes = setup.config.nodes
        try:
            actor, ready = self._become(setup)
        except Exception as error:
            self.send(CONDUCTOR, SetupFailed(self.node, _one_line(error), isinstance(error, UsageError)))
            self._expect(Stop)
            return self._early_end()
        offset = self._clock_offset(setup.host)
        self.send(CONDUCTOR, ready)
        begin = self._expect(Begin)
        if begin is None:
            return self._early_end()
        self.clock.zero = begin.zero - offset
        serve({self.node: Recorded(self.node, actor, self._record)}, self)
        self._flush()
        self.send(CONDUCTOR, Bye(self.rank))
        return 1 if self._orphaned else 0

    def _early_end(self) -> int:
        self.messenger.send(0, Bye(self.rank))
        return 0

    def _expect(self, kind: type) -> Any | None:
        """The next message of this kind, others kept for later; None if the run is over before it starts."""
        deadline, others = time.monotonic() + SETUP_DEADLINE_S, []
        while (received := self.receive(deadline)) is not None:
            if isinstance(received, kind):
                for other in others:
                    self.post(other)
                return received
            if isinstance(received, Stop | Interrupt) or (
                isinstance(received, PeerGone) and received.rank in (0, self.rank)
            ):
                return None
            others.append(received)
        return None

    # --- becoming an instance

    def _become(self, setup: Setup) -> tuple[Actor, Ready]:
        config = setup.config
        enable_compile_cache(Path(config.model_dir) / "compiled")
        path = resolve(config.model, Path(config.model_dir))
        model, fingerprint = load_model(path, config.dtype), model_fingerprint(path, config.dtype)
        layout = config.block_layout(model.config)
        if self.node in config.prefill_nodes:
            engine = PrefillEngine(model, config.prefill_chunk)
            warm_up_s = timed(lambda: engine.warm_up(max(setup.longest_prompt, 1)))
            actor, slots, measured = self._become_prefill(config, engine, model.config, layout)
        else:
            engine = DecodingEngine(model, config.max_batch, config.block_size, config.decoding_pages)
            warm_up_s = timed(engine.warm_up)
            actor, slots, measured = self._become_decoding(config, engine, model, layout)
        return actor, Ready(self.node, fingerprint, slots, measured, engine.compile_count, warm_up_s)

    def _become_prefill(
        self, config: ClusterConfig, engine: PrefillEngine, model: LlamaConfig, layout: BlockLayout
    ) -> tuple[Actor, int, Measured]:
        """The actor, the slots of its block store, and what was measured."""
        points = measure_prefill(engine, layout, config.prefill_chunk, model.max_context, model.vocab_size)
        measured = Measured(prefill=points, transfer=measure_transfer(self, config.decoding_nodes[0]))
        slots = (config.dram_mib << 20) // layout.nbytes
        try:
            store = BlockStore(slots, layout)
        except MemoryError:
            raise UsageError(f"--dram_mib={config.dram_mib}: this machine does not have so much; lower it") from None
        self.hardware = PrefillHardware(self.node, engine, store, self, self.post)
        return PrefillInstance(self.node), slots, measured

    def _become_decoding(
        self, config: ClusterConfig, engine: DecodingEngine, model: LoadedModel, layout: BlockLayout
    ) -> tuple[Actor, int, Measured]:
        measured = Measured(step=measure_steps(engine, layout, config.max_batch, model.config.max_context))
        decode = model.tokenizer.decode if model.tokenizer is not None else None
        self.hardware = DecodingHardware(self.node, engine, layout, decode, self.post)
        return decoding_instance(self.node, config, stop_ids(model.tokenizer)), 0, measured

    def _clock_offset(self, host: str) -> float:
        """What to add to this rank's monotonic clock to get rank 0's, from the quickest of a few round trips."""
        if platform.node() == host:
            return 0.0
        samples = []
        for _ in range(PINGS):
            self.send(CONDUCTOR, Ping(self.node, time.monotonic()))
            pong = self._expect(Pong)
            if pong is None:
                break
            received = time.monotonic()
            samples.append((received - pong.sent, pong.clock - (pong.sent + received) / 2))
        return min(samples)[1] if samples else 0.0

    # --- serving

    def on_received(self, received: Any) -> tuple[bool, Message | None]:
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()
        match received:
            case Stop():
                return True, None
            case Interrupt():
                self.at(self.clock.now() + INTERRUPT_GRACE_S, Stop())
                return False, None
            case PeerGone(rank=rank):
                if rank == self.rank:
                    raise RuntimeError("the messenger failed") from self.messenger.failure
                self._orphaned = rank == 0
                return self._orphaned, None
        return False, received

    def _record(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= FLUSH_LINES:
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._lines:
            self.send(CONDUCTOR, EventLines(tuple(self._lines)))
            self._lines = []


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"
