"""The released traces by name: where they lie, whose they are, and how a copy is known to be whole.

A file appears under its name only when it is complete and checked.
"""

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from mooncake_jax.errors import UsageError

Progress = Callable[[int, int], None]

_PIECE = 1 << 20  # bytes
_SILENCE_S = 60.0  # after so long without a byte a download has failed
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release"
_AZURE_2023 = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data"
_AZURE_2024 = "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace"


@dataclass(frozen=True)
class Released:
    """A file that is published. sha256 of it, or git's id of it (a SHA-1), or neither where none is known."""

    url: str
    about: str
    sha256: str | None = None
    git_blob: str | None = None

    @property
    def file_name(self) -> str:
        return self.url.rpartition("/")[2]


RELEASED = {
    "conversation": Released(
        f"{_MOONCAKE}/traces/conversation_trace.jsonl",
        "Mooncake, FAST25: an hour of online chat; Apache-2.0",
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    "synthetic": Released(
        f"{_MOONCAKE}/traces/synthetic_trace.jsonl",
        "Mooncake, FAST25: ShareGPT, L-Eval and LooGLE mixed; Apache-2.0",
        sha256="bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    "toolagent": Released(
        f"{_MOONCAKE}/traces/toolagent_trace.jsonl",
        "Mooncake, FAST25: tools and agents; Apache-2.0",
        git_blob="b765599d1e0828b37f68d481563c385d3c11de54",
    ),
    "mooncake": Released(
        f"{_MOONCAKE}/arxiv-trace/mooncake_trace.jsonl",
        "Mooncake, the report's own trace (arXiv 2407.00079); Apache-2.0",
        git_blob="d68d1c6ce27b35a168edc235d36d0202d233f0f2",
    ),
    "azure-2023-code": Released(
        f"{_AZURE_2023}/AzureLLMInferenceTrace_code.csv",
        "Azure Public Dataset 2023: code; CC-BY 4.0",
        sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    "azure-2023-conv": Released(
        f"{_AZURE_2023}/AzureLLMInferenceTrace_conv.csv",
        "Azure Public Dataset 2023: conversation; CC-BY 4.0",
        sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    "azure-2024-code": Released(
        f"{_AZURE_2024}/AzureLLMInferenceTrace_code_1week.csv",
        "Azure Public Dataset 2024: code, a week; CC-BY",
    ),
    "azure-2024-conv": Released(
        f"{_AZURE_2024}/AzureLLMInferenceTrace_conv_1week.csv",
        "Azure Public Dataset 2024: conversation, a week; CC-BY",
    ),
}


def fetch_trace(
    trace: Released, folder: Path, progress: Progress, begun: Callable[[], None] = lambda: None
) -> tuple[Path, str]:
    """Brings a trace into the folder, which is made; returns its path and SHA-256. A copy that is there is kept if it
    is whole, or if nothing is known to check it by. progress is told (bytes so far, bytes in all) time and again; begun
    is called before a download, so never where the copy is kept.

    Raises UsageError for a download that failed, for a file that is not the published one, and for a folder that cannot
    be written to.
    """
    path = folder / trace.file_name
    try:
        if path.is_file() and _fault(trace, path) is None:
            return path, _sha256(path)
        folder.mkdir(parents=True, exist_ok=True)
        begun()
        # Inside the folder, so that the last move stays on one file system and is atomic.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as inside:
            got = Path(inside) / trace.file_name
            with got.open("wb") as file:
                for piece in _pieces(trace.url, progress):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if fault := _fault(trace, got):
                raise UsageError(f"{trace.url}: {fault}; the published file has changed or was cut: see there")
            os.replace(got, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be kept ({error.strerror or error}); choose another --dir") from None
    return path, _sha256(path)


def _pieces(url: str, progress: Progress) -> Iterator[bytes]:
    """What is downloaded. Raises UsageError where the network fails."""
    done = 0
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as answer:
            length = answer.length or 0  # as promised; 0 where nothing was
            while piece := answer.read(_PIECE):
                done += len(piece)
                progress(done, max(length, done))
                yield piece
    except (OSError, HTTPException) as error:
        raise _failed(url, str(getattr(error, "reason", error)) or type(error).__name__) from None
    if done < length:
        raise _failed(url, f"{done} of {length} bytes came")


def _failed(url: str, reason: str) -> UsageError:
    remedy = "check the network and https_proxy and run trace get again, or bring the file from another machine"
    return UsageError(f"{url}: cannot be downloaded ({reason}); {remedy}")


def _fault(trace: Released, path: Path) -> str | None:
    """What shows that this is not the published file."""
    if trace.sha256 is not None and (found := _sha256(path)) != trace.sha256:
        return f"SHA-256 is {found}, not {trace.sha256}"
    if trace.git_blob is not None and (found := _git_blob(path)) != trace.git_blob:
        return f"git's id of it is {found}, not {trace.git_blob}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_blob(path: Path) -> str:
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
