"""Instances whose ranks all run on one machine and share its cores (cores.py): a real cluster on a laptop, simulated.

What one of them computes depends on what the others do meanwhile, so that nothing is known ahead: every decoding step
is an event. Times alone are those of the cost model as `mooncake-jax profile` measures them, layer-wise overlap
included.
"""

from collections import deque
from functools import partial

from mooncake_jax.sched.actions import InlinePrefill, LoadKVCache, RunPrefill, RunStep
from mooncake_jax.sched.messages import KVCacheLoaded, PrefillDone, PrefillInlined, PrefillStarted, StepDone
from mooncake_jax.simulate.cores import Cores, Done
from mooncake_jax.simulate.decoding_hardware import DecodingHardware
from mooncake_jax.simulate.prefill_hardware import PrefillHardware


class SharingPrefillHardware(PrefillHardware):
    """An instance of one stage."""

    def __init__(self, cores: Cores, *made_of):
        super().__init__(*made_of)
        self._cores = cores

    def run(self, action: RunPrefill, now: float) -> None:
        """All layers' KVCache but the last one's has arrived by the time that all is computed."""
        reused = self._reused(action)
        self._events.soon.append((self.node, PrefillStarted(action.dispatch, self.node, reused)))
        tokens = action.request.prompt_tokens
        self.group.computed += self._cost.prefill_compute(tokens, reused)
        seconds = self._cost.prefill(tokens, reused)
        self._cores.run(seconds, self._config.prefill_cores, now, partial(self._computed, action, reused, now))

    def _computed(self, action: RunPrefill, reused: int, begun: float, now: float) -> None:
        self.group.busy[0] += now - begun
        stored = tuple([action.blocks[place] for place in action.missing])
        self._events.post(now, self.node, PrefillDone(action.dispatch, self.node, reused, now - begun, stored))
        nbytes = action.request.prompt_tokens * self._config.bytes_per_token // self._config.layers
        self._network.send(self.node, action.decoding, nbytes, now, partial(self._arrived, action, now))


class _Thread:
    """Computes one thing after another."""

    def __init__(self, cores: Cores):
        self._cores = cores
        self._turns: deque[tuple[float, float, Done]] = deque()  # seconds alone, cores; the first is under way

    def run(self, seconds: float, wanted: float, now: float, done: Done) -> None:
        """As Cores.run, once what was asked for before has ended."""
        self._turns.append((seconds, wanted, done))
        if len(self._turns) == 1:
            self._begin(now)

    def _begin(self, now: float) -> None:
        seconds, wanted, _ = self._turns[0]
        self._cores.run(seconds, wanted, now, self._end)

    def _end(self, now: float) -> None:
        _, _, done = self._turns.popleft()
        done(now)
        if self._turns:
            self._begin(now)


class SharingDecodingHardware(DecodingHardware):
    """KVCache moves to the device on a thread and a core of its own, all else happens on another thread."""

    def __init__(self, cores: Cores, *made_of):
        super().__init__(*made_of)
        self._decoding, self._staging = _Thread(cores), _Thread(cores)

    def load(self, action: LoadKVCache, now: float) -> None:
        nbytes = action.request.prompt_tokens * self._config.bytes_per_token
        self.loaded += nbytes
        self._staging.run(self._cost.load(nbytes), 1.0, now, partial(self._staged, action.dispatch))

    def _staged(self, dispatch: int, now: float) -> None:
        """It joins between two steps."""
        self._decoding.run(0.0, 1.0, now, partial(self._has_loaded, dispatch))

    def _has_loaded(self, dispatch: int, now: float) -> None:
        self._events.soon.append((self.node, KVCacheLoaded(dispatch)))

    def prefill(self, action: InlinePrefill, now: float) -> None:
        self._requests[action.dispatch] = action.request
        seconds = self._cost.prefill_compute(action.request.prompt_tokens, 0)
        computed = partial(self._computed, action.dispatch, now)
        self._decoding.run(seconds, self._config.prefill_cores, now, computed)

    def _computed(self, dispatch: int, begun: float, now: float) -> None:
        self.inlined += now - begun
        self._events.post(now, self.node, PrefillInlined(dispatch, now - begun, None))

    def run(self, action: RunStep, now: float) -> None:
        # Attention goes as far for each as for the one with the longest context (parallel/attention.py).
        context = len(action.batch) * max([self._context(dispatch) for dispatch in action.batch])
        self._batch = action.batch
        seconds = self._cost.step(len(action.batch), context)
        self._decoding.run(seconds, self._config.step_cores, now, partial(self._stepped, action.batch, now))

    def _context(self, dispatch: int) -> int:
        at_first = self._requests[dispatch].prompt_tokens + 1 - self.steps
        return self._first.setdefault(dispatch, at_first) + self.steps

    def _stepped(self, batch: tuple[int, ...], begun: float, now: float) -> None:
        self.steps += 1
        self.tokens += len(batch)
        self.busy += now - begun
        done = StepDone(tuple([(dispatch, None) for dispatch in batch]), now - begun)
        self._events.soon.append((self.node, done))

    def catch_up(self, now: float) -> None:
        """Nothing is known ahead."""

    def batch_changes(self, now: float) -> None:
        """After the step under way, as always."""
