"""The network between instances: NICs whose bandwidth the transfers at hand share (report 6.1: congestion).

Every node sends and receives at its NIC's rate. Transfers that meet at a NIC share it max-min fairly: none could be
faster without slowing down one that is no faster. Rates change only when a transfer begins or ends, and only those of
transfers that share a NIC with it, directly or through others. Knows nothing of KVCache.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mooncake_jax.simulate.events import Events

Nic = tuple[str, bool]  # of this node; True: what it sends
Arrived = Callable[[float], None]  # called with the time


@dataclass(slots=True, eq=False)
class Flow:
    """A transfer under way. left: bytes that had not arrived at `since`; rate: bytes per second since then."""

    nics: tuple[Nic, Nic]
    left: float
    arrived: Arrived
    since: float
    rate: float = 0.0
    estimate: int = 0  # how often its end was foretold


@dataclass(slots=True)
class Network:
    """rates: bytes per second that each node's NIC sends; latency: seconds that a transfer takes beside; shared:
    whether transfers slow one another down; receiving: as rates, of what NICs receive, None: as much as they send.
    sent: bytes by sender; carried: how many of them have arrived, of transfers that share NICs.
    """

    events: Events
    rates: Mapping[str, float]
    latency: float = 0.0
    shared: bool = True
    receiving: Mapping[str, float] | None = None
    sent: dict[str, int] = field(default_factory=dict)
    carried: float = 0.0
    _at: dict[Nic, dict[Flow, None]] = field(default_factory=dict)  # transfers that pass a NIC, in order of beginning

    def send(self, source: str, target: str, nbytes: int, now: float, arrived: Arrived) -> None:
        """`arrived` is told once all bytes are there."""
        self.sent[source] = self.sent.get(source, 0) + nbytes
        if not self.shared:
            seconds = nbytes / min(self.rate((source, True)), self.rate((target, False)))
            self.events.at(now + self.latency + seconds, _tell, arrived)
            return
        flow = Flow(((source, True), (target, False)), nbytes, arrived, now)
        alone = True
        for nic in flow.nics:
            passing = self._at.setdefault(nic, {})
            alone = alone and not passing
            passing[flow] = None
        if alone:
            self._set(flow, min(map(self.rate, flow.nics)), now)
        else:
            self._share(flow.nics, now)

    def rate(self, nic: Nic) -> float:
        """Bytes per second that it can carry."""
        node, sends = nic
        return self.rates[node] if sends or self.receiving is None else self.receiving[node]

    def _share(self, nics: tuple[Nic, Nic], now: float) -> None:
        """Find new rates for all that may be touched by a change at these NICs."""
        flows = list(self._connected(nics))
        rates = fair_rates([flow.nics for flow in flows], self.rate)
        for flow, rate in zip(flows, rates):
            if rate != flow.rate:
                self._set(flow, rate, now)

    def _set(self, flow: Flow, rate: float, now: float) -> None:
        arrived = flow.rate * (now - flow.since)
        flow.left -= arrived
        self.carried += arrived
        flow.since, flow.rate = now, rate
        flow.estimate += 1
        self.events.at(now + max(flow.left, 0.0) / rate, self._end, (flow, flow.estimate))

    def _connected(self, nics: tuple[Nic, Nic]) -> Iterator[Flow]:
        reached, ahead = set(nics), list(nics)
        found: dict[Flow, None] = {}
        while ahead:
            for flow in self._at.get(ahead.pop(), ()):
                if flow not in found:
                    found[flow] = None
                    yield flow
                    new = [nic for nic in flow.nics if nic not in reached]
                    reached.update(new)
                    ahead += new

    def _end(self, foretold: tuple[Flow, int], now: float) -> None:
        flow, estimate = foretold
        if estimate != flow.estimate:  # its rate has changed since
            return
        self.carried += flow.rate * (now - flow.since)
        alone = True
        for nic in flow.nics:
            passing = self._at[nic]
            del passing[flow]
            if passing:
                alone = False
            else:
                del self._at[nic]
        if not alone:
            self._share(flow.nics, now)
        if self.latency:
            self.events.at(now + self.latency, _tell, flow.arrived)
        else:
            flow.arrived(now)

    @property
    def idle(self) -> bool:
        return not self._at

    def check(self) -> None:
        """Assert the invariants: no NIC is above its rate, and none with something to send rests."""
        for nic, flows in self._at.items():
            total, rate = sum(flow.rate for flow in flows), self.rate(nic)
            assert 0 < total <= rate * (1 + 1e-9), f"{nic[0]}'s NIC carries {total} of {rate} bytes/s"
        for flow in {flow for flows in self._at.values() for flow in flows}:
            full = [sum(f.rate for f in self._at[nic]) >= self.rate(nic) * (1 - 1e-9) for nic in flow.nics]
            assert any(full), f"a transfer from {flow.nics[0][0]} could be faster"


def fair_rates(flows: list[tuple[Nic, Nic]], capacity: Callable[[Nic], float]) -> list[float]:
    """Max-min fair bytes per second of each: the fullest NIC shares out what it has left, again and again."""
    if len(flows) == 1:
        return [min(map(capacity, flows[0]))]
    rates = [0.0] * len(flows)
    waiting: dict[Nic, list[int]] = {}
    for place, nics in enumerate(flows):
        for nic in nics:
            waiting.setdefault(nic, []).append(place)
    room = {nic: capacity(nic) for nic in waiting}
    while waiting:
        fullest = min(waiting, key=lambda nic: room[nic] / len(waiting[nic]))
        share = room[fullest] / len(waiting[fullest])
        for place in waiting[fullest]:
            rates[place] = share
            for nic in flows[place]:
                if nic != fullest:
                    waiting[nic].remove(place)
                    room[nic] -= share
                    if not waiting[nic]:
                        del waiting[nic]
        del waiting[fullest]
    return rates


def _tell(arrived: Arrived, now: float) -> None:
    arrived(now)
