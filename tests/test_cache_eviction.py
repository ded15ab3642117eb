"""Eviction policies against slow, obvious models of them; hit rates by hand, by brute force and on the real trace."""

import json
import math
import random
import warnings
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_jax.cache.entry import Entry
from mooncake_jax.cache.eviction import POLICIES, Optimal
from mooncake_jax.cache.hit_rates import OPTIMAL, POLICY_NAMES, HitRate, hit_rate, optimal_hit_rate, policy_hit_rate
from mooncake_jax.commands import hit_rates as command
from mooncake_jax.errors import UsageError
from mooncake_jax.workload.trace import read_trace


class Scan:
    """A policy as one would write it without a thought for speed: looks at every block to find the one to evict."""

    def __init__(self, lowest, next_use=None):
        self._lowest, self._next_use = lowest, next_use
        self.blocks, self.pinned, self.now = {}, set(), 0

    def _told(self, key):
        self.now += 1
        self.blocks[key]["last"] = self.now
        self.blocks[key]["next"] = self._next_use[key] if self._next_use is not None else None

    def insert(self, key, depth):
        self.blocks[key] = {"came": self.now, "depth": depth, "uses": 1}
        self._told(key)

    def use(self, key):
        self.blocks[key]["uses"] += 1
        self._told(key)

    def remove(self, key):
        del self.blocks[key]
        self.pinned.discard(key)

    def pin(self, key):
        assert key in self.blocks
        self.pinned.add(key)

    def unpin(self, key):
        self.pinned.remove(key)

    def evict(self):
        free = [key for key in self.blocks if key not in self.pinned]
        if not free:
            return None
        victim = min(free, key=lambda key: self._lowest(self.blocks[key]))
        del self.blocks[victim]
        return victim


class ScanSieve(Scan):
    """SIEVE with its queue as a list, oldest first, and its hand as the index of the block it looks at next."""

    def __init__(self):
        super().__init__(None)
        self.queue, self.used, self.hand = [], set(), 0

    def insert(self, key, depth):
        super().insert(key, depth)
        self.queue.append(key)

    def use(self, key):
        super().use(key)
        self.used.add(key)

    def remove(self, key):
        super().remove(key)
        self.used.discard(key)
        self.hand -= self.queue.index(key) < self.hand
        self.queue.remove(key)

    def evict(self):
        if self.pinned == self.blocks.keys():
            return None
        while True:
            self.hand = 0 if self.hand >= len(self.queue) else self.hand
            key = self.queue[self.hand]
            if key not in self.pinned and key not in self.used:
                self.remove(key)
                return key
            if key not in self.pinned:
                self.used.remove(key)
            self.hand += 1


def make(name, next_use):
    return Optimal(next_use) if name == OPTIMAL else POLICIES[name]()


def slow(name, next_use=None):
    if name == "sieve":
        return ScanSieve()
    lowest = {
        "lru": lambda b: b["last"],
        "lfu": lambda b: (b["uses"], b["last"]),
        "length": lambda b: (b["uses"], -b["depth"], b["last"]),
        "fifo": lambda b: b["came"],
        "optimal": lambda b: (-b["next"], b["last"]),
    }
    return Scan(lowest[name], next_use if name == OPTIMAL else None)


class Told:
    """A policy that is told of keys, each of which has its entry while it is there."""

    def __init__(self, policy, entry=Entry):
        self.policy, self._entry, self.entries = policy, entry, {}
        self.check = policy.check

    def insert(self, key, depth):
        self.entries[key] = self._entry(key)
        self.policy.insert(self.entries[key], depth)

    def use(self, key):
        self.policy.use(self.entries[key])

    def remove(self, key):
        self.policy.remove(self.entries.pop(key))

    def pin(self, key):
        self.entries[key].pins = 1

    def unpin(self, key):
        self.entries[key].pins = 0
        self.policy.unpinned([self.entries[key]])

    def evict(self):
        entry = self.policy.evict()
        return None if entry is None else self.entries.pop(entry.key).key


class OfEntries:
    """A slow model as a policy: told of entries, whose pins it reads."""

    def __init__(self, model):
        self._model, self._entries = model, {}

    def insert(self, entry, depth):
        self._entries[entry.key] = entry
        self._model.insert(entry.key, depth)

    def use(self, entry):
        self._model.use(entry.key)

    def unpinned(self, entries):
        pass

    def evict(self):
        self._model.pinned = {key for key, entry in self._entries.items() if entry.pins}
        return self._entries.pop(self._model.evict())


def step(policy, model, next_use, operation, key, number):
    """The same call to both, if it makes sense in the model's state; evictions must agree."""
    there, pinned = key in model.blocks, key in model.pinned
    next_use[key] = math.inf if number == 9 else number
    if operation == "evict":
        assert policy.evict() == model.evict()
    elif operation == "insert" and not there:
        policy.insert(key, number)
        model.insert(key, number)
    elif pinned if operation == "unpin" else there and operation != "insert":
        getattr(policy, operation)(key)
        getattr(model, operation)(key)


def drain(policy, model):
    for key in sorted(model.pinned):
        policy.unpin(key)
        model.unpin(key)
    while (victim := model.evict()) is not None:
        assert policy.evict() == victim
    assert policy.evict() is None
    policy.check()


OPERATIONS = st.sampled_from(["insert", "insert", "use", "use", "evict", "pin", "unpin", "remove"])


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(deadline=None)
@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 6), st.integers(0, 9)), max_size=60))
def test_each_policy_evicts_what_its_slow_model_does(name, steps):
    next_use = {}
    policy, model = Told(make(name, next_use)), slow(name, next_use)
    for operation, key, number in steps:
        step(policy, model, next_use, operation, key, number)
        policy.check()
    drain(policy, model)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_long_life_agrees_with_the_slow_model_and_sweeps_stale_entries_out(name):
    generator, next_use = random.Random(7), {}
    policy, model = Told(make(name, next_use)), slow(name, next_use)
    weights = {"insert": 4, "use": 8, "evict": 2, "pin": 4, "unpin": 4, "remove": 1}
    for operation in generator.choices(list(weights), weights.values(), k=8000):
        step(policy, model, next_use, operation, generator.randrange(60), generator.randrange(10))
        policy.check()
    drain(policy, model)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_is_not_there_is_no_key(name):
    policy, entry = make(name, {"a": 0}), Entry("a")
    for operation in (policy.use, policy.remove):
        with pytest.raises(KeyError):
            operation(entry)
    policy.insert(entry, 0)
    policy.remove(entry)
    with pytest.raises(KeyError):
        policy.use(entry)
    assert policy.evict() is None


class Counted(Entry):
    """One that counts how often any of its kind is asked for its pins."""

    asked = 0

    @property
    def pins(self):
        Counted.asked += 1
        return self.held

    @pins.setter
    def pins(self, pins):
        self.held = pins


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_thousands_of_pinned_blocks_in_front_are_passed_over_once_and_not_for_every_eviction(name):
    keys = range(6000)
    policy = Told(make(name, dict.fromkeys(keys, math.inf)), Counted)
    for key in keys:
        policy.insert(key, 0)
    for key in keys[:3000]:
        policy.pin(key)
    Counted.asked = 0
    assert [policy.evict() for _ in range(2000)] == list(keys[3000:5000])
    for key in keys[:3000]:
        policy.unpin(key)
    assert Counted.asked < 40_000  # 3000 * 2000 if each eviction passed over all of them
    if name == "sieve":  # the hand is past them
        assert [policy.evict() for _ in range(1000)] == list(keys[5000:])
    assert policy.evict() == keys[0]


def test_blocks_that_found_no_room_leave_the_others_their_depths():
    policy, (a, b, c) = POLICIES["length"](), map(Entry, "abc")
    policy.insert_all([a, b], range(4))
    policy.insert(c, 2)
    assert policy.evict_many(3) == [c, b, a]


def test_lru_forgets_stale_uses_as_blocks_leave_and_places_as_they_change():
    """Uses of blocks that stay, behind those that leave; then pins that come and go."""
    policy, leaving, staying = POLICIES["lru"](), [Entry(n) for n in range(100)], [Entry(n) for n in range(100, 150)]
    policy.insert_all(leaving, range(100))
    policy.insert_all(staying, range(50))
    for _ in range(4):
        policy.use_prompt(staying, ())
    assert policy.evict_many(100) == leaving[::-1]
    policy.check()
    for turn in range(100):
        for entry in staying:
            entry.pins = 1
        if not turn:
            assert policy.evict() is None, "passed over once"
        for entry in staying:
            entry.pins = 0
        policy.unpinned(staying)
    assert len(policy._first) < 500, "5000 were told of"
    assert policy.evict_many(50) == staying[::-1]


def test_orders_of_eviction_by_hand():
    orders = {"lru": "cbfead", "lfu": "cbfeda", "length": "cfbeda", "fifo": "cbafed", "sieve": "cbfead"}
    for name, expected in orders.items():
        policy, there = Told(POLICIES[name]()), set()
        for prompt in ("abc", "def", "a", "a", "d"):
            for depth, key in reversed(list(enumerate(prompt))):
                policy.use(key) if key in there else policy.insert(key, depth)
                there.add(key)
        assert "".join(iter(policy.evict, None)) == expected, name


class Watched:
    """A policy under watch: counts the blocks that left before a child of theirs, and those whose child came in with
    the same prompt.
    """

    def __init__(self, policy):
        self._policy, self._came = policy, {}
        self.prompt = self.orphaning = self.orphaning_at_once = 0

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def serve(self, requests, capacity):
        policy_hit_rate(self._numbered(requests), capacity, self)

    def _numbered(self, requests):
        for self.prompt, request in enumerate(requests):
            yield request

    def insert(self, entry, depth):
        self._came[entry.key] = self.prompt
        self._policy.insert(entry, depth)

    def evict(self):
        entry = self._policy.evict()
        key = entry.key
        prompt = self._came.pop(key)
        children = [came for other, came in self._came.items() if other[:-1] == key]
        self.orphaning += bool(children)
        self.orphaning_at_once += prompt in children
        return entry


def chain(path):
    """The blocks of a prompt: each is named by its whole prefix."""
    return tuple(path[: length + 1] for length in range(len(path)))


def random_chains(generator):
    return [chain("".join(generator.choices("abc", k=generator.randint(0, 5)))) for _ in range(25)]


def foretold(requests, next_use):
    """Requests one by one; when each comes, next_use tells when its blocks will be used again."""
    for now, request in enumerate(requests):
        for key in request:
            later = [other for other in range(now + 1, len(requests)) if key in requests[other]]
            next_use[key] = min(later, default=math.inf)
        yield request


@pytest.mark.parametrize("name", ["lru", "lfu", "length", OPTIMAL])
def test_heads_of_chains_outlive_their_tails(name):
    generator = random.Random(3)
    for _ in range(150):
        requests, next_use = random_chains(generator), {}
        policy = Watched(make(name, next_use))
        policy.serve(foretold(requests, next_use), generator.randint(1, 12))
        assert policy.orphaning == 0


@pytest.mark.parametrize(
    "name, capacity, prompts",
    [("fifo", 3, ("a", "ab", "xy")), ("sieve", 2, ("a", "ab", "ab", "c"))],  # ab stays, a is gone
)
def test_fifo_and_sieve_may_evict_a_head_before_what_was_added_to_it_later(name, capacity, prompts):
    policy = Watched(POLICIES[name]())
    policy.serve([chain(prompt) for prompt in prompts], capacity)
    assert policy.orphaning == 1


@pytest.mark.parametrize("name", ["fifo", "sieve"])
def test_fifo_and_sieve_evict_what_came_in_together_from_the_tail(name):
    generator, orphaning = random.Random(3), 0
    for _ in range(300):
        policy = Watched(POLICIES[name]())
        policy.serve(random_chains(generator), generator.randint(1, 12))
        assert policy.orphaning_at_once == 0
        orphaning += policy.orphaning
    assert orphaning > 0


# Hit rates.


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize(
    "requests, capacity, hits",
    [
        ([], 5, 0),
        ([(), ()], 5, 0),
        ([(1, 2), (1, 2, 3), (4,), (1, 2)], math.inf, 4),
        ([(1, 2), (1, 2, 3), (4,), (1, 2)], 4, 4),
        ([(1, 2), (1, 2)], 0, 0),
        ([(1, 2), (1, 2), (1, 2)], 1, 2),  # there is room for the head
        ([(1, 2, 3), (1, 2, 3)], 2, 2),
        ([(7, 7), (7, 7)], math.inf, 2),  # all looked up before any is inserted
        ([(7, 7), (7, 7)], 1, 2),  # one block, two references
        ([(7, 7, 8), (7, 7, 8)], 2, 3),
        ([(7, 7), (7, 7)], 0, 0),
        ([("a", b"key"), ("a", b"key")], 2, 2),  # anything hashable
    ],
)
def test_hits_by_hand(name, requests, capacity, hits):
    assert hit_rate(iter(requests), capacity, name) == HitRate(hits, sum(map(len, requests)))


@pytest.mark.parametrize(
    "name, hits",
    [
        ("lru", 3),  # 4 pushes 2 out, and 2 pushes 3 out
        ("fifo", 3),
        ("lfu", 4),  # 4 pushes 3 out: 1 and 2 were used twice
        ("length", 4),
        ("sieve", 4),
        (OPTIMAL, 5),  # 4 does not come in at all
    ],
)
def test_where_policies_differ(name, hits):
    assert hit_rate([(1, 2), (1, 2), (3,), (4,), (1, 2), (3,)], 3, name) == HitRate(hits, 9)


def test_rates():
    assert HitRate(1, 4).rate == 0.25
    assert HitRate(0, 0).rate == 0.0


REQUESTS = st.lists(st.lists(st.integers(0, 8), max_size=6), max_size=25)
DISTINCT = st.lists(st.lists(st.integers(0, 8), max_size=6, unique=True), max_size=25)


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(REQUESTS, st.integers(0, 8))
def test_hit_rates_are_those_of_the_slow_models(name, requests, capacity):
    assert hit_rate(requests, capacity, name) == policy_hit_rate(requests, capacity, OfEntries(slow(name)))


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 8))
def test_lru_is_a_list_of_which_the_newest_blocks_stay(requests, capacity):
    pool, hits = [], 0
    for request in requests:
        hits += sum(key in pool for key in request)
        for key in reversed(list(dict.fromkeys(request))):
            pool = [other for other in pool if other != key] + [key]
        pool = pool[-capacity:]
    assert hit_rate(requests, capacity, "lru").hits == hits


def most_hits(requests, capacity):
    """The best of all choices of what to keep after each request, by trying all of them."""
    best = {frozenset(): 0}
    for request in requests:
        after = {}
        for pool, hits in best.items():
            hits += sum(key in pool for key in request)
            blocks = pool | set(request)
            for kept in combinations(sorted(blocks), min(capacity, len(blocks))):
                after[frozenset(kept)] = max(hits, after.get(frozenset(kept), 0))
        best = after
    return max(best.values())


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=7), st.integers(0, 4))
def test_optimal_is_the_best_of_all_choices(requests, capacity):
    assert optimal_hit_rate(requests, capacity).hits == most_hits(requests, capacity)


@settings(deadline=None)
@given(DISTINCT, st.integers(0, 8))
def test_no_policy_is_better_than_optimal(requests, capacity):
    bound = optimal_hit_rate(requests, capacity).hits
    for name in POLICIES:
        assert hit_rate(requests, capacity, name).hits <= bound
    assert bound <= hit_rate(requests, math.inf, "lru").hits


# The command.


@pytest.fixture
def run():
    """Runs the command with its flags as if for the first time."""

    def run(*arguments):
        command.FLAGS.unparse_flags()
        for name in ("trace", "capacities", "policies", "json"):
            command.FLAGS[name].unparse()
        return command.main(list(arguments))

    return run


@pytest.fixture
def trace(tmp_path):
    rows = [
        {"timestamp": now, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for now, ids in enumerate([[1, 2], [1, 2], [3], [4], [1, 2], [3]])
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_prints_a_table_and_writes_the_same_as_json(run, trace, tmp_path, capsys):
    out = tmp_path / "rates.json"
    flags = ["--capacities=0,3,inf", "--policies=lru,optimal", f"--json={out}"]
    assert run(f"--trace={trace}", *flags) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "6 requests, 9 block references, 4 distinct blocks" in " ".join(printed[0])
    assert printed[1][-3:] == ["0", "3", "inf"]
    assert printed[2:4] == [["lru", "0.00%", "33.33%", "55.56%"], ["optimal", "0.00%", "55.56%", "55.56%"]]
    rows = json.loads(out.read_text())
    assert [(row["policy"], row["capacity"], row["hits"], row["references"]) for row in rows] == [
        ("lru", 0, 0, 9), ("lru", 3, 3, 9), ("lru", None, 5, 9),
        ("optimal", 0, 0, 9), ("optimal", 3, 5, 9), ("optimal", None, 5, 9),
    ]  # fmt: skip
    assert rows[1]["hit_rate"] == 3 / 9 and rows[1]["trace"] == str(trace)


def test_the_command_shows_all_policies_at_the_sizes_of_table_1(run, trace, capsys):
    assert run(f"--trace={trace}") == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[1][-6:] == ["1,000", "10,000", "30,000", "50,000", "100,000", "inf"]
    assert [line[0] for line in printed[2 : 2 + len(POLICY_NAMES)]] == list(POLICY_NAMES)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "--trace is missing"),
        (["--trace=nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--trace=TRACE", "--capacities=10,1e3"], "--capacities: '1e3' is no number of blocks"),
        (["--trace=TRACE", "--capacities=-1"], "--capacities: '-1' is no number of blocks"),
        (["--trace=TRACE", "--capacities="], "--capacities= is empty"),
        (["--trace=TRACE", "--policies=lru,mru"], "--policies: there is no policy 'mru'; use some of lru,"),
        (["--trace=TRACE", "--json=TRACE/rates.json"], "its folder does not exist"),
        (["--trace=TRACE", "--json=FOLDER", "--policies=lru"], "cannot be written"),
        (["stray"], "'stray' is no flag"),
    ],
)
def test_the_command_refuses_in_one_line(run, trace, tmp_path, arguments, complaint):
    places = [argument.replace("TRACE", str(trace)).replace("FOLDER", str(tmp_path)) for argument in arguments]
    with pytest.raises(UsageError) as caught:
        run(*places)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_rows_out_of_order_are_told(run, trace, capsys):
    trace.write_text("".join(reversed(trace.read_text().splitlines(keepends=True))))
    assert run(f"--trace={trace}", "--policies=lru") == 0
    assert "warning" in capsys.readouterr().err


# The published trace of conversations: 12,031 requests.


@pytest.fixture(scope="module")
def conversation(traces):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is in order
        return [row.hash_ids for row in read_trace(traces / "conversation_trace.jsonl")]


@pytest.mark.traces
@pytest.mark.parametrize(
    "name, expected",  # in percent, at these sizes
    [
        ("lru", {1000: 4.45, 10_000: 21.2, 30_000: 32.6, 50_000: 35.5, 100_000: 36.4, math.inf: 36.6}),
        ("lfu", {1000: 4.8, 10_000: 13.2, 30_000: 27.6, 50_000: 34.4, 100_000: 36.3}),
        ("length", {1000: 5.0, 10_000: 11.2, 30_000: 20.3, 50_000: 26.0, 100_000: 33.4}),
        ("fifo", {1000: 4.45, 10_000: 18.7, 30_000: 30.2}),
        ("sieve", {1000: 4.8, 10_000: 13.2, 30_000: 27.6}),
        (OPTIMAL, {1000: 19.1, 10_000: 36.6}),
    ],
)
def test_hit_rates_of_the_conversation_trace(conversation, name, expected):
    for capacity, percent in expected.items():
        assert 100 * hit_rate(conversation, capacity, name).rate == pytest.approx(percent, abs=0.1)


@pytest.mark.traces
def test_optimal_needs_10_000_blocks_for_all_that_the_conversation_trace_can_hit(conversation):
    assert hit_rate(conversation, 10_000, OPTIMAL) == hit_rate(conversation, math.inf, "lru")
    assert hit_rate(conversation, 10_000, OPTIMAL).rate > 0.36
