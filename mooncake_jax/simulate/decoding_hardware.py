"""The device of a simulated decoding instance: loads KVCache, runs decoding steps, and computes inlined prompts.

While its batch stays the same, an instance's steps follow from one another: the context grows by a token a request. So
many are computed at once, and told together (StepsDone): when one of the batch is done, or when somebody is about to
look, be it this instance, which has a message to handle, or Conductor, which decides by what has been decoded. Times
are those of one event a step, bit for bit. What changes the batch takes effect after the step under way; what happens
at the very time that a step ends comes before its end.
"""

from bisect import bisect_left

from mooncake_jax.request import Request
from mooncake_jax.sched.actions import DropKVCache, InlinePrefill, LoadKVCache, RunStep
from mooncake_jax.sched.cost import CostModel, PolynomialCost
from mooncake_jax.sched.messages import KVCacheLoaded, KVCacheReceived, PrefillInlined, StepDone, StepsDone
from mooncake_jax.simulate.config import SimulationConfig
from mooncake_jax.simulate.events import Events

_AHEAD = 256  # steps: what is computed ahead is thrown away when somebody joins


class DecodingHardware:
    """busy: seconds that it has decoded; steps: how many; tokens: of output; loaded: bytes moved to the device;
    inlined: seconds that it has computed prompts.
    """

    def __init__(self, node: str, config: SimulationConfig, cost: CostModel, events: Events):
        self.node, self._config, self._cost, self._events = node, config, cost, events
        self.busy, self.steps, self.tokens, self.loaded, self.inlined = 0.0, 0, 0, 0, 0.0
        self._link_free = 0.0  # when all loads that were asked for are done
        self._requests: dict[int, Request] = {}  # whose KVCache is here, by dispatch
        self._dropped: set[int] = set()  # before their KVCache came
        self._first: dict[int, int] = {}  # context at step 0, if it had been decoding then
        self._last: dict[int, int] = {}  # the step that makes the last token
        self._batch: tuple[int, ...] = ()
        self._begun = 0.0  # when the step under way began
        self._ends: list[float] = []  # of the steps of this batch
        self._told = 0  # how many of them the instance has heard of
        self._foretold = 0  # how often an end was

    # --- KVCache

    def receive(self, dispatch: int, request: Request, now: float) -> None:
        """All of it has arrived in host memory."""
        if dispatch in self._dropped:
            self._dropped.remove(dispatch)
            return
        self._requests[dispatch] = request
        self.catch_up(now)
        self._events.soon.append((self.node, KVCacheReceived(dispatch, request, None)))

    def load(self, action: LoadKVCache, now: float) -> None:
        """One after another: each has the link for itself."""
        nbytes = action.request.prompt_tokens * self._config.bytes_per_token
        self.loaded += nbytes
        seconds = 0.0 if "loading" in self._config.without else self._cost.load(nbytes)
        self._link_free = max(now, self._link_free) + seconds
        self._events.post(self._link_free, self.node, KVCacheLoaded(action.dispatch))

    def drop(self, action: DropKVCache, now: float) -> None:
        dispatch = action.dispatch
        if self._requests.pop(dispatch, None) is None:
            self._dropped.add(dispatch)
        self._first.pop(dispatch, None)
        self._last.pop(dispatch, None)
        if dispatch in self._batch:
            self.batch_changes(now)

    def prefill(self, action: InlinePrefill, now: float) -> None:
        """Of a whole prompt, where no step is under way."""
        request = action.request
        self._requests[action.dispatch] = request
        seconds = self._cost.prefill_compute(request.prompt_tokens, 0)
        self.inlined += seconds
        self._events.post(now + seconds, self.node, PrefillInlined(action.dispatch, seconds, None))

    # --- steps

    def run(self, action: RunStep, now: float) -> None:
        """Steps of this batch from now on, or from when the step under way ends."""
        if self._told < len(self._ends):
            return
        batch = action.batch
        context = self._enter(batch)
        count = min([self._last[dispatch] for dispatch in batch]) - self.steps
        most = 1 if self._config.single_steps or action.yields else _AHEAD
        self._batch, self._begun, self._told = batch, now, 0
        self._ends = step_ends(self._cost, len(batch), context, now, min(count, most))
        self._foretell()

    def _enter(self, batch: tuple[int, ...]) -> int:
        """These decode from now on. Returns their tokens of context."""
        for dispatch in batch:
            if dispatch not in self._first:
                request = self._requests[dispatch]
                self._first[dispatch] = request.prompt_tokens + 1 - self.steps
                self._last[dispatch] = request.output_length - 1 + self.steps
        context = len(batch) * self.steps
        for dispatch in batch:
            context += self._first[dispatch]
        return context

    def _foretell(self) -> None:
        self._foretold += 1
        self._events.at_last(self._ends[-1], self._end, self._foretold)

    def _end(self, foretold: int, now: float) -> None:
        if foretold == self._foretold:
            self._tell(len(self._ends))

    def _tell(self, upto: int) -> None:
        """Of the steps that have ended."""
        ends = tuple(self._ends[self._told : upto])
        self._told = upto
        self.steps += len(ends)
        self.tokens += len(ends) * len(self._batch)
        self.busy += ends[-1] - self._begun
        if self._config.single_steps:
            message = StepDone(tuple([(dispatch, None) for dispatch in self._batch]), ends[-1] - self._begun)
        else:
            message = StepsDone(self._batch, ends, upto < len(self._ends))
        self._begun = ends[-1]
        self._events.soon.append((self.node, message))

    def catch_up(self, now: float) -> None:
        """Tell of what has ended before now."""
        if self._told < len(self._ends) and self._ends[self._told] < now:
            self._tell(bisect_left(self._ends, now, self._told))

    def batch_changes(self, now: float) -> None:
        """After the step under way."""
        under_way = bisect_left(self._ends, now, self._told)
        if under_way + 1 < len(self._ends):
            del self._ends[under_way + 1 :]
            self._foretell()

    def check(self) -> None:
        """Assert the invariants."""
        batch = [dispatch for dispatch in self._batch if dispatch in self._first]
        for dispatch in batch:
            request = self._requests[dispatch]
            produced = self._first[dispatch] + self.steps - request.prompt_tokens
            assert 0 < produced <= request.output_length, f"{self.node}: {request.id} has {produced} tokens"
        held = self._held(batch)
        pages = self._config.decoding_pages * self._config.block_size
        assert held <= pages, f"{self.node}: {held} tokens of KVCache are in memory for {pages}"

    def _held(self, batch: list[int]) -> int:
        """Tokens of KVCache that these have in memory."""
        return sum(self._first[dispatch] + self.steps for dispatch in batch)


def step_ends(cost: CostModel, batch: int, context: int, begun: float, count: int) -> list[float]:
    """When each of so many steps ends, of which the first begins at `begun` with so much context in total."""
    contexts = range(context, context + count * batch, batch)
    now = begun
    if type(cost) is PolynomialCost:  # its own sum, in its own order, without the calls
        constant, request, token = cost.step_coefficients
        fixed = constant + request * batch
        return [now := now + (fixed + token * tokens) for tokens in contexts]
    return [now := now + cost.step(batch, tokens) for tokens in contexts]
