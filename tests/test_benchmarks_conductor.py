"""benchmarks/conductor.py: its rows on a small trace, and what it refuses. Never how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "conductor.py"


def run(*arguments):
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture
def trace(tmp_path):
    """Twenty conversations of three turns: each turn has the blocks of the one before, and two more."""
    lines = [
        {
            "timestamp": 1000 * turn + 10 * talk,
            "input_length": 512 * (2 * turn + 2) + 100,
            "output_length": 50,
            "hash_ids": [0, *range(1000 * talk + 1, 1000 * talk + 2 * turn + 3)],
        }
        for turn in range(3)
        for talk in range(20)
    ]
    lines[0]["source"] = "SURROGATE of a trace"
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_number_of_instances_has_its_rows(trace, tmp_path):
    file = tmp_path / "rows.json"
    code, (source, heads, *lines), errors = run(f"--trace={trace}", "--instances=2,16", f"--json={file}")
    assert code == 0, errors
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert len(rows) == len(lines) == 18 and source == f"{trace}: SURROGATE of a trace"
    assert heads.split()[0] == "figure"
    assert rows["16 + 16 instances: decision, median"]["target"] == "<= 40"
    assert rows["2 + 2 instances: decision, median"]["target"] is None
    for number in (2, 16):
        name = f"{number} + {number} instances"
        assert 0 < rows[f"{name}: of it the match, median"]["value"] < rows[f"{name}: decision, median"]["value"]
        # Of block 0 and 20 x 6 more, those that have landed by the last arrival; copies count too.
        assert 41 <= rows[f"{name}: blocks in the pool at the end"]["value"] <= 300
        assert 0 < rows[f"{name}: of it the time limit, median"]["value"] < rows[f"{name}: decision, median"]["value"]
        assert rows[f"{name}: requests rejected"]["value"] == 0
    assert rows["16 + 16 instances, 4 x load: decision, median"]["target"] == "<= 40"
    assert 0 <= rows["2 + 2 instances, 4 x load: requests rejected"]["value"] <= 100


def test_requests_that_come_too_fast_are_rejected(tmp_path):
    """Ten prompts of 100,000 tokens at once, 19 s of prefill each: 30 s are enough for one."""
    file, trace = tmp_path / "rows.json", tmp_path / "trace.jsonl"
    ids = [list(range(196 * number, 196 * (number + 1))) for number in range(10)]
    lines = [{"timestamp": 1, "input_length": 100_000, "output_length": 5, "hash_ids": own} for own in ids]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, errors = run(f"--trace={trace}", "--instances=1", f"--json={file}")
    assert code == 0, errors
    rejected = [row["value"] for row in json.loads(file.read_text()) if "rejected" in row["name"]]
    assert rejected == [90, 90]


def test_only_the_first_requests(trace, tmp_path):
    file = tmp_path / "rows.json"
    code, _, _ = run(f"--trace={trace}", "--instances=1", "--requests=5", f"--json={file}")
    [held] = [row["value"] for row in json.loads(file.read_text()) if "blocks" in row["unit"]]
    assert code == 0 and 2 <= held <= 11, "of blocks 0 and 5 more, those that have landed before the last arrival"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--trace is missing: name a Mooncake trace"),
        (("--trace=absent.jsonl",), "absent.jsonl: cannot be read"),
        (("--instances=16,x",), "--instances=16,x: name numbers of at least 1"),
        (("--instances=0",), "--instances=0: name numbers"),
    ],
)
def test_bad_flags_end_with_one_line(arguments, told):
    code, lines, errors = run(*arguments)
    assert (code, lines, errors.count("\n")) == (2, [], 1)
    assert errors.startswith("benchmarks/conductor.py: ") and told in errors
