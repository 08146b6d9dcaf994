"""The board's server: reads, never writes; answers this machine's browser and nobody else unless told to.

Four things keep it harmless. It binds to the loopback address by default. It answers only requests whose `Host` names
this server, so that a page elsewhere cannot reach it under a name of its own (DNS rebinding). It serves only runs that
the index found, by name, and of each only its report; links are not followed. And every page carries a security policy
that lets nothing in from elsewhere; a report, which may come from another hospital, is shut off from the board as well.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from wardround.board import pages
from wardround.board.index import REPORT, Index, Run
from wardround.board.live import Watch
from wardround.errors import BadInput
from wardround.record.plain import read
from wardround.report.page import style_sheet

STYLE = "board.css"
STATIC = {STYLE: "text/css; charset=utf-8", "board.js": "text/javascript; charset=utf-8"}
HTML, JSON = "text/html; charset=utf-8", "application/json"
MOST = 26  # methods to tell apart in one picture
CLOSED = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'"
PAGE = f"{CLOSED}; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; form-action 'self'"
# A report has its styles and pictures inside. It is sandboxed: nothing it holds could ask the board for another run.
REPORT_POLICY = f"{CLOSED}; style-src 'unsafe-inline'; img-src data:; form-action 'none'; sandbox"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Answer(NamedTuple):
    """What a request gets."""

    body: bytes
    kind: str = HTML
    status: HTTPStatus = HTTPStatus.OK
    policy: str = PAGE


class Board:
    """What can be asked about a folder of runs; knows nothing of HTTP but addresses."""

    def __init__(self, folder: Path) -> None:
        self.index = Index(folder)
        self.watch = Watch()

    def answer(self, address: str) -> Answer:
        """The answer to a GET."""
        try:
            parts = urlsplit(address)
        except ValueError:  # what no browser sends, such as http://[
            return _missing("There is no such address.")
        _, _, path = parts.path.partition("/")
        head, _, rest = path.partition("/")
        if path == "":
            runs = self.index.runs()
            return _page(pages.runs_page(runs, self.index.folder, _version(runs)))
        if head == "compare" and not rest:
            return self._compare(parse_qs(parts.query).get("run", []))
        if head == "static" and rest in STATIC:
            return Answer(_static(rest), STATIC[rest])
        if path == "api/runs":
            return _json({"version": _version(self.index.runs())})
        if path.startswith("api/run/"):
            head, rest = "api", path.removeprefix("api/run/")
        run = self.index.run(_name(rest)) if head in ("run", "report", "api") else None
        if run is None:
            return _missing("There is no such run in this folder.")
        if head == "report":
            page = read(run.path / REPORT)
            return _missing("This run has no report.") if page is None else Answer(page, policy=REPORT_POLICY)
        courses = self.watch.courses(run)
        if head == "api":
            return _json({"state": run.state, "html": pages.progress(run, courses)})
        return _page(pages.run_page(run, courses))

    def _compare(self, names: list[str]) -> Answer:
        asked = list(dict.fromkeys(map(_name, names)))
        if not asked:
            return _page(pages.message_page("Nothing to compare", "Tick the runs you want to compare in the list."))
        chosen: list[Run] = []
        for name in asked:
            run = self.index.run(name)
            room = MOST - sum(len(other.methods) for other in chosen)
            if run is not None and run.state == "finished" and len(run.methods) <= room:
                chosen.append(run)
        if not chosen:
            return _missing("None of these runs is in this folder and finished.")
        return _page(pages.compare_page(chosen, len(asked) - len(chosen)))


class Server(ThreadingHTTPServer):
    """A board behind an address."""

    daemon_threads = True

    def __init__(self, board: Board, host: str, port: int) -> None:
        self.board = board
        self.host = host
        self.is_loopback = is_loopback(host)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot listen on {host}, port {port}: {error}; choose another --host or --port") from error

    def server_bind(self) -> None:
        """As the base class does, without asking a name server who we are."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_port}/"

    def is_meant(self, host: str) -> bool:
        """Whether a `Host` header names this server. No name server can send a bare address elsewhere."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name == self.host.lower():
            return True
        if not self.is_loopback and name == socket.gethostname().lower():
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return number.is_loopback or not self.is_loopback


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    server: Server

    def parse_request(self) -> bool:
        """Refuse what is no question, and what was meant for another server."""
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            self.close_connection = True
            self._send(_plain("the board can only be read", HTTPStatus.METHOD_NOT_ALLOWED), {"Allow": "GET, HEAD"})
            return False
        if not self.server.is_meant(self.headers.get("Host", "")):
            self._send(_plain("this address is not the board's", HTTPStatus.MISDIRECTED_REQUEST))
            return False
        return True

    def do_GET(self) -> None:
        """Answer."""
        self._send(self.server.board.answer(self.path))

    do_HEAD = do_GET

    def _send(self, answer: Answer, more: dict[str, str] | None = None) -> None:
        self.send_response(answer.status)
        common = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        for name, value in {**common, "Content-Security-Policy": answer.policy, **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        """Nothing about this machine."""
        return "wardround"

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is for the address; requests are not logged."""


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def _static(name: str) -> bytes:
    own = (Path(__file__).parent / "static" / name).read_bytes()
    return b"".join([*(style_sheet(part).encode() for part in ("palette", "chart")), own] if name == STYLE else [own])


def _name(quoted: str) -> str:
    return unquote(quoted, errors="surrogateescape")


def _version(runs: list[Run]) -> str:
    """Changes when the list would look different."""
    text = json.dumps([(run.id, run.state, run.when) for run in runs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _page(text: str, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(text.encode(), status=status)


def _missing(text: str) -> Answer:
    return _page(pages.message_page("Not found", text), HTTPStatus.NOT_FOUND)


def _json(value: Any) -> Answer:
    return Answer(json.dumps(value).encode(), JSON)


def _plain(text: str, status: HTTPStatus) -> Answer:
    return Answer(f"{text}\n".encode(), "text/plain; charset=utf-8", status)
