"""`mooncake-jax models` and `mooncake-jax convert`, as a user calls them."""

import os
import signal
import subprocess
import sys
import time

import pytest
from absl import flags
from conftest import DATA

from mooncake_jax.commands import convert, models
from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.catalog import CATALOG
from mooncake_jax.model.sources import inspect_model

TINY = DATA / "tiny-llama2"
CONVERT = "import sys; from mooncake_jax.commands import convert; sys.exit(convert.main(sys.argv[1:]))"


def test_models_lists_each_with_its_sizes(tmp_path, capsys):
    assert models.main([f"--model_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {words[0]: words for words in map(str.split, lines) if words and words[0] in ARCHITECTURES}
    assert rows.keys() == ARCHITECTURES.keys()
    assert rows["llama2-70b"][1:-1] == "68,976,648,192 256.96 GiB 128.48 GiB 640 KiB 320 KiB 4,096".split()
    assert rows["smollm2-135m"][-3:] == ["can", "be", "fetched"]
    (tmp_path / CATALOG["smollm2-135m"].file_name).touch()
    models.main([f"--model_dir={tmp_path}"])
    assert "8,192  fetched" in capsys.readouterr().out


def test_models_and_its_input_checks_need_no_jax():
    code = (
        "import sys; from mooncake_jax.commands import convert, models; models.main([]); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_convert_makes_a_model(tmp_path, capsys):
    out = tmp_path / "tiny"
    assert convert.main([f"--model={TINY}", f"--out={out}", "--dtype=float32"]) == 0
    assert f"use it with --model={out}" in capsys.readouterr().out
    assert inspect_model(out) == inspect_model(TINY)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "--model is missing"),
        ([f"--model={TINY}"], "--out is missing"),
        (["--model=llama2-7b", "--out=x"], "has no weights that can be fetched"),
        (["--model=nothing", "--out=x"], "model 'nothing' is neither"),
        ([f"--model={TINY}", f"--out={TINY}"], "exists already"),
        (["stray"], "'stray' is no flag"),
    ],
)
def test_convert_refuses(arguments, complaint):
    convert.FLAGS.unparse_flags()
    for name in ("model", "out"):
        convert.FLAGS[name].unparse()
    with pytest.raises(UsageError, match=complaint) as caught:
        convert.main(arguments)
    assert "\n" not in str(caught.value)


def test_convert_refuses_other_dtypes():
    with pytest.raises(flags.Error, match="dtype"):
        convert.main(["--dtype=int4"])


def writing(out):
    """A conversion under way."""
    arguments = ["--model=dummy:smollm2-135m", f"--out={out}", "--dtype=float32"]
    process = subprocess.Popen([sys.executable, "-c", CONVERT, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(out.parent.glob(f".{out.name}-*/layer_00*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_a_conversion_that_is_killed_leaves_nothing_under_the_name(tmp_path):
    out = tmp_path / "models" / "big"
    process = writing(out)
    process.kill()
    process.communicate()
    assert not os.path.lexists(out)
    assert convert.main([f"--model={TINY}", f"--out={out}", "--dtype=float32"]) == 0
    assert inspect_model(out) == inspect_model(TINY)


def test_a_conversion_that_is_interrupted_leaves_nothing_at_all(tmp_path):
    process = writing(tmp_path / "models" / "big")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "mooncake-jax convert: interrupted; nothing was written\n"
    assert process.returncode == 130
    assert list((tmp_path / "models").iterdir()) == []
