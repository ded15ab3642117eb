"""`mooncake-jax pool`, as a user calls it."""

import dataclasses
import hashlib
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mooncake_jax.cache.ssd import SSDStore
from mooncake_jax.cache.ssd_format import StoredModel, slot_index
from mooncake_jax.cache.store import BlockLayout
from mooncake_jax.commands import pool, progress
from mooncake_jax.errors import UsageError

LAYOUT = BlockLayout(layers=3, tokens=4, kv_heads=2, head_dim=32, dtype="bfloat16")
OURS, THEIRS = b"ours" * 8, b"theirs" * 6


def key(number):
    return hashlib.sha256(b"%d" % number).digest()


def model_folder(node, fingerprint=OURS):
    return node / StoredModel(fingerprint, LAYOUT).name


def file_of(node, number, fingerprint=OURS):
    return model_folder(node, fingerprint) / f"c.{slot_index(key(number))}.0.0"


def fill(node, numbers, fingerprint=OURS):
    with closing(SSDStore(node, LAYOUT, fingerprint, 1 << 24)) as store:
        for number in numbers:
            block = np.full(LAYOUT.shape, number, np.uint16)
            store.put(key(number), block, parent=key(number - 1) if number else None).result()


@pytest.fixture
def ssd_dir(tmp_path):
    """Two nodes; the first has blocks of two models."""
    fill(tmp_path / "prefill0", range(3))
    fill(tmp_path / "prefill0", range(2), THEIRS)
    fill(tmp_path / "prefill1", range(5, 6))
    return tmp_path


def run(*arguments):
    pool.FLAGS.unparse_flags()
    for name in ("ssd_dir", "damaged", "foreign_to", "all", "yes"):
        pool.FLAGS[name].unparse()
    return pool.main(list(arguments))


def flip(path, offset):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def files(folder):
    return {path for path in folder.rglob("*") if path.is_file() and path.name != "mooncake-ssd.lock"}


def test_ls_names_every_block(ssd_dir, capsys):
    flip(file_of(ssd_dir / "prefill0", 2), 20)
    assert run("ls", f"--ssd_dir={ssd_dir}") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    ours, theirs = (model_folder(ssd_dir, whose).name[:12] for whose in (OURS, THEIRS))
    found = {tuple(row[:3]) for row in rows if row[0] != "damaged"}
    hexes = [key(number).hex()[:12] for number in range(6)]
    assert found == {
        *((hexes[0], "-", whose) for whose in (ours, theirs)),
        *((hexes[1], hexes[0], whose) for whose in (ours, theirs)),
        (hexes[5], hexes[4], ours),
    }
    [damaged] = [row for row in rows if row[0] == "damaged"]
    assert damaged[-1] == str(file_of(ssd_dir / "prefill0", 2))
    assert {row[3] for row in rows if row[0] != "damaged"} == {str(StoredModel(OURS, LAYOUT).slot_bytes)}
    assert run("ls", f"--ssd_dir={ssd_dir / 'prefill1'}") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_stats_tell_models_layouts_and_ages(ssd_dir, capsys):
    assert run("stats", f"--ssd_dir={ssd_dir}") == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert "node model layout fingerprint blocks on disk oldest newest hits last hit" in flat
    rows = [line.split() for line in text.splitlines() if "prefill" in line]
    names = {(row[0], row[1]) for row in rows}
    ours, theirs = (model_folder(ssd_dir, whose).name[:12] for whose in (OURS, THEIRS))
    assert names == {("prefill0", ours), ("prefill0", theirs), ("prefill1", ours)}
    counts = {(row[0], row[1]): re.search(r" (\d+) 0\.\d\d MiB \d+ s \d+ s 0 -$", " ".join(row))[1] for row in rows}
    assert counts == {("prefill0", ours): "3", ("prefill0", theirs): "2", ("prefill1", ours): "1"}
    assert OURS.hex()[:12] in text and "bfloat16" in text


def test_hits_are_told(ssd_dir, capsys):
    """A read of one of three layers is a third of a hit."""
    before = time.time_ns()
    with closing(SSDStore(ssd_dir / "prefill0", LAYOUT, OURS, 1 << 24)) as store:
        out = np.zeros(LAYOUT.shape, np.uint16)
        for number, layers in ((0, 3), (0, 3), (1, 1)):
            store.read(key(number), range(layers), out[:layers]).result()
    assert run("ls", f"--ssd_dir={ssd_dir / 'prefill0'}") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    ours = model_folder(ssd_dir).name[:12]
    hits = {row[0]: row[6:8] for row in rows if row[2] == ours}
    hexes = [key(number).hex()[:12] for number in range(3)]
    assert [hits[name][0] for name in hexes] == ["2", "0.3333", "0"]
    assert hits[hexes[2]][1] == "-" and hits[hexes[0]][1].isdecimal()
    assert run("stats", f"--ssd_dir={ssd_dir / 'prefill0'}") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    [line] = [line for line in lines if f" {ours} " in line]
    seconds = re.search(r" 3 0\.\d\d MiB \d+ s \d+ s 2\.333 (\d+) s$", line)[1]
    assert 0 <= int(seconds) <= (time.time_ns() - before) / 1e9 + 1


def test_verify_names_what_is_damaged(ssd_dir, capsys):
    assert run("verify", f"--ssd_dir={ssd_dir}") == 0
    assert capsys.readouterr().out == "6 blocks read, none damaged\n"
    node, row = ssd_dir / "prefill0", StoredModel(OURS, LAYOUT).row_bytes
    flip(file_of(node, 0), 2 * row - 1)
    flip(file_of(node, 1), 30)
    file_of(node, 1, THEIRS).write_bytes(b"")
    assert run("verify", f"--ssd_dir={ssd_dir}") == 1
    *named, last = capsys.readouterr().out.splitlines()
    assert last == "6 blocks read, 3 damaged"
    told = dict(line.split(": ", 1) for line in named)
    assert told[str(file_of(node, 0))] == "layer 1 does not match its checksum"
    assert told[str(file_of(node, 1))] == "its header does not match its checksum"
    assert told[str(file_of(node, 1, THEIRS))].startswith("its file has 0 bytes instead of")


def test_verify_names_a_folder_that_cannot_be_told(ssd_dir, capsys):
    metadata = model_folder(ssd_dir / "prefill1") / "zarr.json"
    metadata.write_text("{}")
    assert run("verify", f"--ssd_dir={ssd_dir}") == 1
    assert f"{metadata.parent}: cannot tell whose blocks these are" in capsys.readouterr().out
    assert run("stats", f"--ssd_dir={ssd_dir}") == 0
    assert "cannot be told" in " ".join(capsys.readouterr().out.split())


def test_purge_does_nothing_without_yes(ssd_dir, capsys):
    flip(file_of(ssd_dir / "prefill0", 1), 30)
    before = files(ssd_dir)
    ours = model_folder(ssd_dir).name
    for flag, told in (
        ("--damaged", "1 damaged blocks"),
        (f"--foreign_to={ours}", "1 models'"),
        ("--all", "3 models'"),
    ):
        assert run("purge", f"--ssd_dir={ssd_dir}", flag) == 0
        out = capsys.readouterr().out
        assert told in out and out.endswith("still there; add --yes to remove them\n")
        assert files(ssd_dir) == before


def test_purge_removes_what_it_says(ssd_dir, capsys):
    node = ssd_dir / "prefill0"
    flip(file_of(node, 1), 30)
    before = files(ssd_dir)
    assert run("purge", f"--ssd_dir={ssd_dir}", "--damaged", "--yes") == 0
    assert capsys.readouterr().out == f"{file_of(node, 1)}\n1 damaged blocks: removed\n"
    assert before - files(ssd_dir) == {file_of(node, 1)}
    assert run("purge", f"--ssd_dir={ssd_dir}", f"--foreign_to={model_folder(ssd_dir).name[:12]}", "--yes") == 0
    assert not model_folder(node, THEIRS).exists() and file_of(node, 0).exists()
    assert file_of(ssd_dir / "prefill1", 5).exists()
    (node / "notes.txt").write_text("mine")
    assert run("purge", f"--ssd_dir={ssd_dir}", "--all", "--yes") == 0
    assert files(ssd_dir) == {node / "notes.txt"}


def test_all_parts_of_a_kept_model_are_kept(ssd_dir, capsys):
    """Other stages have other layers of the same blocks; other block sizes are other blocks."""
    later, larger = ssd_dir / "prefill0.1", dataclasses.replace(LAYOUT, tokens=8)
    SSDStore(later, LAYOUT, OURS, 1 << 24, first_layer=3).close()
    SSDStore(ssd_dir / "prefill1", larger, OURS, 1 << 24).close()
    part, other = StoredModel(OURS, LAYOUT, 3), StoredModel(OURS, larger)
    assert run("stats", f"--ssd_dir={ssd_dir}") == 0
    assert "layers 3 to 5" in " ".join(capsys.readouterr().out.split())
    assert run("purge", f"--ssd_dir={ssd_dir}", f"--foreign_to={part.name}", "--yes") == 0
    assert (later / part.name).exists() and file_of(ssd_dir / "prefill0", 0).exists()
    assert not (ssd_dir / "prefill1" / other.name).exists()
    assert not model_folder(ssd_dir / "prefill0", THEIRS).exists()


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "say what to do, one of ls, stats, verify, purge"),
        (["eat"], "pool eat: say what to do"),
        (["ls", "ls"], "say what to do"),
        (["ls"], "--ssd_dir is missing"),
        (["ls", "--ssd_dir=no/such"], "--ssd_dir=no/such: No such file or directory; give"),
        (["ls", f"--ssd_dir={Path(__file__).parent / 'data'}"], "no SSD tier was ever there"),
        (["purge", "--ssd_dir=HERE"], "purge takes one of"),
        (["purge", "--ssd_dir=HERE", "--all", "--damaged"], "purge takes one of"),
        (["purge", "--ssd_dir=HERE", "--foreign_to=abc", "--yes"], "--foreign_to=abc: no such model"),
        (["purge", "--ssd_dir=HERE", "--foreign_to=", "--yes"], "--foreign_to=: no such model"),
    ],
)
def test_bad_input_is_told_in_one_line_and_harms_nothing(ssd_dir, arguments, complaint):
    before = files(ssd_dir)
    with pytest.raises(UsageError, match=complaint) as caught:
        run(*(argument.replace("HERE", str(ssd_dir)) for argument in arguments))
    assert "\n" not in str(caught.value)
    assert files(ssd_dir) == before


def test_purge_refuses_a_folder_in_use_and_the_rest_does_not_mind(ssd_dir):
    with closing(SSDStore(ssd_dir / "prefill1", LAYOUT, OURS, 1 << 24)):
        with pytest.raises(UsageError, match="prefill1: in use by process"):
            run("purge", f"--ssd_dir={ssd_dir}", "--all", "--yes")
        assert len(files(ssd_dir)) == 9
        for action in ("ls", "stats", "verify"):
            assert run(action, f"--ssd_dir={ssd_dir}") == 0
    assert run("purge", f"--ssd_dir={ssd_dir}", "--all", "--yes") == 0


def test_the_command_needs_no_jax():
    code = "import sys; from mooncake_jax.commands import pool; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_long_readings_tell_the_time_left(ssd_dir, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_INTERVAL_S", 0)
    assert run("verify", f"--ssd_dir={ssd_dir}") == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and lines[-1].startswith("100% read in 0 s, about 0 s left")
