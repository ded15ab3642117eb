"""Stand-ins for traces whose files are not at hand: the report's (section 4), and FAST25's tool&agent.

Made from what the papers publish of them (published.py): figure 5's lengths, figure 6's uses of blocks with the two
hottest of them, the means, and the hit rates of table 1. All else is made up: that requests come in *sessions*, which
share a *context* (a document, a conversation) at the start of their prompts and are of about the same length; that
before it comes an application's system prompt, which has the hottest blocks; how a session's requests lie in time; and
that sessions start at any moment alike. A result on it is a result on a surrogate, and must be called so.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from mooncake_jax.workload import published
from mooncake_jax.workload.checks import is_integer, is_number, require, require_requests
from mooncake_jax.workload.dice import Dice
from mooncake_jax.workload.published import Histogram
from mooncake_jax.workload.trace import TRACE_BLOCK, TraceRow

SURROGATE = "SURROGATE"  # so begins what a surrogate says of itself
REQUESTS = published.REQUESTS
RATE = published.REQUESTS / published.DURATION_S  # requests a second

# Sessions of four and more requests are thinned to this part of figure 6's, or table 1's hit rates could not be met.
_KEPT_FROM_FOUR = 0.63
_HOT_SHARES = tuple(uses / published.REQUESTS for uses in published.HOTTEST_BLOCKS)


@dataclass(frozen=True)
class Shape:
    """A kind of trace; lengths in tokens. gaps: of so large a share of a session's gaps, how many of the trace's
    requests lie between at most; linear in between.
    """

    name: str
    mean_input: float
    mean_output: float
    in_sessions: float  # share of requests that are of a session
    context: float  # share that the context has of its session's shortest prompt
    hot_blocks: tuple[int, int]  # in the system prompts of the two applications
    gaps: tuple[tuple[float, float], ...]


REPORT = Shape(
    name="report",
    mean_input=published.MEAN_INPUT,
    mean_output=published.MEAN_OUTPUT,
    in_sessions=0.93,
    context=0.82,
    hot_blocks=(1, 1),
    gaps=((0.0, 0.0), (0.525, 60.0), (0.73, 850.0), (0.945, 2700.0), (0.99, 4800.0), (1.0, 6500.0)),
)
TOOL_AGENT = Shape(
    name="toolagent",
    mean_input=8596,
    mean_output=published.MEAN_OUTPUT,
    in_sessions=0.88,
    context=0.795,
    hot_blocks=(1, 10),
    gaps=((0.0, 0.0), (0.3, 10.0), (0.35, 60.0), (0.67, 650.0), (0.95, 2500.0), (1.0, 4800.0)),
)
SHAPES = {f"surrogate-{shape.name}": shape for shape in (REPORT, TOOL_AGENT)}


@dataclass(frozen=True)
class _Session:
    """input_lengths: of its requests, ascending. application: whose system prompt comes first, if any's does."""

    input_lengths: Sequence[int]
    application: int | None

    @property
    def full_blocks(self) -> int:
        """Of its shortest prompt."""
        return self.input_lengths[0] // TRACE_BLOCK


def surrogate_rows(shape: Shape, requests: int, rate: float, seed: int) -> list[TraceRow]:
    """So many rows in order of time, `rate` of them a second on average. Raises UsageError naming the flag."""
    require_requests(requests)
    require(is_number(rate) and rate >= 1e-6, "rate", rate, "a number of requests a second, at least 0.000001")
    require(is_integer(seed, 0), "seed", seed, "an integer, not negative")
    dice = Dice("surrogate", shape.name, seed)
    scale = shape.mean_input / published.MEAN_INPUT
    unscaled = sorted(_lengths(published.INPUT_LENGTHS, published.MEAN_INPUT, requests, dice))
    sessions = list(
        _sessions(dice.shuffled(_grouped([int(length * scale) for length in unscaled], shape, dice)), shape)
    )
    outputs = dice.shuffled(map(int, _lengths(published.OUTPUT_LENGTHS, shape.mean_output, requests, dice)))
    inputs = chain.from_iterable(session.input_lengths for session in sessions)
    places = chain.from_iterable(_places(len(session.input_lengths), requests, shape, dice) for session in sessions)
    prompts = chain.from_iterable(_prompts(number, session, shape, dice) for number, session in enumerate(sessions))
    unordered = zip(places, inputs, outputs, prompts)
    return _numbered(sorted(unordered, key=lambda request: request[0]), 1000 / rate)


def surrogate_name(shape: Shape, rate: float, seed: int, requests: int = REQUESTS) -> str:
    """How a trace says what it is, and that it is not fitted where it has another length than the original's."""
    origin = {"report": "the report's trace (arXiv 2407.00079)", "toolagent": "FAST25's tool&agent trace"}[shape.name]
    made = f"made from published figures, {rate:g} requests/s, seed {seed}"
    fits = "" if requests == REQUESTS else f"; {requests:,} requests: it fits those figures at {REQUESTS:,} only"
    return f"{SURROGATE} of {origin}, not the trace itself: {made}{fits}"


def _lengths(histogram: Histogram, mean: float, count: int, dice: Dice) -> list[float]:
    """Ascending by bins, each of which has its share; within all bins they lie alike, so that the mean is `mean`."""
    edges = [0.0, *(share for _, share in histogram.cdf())]
    lowest = sum(place * requests for place, requests in enumerate(histogram.counts)) / sum(histogram.counts)
    within = (mean - histogram.first) / histogram.width - lowest  # 0 to 1: where in their bins lengths are on average
    # u (1 - skew) + skew u^4 has a mean of 0.5 - 0.3 skew over uniform u.
    skew = (0.5 - within) / 0.3
    lengths, place = [], 0
    for quantile in dice.strata(count):
        while quantile >= edges[place + 1]:
            place += 1
        u = dice.uniform()
        lengths.append(histogram.first + histogram.width * (place + u * (1 - skew + skew * u * u * u)))
    return lengths


def _grouped(lengths: Sequence[int], shape: Shape, dice: Dice) -> Iterator[Sequence[int]]:
    """The input lengths of each session: neighbours in ascending order."""
    start = 0
    for size in _session_sizes(len(lengths), shape, dice):
        yield lengths[start : start + size]
        start += size


def _session_sizes(requests: int, shape: Shape, dice: Dice) -> list[int]:
    """As many sessions of each size as give blocks the uses of figure 6, each size spread evenly over the list."""
    bounds = pairwise(published.BLOCK_USES.items())
    weights = {uses: (upper - lower) * (_KEPT_FROM_FOUR if uses >= 4 else 1) for (_, lower), (uses, upper) in bounds}
    per_weight = requests * shape.in_sessions / sum(uses * weight for uses, weight in weights.items())
    placed, left = [], requests
    for size, weight in weights.items():
        sessions = min(round(per_weight * weight), left // size)
        placed += [(place, size) for place in dice.strata(sessions)]
        left -= sessions * size
    placed += [(place, 1) for place in dice.strata(left)]
    return [size for _, size in sorted(placed)]


def _sessions(grouped: Iterable[Sequence[int]], shape: Shape) -> Iterator[_Session]:
    """Gives each session the application that is most short of its share, if any of its prompts has room for it."""
    shares = (*_HOT_SHARES, 1 - sum(_HOT_SHARES))  # the last are of no application
    needed = (*shape.hot_blocks, 0)
    given, total = [0, 0, 0], 0
    for lengths in grouped:
        total += len(lengths)
        roomy = [place for place in range(3) if lengths[0] // TRACE_BLOCK >= needed[place]]
        chosen = max(roomy, key=lambda place: shares[place] * total - given[place])
        given[chosen] += len(lengths)
        yield _Session(lengths, chosen if chosen < 2 else None)


def _prompts(number: int, session: _Session, shape: Shape, dice: Dice) -> Iterator[list[Hashable]]:
    """The blocks of each request: the application's, the context's, and its own."""
    application = session.application
    hot = (
        [] if application is None else [("application", application, at) for at in range(shape.hot_blocks[application])]
    )
    room = session.full_blocks - len(hot)
    shared = min(int(room * shape.context + dice.uniform()), room) if len(session.input_lengths) > 1 else 0
    common = hot + [("context", number, at) for at in range(shared)]
    for place, length in enumerate(session.input_lengths):
        own = -(-length // TRACE_BLOCK) - len(common)
        yield common + [("own", number, place, at) for at in range(own)]


def _places(size: int, requests: int, shape: Shape, dice: Dice) -> Iterator[float]:
    """Where in the trace a session's requests are, 0 to `requests`; what would come after its end goes to the start."""
    place = dice.uniform() * requests
    for _ in range(size):
        yield place % requests
        share = dice.uniform()
        (low, fewest), (high, most) = next(pair for pair in pairwise(shape.gaps) if share < pair[1][0])
        place += fewest + (most - fewest) * (share - low) / (high - low)


def _numbered(requests: Sequence[tuple], spacing_ms: float) -> list[TraceRow]:
    """Blocks get numbers in the order in which they first occur."""
    numbers: dict[Hashable, int] = {}
    rows = []
    for index, (place, input_length, output_length, blocks) in enumerate(requests):
        ids = tuple([numbers.setdefault(block, len(numbers)) for block in blocks])
        rows.append(TraceRow(int(place * spacing_ms), input_length, output_length, ids, index))
    return rows
