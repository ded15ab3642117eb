"""Report table 3: requests rejected under overload by the baseline, early rejection, and that on prediction.

    python experiments/arxiv_table3.py --traces=traces [--trace=FILE] [--speed=2] [--seeds=0,1,2,3]  # 2.5 minutes

Claim: on 8 prefill and 8 decoding instances, a trace replayed twice as fast, the baseline rejects 4,183 of 23,000
requests, early rejection 3,771, and with prediction 3,589. The report does not say how many of the others kept their
SLOs: here good requests stand beside the rejected ones. Expected: no number. On the conversation trace the order comes
out where admissions go by the very SLO: by 2 % where decoding instances judge again as KVCache arrives; where they do
not, early rejection has 4 % and prediction 16 % fewer (the report: 10 and 14 %), but then most requests that are
admitted miss their TBT. It does not come out by 0.095 s, nor on surrogates of the report's trace (there it is the
reverse, by 2 %), nor with profiles `arxiv` and `micro`, with which decoding never binds and next to none are rejected.

What decides: a policy that keeps the pool that binds busy serves what that pool can, and all three do, so they reject
about alike: what the baseline prefills in vain costs it nothing while prefill has time to spare. With 6 prefill
instances, or with prefill 10 or 20 % slower, the order is another one. Judging by the mean of the decoding pool, by
those alone whose prefill has ended, or by a t_d that is too short admits more than instances can decode in time; those
that judge again take that back. Good requests hang on a hair where admissions go by the very SLO, since steps grow by a
few per mille while outputs do: so one setting has them go by 0.095 s. Profile `fast25` was taken because with the
report's own, `arxiv`, nothing is to be seen, so its rows are marked fitted.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from absl import flags
from clusters import Trace, released
from figure import Headline, Sensitivity, define_flags, parse, publish, run_script, same, untargeted
from overload import ADMISSIONS, Overloaded, serve
from reference import rows as paper_rows
from style import bars
from surrogates import Spread, described, report_traces
from systems import with_prefill_factor

from mooncake_jax.commands.scheduling_flags import check_speed
from mooncake_jax.sched.cost import CostModel
from mooncake_jax.sched.profiles import profile

CLAIM = (
    "Of 23,000 requests at twice the speed the baseline rejects 4,183, early rejection 3,771, with prediction 3,589."
)


@dataclass(frozen=True)
class Setting:
    """name: as the picture has it. fields: of SimulationConfig."""

    name: str
    profile: str
    fields: dict[str, Any]


SETTINGS = (
    Setting("judged again", "fast25", {"recheck": True}),
    Setting("judged once", "fast25", {"recheck": False}),
    Setting("judged again, by 0.095 s", "fast25", {"recheck": True, "tbt_slo": 0.095}),
    Setting("judged again", "arxiv", {"recheck": True}),
    Setting("judged again", "micro", {"recheck": True}),
)

PREFILL_FACTORS = (1.0, 1.1, 1.2)

FLAGS = define_flags("arxiv_table3", traces=True, trace=True, seeds=4)
flags.DEFINE_float("speed", 2.0, "how many times faster the trace is replayed", flag_values=FLAGS)
flags.DEFINE_integer("prefill", 8, "prefill instances", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("decode", 8, "decoding instances", lower_bound=1, flag_values=FLAGS)

Table = dict[str, Overloaded]  # by admission


@dataclass(frozen=True)
class Case:
    """What was served, a table for each trace. label: of the traces."""

    setting: Setting
    label: str
    tables: list[Table]

    def spread(self, admission: str, what: str) -> Spread:
        """rejected or good, in per cent of all requests."""
        return Spread([100 * count(of[admission], what) / len(of[admission].outcomes) for of in self.tables])

    def rejected(self) -> dict[str, float]:
        """Means over the traces."""
        return {name: Spread([of[name].rejected for of in self.tables]).mean for name in ADMISSIONS}


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    check_speed(FLAGS.speed, "--speed=")
    conversation, surrogates = released(FLAGS, "conversation"), report_traces(FLAGS)
    reported = described(FLAGS, surrogates)["trace"]
    ours = [Case(setting, conversation.label, [table(conversation, setting)]) for setting in SETTINGS]
    ours.append(Case(SETTINGS[0], reported, [table(trace, SETTINGS[0]) for trace in surrogates]))
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=[row for case in ours for row in rows_of(case)],
        headlines=[one for case in ours for one in headlines(case)],
        sensitivities=[] if FLAGS.quick else [*sensitivities(conversation, ours)],
        lessons=[lesson(*[case.tables[0] for case in ours[:2]])],
        draw=lambda *panels: draw(panels, ours),
        panels=(2, 1),
        size=(10.0, 6.5),
    )


def lesson(again: Table, once: Table) -> str:
    last = list(ADMISSIONS)[-1]
    fewer = [1 - found[last].rejected / max(1, found["baseline"].rejected) for found in (again, once)]
    return (
        f"Few rejections are no merit by themselves: judged once, prediction rejects {fewer[1]:.1%} fewer than the "
        f"baseline and leaves {once[last].good()} good requests; judged again, {fewer[0]:.1%} fewer, and "
        f"{again[last].good()}."
    )


def table(trace: Trace, setting: Setting, cost: CostModel | None = None, **fields: Any) -> Table:
    """cost: None, that of the setting's profile."""
    cluster = {"prefill": FLAGS.prefill, "decode": FLAGS.decode} | setting.fields | fields
    requests = trace.requests(FLAGS.speed)
    return {name: serve(requests, name, cost or setting.profile, **cluster) for name in ADMISSIONS}


def count(served: Overloaded, what: str) -> int:
    return served.rejected if what == "rejected" else served.good()


def paper() -> dict[str, dict[str, float]]:
    """The report's: rejected requests, and those in per cent of all that were replayed."""
    rows = paper_rows("arxiv_table3")
    rejected = {row["series"]: int(row["y_rejected_requests"]) for row in rows}
    shares = {row["series"]: 100 * rejected[row["series"]] / int(row["x_replayed_requests"]) for row in rows}
    return {"requests": rejected, "shares": shares}


def in_order(rejected: dict[str, float]) -> str:
    """Of the policies, the most rejections first; = between those that reject as many."""
    first, *others = sorted(rejected, key=lambda name: -rejected[name])
    text, last = first, first
    for name in others:
        text += f" {'=' if rejected[name] == rejected[last] else '>'} {name}"
        last = name
    return text


def headlines(case: Case) -> Iterator[Headline]:
    setting, shares = case.setting, paper()["shares"]
    # fast25 stands for the report's own profile since with that next to none are rejected: chosen on this table.
    kind = "fitted" if setting.profile == "fast25" else "predicted"
    common = {"profile": setting.profile, "trace": case.label, "kind": kind}
    theirs, ours = in_order(paper()["requests"]), in_order(case.rejected())
    yield Headline(f"policies by rejections, {setting.name}", theirs, ours, same(), **common, note=told(case))
    for name in ADMISSIONS:
        about = f"{setting.name}, {name}"
        for what, known in (("rejected", shares[name]), ("good", None)):
            found = case.spread(name, what)
            least, most = found.ends
            note = f"seeds from {least:.2f} to {most:.2f}" if len(case.tables) > 1 else ""
            yield Headline(f"{what}, {about}, %", known, found.mean, untargeted(), **common, note=note)


def told(case: Case) -> str:
    """Rejected and good requests, which of the rejected had been prefilled, and what decides."""
    rejected, first = case.rejected(), case.tables[0]
    if not any(rejected.values()):
        return "nothing is rejected"
    each = [
        f"{name} {served.rejected} rejected ({served.wasted} of them prefilled), {served.good()} good "
        f"({served.good('tbt_mean_s')} by the mean gap)"
        for name, served in first.items()
    ]
    counts = "; ".join(each) + (" (of the first seed)" if len(case.tables) > 1 else "")
    apart = max(rejected.values()) / min(rejected.values()) - 1 if min(rejected.values()) else 1.0
    if not apart:
        return f"{counts}; batches as cheap as this profile's never bind, so the three judge alike"
    if apart < 0.05:
        return (
            f"{counts}; decoding binds, and all three keep it busy: they differ by {apart:.1%}, and which rejects "
            "fewest changes with the trace, the SLO judged by, the prefill instances and their speed (see the sweeps)"
        )
    return f"{counts}; they differ by {apart:.1%} since nothing takes back what Conductor admits"


def sensitivities(trace: Trace, ours: list[Case]) -> Iterator[Sensitivity]:
    """Of what decides the order, and of how many are good."""
    (again, judged_again), (once, judged_once) = ((case.setting, case.tables[0]) for case in ours[:2])
    fewer = FLAGS.prefill * 3 // 4
    tried = [table(trace, again, prefill=fewer), judged_again]
    for name in ADMISSIONS:
        values = (fewer, FLAGS.prefill)
        about = f"{again.name}, {name}"
        yield Sensitivity("prefill instances", values, f"rejected, {about}", [found[name].rejected for found in tried])
        yield Sensitivity("prefill instances", values, f"good, {about}", [found[name].good() for found in tried])
    slower = [with_prefill_factor(profile(again.profile), factor) for factor in PREFILL_FACTORS[1:]]
    tried = [judged_again, *(table(trace, again, cost) for cost in slower)]
    assumption = f"prefill times this, {trace.label}, one seed (MFU is divided by it)"
    for name in ADMISSIONS:
        results = [found[name].rejected for found in tried]
        yield Sensitivity(assumption, PREFILL_FACTORS, f"rejected, {again.name}, {name}", results)
    orders = [in_order({name: found[name].rejected for name in ADMISSIONS}) for found in tried]
    yield Sensitivity(assumption, PREFILL_FACTORS, f"policies by rejections, {again.name}", orders)
    times, name = (20.0, 40.0, 60.0), "with prediction"
    cluster = {"prefill": FLAGS.prefill, "decode": FLAGS.decode} | once.fields
    requests = trace.requests(FLAGS.speed)
    tried = [serve(requests, name, once.profile, **cluster, decoding_time_s=seconds) for seconds in times]
    served, values = [*tried, judged_once[name]], (*times, "learned")
    yield Sensitivity("t_d, s", values, f"rejected, {once.name}, {name}", [one.rejected for one in served])
    yield Sensitivity("t_d, s", values, f"good, {once.name}, {name}", [one.good() for one in served])


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    for place, found in enumerate(case.tables):
        for name, served in found.items():
            about = {"setting": case.setting.name, "profile": case.setting.profile, "trace": case.label}
            about |= {"place": place, "admission": name, "requests": len(served.outcomes)}
            counts = {"rejected": served.rejected, "rejected_prefilled": served.wasted}
            yield about | counts | {"good": served.good(), "good_by_mean_gap": served.good("tbt_mean_s")}


def draw(panels, ours: list[Case]) -> None:
    groups = [f"{case.setting.name},\nprofile {case.setting.profile},\n{wrapped(case.label)}" for case in ours]
    shares = {name: [share] * len(ours) for name, share in paper()["shares"].items()}
    for axes, what in zip(panels, ("rejected", "good"), strict=True):
        found = {name: [case.spread(name, what) for case in ours] for name in ADMISSIONS}
        heights = {name: [one.mean for one in of_each] for name, of_each in found.items()}
        spread = {name: [one.ends for one in of_each] for name, of_each in found.items()}
        bars(axes, groups, heights, shares if what == "rejected" else None, spread=spread)
        axes.set(ylabel=f"{what}, % of all requests")
    panels[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, 20))


if __name__ == "__main__":
    run_script(main)
