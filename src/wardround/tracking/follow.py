"""Follow a run's record into a tool: while it runs, or after the fact.

    settings.json   parameters, by dotted key
    events.jsonl    METRIC/SPLIT/MODEL[/SITE] at each round, counted from 1; notes
    result.json     headline/FIGURE, bytes/up, bytes/down, seconds; where the report is

The record is only read. Tracking never makes a run fail: whatever goes wrong with it ends in a warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wardround.errors import BadInput
from wardround.record.follow import RESULT, Follower
from wardround.record.plain import json_object, read, stamp
from wardround.report.values import as_count, as_dict, as_number, as_records, as_text, dotted
from wardround.tracking.sink import Sink, open_sink, plain_name

EVERY = 2.0  # seconds between two looks at a run that is under way
SETTINGS, COMPARISON = "settings.json", "comparison.json"
Warn = Callable[[str], None]


class Track:
    """One run in one tool."""

    def __init__(self, run: Path, tool: str, name: str) -> None:
        self.run = run
        self.sink: Sink = open_sink(tool, run, name)
        self.follower = Follower(run)
        self.notes: list[str] = []
        self.is_over = False
        self.sink.settings(dotted(json_object(read(run / SETTINGS))))

    def go_on(self) -> None:
        """Log what has become certain since last time."""
        if self.is_over:
            return
        is_finished = self.follower.is_finished
        before = len(self.notes)
        for event in self.follower.news():
            if event["kind"] == "row":
                self._figure(_name(event), as_count(event.get("round")) + 1, as_number(event.get("value")))
            elif event["kind"] == "note":
                self.notes.append(as_text(event.get("text")))
        if len(self.notes) > before:
            self.sink.texts({"notes": _listed(self.notes)})
        if is_finished:
            self._conclude(json_object(read(self.run / RESULT)))
            self.is_over = True
        self.sink.flush()

    def _conclude(self, result: dict[str, Any]) -> None:
        for headline in as_records(result.get("headlines")):
            self._figure(f"headline/{as_text(headline.get('key'))}", 0, as_number(headline.get("value")))
        sent = {"up": 0, "down": 0}
        for row in as_records(as_dict(result.get("ledger")).get("totals")):
            direction = as_text(row.get("direction"))
            sent[direction] = sent.get(direction, 0) + as_count(row.get("bytes"))
        for direction, count in sent.items():
            self._figure(f"bytes/{direction}", 0, count)
        for seconds in as_dict(result.get("seconds")).values():
            self._figure("seconds", 0, as_number(seconds))
        notes = [as_text(note.get("text")) for note in as_records(result.get("notes"))]
        texts = {"notes": _listed(notes)} if notes else {}
        self.sink.texts({**texts, "report": str((self.run / "report.html").resolve())})

    def _figure(self, name: str, step: int, value: float | None) -> None:
        name = plain_name(name)
        if value is not None and (name, step) not in self.sink.seen:
            self.sink.seen.add((name, step))
            self.sink.figure(name, step, value)


class Tracker:
    """A run, or every run of a comparison, in one tool."""

    def __init__(self, path: Path, tool: str) -> None:
        self.path = path
        self.tool = tool
        self._tracks: dict[Path, Track] = {}

    def go_on(self) -> None:
        """Log what is new, of runs that began only now, too."""
        for run in self._runs():
            if run not in self._tracks:
                name = self.path.name if run == self.path else f"{self.path.name}/{run.name}"
                self._tracks[run] = Track(run, self.tool, name)
            self._tracks[run].go_on()

    def close(self) -> list[str]:
        """Where to look for what was logged."""
        for track in self._tracks.values():
            track.sink.close(track.is_over)
        return list(dict.fromkeys(track.sink.place for track in self._tracks.values()))

    def _runs(self) -> list[Path]:
        if stamp(self.path / COMPARISON) is None:
            return [self.path]
        inner = (path for path in self.path.iterdir() if path.is_dir() and not path.is_symlink())
        return sorted(path for path in inner if stamp(path / SETTINGS))


def track(path: Path, tool: str) -> list[str]:
    """Log all that a run's record holds; where to look for it."""
    if stamp(path / SETTINGS) is None:
        raise BadInput(f"{path} is not the directory of a run: it has no {SETTINGS}; check the path")
    tracker = Tracker(path, tool)
    tracker.go_on()
    return tracker.close()


@contextmanager
def tracked(path: Path, tools: Sequence[str], warn: Warn, say: Warn) -> Iterator[None]:
    """Follow a run for as long as the block lasts, and to its end; in threads, so that the run does not wait."""
    done = threading.Event()
    threads = [threading.Thread(target=_follow, args=(path, tool, done, warn, say), daemon=True) for tool in tools]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _follow(path: Path, tool: str, done: threading.Event, warn: Warn, say: Warn) -> None:
    try:
        tracker = Tracker(path, tool)
        while not done.wait(EVERY):
            tracker.go_on()
        tracker.go_on()
        for place in tracker.close():
            say(f"tracked: {place}")
    except Exception as error:  # noqa: BLE001 - whatever another tool does, the run goes on
        again = f"wardround track {path} --to {tool}"
        warn(f"warning: {tool} could not follow the run ({type(error).__name__}: {error}); afterwards try: {again}")


def _name(row: dict[str, Any]) -> str:
    """`accuracy/local/personal/site-1`; figures of all sites have no site."""
    parts = [as_text(row.get(key)) for key in ("metric", "split", "model", "site")]
    return "/".join(part for part in parts if part)


def _listed(notes: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(note.split())}" for note in notes)
