"""FAST25 figure 12: how long the KVCache of a request takes from node to node, by its size.

    python experiments/fast25_fig12.py [--seeds=0,1,2,3]      # NICs as `micro` has them: a second
    python experiments/fast25_fig12.py --real      # this machine's messenger against a plain TCP socket: half a minute

Claim: spread over all NICs, KVCache moves 2.4 times as fast as over TCP on 4 x 200 Gbps, 4.6 times on 8 x 400: at nine
tenths of the links' rate, and at half of it. Expected, 64 transfers side by side: 40 GB over 4 x 200 Gbps within 5 % of
the paper's; over 8 x 400 Gbps they would take 0.54 of its time. Slots of PCIe 4.0, brought in to explain that and so
shown as fitted, limit what a NIC gets from its node: with them it is 0.86. TCP and Gloo are the paper's own points.
With --real two ranks of this machine send blocks through the messenger over shared memory, over MPI's TCP, and through
a socket.
"""

import random

from absl import flags
from figure import Headline, Sensitivity, define_flags, parse, publish, run_script, seeds_of, share, untargeted
from reference import points as paper_points
from style import line

from mooncake_jax.sched.profiles import profile
from mooncake_jax.simulate.events import Events
from mooncake_jax.simulate.network import Network

CLAIM = (
    "KVCache spread over all NICs moves 2.4 times as fast as over TCP on 4 x 200 Gbps, 4.6 times on 8 x 400; TCP and "
    "Gloo hardly gain by more and faster NICs."
)
GB = 1e9
SETUPS = {"4x200gbps": (4, 200), "8x400gbps": (8, 400)}  # NICs, Gbps of each
STREAMS = 64
SHOWN_GB, LARGEST_GB = 40, 100
ENGINE = "Transfer Engine"
CALIBRATED_GBPS = 800  # of a node of `micro`: what its transfers reach is a share of this
PCIE4_BYTES_PER_S = 31.5e9  # 16 lanes of 16 GT/s, 128 of 130 bits
SLOTS = {"none": None, "PCIe 4.0 x16": PCIE4_BYTES_PER_S}
OTHER_SLOTS = (0.8, 0.9, 1.0, 2.0)  # of PCIe 4.0 x16
NOTE = (
    "the links of 8 x 400 Gbps carry more than slots of PCIe 4.0 x16, which were brought in to explain this figure; "
    "what of them is lost to packet headers and to the host's memory is not known"
)

FLAGS = define_flags("fast25_fig12", real=True, seeds=4)  # of which stream keeps to which NIC
flags.DEFINE_integer("largest_mib", 256, "--real: the largest of the sizes", lower_bound=4, flag_values=FLAGS)
flags.DEFINE_integer("repeats", 5, "--real: turns of which the median counts", lower_bound=1, flag_values=FLAGS)

Points = list[tuple[float, float]]  # bytes or GB, seconds


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    if FLAGS.real:
        from fast25_fig12_machine import measured  # it brings MPI, which nothing else here wants

        return measured(FLAGS, CLAIM)
    return simulated()


def simulated() -> int:
    theirs = {setup: paper_points(f"fast25_fig12_{setup}") for setup in SETUPS}
    ours = {}
    for setup, nics in SETUPS.items():
        sizes = [gb for gb, _ in theirs[setup][ENGINE]]
        for name, slot in SLOTS.items():
            of_one = transfer_s(GB, *nics, slot)  # rates do not depend on how much there is to send
            ours[setup, name] = [(gb, gb * of_one) for gb in sizes]
    rows = [
        {"source": f"ours, slots: {name}", "setup": setup, "size_gb": gb, "seconds": seconds}
        for (setup, name), points in ours.items()
        for gb, seconds in points
    ]
    rows += [
        {"source": series, "setup": setup, "size_gb": gb, "seconds": seconds}
        for setup, found in theirs.items()
        for series, points in found.items()
        for gb, seconds in points
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines(ours, theirs),
        sensitivities=sensitivities(ours),
        lessons=lessons(ours, theirs),
        draw=lambda *panels: draw(panels, ours, theirs),
        panels=(1, 2),
        size=(9.0, 3.8),
    )


def nic_bytes_per_s(gbps: float, slot: float | None) -> float:
    """What one NIC carries: the share of its link that `micro`'s transfers have of theirs, and no more than its slot
    gives it, less the same share.
    """
    reached = 1 / (profile("micro").transfer(1) - profile("micro").transfer(0)) / (CALIBRATED_GBPS / 8 * GB)
    link = gbps / 8 * GB
    return reached * (link if slot is None else min(link, slot))


def transfer_s(nbytes: float, nics: int, gbps: float, slot: float | None, chosen: random.Random | None = None) -> float:
    """Until the last of STREAMS equal transfers between two nodes has arrived. Their slices go over all NICs in turns;
    or each keeps to one NIC that is `chosen`.
    """
    rate = nic_bytes_per_s(gbps, slot)
    ends = [f"{node}{nic}" for node in ("source", "target") for nic in range(nics)]
    events, arrivals = Events(), []
    network = Network(events, dict.fromkeys(ends, rate))
    for _ in range(STREAMS):
        used = range(nics) if chosen is None else [chosen.randrange(nics)]
        for nic in used:
            part = nbytes / STREAMS / len(used)
            network.send(f"source{nic}", f"target{nic}", round(part), 0.0, arrivals.append)
    events.advance()
    return max(arrivals)


def at(points: Points, gb: float = SHOWN_GB) -> float:
    return dict(points)[gb]


def headlines(ours: dict, theirs: dict) -> list[Headline]:
    found = []
    for (setup, slot), points in ours.items():
        tolerance, note = (share(0.05), "") if setup == "4x200gbps" else (untargeted(), NOTE)
        for gb in (SHOWN_GB, LARGEST_GB):
            name, expected = f"{gb} GB over {setup}, slots: {slot}, s", at(theirs[setup][ENGINE], gb)
            kind = "predicted" if slot == "none" else "fitted"
            found.append(Headline(name, expected, at(points, gb), tolerance, "micro's NICs", "none", kind, note))
    for setup in SETUPS:
        tcp = at(theirs[setup]["TCP"])
        expected, reached = tcp / at(theirs[setup][ENGINE]), tcp / at(ours[setup, "PCIe 4.0 x16"])
        name = f"the paper's TCP over ours with PCIe 4.0 x16, {setup}, {SHOWN_GB} GB"
        found.append(Headline(name, expected, reached, untargeted(), "micro's NICs", "none", "fitted", NOTE))
    return found


def kept_s(setup: str) -> list[float]:
    """Without slices, for each seed: the busiest NIC decides."""
    nics = SETUPS[setup]
    return [transfer_s(SHOWN_GB * GB, *nics, PCIE4_BYTES_PER_S, random.Random(seed)) for seed in seeds_of(FLAGS)]


def sensitivities(ours: dict) -> list[Sensitivity]:
    found = []
    for setup, nics in SETUPS.items():
        name = f"{SHOWN_GB} GB over {setup}, slots: PCIe 4.0 x16, s"
        values = ("slices over all", *(f"each stream keeps to one, seed {seed}" for seed in seeds_of(FLAGS)))
        results = (at(ours[setup, "PCIe 4.0 x16"]), *kept_s(setup))
        found.append(Sensitivity("which NICs a transfer uses", values, name, results))
        slots = [transfer_s(SHOWN_GB * GB, *nics, part * PCIE4_BYTES_PER_S) for part in OTHER_SLOTS]
        found.append(Sensitivity("what a slot carries over PCIe 4.0 x16", OTHER_SLOTS, name, slots))
    return found


def lessons(ours: dict, theirs: dict) -> list[str]:
    def part(setup: str) -> float:
        """Of the links' rate, that the paper's engine reaches."""
        nics, gbps = SETUPS[setup]
        return SHOWN_GB / at(theirs[setup][ENGINE]) / (nics * gbps / 8)

    slower = max(kept_s("8x400gbps")) / at(ours["8x400gbps", "PCIe 4.0 x16"])
    gain = at(theirs["4x200gbps"][ENGINE]) / at(theirs["8x400gbps"][ENGINE])
    return [
        f"If each of {STREAMS} transfers kept to one NIC chosen at random, moving {SHOWN_GB} GB over eight could take "
        f"{slower:.1f} times as long: slices over all NICs are what keeps each of them busy to the end.",
        f"From 4 x 200 to 8 x 400 Gbps the paper's engine gains {gain:.1f}, not 4: it reaches {part('4x200gbps'):.0%} "
        f"of the first links' rate and {part('8x400gbps'):.0%} of the second's, which are not what limits it.",
    ]


def draw(panels, ours: dict, theirs: dict) -> None:
    for axes, setup in zip(panels, SETUPS, strict=True):
        for place, slot in enumerate(SLOTS):
            line(axes, ours[setup, slot], f"ours, slots: {slot}", place)
        for place, (series, points) in enumerate(theirs[setup].items()):
            line(axes, points, f"{series}, FAST25", place + (place > 0), paper=True)
        axes.set(title=setup, xlabel="size, GB", ylabel="seconds", xlim=(0, 105), ylim=(0, 4))
        axes.legend()


if __name__ == "__main__":
    run_script(main)
