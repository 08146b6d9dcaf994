"""Which runs lie in a folder, and how each stands.

Looking costs a glance at two files a run; a record is read again only when its file has changed, so that a folder of a
thousand runs is listed at once. Only what was found here is ever served: a request names a run, not a path.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from wardround.board import record
from wardround.errors import BadInput
from wardround.record.plain import Stamp, json_object, read, stamp
from wardround.report.values import as_dict, as_list, as_number, as_records, as_text, as_texts

try:
    import fcntl
except ImportError:  # Windows has no such locks; a run without a result is then shown as stopped
    fcntl = None  # type: ignore[assignment]

RESULT, SETTINGS, COMPARISON, EVENTS, REPORT = (
    "result.json",
    "settings.json",
    "comparison.json",
    "events.jsonl",
    "report.html",
)
DEPTH = 3  # folders within folders; studies are kept by project and by year, hardly deeper
TAIL = 8192  # bytes at the end of an event log that hold its last line


@dataclass(frozen=True)
class Run:
    """One run, or one comparison of several methods, as a list shows it."""

    id: str  # its path from the served folder, with slashes
    path: Path
    kind: str = "run"
    methods: tuple[str, ...] = ()
    data: str = ""
    sites: int = 0
    when: str = ""
    state: str = "stopped"  # finished, running, failed, stopped or unreadable
    reason: str = ""  # why it failed, or cannot be read
    sites_hash: str = ""  # two runs of the same one had the same images at the same sites
    figures: dict[str, dict[str, float | None]] = field(default_factory=dict)  # by method
    sent: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes up and down, by method
    seconds: dict[str, float | None] = field(default_factory=dict)  # by method
    has_report: bool = False

    @property
    def bytes(self) -> int | None:
        """All that crossed a boundary, in both directions; None where that is not known yet."""
        return sum(sum(ways.values()) for ways in self.sent.values()) if self.state == "finished" else None

    @property
    def total_seconds(self) -> float | None:
        """Of all methods together."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) if known else None

    def best(self, key: str) -> float | None:
        """The highest of a figure among the methods."""
        known = [value for found in self.figures.values() if (value := found.get(key)) is not None]
        return max(known, default=None)


class Index:
    """The runs under one folder; safe to ask from several threads."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise BadInput(f"there is no folder {folder}; give the folder that holds your runs")
        if any(stamp(folder / name) for name in (RESULT, SETTINGS)):
            raise BadInput(f"{folder} is itself a run; give the folder that holds it: {folder.resolve().parent}")
        self.folder = folder.resolve()
        self._known: dict[str, tuple[tuple[Stamp | None, Stamp | None], Run]] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[Run]:
        """All runs as they stand now, the latest first."""
        with self._lock:
            found = {name: self._look(name, path) for name, path in _folders(self.folder)}
            self._known = {name: kept for name, kept in self._known.items() if name in found}
        return sorted(found.values(), key=lambda run: (run.when, run.id), reverse=True)

    def run(self, name: str) -> Run | None:
        """One run by its name; None where there is no such run among those found."""
        if name not in self._known:
            self.runs()
        with self._lock:
            known = self._known.get(name)
            return self._look(name, known[1].path) if known else None

    def _look(self, name: str, path: Path) -> Run:
        stamps = stamp(path / RESULT), stamp(path / SETTINGS)
        known = self._known.get(name)
        if known is None or known[0] != stamps:
            run = _finished(name, path) if stamps[0] else _begun(name, path, stamps[1])
            known = self._known[name] = stamps, run
        return known[1] if stamps[0] else _standing(known[1])


def _folders(folder: Path, prefix: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Path]]:
    """Every run below a folder. A run's own folders are its own business; links and hidden folders are passed over."""
    try:
        with os.scandir(folder) as entries:
            inner = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:  # a folder that may not be read holds nothing that may be shown
        return
    for entry in inner:
        if not entry.is_dir(follow_symlinks=False):
            continue
        path, name = Path(entry.path), f"{prefix}{entry.name}"
        if stamp(path / RESULT) or stamp(path / SETTINGS):
            yield name, path
        elif depth > 1:
            yield from _folders(path, f"{name}/", depth - 1)


def _finished(name: str, path: Path) -> Run:
    found = record.read_summary(read(path / RESULT) or b"")
    if found is None:
        reason = f"its {RESULT} is damaged, or another version's"
        return Run(name, path, state="unreadable", reason=reason, when=_written(stamp(path / RESULT)))
    data = as_dict(found.get("data"))
    seconds = {as_text(method): as_number(value) for method, value in as_dict(found.get("seconds")).items()}
    return Run(
        name,
        path,
        kind="compare" if found.get("kind") == "compare" else "run",
        methods=tuple(as_texts(found.get("methods"))),
        data=_data_name(as_dict(found.get("settings"))),
        sites=len(as_records(data.get("sites"))),
        when=as_text(found.get("created")),
        state="finished",
        sites_hash=f"{as_text(data.get('partition_hash'))} {as_text(data.get('test_sha256'))}",
        figures=record.figures(found),
        sent=record.sent(found),
        seconds=seconds,
        has_report=stamp(path / REPORT) is not None,
    )


def _begun(name: str, path: Path, settings_stamp: Stamp | None) -> Run:
    settings = json_object(read(path / SETTINGS))
    comparison = read(path / COMPARISON)
    methods = [as_text(settings.get("method"))]
    if comparison is not None:
        methods = [as_text(entry.get("method")) for entry in as_records(_list(comparison))]
    held = json_object(read(path / "data.json"))
    return Run(
        name,
        path,
        kind="run" if comparison is None else "compare",
        methods=tuple(PurePath(method).stem for method in methods if method),
        data=_data_name(settings),
        sites=len(as_records(held.get("sites"))),
        when=_written(settings_stamp),
        sites_hash=f"{as_text(held.get('partition_hash'))} {as_text(held.get('test_sha256'))}",
    )


def _standing(run: Run) -> Run:
    """A run that has no result yet: at work, failed, or stopped."""
    if _is_held(run.path / ".lock"):
        return replace(run, state="running")
    for log in logs(run):
        found = stamp(log)
        tail = (read(log, max(0, found.size - TAIL)) or b"").splitlines() if found else []
        last = json_object(tail[-1]) if tail else {}
        if last.get("kind") == "failed":
            return replace(run, state="failed", reason=as_text(last.get("text")))
    return run


def logs(run: Run) -> list[Path]:
    """The event logs of a run: its own, or one for each method of a comparison in the order they are asked."""
    if run.kind == "run":
        return [run.path / EVENTS]
    try:
        with os.scandir(run.path) as entries:
            inner = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    except OSError:
        return []
    names = [method for method in run.methods if method in inner]
    return [run.path / name / EVENTS for name in names if stamp(run.path / name / EVENTS)]


def _is_held(lock: Path) -> bool:
    """Whether a process works in the run's folder: for an instant, the board asks for a share of its lock."""
    if fcntl is None or stamp(lock) is None:
        return False
    try:
        file = lock.open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _data_name(settings: dict[str, Any]) -> str:
    data = as_dict(settings.get("data"))
    return "a file per site" if data.get("files") else PurePath(as_text(data.get("source"))).name


def _written(found: Stamp | None) -> str:
    return datetime.fromtimestamp(found.changed / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if found else ""


def _list(text: bytes) -> list[Any]:
    try:
        return as_list(json.loads(text))
    except (ValueError, RecursionError):
        return []
