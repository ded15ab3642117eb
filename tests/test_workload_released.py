"""Downloads of traces, from a server on this machine: whole, checked, or not there at all."""

import hashlib
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.released import RELEASED, Released, fetch_trace

CONTENT = b'{"timestamp": 0}\n' * 200_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
GIT_BLOB = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()


@contextmanager
def server(content=CONTENT, status=200, promised=None):
    """Serves content at every path; yields a base URL and the list of what was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) if promised is None else promised))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/data", asked
        finally:
            http.shutdown()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def fetch(base, folder, told=lambda done, total: None, **checksum):
    return fetch_trace(Released(f"{base}/some_trace.jsonl", "", **checksum), folder, told)


@pytest.mark.parametrize("checksum", [{"sha256": SHA256}, {"git_blob": GIT_BLOB}, {}])
def test_a_trace_is_brought_once(tmp_path, checksum):
    told = []
    with server() as (base, asked):
        for _ in range(2):
            path, digest = fetch(base, tmp_path / "new" / "traces", lambda *counts: told.append(counts), **checksum)
    assert path == tmp_path / "new" / "traces" / "some_trace.jsonl"
    assert path.read_bytes() == CONTENT and digest == SHA256
    assert asked == ["/data/some_trace.jsonl"]
    assert told[-1] == (len(CONTENT), len(CONTENT)) and len(told) > 1
    assert list(path.parent.iterdir()) == [path]


def test_a_download_is_told_before_it_begins_and_a_kept_copy_never(tmp_path):
    begun = []
    with server() as (base, asked):
        for _ in range(2):
            trace = Released(f"{base}/some_trace.jsonl", "", sha256=SHA256)
            fetch_trace(trace, tmp_path, lambda done, total: None, lambda: begun.append(len(asked)))
    assert begun == [0]


def test_a_damaged_copy_is_brought_again(tmp_path):
    (tmp_path / "some_trace.jsonl").write_bytes(CONTENT[:-1])
    with server() as (base, asked):
        path, _ = fetch(base, tmp_path, sha256=SHA256)
    assert path.read_bytes() == CONTENT and len(asked) == 1


@pytest.mark.parametrize("checksum", [{"sha256": "0" * 64}, {"git_blob": "0" * 40}])
def test_another_file_is_not_kept(tmp_path, checksum):
    (tmp_path / "some_trace.jsonl").write_bytes(b"what was there")
    with server() as (base, _), pytest.raises(UsageError, match="some_trace.jsonl: .* not 000"):
        fetch(base, tmp_path, **checksum)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"what was there"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"status": 404}, "Not Found"),
        ({"content": CONTENT[:100_000], "promised": len(CONTENT)}, f"100000 of {len(CONTENT)} bytes"),
    ],
)
def test_a_failed_download_leaves_nothing(tmp_path, answer, told):
    with server(**answer) as (base, _), pytest.raises(UsageError) as raised:
        fetch(base, tmp_path)
    assert told in str(raised.value) and "check the network" in str(raised.value) and "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_told(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        base = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"^{base}/some_trace.jsonl: cannot be downloaded .*refused"):
            fetch(base, tmp_path)


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with server() as (base, _), pytest.raises(UsageError, match="cannot be kept .*choose another --dir"):
        fetch(base, tmp_path / "file")


def test_what_is_released():
    names = [trace.file_name for trace in RELEASED.values()]
    assert len(set(names)) == len(names)
    for trace in RELEASED.values():
        assert trace.url.startswith("https://") and trace.file_name.endswith((".jsonl", ".csv"))


@pytest.mark.traces
@pytest.mark.parametrize("name", [name for name, trace in RELEASED.items() if trace.sha256])
def test_the_checksums_are_those_of_the_files_at_hand(traces, name):
    if not (traces / RELEASED[name].file_name).is_file():
        pytest.skip(f"no {RELEASED[name].file_name} there")
    found = hashlib.sha256((traces / RELEASED[name].file_name).read_bytes()).hexdigest()
    assert found == RELEASED[name].sha256
