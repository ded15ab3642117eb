"""benchmarks/simulator.py: its rows on a small trace, and what it refuses. Never how fast it is."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "simulator.py"


def run(*arguments):
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_each_scale_has_its_rows(tmp_path):
    trace, file = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    line = {"input_length": 1000, "output_length": 5}
    lines = [line | {"timestamp": 100 * place, "hash_ids": [0, place + 1]} for place in range(6)]
    lines[0]["source"] = "SURROGATE of a trace"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, printed, errors = run(f"--trace={trace}", "--repeats=1", f"--json={file}")
    assert code == 0, errors
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert printed[0] == f"{trace}: SURROGATE of a trace" and len(printed) == len(rows) + 2
    assert rows["8P+8D: CPU time"]["target"] == "<= 2" and rows["8P+8D: peak memory"]["target"] == "<= 250"
    assert rows["32P+32D: CPU time"]["reference"] == rows["8P+8D: CPU time"]["value"]
    assert {"8P+8D at 8x: CPU time", "8P+8D, half of the requests: CPU time"} <= rows.keys()


def test_a_trace_is_needed():
    code, _, errors = run()
    assert code == 2 and errors.startswith("benchmarks/simulator.py: --trace is missing")
