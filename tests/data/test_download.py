"""Downloads, against a real server on this machine: what arrives, what breaks, and what is left behind."""

import hashlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from wardround.data import download
from wardround.data.download import ADDRESS, MD5, SIZES, fetch, file_name
from wardround.data.medmnist import OFFICIAL
from wardround.errors import BadInput

CONTENT = bytes(range(256)) * 6000  # more than one chunk


@dataclass
class Server:
    """A stand-in for Zenodo: what it answers, and what it was asked."""

    port: int = 0
    status: int = 200
    body: bytes = CONTENT
    announced: int | None = len(CONTENT)
    asked: list[str] = field(default_factory=list)

    def open(self, url: str, timeout: float) -> Any:
        """As `urlopen`, with Zenodo's address led to this server."""
        assert url.startswith(ADDRESS)
        assert timeout == download.TIMEOUT
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return direct.open(url.replace(ADDRESS, f"http://127.0.0.1:{self.port}"), timeout=5)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            state.asked.append(self.path)
            self.send_response(state.status)
            if state.announced is not None:
                self.send_header("Content-Length", str(state.announced))
            self.end_headers()
            self.wfile.write(state.body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing in the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield state
        http.shutdown()
        thread.join(timeout=5)


@pytest.fixture
def right_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the served bytes the official ones of BloodMNIST, at 28 and at 64 pixels."""
    found = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(MD5, "bloodmnist", (found, found, "", ""))


def refusal(folder: Path, server: Server, name: str = "bloodmnist", size: int = 28) -> str:
    with pytest.raises(BadInput) as caught:
        fetch(name, folder, size, opener=server.open)
    message = str(caught.value)
    assert "\n" not in message
    return message


def left_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.usefixtures("right_sum")
def test_a_file_arrives_once(tmp_path: Path, server: Server) -> None:
    seen: list[tuple[int, int]] = []
    folder = tmp_path / "new" / "data"
    path = fetch("Blood", folder, progress=lambda done, total: seen.append((done, total)), opener=server.open)
    assert path == folder / "bloodmnist.npz"
    assert path.read_bytes() == CONTENT
    assert left_in(folder) == ["bloodmnist.npz"]
    assert server.asked == ["/bloodmnist.npz?download=1"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert len(seen) > 1
    assert fetch("bloodmnist", folder, opener=server.open) == path
    assert len(server.asked) == 1


@pytest.mark.usefixtures("right_sum")
def test_another_size_is_another_file(tmp_path: Path, server: Server) -> None:
    assert fetch("blood", tmp_path, 64, opener=server.open).name == "bloodmnist_64.npz"
    assert server.asked == ["/bloodmnist_64.npz?download=1"]


@pytest.mark.usefixtures("right_sum")
def test_a_server_that_does_not_say_how_long(tmp_path: Path, server: Server) -> None:
    server.announced = None
    totals: list[int] = []
    fetch("blood", tmp_path, progress=lambda _, total: totals.append(total), opener=server.open)
    assert set(totals) == {0}


def test_a_wrong_sum_leaves_nothing(tmp_path: Path, server: Server) -> None:
    assert f"instead of {MD5['bloodmnist'][0]} and was removed" in refusal(tmp_path, server)
    assert left_in(tmp_path) == []


@pytest.mark.usefixtures("right_sum")
def test_a_transfer_cut_short_leaves_nothing(tmp_path: Path, server: Server) -> None:
    server.body = CONTENT[:1000]
    message = refusal(tmp_path, server)
    assert "broke" in message
    assert f"copy the file by hand into {tmp_path}" in message
    assert left_in(tmp_path) == []


def test_nobody_answers(tmp_path: Path, server: Server) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound but not listening: a connection is refused
        server.port = unheard.getsockname()[1]
        message = refusal(tmp_path, server)
    assert message.startswith("the network cannot be reached (")
    assert f"{ADDRESS}/bloodmnist.npz" in message
    assert f"copy the file by hand into {tmp_path}" in message
    assert left_in(tmp_path) == []


def test_the_server_refuses(tmp_path: Path, server: Server) -> None:
    server.status = 503
    assert "answered 503" in refusal(tmp_path, server)
    assert left_in(tmp_path) == []


def test_a_connection_that_breaks_while_reading(tmp_path: Path) -> None:
    class Broken:
        headers: dict[str, str] = {}  # noqa: RUF012

        def __enter__(self) -> "Broken":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def read(self, _: int) -> bytes:
            raise ConnectionResetError(104, "Connection reset by peer")

    with pytest.raises(BadInput, match="connection broke after 0 bytes"):
        fetch("blood", tmp_path, opener=lambda url, timeout: Broken())
    assert left_in(tmp_path) == []


def test_a_file_of_ones_own_is_not_overwritten(tmp_path: Path, server: Server) -> None:
    (tmp_path / "bloodmnist.npz").write_bytes(b"mine")
    assert "is not the official file" in refusal(tmp_path, server)
    assert (tmp_path / "bloodmnist.npz").read_bytes() == b"mine"
    assert server.asked == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot be written (Not a directory)" in refusal(tmp_path / "file" / "data", server)


@pytest.mark.usefixtures("right_sum")
def test_a_full_disk_leaves_nothing(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left on device" in refusal(tmp_path, server)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("bloodmnist", 32, "28, 64, 128, 224 pixels, not 32"),
        ("kidney", 28, "no set kidneymnist"),
        ("chest", 28, "several labels at once"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path: Path, server: Server, name: str, size: int, says: str) -> None:
    assert says in refusal(tmp_path, server, name, size)
    assert server.asked == []


def test_the_table_of_sums() -> None:
    assert set(MD5) == set(OFFICIAL)
    sums = [md5 for row in MD5.values() for md5 in row]
    assert len(set(sums)) == len(OFFICIAL) * len(SIZES)
    assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in sums)
    assert MD5["bloodmnist"][0] == "7053d0359d879ad8a5505303e11de1dc"
    assert file_name("bloodmnist") == "bloodmnist.npz"
