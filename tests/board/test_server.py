"""The board's server over a real connection: what it answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from board.samples import Study, finished, row
from wardround.board import server as module
from wardround.board.server import Board, Server, is_loopback
from wardround.cli import main
from wardround.errors import BadInput
from wardround.record.rundir import lock_directory
from wardround.report.patients import PAGE

HOSTILE = "<img src=x onerror=alert(1)>&\"'\u202e"


@contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[Server]:
    with Server(Board(folder), host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: Server, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "runs"
    finished(folder, "one", created="2026-11-01T10:00:00Z", report="the report of one")
    finished(folder, "deep/er/two", "fedavg", "local", created="2026-11-02T10:00:00Z")
    finished(folder, "no-report", report=None)
    (folder.parent / "secret.txt").write_text("secret")
    linked = finished(folder, "linked", report=None)
    (linked / "report.html").symlink_to(folder.parent / "secret.txt")
    (folder / "away").symlink_to(folder.parent)
    return folder


@pytest.fixture(scope="module")
def board(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


def test_it_listens_on_this_machine_only_and_on_a_free_port(board: Server) -> None:
    assert board.server_address[0] == "127.0.0.1"
    assert board.address == f"http://127.0.0.1:{board.server_port}/"
    assert board.is_loopback
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.3", "example.org", "")))  # noqa: S104


def test_the_list_names_every_run_the_latest_first(board: Server) -> None:
    status, headers, body = ask(board, "/")
    text = body.decode()
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert text.index('href="/run/deep/er/two"') < text.index('href="/run/one"')
    assert "4 runs: 4 finished" in text


def test_every_answer_is_closed_to_the_outside(board: Server) -> None:
    for path in ("/", "/run/one", "/report/one", "/compare?run=one", "/api/runs", "/static/board.js", "/nowhere"):
        _, headers, _ = ask(board, path)
        policy = dict(part.strip().partition(" ")[::2] for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert set(" ".join(policy.values()).split()) <= {"'none'", "'self'", "data:", "'unsafe-inline'"}
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Server"] == "wardround"


def test_a_report_is_served_as_it_is_and_shut_off(board: Server) -> None:
    status, headers, body = ask(board, "/report/one")
    assert (status, body) == (200, b"the report of one")
    policy = headers["Content-Security-Policy"].split("; ")
    assert "sandbox" in policy
    assert not any(part.startswith(("script-src", "connect-src")) for part in policy)
    assert "style-src 'unsafe-inline'" in policy


def test_head_is_get_without_a_body(board: Server) -> None:
    _, of_get, body = ask(board, "/run/one")
    status, of_head, nothing = ask(board, "/run/one", "HEAD")
    assert (status, nothing) == (200, b"")
    assert of_head["Content-Length"] == of_get["Content-Length"] == str(len(body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_it_can_only_be_read(board: Server, method: str) -> None:
    status, headers, body = ask(board, "/", method)
    assert (status, headers["Allow"], body) == (405, "GET, HEAD", b"the board can only be read\n")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "10.0.0.1", "[::1", "localhost.", "a b"]
)
def test_a_host_that_is_not_the_board_s_is_refused(board: Server, host: str) -> None:
    status, _, body = ask(board, "/", host=host)
    assert (status, body) == (421, b"this address is not the board's\n")


def test_the_names_of_this_machine_are_known(board: Server) -> None:
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", f"127.0.0.1:{board.server_port}", "[::1]:80"):
        assert ask(board, "/api/runs", host=host)[0] == 200


def test_a_board_for_others_knows_addresses_and_its_own_name(folder: Path) -> None:
    with serving(folder, "0.0.0.0") as server:  # noqa: S104
        assert not server.is_loopback
        for host in ("10.1.2.3:80", "[fe80::1]", socket.gethostname(), "localhost"):
            assert ask(server, "/api/runs", host=host)[0] == 200
        assert ask(server, "/", host="evil.example")[0] == 421


@pytest.mark.parametrize(
    "path",
    [
        "/report/../../secret.txt",
        "/report/..%2f..%2fsecret.txt",
        "/report/one/../../../secret.txt",
        "/report/%2e%2e/%2e%2e/secret.txt",
        "/report/away",
        "/report/away/runs/one",
        "/report/linked",
        "/report//etc/passwd",
        "/report/one%00",
        "/report/one/",
        "/report/no-report",
        "/report/",
        "/run/one/result.json",
        "/run/..",
        "/run/.",
        "/static/../server.py",
        "/static/",
        "/static",
        "/compare/one",
        "/one",
        "//one",
        "/api/run/nothing",
        "/api/run/",
        "/compare?run=..%2f..%2fsecret.txt",
        "/run/" + "a" * 5000,
        "http://[",
    ],
)
def test_nothing_but_runs_and_their_reports_is_served(board: Server, path: str) -> None:
    status, _, body = ask(board, path)
    assert status == 404
    assert b"secret" not in body.replace(b"secret.txt", b"")


def test_the_page_with_patients_images_is_never_served(tmp_path: Path) -> None:
    run = finished(tmp_path, "one", report="without")
    (run / PAGE).write_text("a face")
    with serving(tmp_path) as server:
        for path in (f"/run/one/{PAGE}", f"/report/one/{PAGE}", f"/one/{PAGE}", f"/static/{PAGE}"):
            assert ask(server, path)[0] == 404
        for path in ("/", "/run/one", "/report/one"):
            status, _, body = ask(server, path)
            assert status == 200
            assert PAGE.encode() not in body
            assert b"a face" not in body


def test_several_runs_are_compared_a_line_for_each_method(board: Server) -> None:
    status, _, body = ask(board, "/compare?run=one&run=deep/er/two&run=one&run=gone")
    text = body.decode()
    assert status == 200
    names = ("A · one: ", "B · deep/er/two: fedavg", "C · deep/er/two: local")
    assert [text.count(name) for name in names] == [2, 2, 2]
    assert "1 left out" in text
    assert "Local against global accuracy" in text
    assert ask(board, "/compare")[0] == 200


def test_every_column_of_a_comparison_is_defined(board: Server) -> None:
    page = ask(board, "/compare?run=one&run=deep/er/two")[2].decode()
    heads = re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', page)
    defined = ", ".join(re.findall(r"<dt>(.*?)</dt>", page)).split(", ")
    assert heads == defined
    assert heads[-1] == "time"


def test_runs_on_other_sites_are_told_apart(tmp_path: Path) -> None:
    finished(tmp_path, "a")
    finished(tmp_path, "b")
    finished(tmp_path, "c", data={"partition_hash": "other", "sites": []})
    with serving(tmp_path) as server:
        assert b"did not have the same images" not in ask(server, "/compare?run=a&run=b")[2]
        assert b"did not have the same images" in ask(server, "/compare?run=a&run=c")[2]


def test_no_more_methods_are_compared_than_can_be_told_apart(tmp_path: Path) -> None:
    methods = [f"m{i}" for i in range(20)]
    finished(tmp_path, "a", *methods)
    finished(tmp_path, "b", *methods)
    with serving(tmp_path) as server:
        assert b"1 left out" in ask(server, "/compare?run=a&run=b")[2]


def test_progress_is_told_as_it_comes(tmp_path: Path) -> None:
    study = Study(tmp_path / "live")
    with serving(tmp_path) as server, lock_directory(study.path):
        before = json.loads(ask(server, "/api/run/live")[2])
        assert before["state"] == "running"
        assert "0 of 4 rounds done" in before["html"]
        version = json.loads(ask(server, "/api/runs")[2])["version"]
        study.round(0, 0.5)
        study.append({"kind": "note", "text": HOSTILE})
        study.round(1, 0.625)
        study.append(row(2, 0.99))  # not certain yet
        html = json.loads(ask(server, "/api/run/live")[2])["html"]
        assert "2 of 4 rounds done" in html
        assert "<b>62.5%</b>" in html
        assert "99.0%" not in html
        assert "&lt;img src=x onerror=alert(1)&gt;&amp;&#34;&#39;\ufffd" in html
        assert "<img" not in html
        assert json.loads(ask(server, "/api/runs")[2])["version"] == version
    with serving(tmp_path) as server:
        assert json.loads(ask(server, "/api/run/live")[2])["state"] == "stopped"


def test_hostile_names_and_contents_are_only_text(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")
    path = finished(tmp_path, name, methods=[HOSTILE], headlines=[], settings={"data": {"source": HOSTILE}})
    odd = os.fsdecode(b"odd\xff name?#%2e")
    finished(tmp_path, odd)
    assert path.exists()
    with serving(tmp_path) as server:
        for address in ("/", f"/run/{quote(name)}", f"/compare?run={quote(name)}", "/nothing<script>"):
            text = ask(server, address if "<" not in address else "/nothing%3Cscript%3E")[2].decode()
            assert "<img" not in text
            assert "<script>" not in text
            assert "\u202e" not in text
        assert ask(server, f"/report/{quote(odd, errors='surrogateescape')}")[2] == b"<h1>a report</h1>"
        assert "odd\ufffd name?#%2e" in ask(server, "/")[2].decode()


def test_a_run_with_impossible_numbers_hides_no_other(tmp_path: Path) -> None:
    finished(tmp_path, "good")
    huge = 10**400
    totals = [{"method": "fedavg", "direction": "up", "bytes": 1e308}] * 3
    finished(tmp_path, "odd", seconds={"fedavg": huge}, ledger={"totals": totals}, created="0001-01-01T00:00:00+23:59")
    Study(tmp_path / "live").append({"kind": "round", "round": huge, "seconds": huge}, row(huge, huge))
    Study(tmp_path / "done").append(row(0, 1e15), row(1, 1e15))
    (tmp_path / "done/result.json").write_text('{"schema_version": 1, "methods": ["fedavg"]}')
    with serving(tmp_path) as server:
        assert "good" in ask(server, "/")[2].decode()
        for name in ("odd", "live", "done"):
            assert ask(server, f"/run/{name}")[0] == 200


def test_a_place_it_cannot_listen_on_is_told(board: Server, folder: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot listen on 127\.0\.0\.1, port .*; choose another --host or --port"):
        Server(Board(folder), "127.0.0.1", board.server_port)
    with pytest.raises(BadInput, match=r"cannot listen on 203\.0\.113\.9"):
        Server(Board(folder), "203.0.113.9", 0)


def test_the_command_prints_the_address_warns_and_ends_with_ctrl_c(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def stopped(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Server, "serve_forever", stopped)
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["board", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("http://127.0.0.1:")
    assert "warning" not in err
    assert opened == []
    assert main(["board", str(folder), "--host", "0.0.0.0", "--open"]) == 0  # noqa: S104
    out, err = capsys.readouterr()
    assert err.startswith("warning: whoever can reach 0.0.0.0 on port ")
    assert opened == [out.strip()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "error: there is no folder nowhere; give the folder that holds your runs\n"),
        ([".", "--port", "70000"], "error: Invalid value for '--port': 70000 is not in the range 0<=x<=65535."),
        ([], "error: Missing argument 'DIR'."),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["board", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == 1
