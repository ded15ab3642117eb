"""`mooncake-jax replay --ssd_dir`: what leaves DRAM is read back, what an earlier run has stored is found, and whatever
befalls the SSD, requests get the same tokens.
"""

import shutil
import subprocess

import pytest
from cluster_run import TINY, finish, prompt, replay, replayed_differences, start, wait_for_message, write_prompts
from ssd_blocks import fill, tmpfs

from mooncake_jax.cache.ssd_folder import FolderLock, model_folders
from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.request import COMPLETED

FLAGS = [TINY, "--prefill=1", "--prefill_chunk=64"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return write_prompts(path, [prompt("a", 300, seed=1), prompt("b", 200, seed=2, arrival_s=1.0)])


@pytest.fixture(scope="module")
def first(prompts, tmp_path_factory):
    """A run that fills an empty SSD tier."""
    folder = tmp_path_factory.mktemp("first")
    run = replay(folder / "out", *FLAGS, f"--prompts={prompts}", f"--ssd_dir={folder / 'ssd'}")
    run.ssd = folder / "ssd"
    return run


def tokens(run):
    assert run.code == 0, run.stderr
    assert all(row["status"] == COMPLETED for row in run.rows().values())
    return {name: row["token_ids"] for name, row in run.rows().items()}


def reused(run):
    return {name: row["reused_tokens"] for name, row in run.rows().items()}


def again(first, prompts, tmp_path, *flags):
    """Another run on a copy of what the first has stored."""
    shutil.copytree(first.ssd, tmp_path / "ssd")
    return replay(tmp_path / "out", *FLAGS, f"--prompts={prompts}", f"--ssd_dir={tmp_path / 'ssd'}", *flags)


def slots(ssd):
    """The files of blocks of the only node and model there."""
    [model] = model_folders(ssd / "prefill0")
    return sorted(path for path in model.iterdir() if path.name.startswith("c."))


def test_what_landed_is_on_the_ssd_when_the_run_ends(first):
    assert reused(first) == {"a": 0, "b": 0}
    assert len(slots(first.ssd)) == 300 // 16 + 200 // 16
    assert first.summary()["pool"]["blocks"]["prefill0"]["dram"] == 18 + 12


def test_an_earlier_runs_blocks_are_found_and_give_the_same_tokens(first, prompts, tmp_path):
    later = again(first, prompts, tmp_path)
    assert tokens(later) == tokens(first)
    assert reused(later) == {"a": 288, "b": 192}
    assert later.summary()["pool"]["changes"] == {"dram": {"promoted": 30}, "ssd": {"restored": 30}}
    assert replayed_differences(later, ActorSettings.from_json(later.summary()["settings"]).actors()) == []


def test_what_leaves_dram_is_promoted_by_its_next_use(prompts, tmp_path):
    """DRAM holds 126 blocks, of which c takes 125."""
    rows = [prompt("c", 2000, seed=3, arrival_s=2.0), prompt("a-again", 300, seed=1, arrival_s=4.0)]
    path = write_prompts(tmp_path / "more.jsonl", rows)
    both = write_prompts(tmp_path / "all.jsonl", [])
    both.write_text(prompts.read_text() + path.read_text())
    run = replay(tmp_path / "out", *FLAGS, f"--prompts={both}", f"--ssd_dir={tmp_path / 'ssd'}", "--dram_mib=1")
    assert run.summary()["settings"]["slots"]["prefill0"] < 130
    assert reused(run)["a-again"] == 288
    assert tokens(run)["a-again"] == tokens(run)["a"]
    changes = run.summary()["pool"]["changes"]["dram"]
    assert changes["demoted"] > 0 and changes["promoted"] > 0
    assert replayed_differences(run, ActorSettings.from_json(run.summary()["settings"]).actors()) == []


def test_the_ssd_takes_no_more_than_it_may(tmp_path):
    path = write_prompts(tmp_path / "more.jsonl", [prompt(str(i), 500, seed=i, arrival_s=i / 2) for i in range(6)])
    run = replay(tmp_path / "out", *FLAGS, f"--prompts={path}", f"--ssd_dir={tmp_path / 'ssd'}", "--ssd_mib=1")
    assert run.summary()["pool"]["changes"]["ssd"]["evicted"] > 0
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "ssd").rglob("*"))
    assert 2**19 < taken <= 2**20
    assert "SSD tier" not in run.stderr


@pytest.mark.slow
def test_stages_keep_their_own_layers_and_find_them_again(prompts, first, tmp_path):
    flags = [TINY, "--prefill=1x2", "--prefill_chunk=64", f"--prompts={prompts}", f"--ssd_dir={tmp_path / 'ssd'}"]
    replay(tmp_path / "out1", *flags)
    for path in list((tmp_path / "ssd" / "prefill0.1").rglob("c.*"))[:1]:
        path.unlink()  # the other stage's part of this block is useless now
    later = replay(tmp_path / "out2", *flags)
    assert tokens(later) == tokens(first)
    assert later.summary()["pool"]["changes"]["ssd"]["restored"] == 29
    assert sum(reused(later).values()) < 288 + 192
    kept = [len(list((tmp_path / "ssd" / node).rglob("c.*"))) for node in ("prefill0", "prefill0.1")]
    assert kept == [30, 30]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-500] ^= 16  # in the last layer's values
    path.write_bytes(content)


FAULTS = [
    lambda path: path.write_bytes(path.read_bytes()[:-100]),  # truncated
    lambda path: path.write_bytes(b""),
    lambda path: path.unlink(),
]


def test_damaged_blocks_are_computed_again_and_the_others_are_reused(first, prompts, tmp_path):
    shutil.copytree(first.ssd, tmp_path / "ssd")
    for fault, path in zip(FAULTS, slots(tmp_path / "ssd")[::10], strict=True):
        fault(path)
    later = replay(tmp_path / "out", *FLAGS, f"--prompts={prompts}", f"--ssd_dir={tmp_path / 'ssd'}")
    assert tokens(later) == tokens(first)
    assert sum(reused(later).values()) < 288 + 192
    changes = later.summary()["pool"]["changes"]["ssd"]
    assert changes["restored"] == 27
    final = replay(tmp_path / "final", *FLAGS, f"--prompts={prompts}", f"--ssd_dir={tmp_path / 'ssd'}")
    assert tokens(final) == tokens(first)
    assert reused(final) == {"a": 288, "b": 192}, "what was computed again was stored again"


def test_a_flipped_bit_is_told_and_counted(first, prompts, tmp_path):
    shutil.copytree(first.ssd, tmp_path / "ssd")
    for path in slots(tmp_path / "ssd"):
        flip(path)
    later = replay(tmp_path / "out", *FLAGS, f"--prompts={prompts}", f"--ssd_dir={tmp_path / 'ssd'}")
    assert tokens(later) == tokens(first)
    assert later.summary()["pool"]["changes"]["ssd"]["unreadable"] == 30
    assert "prefill0: SSD tier: damaged" in later.stderr and "does not match its checksum" in later.stderr


def test_another_models_blocks_are_not_found(first, prompts, tmp_path):
    later = again(first, prompts, tmp_path, "--block_size=32")
    assert tokens(later) == tokens(first)
    assert reused(later) == {"a": 0, "b": 0}
    assert len(list(model_folders(tmp_path / "ssd" / "prefill0"))) == 2


@pytest.mark.slow
def test_a_folder_that_vanishes_costs_only_what_it_held(tmp_path):
    rows = [prompt("a", 300, seed=1), prompt("b", 300, seed=2, arrival_s=4.0), prompt("a2", 300, seed=1, arrival_s=5.0)]
    path = write_prompts(tmp_path / "prompts.jsonl", rows)
    process = start(tmp_path / "out", *FLAGS, f"--prompts={path}", f"--ssd_dir={tmp_path / 'ssd'}")
    wait_for_message(process, tmp_path / "out", "BlocksWritten")
    shutil.rmtree(tmp_path / "ssd")
    run = finish(process, tmp_path / "out")
    assert tokens(run)["a"] == tokens(run)["a2"]
    assert reused(run)["a2"] == 288
    assert "prefill0: SSD tier: failed" in run.stderr and "is gone" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_folders_that_cannot_be_used_end_with_one_line_and_code_2(prompts, tmp_path):
    (tmp_path / "file").write_text("")
    held = FolderLock(tmp_path / "held" / "prefill0")
    cases = [
        (["--ssd_mib=5"], "--ssd_mib=5 is for the SSD tier: give --ssd_dir=FOLDER too"),
        ([f"--ssd_dir={tmp_path / 'file'}"], "name another folder for the SSD tier"),
        ([f"--ssd_dir={tmp_path / 'held'}"], "in use by process"),
        (
            [f"--ssd_dir={tmp_path / 'small'}", "--ssd_mib=1", "--block_size=4096", "--max_batch=1"],
            "allow the SSD tier more",
        ),
    ]
    for flags, complaint in cases:
        run = replay(tmp_path / "out", *FLAGS, f"--prompts={prompts}", *flags)
        assert run.code == 2, run.stderr
        assert complaint in run.stderr
        assert len(run.stderr.splitlines()) == 1
        assert ("starting" in run.stdout) == (complaint == "allow the SSD tier more"), "found before any rank starts"
    held.close()


@pytest.mark.slow
def test_a_disk_that_others_fill_keeps_what_it_has_and_all_requests_are_served(tmp_path):
    rows = [prompt("a", 300, seed=1), prompt("b", 300, seed=2, arrival_s=4.0), prompt("a2", 300, seed=1, arrival_s=5.0)]
    path = write_prompts(tmp_path / "prompts.jsonl", rows)
    with tmpfs(tmp_path / "ssd", "size=2m") as folder:
        process = start(tmp_path / "out", *FLAGS, f"--prompts={path}", f"--ssd_dir={folder}")
        wait_for_message(process, tmp_path / "out", "BlocksWritten")
        fill(folder)
        run = finish(process, tmp_path / "out")
        later = replay(tmp_path / "later", *FLAGS, f"--prompts={path}", f"--ssd_dir={folder}")
    assert tokens(run) == tokens(later)
    assert run.summary()["pool"]["unwritten"] > 0
    assert "prefill0: SSD tier: failed" in run.stderr and "No space left" in run.stderr
    assert reused(later)["a"] > 200, "older blocks stay readable, as many as leave room for writing"


def test_a_disk_that_is_read_only_serves_what_it_has(first, tmp_path):
    rows = [prompt("a", 300, seed=1), prompt("new", 300, seed=7, arrival_s=1.0)]
    path = write_prompts(tmp_path / "prompts.jsonl", rows)
    with tmpfs(tmp_path / "disk", "size=4m") as folder:
        shutil.copytree(first.ssd, folder / "ssd")
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        run = replay(tmp_path / "out", *FLAGS, f"--prompts={path}", f"--ssd_dir={folder / 'ssd'}")
    assert tokens(run)["a"] == tokens(first)["a"]
    assert reused(run) == {"a": 288, "new": 0}
    assert run.summary()["pool"]["unwritten"] > 0
    assert "prefill0: SSD tier: failed" in run.stderr and "Read-only file system" in run.stderr
