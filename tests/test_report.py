"""The terminal report: printed literally, cut to the width, on any terminal."""

import os
import pty
import subprocess
import sys

import pytest

from mooncake_jax import report
from mooncake_jax.metrics import outcome, summarise
from mooncake_jax.request import COMPLETED, FAILED, REJECTED, SLO, Request

PRINT_ONE = """
from mooncake_jax.metrics import outcome, summarise
from mooncake_jax.report import Progress, print_results
from mooncake_jax.request import COMPLETED, SLO, Request
rows = [outcome(Request("caf\\u00e9", 0.0, 3, 2), COMPLETED, token_times=[0.5], text="\\u96ea \\u2603 " + "x" * 300)]
with Progress(1) as progress:
    progress.update(completed=0, running=1, rejected=0, failed=0)
    progress.update(completed=1, running=0, rejected=0, failed=0)
print_results(rows, summarise(rows, SLO(), 1.0))
"""


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def ended(name="r", status=COMPLETED, text=None, **options):
    return outcome(Request(name, 0.0, 12, 5), status, text=text, **options)


def printed(capsys, *rows):
    report.print_results(rows, summarise(rows, SLO(), 2.0))
    return capsys.readouterr().out.splitlines()


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONUTF8", "FORCE_COLOR", "NO_COLOR")}
    return kept | {"COLUMNS": "80", "PYTHONUTF8": "0"} | changes


def test_texts_come_first_literal_and_on_one_line(capsys):
    lines = printed(
        capsys,
        ended("a", text="[bold]x[/bold] [/nothing]\nnext\x1b[31m :smile:"),
        ended("[red]b", REJECTED, reason="[i]too long"),
        ended("c", FAILED, text="half", reason="peer\nlost"),
        ended("d", text="y" * 200),
        ended("e"),
        ended("f", REJECTED, reason="predicted TTFT is above the SLO", estimate=31.23456, limit=30.0),
        ended("g", REJECTED, reason="busy", estimate=7),
    )
    assert lines[0] == "a  [bold]x[/bold] [/nothing] next [31m :smile:"
    assert lines[1] == "[red]b  rejected: [i]too long"
    assert lines[2] == "c  failed: peer lost"
    assert lines[3].startswith("d  yyyy") and len(lines[3]) == 80
    assert lines[4] == "f  rejected: predicted TTFT is above the SLO (31.23, at most 30)"
    assert lines[5] == "g  rejected: busy (7)"
    assert lines[6].strip() == "" and lines[7].strip() == "Requests"
    assert any(line.startswith("[red]b  rejected  ") for line in lines[7:])
    assert all(len(line) <= 80 for line in lines)


def test_table_shows_figures_and_dashes_for_unknown(capsys):
    full = ended("full", token_times=[0.25, 0.5], reused_tokens=8, prefill_instance="p1", decoding_instance="d0")
    lines = [line.split() for line in printed(capsys, full, ended("bare", FAILED))]
    assert ["full", "completed", "12", "8", "2", "0.250", "0.250", "p1", "d0"] in lines
    assert ["bare", "failed", "12", "-", "0", "-", "-", "-", "-"] in lines


@pytest.mark.parametrize(("count", "shown"), [(40, 40), (41, 40), (1000, 40)])
def test_long_tables_leave_out_the_middle(capsys, count, shown):
    lines = printed(capsys, *[ended(f"r{place}") for place in range(count)])
    ids = [line.split()[0] for line in lines if "completed  " in line]
    assert ids == [f"r{place}" for place in [*range(20), *range(count - shown + 20, count)]]
    told = [line for line in lines if "left out" in line]
    assert told == ([f"{count - 40} requests between the first and last 20 are left out above"] if count > 40 else [])


def test_summary(capsys):
    rows = [ended(token_times=[0.5, 0.75], reused_tokens=6), ended("x", REJECTED, reason="[b]empty")]
    text = "\n".join(line.rstrip() for line in printed(capsys, *rows))
    assert "requests  2 in 2.0 s: 1 completed, 1 rejected, 0 failed" in text
    assert "rejected  1 x [b]empty" in text
    assert "reuse     6 tokens, 50.0% of the prompts" in text
    assert "tokens/s  1.0 output, 7.0 with the prompts" in text
    assert "goodput   0.50 requests/s, 50.0% of requests within the SLO" in text
    assert ["TTFT", *["0.500"] * 4] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("floor", "met", "shown"), [(None, None, ""), (0.25, True, ", keeps the floor of 25.0%"),
                                (0.5, False, ", BELOW the floor of 50.0%")]
)  # fmt: skip
def test_the_pools_mfu_changed_roles_and_faults_are_shown(capsys, floor, met, shown):
    mfu = {"pool": 0.3, "peak_flops": {"prefill0": 1e12, "prefill1": 2.5e11}, "floor": floor, "floor_met": met}
    summary = summarise([], SLO(), 2.0) | {"prefill_mfu": mfu, "faults": {"policy x:Y raised [b]": 3}}
    summary["roles"] = {"to_decoding": 2, "to_prefill": 1}
    report.print_results([], summary)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert f"MFU       30.0% of the prefill pool's 1.25 TFLOPS{shown}" in lines
    assert "fault     3 x policy x:Y raised [b]" in lines
    assert "roles     2 x a prefill instance began to decode, 1 x one went back" in lines


def test_nothing_to_report(capsys):
    assert any("0 in 2.0 s" in line for line in printed(capsys))


@pytest.mark.parametrize("width", ["1", "10", "40"])
def test_narrow_terminals(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    assert printed(capsys, ended("request", text="some text", token_times=[1.0, 2.0]))


def test_plain_lines_at_most_every_five_seconds(capsys, monkeypatch):
    now = iter([0.0, 1.0, 4.9, 5.0, 9.9, 10.0])
    monkeypatch.setattr(report, "monotonic", lambda: next(now))
    with report.Progress(12) as progress:
        for completed in range(5):
            progress.update(completed=completed, running=2, rejected=1, failed=1)
    assert capsys.readouterr().out.splitlines() == [
        "4/12 done, 2 running, 1 rejected, 1 failed, 5 s, about 10 s left",
        "6/12 done, 2 running, 1 rejected, 1 failed, 10 s, about 10 s left",
    ]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_without_a_terminal(encoding):
    command = [sys.executable, "-c", PRINT_ONE]
    run = subprocess.run(command, capture_output=True, env=environment(PYTHONIOENCODING=encoding), timeout=60)
    assert run.returncode == 0, run.stderr.decode()
    first = run.stdout.decode(encoding).splitlines()[0]
    assert first.startswith({"ascii": "caf?  ? ? x", "latin-1": "café  ? ? x", "utf-8": "café  雪 ☃ x"}[encoding])


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_bar_on_a_terminal(encoding):
    output = on_terminal(environment(PYTHONIOENCODING=encoding, TERM="xterm"))
    assert "1/1" in output and "0 running, 0 rejected, 0 failed" in output
    assert "Summary" in output and "Traceback" not in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1, "the cursor is hidden, then shown again"


def on_terminal(env):
    """What PRINT_ONE writes to a real pseudo-terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", PRINT_ONE], stdout=theirs, stderr=theirs, env=env) as child:
        os.close(theirs)
        output = b""
        try:
            while piece := os.read(ours, 4096):
                output += piece
        except OSError:  # how Linux tells that the other end was closed
            pass
        os.close(ours)
        assert child.wait(timeout=60) == 0, output.decode(errors="replace")
    return output.decode("utf-8")
