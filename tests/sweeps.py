"""A small trace and sweep files for the tests of `mooncake-jax sweep`."""

import json
import os
import re
import subprocess
import sys

REQUESTS = 40
COST = "--cost=fast25"


def write_trace(path, requests=REQUESTS):
    """Prompts of 16 blocks, four of which are those of one of four conversations, one arriving every 2 seconds."""
    lines = [
        {
            "timestamp": 2000 * place,
            "input_length": 16 * 512,
            "output_length": 20,
            "hash_ids": [
                *range(4 * (place % 4), 4 * (place % 4) + 4),
                *range(100 * (place + 1), 100 * (place + 1) + 12),
            ],
        }
        for place in range(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_sweep(folder, tables="", base=""):
    """One prefill and one decoding instance; tables: axes and what else it has."""
    trace = write_trace(folder / "trace.jsonl")
    text = (
        f'[base]\ntrace = "{trace}"\ncost = "fast25"\nprefill = 1\ndecode = 1\nadmission = "none"\n{base}\n{tables}\n'
    )
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def command(*arguments):
    return [sys.executable, "-m", "mooncake_jax", "sweep", *map(str, arguments)]


def sweep(*arguments):
    """Exit code, output, and errors without the lines of progress that a slow machine has."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, env=dict(os.environ))
    errors = [line for line in done.stderr.splitlines(keepends=True) if not re.match(r"\d+% done in ", line)]
    return done.returncode, done.stdout, "".join(errors)
