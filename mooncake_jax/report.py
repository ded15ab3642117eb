"""What a run shows on the terminal: progress while it runs, then texts, a table of requests and a summary.

Prints whatever a model or a user may have written literally, on terminals of any width and encoding. Knows nothing of
how requests are served: it reads Outcomes and the dict of metrics.summarise.
"""

import sys
from collections.abc import Iterable, Sequence
from time import monotonic

from rich import progress as bars
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mooncake_jax.request import COMPLETED, FAILED, REJECTED, Outcome

PLAIN_INTERVAL = 5.0  # seconds between progress lines where there is no terminal
SHOWN_AT_END = 20  # rows shown from either end of a long table
STYLES = {COMPLETED: "green", REJECTED: "yellow", FAILED: "red"}


class Progress:
    """A context manager: a progress bar on a terminal; elsewhere plain lines, at most one every PLAIN_INTERVAL."""

    def __init__(self, total: int):
        self._total = total
        self._console = _stdout_console()
        self._bar = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = bars.Progress(*_bar_columns(), console=self._console)
            self._task = self._bar.add_task(_counts(0, 0, 0), total=total)

    def __enter__(self) -> "Progress":
        self._started = self._last_line = monotonic()
        if self._bar:
            self._bar.start()
        return self

    def update(self, *, completed: int, running: int, rejected: int, failed: int) -> None:
        """Shows the requests so far, by status; cheap enough to call at every event."""
        done = completed + rejected + failed
        counts = _counts(running, rejected, failed)
        if self._bar:
            self._bar.update(self._task, completed=done, description=counts)
            return
        now = monotonic()
        if now - self._last_line >= PLAIN_INTERVAL:
            self._last_line = now
            elapsed = now - self._started
            left = f", about {elapsed / done * (self._total - done):.0f} s left" if done else ""
            line = f"{done}/{self._total} done, {counts}, {elapsed:.0f} s{left}"
            self._console.print(Text(line), soft_wrap=True)

    def __exit__(self, *exception) -> None:
        if self._bar:
            self._bar.stop()


def print_results(outcomes: Iterable[Outcome], summary: dict) -> None:
    """Prints each request's text (or why it has none) on one line, the table of requests, and the summary: that of
    metrics.summarise, perhaps with "engine", how real engines computed, "prefill_mfu" (sched/mfu.py), "roles" that have
    changed (sched/elastic.py), and "faults" of the policy and the admission.

    Of more than 2 * SHOWN_AT_END requests, the first and last SHOWN_AT_END are shown.
    """
    outcomes = list(outcomes)
    console = _stdout_console()
    left_out = max(len(outcomes) - 2 * SHOWN_AT_END, 0)
    shown = outcomes if not left_out else outcomes[:SHOWN_AT_END] + outcomes[-SHOWN_AT_END:]
    # An ellipsis is not in every encoding; there a text is cut without one.
    overflow = "ellipsis" if console.encoding.startswith("utf") else "crop"
    for outcome in shown:
        line = _text_line(outcome)
        if line:
            console.print(line, no_wrap=True, overflow=overflow)
    console.print(_request_table(shown, left_out))
    if left_out:
        console.print(Text(f"{left_out} requests between the first and last {SHOWN_AT_END} are left out above"))
    console.print(_summary_table(summary))
    console.print(_latency_table(summary))


def _stdout_console() -> Console:
    # A character that the terminal's encoding lacks is shown as "?"; it must not end the run.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def _bar_columns() -> list[bars.ProgressColumn]:
    return [
        bars.BarColumn(bar_width=20),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    ]


def _counts(running: int, rejected: int, failed: int) -> str:
    return f"{running} running, {rejected} rejected, {failed} failed"


def _literal(text: str) -> str:
    """The text on one line, with a space for every character that would move the cursor or colour the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _text_line(outcome: Outcome) -> Text | None:
    if outcome.status != COMPLETED:
        text = f"{outcome.status}: {outcome.reason or 'no reason given'}{_estimate(outcome)}"
    elif outcome.text is not None:
        text = outcome.text
    else:
        return None
    return Text.assemble((_literal(outcome.id), "bold"), "  ", _literal(text))


def _estimate(outcome: Outcome) -> str:
    """What a rejection was decided by."""
    if outcome.estimate is None:
        return ""
    limit = "" if outcome.limit is None else f", at most {outcome.limit:.4g}"
    return f" ({outcome.estimate:.4g}{limit})"


def _table(title: str, names: Sequence[str], numeric: Sequence[str] = (), show_header: bool = True) -> Table:
    # No borders: nine columns then fit 80 characters. What does not fit goes on below: a cut number misleads.
    columns = [Column(name, justify="right" if name in numeric else "left", overflow="fold") for name in names]
    return Table(*columns, title=f"\n{title}", title_justify="left", box=None, pad_edge=False, show_header=show_header)


def _request_table(outcomes: list[Outcome], left_out: int) -> Table:
    names = ("id", "status", "prompt", "reused", "output", "TTFT s", "TBT s", "prefill", "decoding")
    table = _table("Requests", names, numeric=names[2:7])
    for place, outcome in enumerate(outcomes):
        if left_out and place == SHOWN_AT_END:
            table.add_row("...")
        counts = (outcome.prompt_tokens, outcome.reused_tokens, outcome.output_tokens)
        table.add_row(
            Text(_literal(outcome.id)),
            Text(outcome.status, STYLES.get(outcome.status, "")),
            *[Text("-" if count is None else str(count)) for count in counts],
            Text(_number(outcome.ttft_s, 3)),
            Text(_number(outcome.tbt_mean_s, 3)),
            Text(outcome.prefill_instance or "-"),
            Text(outcome.decoding_instance or "-"),
        )
    return table


def _summary_table(summary: dict) -> Table:
    requests, tokens, slo = summary["requests"], summary["tokens"], summary["slo"]
    table = _table("Summary", ("", ""), show_header=False)
    statuses = ", ".join(f"{requests[status]} {status}" for status in STYLES)
    table.add_row("requests", Text(f"{requests['total']} in {_number(summary['duration_s'], 1)} s: {statuses}"))
    for status, reasons in summary["reasons"].items():
        for reason, count in reasons.items():
            table.add_row(Text(status), Text(_literal(f"{count} x {reason}")))
    table.add_row("tokens", Text(f"{tokens['prompt']} prompt, {tokens['output']} output"))
    table.add_row("reuse", Text(f"{tokens['reused']} tokens, {_percent(summary['reuse_share'])} of the prompts"))
    output, total = (_number(summary[key], 1) for key in ("output_tokens_per_s", "total_tokens_per_s"))
    table.add_row("tokens/s", Text(f"{output} output, {total} with the prompts"))
    goodput, attainment = _number(summary["goodput_requests_per_s"], 2), _percent(summary["attainment"])
    table.add_row("goodput", Text(f"{goodput} requests/s, {attainment} of requests within the SLO"))
    if engine := summary.get("engine"):
        compiled, seconds = sum(engine["compiled"].values()), max(engine["warm_up_s"].values())
        table.add_row("engine", Text(f"{engine['dtype']}; {compiled} shapes warmed up in {_number(seconds, 1)} s"))
    if mfu := summary.get("prefill_mfu"):
        table.add_row("MFU", Text(_mfu(mfu)))
    if roles := summary.get("roles"):
        there, back = roles["to_decoding"], roles["to_prefill"]
        table.add_row("roles", Text(f"{there} x a prefill instance began to decode, {back} x one went back"))
    for fault, count in summary.get("faults", {}).items():
        table.add_row(Text("fault", "red"), Text(_literal(f"{count} x {fault}")))
    table.add_row("SLO", Text(f"TTFT {_limit(slo['ttft_s'])}, TBT {_limit(slo['tbt_s'])}"))
    return table


def _mfu(mfu: dict) -> str:
    peak = sum(mfu["peak_flops"].values()) / 1e12
    text = f"{_percent(mfu['pool'])} of the prefill pool's {peak:.4g} TFLOPS"
    if mfu["floor_met"] is None:
        return text
    return f"{text}, {'keeps' if mfu['floor_met'] else 'BELOW'} the floor of {_percent(mfu['floor'])}"


def _latency_table(summary: dict) -> Table:
    names = ("seconds", "mean", "P50", "P90", "P99")
    table = _table("Latency over completed requests", names, numeric=names[1:])
    for name, key in (("TTFT", "ttft_s"), ("TBT", "tbt_mean_s"), ("TBT, longest 10 %", "tbt_top10_s")):
        table.add_row(name, *[Text(_number(summary[key][column], 3)) for column in ("mean", "p50", "p90", "p99")])
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _limit(seconds: float | None) -> str:
    return "without limit" if seconds is None else f"at most {seconds:g} s"
