"""Figure 7 of the report: what storing the KVCache adds to a prefill, serialized and layer-wise (section 5.2).

    python experiments/arxiv_fig07.py [--model=smollm2-135m] [--lengths=512,1024,2048,4096,8192] [--out=FOLDER]

Claim: layer-wise, storing hides behind the computation; serialized, it grows with the length. Two ranks measure it with
the real engine, block store, export and messenger, over a link so slow that sending the longest prompt's KVCache takes
`--share` of computing it. Beside it a model of the report's machines (storing.py), and the report's own points. Writes
arxiv_fig07.json and, where matplotlib is installed (extra `plots`), arxiv_fig07.png.
"""

import json
import subprocess
import sys
from pathlib import Path

from absl import flags
from reference import points
from script import make_folder, parse, run_script
from storing import a800_added_s

from mooncake_jax.cluster.launch import mpiexec_command
from mooncake_jax.commands.plots import NO_PICTURE, can_plot, pyplot
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import DEFAULT_MODEL_DIR, resolve
from mooncake_jax.model.sources import open_source

HERE = Path(__file__).parent
WAYS = ("serialized", "layer-wise")
MOST_SHARE = 0.15  # of what serialized adds at the longest length
DEADLINE_S = 3600

FLAGS = flags.FlagValues()
flags.DEFINE_string("model", "smollm2-135m", "a model's name or path", flag_values=FLAGS)
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", flag_values=FLAGS)
flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096", "8192"], "tokens of the prompts", flag_values=FLAGS)
flags.DEFINE_integer("prefill_chunk", 512, "most tokens of a chunk", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_float("share", 0.8, "time to send the longest prompt's KVCache over that to compute it", flag_values=FLAGS)
flags.DEFINE_integer("repeats", 3, "runs of which the median counts", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string("out", "results/arxiv_fig07", "folder for the results", flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    if not FLAGS.share > 0:
        raise UsageError(f"--share={FLAGS.share}: it must be above 0")
    lengths = check_lengths()
    out = make_folder(FLAGS.out)
    try:
        measured = measure(lengths)
    except subprocess.SubprocessError as error:  # the ranks have told why
        print(f"experiments/arxiv_fig07.py: {error}", file=sys.stderr)
        return 1
    series = {"measured": measured, "simulated A800": simulated(), "report": report()}
    (out / "arxiv_fig07.json").write_text(json.dumps(series, indent=1) + "\n")
    print_table(series)
    longest = measured[-1]
    share = longest["layer-wise"] / longest["serialized"]
    verdict = "holds" if share <= MOST_SHARE else "does not hold"
    claim = f"layer-wise adds at most {MOST_SHARE:.0%} of what serialized adds at the longest"
    print(f"claim: {claim}: {share:.1%}, {verdict}")
    print(f"results are in {out}{draw(series, out / 'arxiv_fig07.png')}")
    return 0


def check_lengths() -> list[int]:
    context = open_source(resolve(FLAGS.model, Path(FLAGS.model_dir))).config().max_context
    if not all(length.isdecimal() and 0 < int(length) <= context for length in FLAGS.lengths):
        raise UsageError(
            f"--lengths={','.join(FLAGS.lengths)}: name numbers of tokens from 1 to the model's context of {context}, "
            "with commas between"
        )
    return sorted(map(int, FLAGS.lengths))


def measure(lengths: list[int]) -> list[dict[str, float]]:
    """Seconds that each way adds, by length."""
    arguments = [FLAGS.model, FLAGS.model_dir, FLAGS.prefill_chunk, FLAGS.share, FLAGS.repeats, *lengths]
    command = [*mpiexec_command(2), sys.executable, str(HERE / "arxiv_fig07_ranks.py"), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    print(
        f"the link carries {figures['link_gbps']:.3f} Gbps; a token has {figures['bytes_per_token']} bytes of KVCache"
    )
    rows = []
    for length, seconds in figures["lengths"].items():
        added = {way: seconds[way] - seconds["computed"] for way in WAYS}
        rows.append({"tokens": int(length), "computed": seconds["computed"], **added})
    return rows


def simulated() -> list[dict[str, float]]:
    rows = ((tokens, a800_added_s(tokens)) for tokens in (row["tokens"] for row in report()))
    return [{"tokens": tokens, **dict(zip(WAYS, added, strict=True))} for tokens, added in rows]


def report() -> list[dict[str, float]]:
    by_tokens: dict[int, dict[str, float]] = {}
    for way, series in zip(WAYS, points("arxiv_fig07").values(), strict=True):
        for tokens, seconds in series:
            by_tokens.setdefault(int(tokens), {})[way] = seconds
    return [{"tokens": tokens, **added} for tokens, added in by_tokens.items()]


def print_table(series: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'':15}{'tokens':>8}{'serialized':>12}{'layer-wise':>12}   seconds added")
    for name, rows in series.items():
        for row in rows:
            print(f"{name:15}{row['tokens']:8d}{row['serialized']:12.3f}{row['layer-wise']:12.3f}")


def draw(series: dict[str, list[dict[str, float]]], file: Path) -> str:
    """All series with lengths and seconds as shares of the longest one's serialized; says where it is, or why not."""
    if not can_plot():
        return NO_PICTURE
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(7, 4.2), layout="constrained")
    styles = {"measured": "-o", "simulated A800": "--s", "report": ":^"}
    for name, rows in series.items():
        longest = rows[-1]
        for way, colour in zip(WAYS, ("tab:red", "tab:blue"), strict=True):
            x = [row["tokens"] / longest["tokens"] for row in rows]
            y = [row[way] / longest["serialized"] for row in rows]
            axes.plot(x, y, styles[name], color=colour, label=f"{way}, {name} (to {longest['tokens'] // 1000}k)")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="sequence length / the longest", ylabel="storing latency / serialized at the longest")
    axes.set_title("What storing the KVCache adds to a prefill (report, figure 7)", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)
    return f", the picture in {file.name}"


if __name__ == "__main__":
    run_script(main)
