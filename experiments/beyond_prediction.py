"""Beyond the paper: predicting each request's output against the admissions of table 3, in overload.

    python experiments/beyond_prediction.py --traces=DIR     # 1 minute

The report predicts how loaded decoding will be with one length for all outputs, and names request-level prediction as
future work (7.4). Here an output of a prompt is taken to be as long as those of prompts of its length were lately
(sched/output_lengths.py). Overload: the conversation trace at several speeds, with decoding instances that judge TBT
again as KVCache arrives, and without. Expected: request-level prediction keeps most requests within their SLOs in both,
if TBT is the mean of the longest 10 % of gaps; where nobody judges again, early rejection admits far too many.
"""

from collections.abc import Sequence

from beyond import PROFILE, SLOS, finding, good, good_by_mean
from clusters import Trace, released, run
from figure import define_flags, parse, publish, run_script
from style import bars

from mooncake_jax.request import REJECTED

CLAIM = "Predicting each output's length keeps more requests within their SLOs than one length for all."
ADMISSIONS = ("baseline", "early", "early-predicted", "request-level")
SPEEDS = (1.5, 2.0)
SHOWN_SPEED = 2.0
RECHECKS = {"judged again": True, "judged once": False}

NUMBERS = {  # column, and name
    "requests_within_slos": "within SLOs",
    "requests_within_slos_by_mean_tbt": "within SLOs by mean TBT",
    "requests_rejected": "rejected",
}

Found = dict[tuple[str, str, float], tuple[int, ...]]  # by recheck, admission, speed: requests, as NUMBERS says

FLAGS = define_flags("beyond_prediction", traces=True)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    trace = released(FLAGS, "conversation")
    speeds: Sequence[float] = (SHOWN_SPEED,) if FLAGS.quick else SPEEDS
    ours = {
        (recheck, admission, speed): serve(trace, recheck, admission, speed)
        for recheck in RECHECKS
        for admission in ADMISSIONS
        for speed in speeds
    }
    rows = [
        {"tbt": recheck, "admission": admission, "speed": speed} | dict(zip(NUMBERS, numbers, strict=True))
        for (recheck, admission, speed), numbers in ours.items()
    ]
    headlines = [
        finding(f"{what}, {admission}, {recheck}, {speed:g}x", number, trace.label)
        for (recheck, admission, speed), numbers in ours.items()
        if speed == SHOWN_SPEED
        for what, number in zip(NUMBERS.values(), numbers, strict=True)
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines,
        lessons=[lesson(ours, recheck) for recheck in RECHECKS],
        draw=lambda *panels: draw(panels, ours, speeds, len(trace.rows)),
        panels=(1, 2),
        size=(10.0, 4.0),
    )


def serve(trace: Trace, recheck: str, admission: str, speed: float) -> tuple[int, ...]:
    fields = {"prefill": 8, "decode": 8, "admission": admission, "recheck": RECHECKS[recheck]}
    outcomes = run(trace.requests(speed), PROFILE, **fields, **SLOS).outcomes
    return good(outcomes), good_by_mean(outcomes), sum(outcome.status == REJECTED for outcome in outcomes)


def lesson(ours: Found, recheck: str) -> str:
    kept = {admission: ours[recheck, admission, SHOWN_SPEED] for admission in ADMISSIONS}
    told = ", ".join(f"{admission} {strict:,} ({mean:,})" for admission, (strict, mean, _) in kept.items())
    return f"At twice the speed, TBT {recheck}, requests within their SLOs (by mean TBT): {told}."


def draw(panels, ours: Found, speeds: Sequence[float], requests: int) -> None:
    for axes, recheck in zip(panels, RECHECKS, strict=True):
        groups = [f"{speed:g}x, {name}" for speed in speeds for name in ("longest gaps", "mean TBT")]
        heights = {
            admission: [
                100 * ours[recheck, admission, speed][number] / requests for speed in speeds for number in (0, 1)
            ]
            for admission in ADMISSIONS
        }
        bars(axes, groups, heights)
        axes.set(title=f"TBT {recheck}, profile {PROFILE}", ylabel="requests within SLOs, %", ylim=(0, 105))
        axes.legend(ncols=2)


if __name__ == "__main__":
    run_script(main)
