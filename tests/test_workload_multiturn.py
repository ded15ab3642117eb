"""The seeded multi-turn workload, its ideal reuse, and the script that writes it."""

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.multiturn import ideal_reuse, multi_turn
from mooncake_jax.workload.prompts import Prompt, read_prompts

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "multiturn.py"
SIZES = {"conversations": 3, "turns": 4, "system_tokens": 10, "turn_tokens": 5, "answer_tokens": 7}


def talks(**options):
    return multi_turn(**(SIZES | {"seed": 0, "vocab_size": 1000, "gap_s": 0.5} | options))


def prompts_of(*ids):
    return [Prompt(str(place), 0.0, prompt_ids=tuple(tokens)) for place, tokens in enumerate(ids)]


def test_turns_repeat_all_before_them_and_interleave():
    prompts = talks()
    assert [prompt.id for prompt in prompts[:5]] == ["c0t0", "c1t0", "c2t0", "c0t1", "c1t1"]
    assert [prompt.arrival for prompt in prompts] == [0.5 * place for place in range(12)]
    assert [len(prompt.prompt_ids) for prompt in prompts[::3]] == [15, 27, 39, 51]
    assert all(prompt.max_tokens == 7 and prompt.ignore_eos for prompt in prompts)
    assert len({prompt.prompt_ids[:10] for prompt in prompts}) == 1
    assert len({prompt.prompt_ids[10:15] for prompt in prompts}) == 3
    for earlier, later in zip(prompts, prompts[3:]):
        assert later.prompt_ids[: len(earlier.prompt_ids)] == earlier.prompt_ids


def test_the_seed_decides():
    assert talks() == talks()
    assert talks()[0].prompt_ids != talks(seed=1)[0].prompt_ids
    assert all(0 <= token < 3 for prompt in talks(vocab_size=3) for token in prompt.prompt_ids)


@pytest.mark.parametrize(
    "options",
    [
        *[{name: 0} for name in ("conversations", "turns", "turn_tokens", "answer_tokens", "vocab_size")],
        {"system_tokens": -1},
        {"seed": -1},
        {"gap_s": -0.1},
        {"gap_s": float("inf")},
    ],
)
def test_bad_flags_are_told(options):
    ((flag, _),) = options.items()
    with pytest.raises(UsageError, match=f"^--{flag}=.*: must be "):
        talks(**options)


def test_ideal_reuse_counts_full_blocks_of_equal_prefixes():
    prompts = prompts_of(
        [1, 2, 3, 4, 5, 6],  # nothing known
        [1, 2, 3, 4, 5, 6],  # the block (5, 6) is full with blocks of 2, but the last token must be computed
        [1, 2, 3, 4, 9],
        [3, 4, 5, 6],  # equal blocks after another prefix are other blocks
        [1, 2, 3],
        [1],
        [],
    )
    assert ideal_reuse(prompts, 2) == [0, 5, 4, 0, 2, 0, 0]
    assert ideal_reuse(prompts, 4) == [0, 4, 4, 0, 0, 0, 0]


def test_a_gap_in_the_prefix_ends_the_reuse():
    assert ideal_reuse(prompts_of([1, 2, 3, 4], [1, 9, 3, 4], [1, 9, 3, 4, 5]), 1) == [0, 1, 4]


def test_reuse_of_the_workload_to_the_token():
    first, later = 10 // 4 * 4, [length // 4 * 4 for length in (15, 27, 39)]
    assert ideal_reuse(talks(), 4) == [0, first, first] + [length for length in later for _ in range(3)]


def test_the_script_writes_what_replay_reads(tmp_path):
    out = tmp_path / "multiturn.jsonl"
    run = subprocess.run([sys.executable, SCRIPT, f"--out={out}"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    prompts = read_prompts(out, 1000.0)
    assert len(prompts) == 40 and prompts[-1].arrival == 39.0
    reused = ideal_reuse(prompts, 16)
    shares = [hit / len(prompt.prompt_ids) for hit, prompt in zip(reused, prompts)]
    assert sum(shares) / 40 > 0.5
    assert f"{sum(reused)} tokens" in run.stdout and f"mean over prompts {sum(shares) / 40:.1%}" in run.stdout


@pytest.mark.parametrize("flag", ["--turns=0", "--block_size=0", "--out=absent/folder/file"])
def test_the_script_tells_bad_flags_in_one_line(tmp_path, flag):
    command = [sys.executable, SCRIPT, "--out=out.jsonl", flag]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("multiturn.py: ") and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
