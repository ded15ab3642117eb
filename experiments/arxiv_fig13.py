"""Report figure 13: TTFT and TBT of 10 prefill and 10 decoding instances against 20 coupled ones, on a real trace.

    python experiments/arxiv_fig13.py --traces=traces [--trace=FILE] [--seeds=0,1,2,3]      # 1 minute

Claim: both keep TTFT below 30 s, but Mooncake's requests keep a TBT of 0.1 s where only 57 % of vLLM's do, because
prefills interrupt nobody's decoding. The report's own trace is not at hand: surrogates of 4 seeds stand for it, and
beside them FAST25's conversation trace. TBT is the mean of a request's longest 10 % of gaps. Expected: Mooncake above
98 %, vLLM 50 to 65 %; not met by vLLM with profiles `arxiv` and `micro` (71 and 72 %). `fast25`, and `vllm051` with
it, were taken because they come nearer here, so their rows are marked fitted; with prefill 10 % slower vLLM has 45 % on
the conversation trace, and Mooncake what it had.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from clusters import Trace, cdf, completed, released, run, share_within
from figure import (
    Headline,
    Sensitivity,
    at_least,
    between,
    define_flags,
    parse,
    points,
    publish,
    run_script,
    untargeted,
)
from reference import points as papers
from style import cdf as curve
from surrogates import Spread, described, report_traces
from systems import request_ms, with_prefill_factor

from mooncake_jax.commands.scheduling_flags import check_speed
from mooncake_jax.request import Outcome
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.profiles import profile as cost_model

CLAIM = "Both keep TTFT below 30 s; nearly all of Mooncake's requests keep a TBT of 0.1 s, and 57 % of vLLM's."
LIMITS = {"ttft": 30.0, "tbt": 0.1}
SYSTEMS = {"Mooncake-[10P+10D]": {"prefill": 10, "decode": 10}, "vLLM-[20M]": {"coupled": 20}}
MOONCAKE, VLLM = SYSTEMS
COSTS = {"fast25": ("fast25", "vllm051"), "arxiv": ("arxiv",) * 2, "micro": ("micro",) * 2}  # of each system
BOTH = tuple(enumerate(SYSTEMS))
STEPS = ("micro", "arxiv", "fast25", "vllm051", "vllm")  # profiles that differ in what a request more adds to one
PREFILL_FACTORS = (1.0, 1.1, 1.2)
ROUTERS = ("load-balancing", "round-robin", "random")
GRID = [place / 200 for place in range(201)]  # of the curves that the CSV keeps, as shares

FLAGS = define_flags("arxiv_fig13", traces=True, trace=True, seeds=4)
flags.DEFINE_float("speed", 1.0, "how many times faster the trace is replayed", flag_values=FLAGS)

Values = dict[str, list[float]]  # TTFT and TBT of the completed, seconds


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    check_speed(FLAGS.speed, "--speed=")
    conversation, surrogates = released(FLAGS, "conversation"), report_traces(FLAGS)
    reported = described(FLAGS, surrogates)["trace"]
    ours = {profile: serve([conversation], profile) for profile in COSTS}
    stood_in = serve(surrogates, "fast25")
    found = [one for profile in COSTS for one in headlines(ours[profile], profile, conversation.label)]
    rows = [row for profile in COSTS for row in rows_of(ours[profile], profile, conversation.label)]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[*rows, *rows_of(stood_in, "fast25", reported)],
        headlines=[*headlines(stood_in, "fast25", reported), *found],
        sensitivities=[*sensitivities(conversation, ours)],
        lessons=[
            "20 instances that do both keep nobody waiting for a first token either: what parts the two is that a "
            "prefill interrupts the decoding of all others there.",
        ],
        draw=lambda *panels: draw(panels, {reported: stood_in, conversation.label: ours["fast25"]}),
        panels=(2, 2),
        size=(9.0, 7.0),
    )


def serve(traces: Sequence[Trace], profile: str) -> dict[str, list[Values]]:
    """By system, of each trace."""
    costs = dict(zip(SYSTEMS, COSTS[profile], strict=True))
    return {system: [values(outcomes(trace, system, costs[system])) for trace in traces] for system in SYSTEMS}


def outcomes(trace: Trace, system: str, cost: str | CostModel, **fields: Any) -> list[Outcome]:
    return completed(run(trace.requests(FLAGS.speed), cost, admission="none", **SYSTEMS[system], **fields).outcomes)


def values(outcomes: list[Outcome], tbt: str = "tbt_top10_s") -> Values:
    tbts = [getattr(outcome, tbt) or 0.0 for outcome in outcomes]
    return {"ttft": [outcome.ttft_s for outcome in outcomes], "tbt": tbts}


def kept(found: Values, what: str) -> float:
    """Per cent within the limit."""
    return 100 * share_within(found[what], LIMITS[what])


def papers_curve(what: str, system: str) -> list[tuple[float, float]]:
    return papers(f"arxiv_fig13_{what}", system)[system]


def papers_kept(what: str, system: str) -> float:
    """Per cent within the limit, between the two points about it."""
    known = papers_curve(what, system)
    limit = LIMITS[what]
    x0, y0 = max(point for point in known if point[0] <= limit)
    x1, y1 = min((point for point in known if point[0] > limit), default=(x0 + 1, y0))
    return 100 * (y0 + (y1 - y0) * (limit - x0) / (x1 - x0))


def headlines(ours: dict[str, list[Values]], profile: str, trace: str) -> Iterator[Headline]:
    goals = {(MOONCAKE, "tbt"): at_least(98), (VLLM, "tbt"): between(50, 65)}
    # That fast25 and vllm051 stand for the report's own profile here was chosen on this figure: they come nearer.
    common = {"trace": trace, "kind": "fitted" if profile == "fast25" else "predicted"}
    for system in SYSTEMS:
        cost = COSTS[profile][list(SYSTEMS).index(system)]
        for what, limit in LIMITS.items():
            goal = goals.get((system, what), points(1))
            name = f"{what.upper()} within {limit:g} s, {system}, %"
            found = Spread([kept(one, what) for one in ours[system]])
            theirs = papers_kept(what, system)
            yield Headline(name, theirs, found.mean, goal, cost, **common, note=told(found, profile))
    more = Spread([kept(one, "tbt") / kept(other, "tbt") for one, other in zip(*ours.values(), strict=True)])
    theirs = papers_kept("tbt", MOONCAKE) / papers_kept("tbt", VLLM)
    costs = "/".join(dict.fromkeys(COSTS[profile]))
    yield Headline("requests within TBT, Mooncake over vLLM", theirs, more.mean, untargeted(), costs, **common)


def told(found: Spread, profile: str) -> str:
    decides = (
        "what decides is the cost of a request more in a step, the speed of prefill, the trace and vLLM's router (see "
        "the sweeps)"
    )
    if profile == "fast25":
        decides += "; fast25 and vllm051 were taken since this figure comes nearer with them than with arxiv"
    if len(found.of_each) == 1:
        return decides
    return f"seeds from {found.ends[0]:.2f} to {found.ends[1]:.2f}; {decides}"


def sensitivities(trace: Trace, ours: dict[str, dict[str, list[Values]]]) -> Iterator[Sensitivity]:
    """Of what decides the two shares within the limit of TBT."""
    if FLAGS.quick:
        return
    names = {system: f"TBT within {LIMITS['tbt']:g} s, {system}, %" for system in SYSTEMS}
    served = outcomes(trace, VLLM, "vllm051")
    tried = [served, *(outcomes(trace, VLLM, "vllm051", policy=policy) for policy in ROUTERS[1:])]
    yield Sensitivity("vLLM's router", ROUTERS, names[VLLM], [kept(values(one), "tbt") for one in tried])
    known = {(COSTS[profile][place], system): ours[profile][system][0] for profile in COSTS for place, system in BOTH}
    known |= {(cost, VLLM): values(outcomes(trace, VLLM, cost)) for cost in ("fast25", "vllm")}
    for system, costs in ((MOONCAKE, STEPS[:3]), (VLLM, STEPS)):
        results = [kept(known[cost, system], "tbt") for cost in costs]
        yield Sensitivity("ms that a request more adds to a step", [*map(request_ms, costs)], names[system], results)
    for system, cost in zip(SYSTEMS, COSTS["fast25"], strict=True):
        slower = [with_prefill_factor(cost_model(cost), factor) for factor in PREFILL_FACTORS[1:]]
        tried = [known[cost, system], *(values(outcomes(trace, system, one)) for one in slower)]
        assumption = f"prefill times this, {trace.label}, one seed (MFU is divided by it)"
        yield Sensitivity(assumption, PREFILL_FACTORS, names[system], [kept(one, "tbt") for one in tried])
    ways = ("tbt_mean_s", "tbt_p90_s", "tbt_top10_s")
    yield Sensitivity("what TBT is", ways, names[VLLM], [kept(values(served, way), "tbt") for way in ways])


def rows_of(ours: dict[str, list[Values]], profile: str, trace: str) -> Iterator[dict[str, Any]]:
    """Quantiles: 200 of each curve."""
    for system, by_trace in ours.items():
        for place, found in enumerate(by_trace):
            for what, seconds in found.items():
                ordered = sorted(seconds)
                about = {"profile": profile, "trace": trace, "place": place, "system": system, "what": what}
                for share in GRID:
                    yield about | {"share": share, "seconds": ordered[round(share * (len(ordered) - 1))]}


def draw(panels, ours: dict[str, dict[str, list[Values]]]) -> None:
    """By trace."""
    places = iter(panels)
    for trace, found in ours.items():
        for what, most in (("ttft", 30.0), ("tbt", 1.0)):
            draw_curves(axes := next(places), found, what)
            axes.set(xlim=(0, most), ylim=(0, 1.02), xlabel=f"{what.upper()}, s", ylabel="share of requests")
            axes.set_title(trace)
    panels[1].legend(loc="lower right")


def draw_curves(axes, found: dict[str, list[Values]], what: str) -> None:
    """Of each seed one, all of them alike."""
    for place, (system, by_trace) in enumerate(found.items()):
        for number, one in enumerate(by_trace):
            title = "_" if number else f"{system}, profile {COSTS['fast25'][place]}"
            curve(axes, cdf(one[what]), title, place)
        curve(axes, papers_curve(what, system), f"{system}, paper", place, paper=True)
    axes.axvline(LIMITS[what], color="black", linewidth=0.6)


if __name__ == "__main__":
    run_script(main)
