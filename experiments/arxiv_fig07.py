"""Figure 7 of the report: what storing the KVCache adds to a prefill, serialized and layer-wise (section 5.2).

    python experiments/arxiv_fig07.py                                  # a model of the report's machine: a second
    python experiments/arxiv_fig07.py --real [--model=smollm2-135m] [--lengths=512,1024,2048,4096]  # 3 minutes

Claim: layer-wise, storing hides behind the computation and stays flat; serialized, it grows with the length. Expected:
layer-wise adds at most 15 % of what serialized adds at the longest (the report: 12 %). With --real two ranks measure it
with the real engine, block store, export and messenger, over a link so slow that sending KVCache takes `--share` of
computing it, at the length whose tokens are computed fastest: were it slower, nothing could hide behind the computation
of such prompts. One core sends and receives, the others compute, as beside an accelerator: where two cores did both,
what storing took of them was 20 % of what serialized storing adds. Not met there is that layer-wise is flat: it grows
from 0.01 to 0.12 s, while serialized grows from 0.5 to 3.9 s.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

from absl import flags
from figure import Headline, Sensitivity, at_most, define_flags, parse, publish, run_script, same, untargeted
from reference import points
from storing import a800_added_s, a800_bytes_per_s
from style import line

from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.sources import open_source

HERE = Path(__file__).parent
CLAIM = (
    "Serialized, storing a prompt's KVCache adds to its prefill what its length asks for; layer-wise, next to nothing."
)
WAYS = ("serialized", "layer-wise")
MOST_SHARE = 0.15  # of what serialized adds at the longest length
MOST_GROWTH = 1.5  # of layer-wise, for "flat"
DEADLINE_S = 3600
K = 1024

Seconds = dict[str, list[tuple[int, float]]]  # by way (tokens, seconds added)

FLAGS = define_flags("arxiv_fig07", real=True)
flags.DEFINE_string("model", "smollm2-135m", "a model's name or path", flag_values=FLAGS)
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", flag_values=FLAGS)
flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096"], "tokens of the prompts", flag_values=FLAGS)
flags.DEFINE_integer("prefill_chunk", 512, "most tokens of a chunk", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_float("share", 0.8, "time to send KVCache over the least time to compute it", flag_values=FLAGS)
flags.DEFINE_integer("repeats", 3, "runs of which the median counts", lower_bound=1, flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    if not FLAGS.share > 0:
        raise UsageError(f"--share={FLAGS.share}: it must be above 0")
    lengths = check_lengths() if FLAGS.real else ()
    try:
        ours = measured(lengths) if FLAGS.real else simulated()
    except subprocess.SubprocessError as error:  # the ranks have told why
        print(f"experiments/arxiv_fig07.py: {error}", file=sys.stderr)
        return 1
    machine = f"this machine, {FLAGS.model}" if FLAGS.real else "micro"
    series = {machine: ours, "paper": report()}
    rows = [
        {"source": source, "way": way, "prompt_tokens": tokens, "added_s": added}
        for source, ways in series.items()
        for way, points in ways.items()
        for tokens, added in points
    ]
    return publish(
        FLAGS,
        claim=CLAIM,
        rows=rows,
        headlines=headlines(ours, machine),
        sensitivities=() if FLAGS.real else sensitivities(),
        lessons=lessons(ours),
        draw=lambda axes: draw(axes, ours, machine),
    )


def report() -> Seconds:
    """Its 8000 tokens are 8k."""
    series = points("arxiv_fig07").values()
    return {way: [(int(n) * K // 1000, s) for n, s in found] for way, found in zip(WAYS, series, strict=True)}


def simulated() -> Seconds:
    lengths = [tokens for tokens, _ in report()[WAYS[0]]]
    added = [a800_added_s(tokens) for tokens in lengths]
    return {way: [(n, s[place]) for n, s in zip(lengths, added, strict=True)] for place, way in enumerate(WAYS)}


def check_lengths() -> list[int]:
    context = open_source(resolve(FLAGS.model, Path(FLAGS.model_dir))).config().max_context
    if not all(length.isdecimal() and 0 < int(length) <= context for length in FLAGS.lengths):
        raise UsageError(
            f"--lengths={','.join(FLAGS.lengths)}: name numbers of tokens from 1 to the model's context of {context}, "
            "with commas between"
        )
    lengths = sorted(map(int, FLAGS.lengths))
    return lengths[:2] if FLAGS.quick else lengths


def measured(lengths: list[int]) -> Seconds:
    """On two ranks (arxiv_fig07_ranks.py)."""
    arguments = [FLAGS.model, FLAGS.model_dir, FLAGS.prefill_chunk, FLAGS.share, FLAGS.repeats, *lengths]
    command = [*mpiexec_command(2), sys.executable, str(HERE / "arxiv_fig07_ranks.py"), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    print(
        f"the link carries {figures['link_gbps']:.3f} Gbps; a token has {figures['bytes_per_token']} bytes of KVCache"
    )
    found = {int(length): seconds for length, seconds in figures["lengths"].items()}
    return {way: [(n, seconds[way] - seconds["computed"]) for n, seconds in found.items()] for way in WAYS}


def headlines(ours: Seconds, machine: str) -> list[Headline]:
    paper = report()
    common = {"profile": machine, "trace": "none", "kind": "predicted"}
    note = (
        "the report stores at 49 GB/s from 32k on, the link of the model carries 87.5; layer-wise the report shows "
        "0.1 s at four of five lengths, perhaps a constant beside what is sent"
    )
    slow = (
        f"the link is so slow that sending takes {FLAGS.share:.0%} of the least time a token is computed in; what else "
        "the machine does meanwhile counts, and next to nothing is not the same at all lengths"
    )
    link = slow if FLAGS.real else ""
    rows = [
        ("serialized, by length", trend(paper[WAYS[0]]), trend(ours[WAYS[0]]), same(), ""),
        ("layer-wise, by length", trend(paper[WAYS[1]]), trend(ours[WAYS[1]]), same(), link),
        ("layer-wise over serialized at the longest", last(paper), last(ours), at_most(MOST_SHARE), link),
    ]
    if not FLAGS.real:
        rows.append(("serialized at 128k, s", paper[WAYS[0]][-1][1], ours[WAYS[0]][-1][1], untargeted(), note))
    return [
        Headline(name, theirs, found, tolerance, note=why, **common) for name, theirs, found, tolerance, why in rows
    ]


def trend(points: list[tuple[int, float]]) -> str:
    """flat: no length adds more than MOST_GROWTH of what another does."""
    added = [seconds for _, seconds in points]
    if max(added) <= MOST_GROWTH * min(added):
        return "flat"
    return "grows" if all(a < b for a, b in itertools.pairwise(added)) else "neither flat nor growing"


def last(ways: Seconds) -> float:
    """What layer-wise adds over what serialized does, at the longest."""
    return ways[WAYS[1]][-1][1] / ways[WAYS[0]][-1][1]


def sensitivities() -> list[Sensitivity]:
    name, longest, gb = "layer-wise over serialized at the longest", 128 * K, 1e9
    rates, chunks = (1, 2, 5, 10, 25, 50, round(a800_bytes_per_s() / gb, 1)), (1024, 8192, 32768, 131072)

    def share(serialized: float, layer_wise: float) -> float:
        return layer_wise / serialized

    by_rate = [share(*a800_added_s(longest, bytes_per_s=rate * gb)) for rate in rates]
    by_chunk = [share(*a800_added_s(longest, chunk=chunk)) for chunk in chunks]
    return [
        Sensitivity("rate at which KVCache is stored, GB/s", rates, name, by_rate),
        Sensitivity("tokens of a chunk", chunks, name, by_chunk),
    ]


def lessons(ours: Seconds) -> list[str]:
    return [
        f"Layer-wise storing adds {last(ours):.2%} of what serialized storing adds to the longest prompt: what is sent "
        "while later layers are computed costs nothing, as long as the link keeps up with the computation."
    ]


def draw(axes, ours: Seconds, machine: str) -> None:
    """Over the longest prompt, and over what serialized adds to it: machines and models differ."""
    for paper, ways in ((False, ours), (True, report())):
        longest, most = ways[WAYS[0]][-1]
        for place, way in enumerate(WAYS):
            shares = [(tokens / longest, added / most) for tokens, added in ways[way]]
            source = f"report (to {longest // K}k)" if paper else f"{machine} (to {longest // K}k)"
            line(axes, shares, f"{way}, {source}", place, paper=paper)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="prompt length / the longest", ylabel="seconds added / serialized at the longest")
    axes.legend()


if __name__ == "__main__":
    run_script(main)
