"""A grid of runs as one process that can be stopped at any moment: its file of results, and who works it off.

A grid brings along a `Plan` for every entry in every cell, how a finished run becomes figures (`Worker.figures`), and
how figures become a summary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from common import machine
from wardround.errors import BadInput, WardroundError
from wardround.files import disk_errors, write_atomically
from wardround.progress import Silent
from wardround.record.rundir import RunDir
from wardround.run import begin_run, reopen
from wardround.settings import Settings
from wardround.tensorfile import canonical

MARGIN, OVERHEAD = 1.1, 5.0  # on the longest earlier entry alike; seconds to read images and write what is found
DATA_WORDS = ("provenance", "partition_rule", "partition_hash", "local_protocol", "global_protocol")


class Cell(Protocol):
    """Where an entry is measured: a set of images and whatever else a grid varies."""

    @property
    def source(self) -> Path:
        """The file of images."""

    @property
    def place(self) -> dict[str, Any]:
        """The cell as the results name it; `set` is the name of the images."""

    @property
    def folder(self) -> str:
        """The cell as a folder's name."""


@dataclass(frozen=True)
class Entry:
    """A line of the table: a method, what is set otherwise than in the preset, and what of the study is changed."""

    label: str
    method: str
    own: Mapping[str, Any] = field(default_factory=dict)
    study: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The name that `--methods` selects it by: the label up to its comma."""
        return self.label.partition(",")[0]


@dataclass(frozen=True)
class Plan:
    """One entry in one cell, with all its settings; `recipe` is the entry's without the cell, `id` everything."""

    cell: Cell
    entry: Entry
    settings: Settings
    record: dict[str, Any]
    recipe: str
    id: str


class Results:
    """The file of results: read once, written whole after every entry."""

    def __init__(
        self,
        path: Path,
        head: Mapping[str, Any],
        same: Sequence[str],
        summarise: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    ) -> None:
        """`head` begins the file; one whose values of the keys `same` differ holds something else and is refused."""
        self.path, self._summarise = path, summarise
        self.tree: dict[str, Any] = {**head, "recipes": {}, "cells": [], "entries": [], "summary": []}
        if path.exists():
            found = read_results(path, head["benchmark"])
            if any(found[key] != head[key] for key in same):
                raise BadInput(f"{path} holds results of another preset or other settings; use another --out")
            self.tree |= {key: found[key] for key in ("recipes", "cells", "entries")}
            self.tree["summary"] = summarise(self.entries)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What is finished, in the order it finished."""
        found: list[dict[str, Any]] = self.tree["entries"]
        return found

    def has(self, planned: Plan) -> bool:
        """Whether this very entry is finished."""
        return any(entry["id"] == planned.id for entry in self.entries)

    def add(self, planned: Plan, found: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Keep an entry, in place of the one of the same cell and label under earlier settings, and write the file."""
        place = planned.cell.place
        line = {**place, "entry": planned.entry.label, "recipe": planned.recipe, "id": planned.id, **found}
        kept = [entry for entry in self.entries if not (_at(entry, place) and entry["entry"] == line["entry"])]
        self.tree["entries"] = [*kept, line]
        self.tree["recipes"][planned.recipe] = planned.record
        used = {entry["recipe"] for entry in self.entries}
        self.tree["recipes"] = {key: value for key, value in self.tree["recipes"].items() if key in used}
        cells = [cell for cell in self.tree["cells"] if not _at(cell, place)]
        self.tree["cells"] = [*cells, {**place, **data}]
        self.tree["summary"] = self._summarise(self.entries)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, compact(self.tree).encode())


def compact(tree: Mapping[str, Any]) -> str:
    """JSON with a line for every value, but lists of numbers in one line."""
    text = json.dumps(tree, indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def file_hash(path: Path) -> str:
    """What a file of images is known by."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; check the path") from error


def record_hash(record: Mapping[str, Any]) -> str:
    """A short name for settings."""
    return hashlib.sha256(canonical(record).encode()).hexdigest()[:12]


def read_results(path: Path, benchmark: str) -> dict[str, Any]:
    """What an earlier start wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("benchmark") != benchmark:
            raise ValueError("it is not of this benchmark")
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path} cannot be used: {error}; give the results of an earlier start, or a new path"
        ) from error
    return found


def _at(line: Mapping[str, Any], place: Mapping[str, Any]) -> bool:
    return all(line[key] == value for key, value in place.items())


def expected_seconds(entries: Sequence[Mapping[str, Any]], images: str, label: str) -> float:
    """How long an entry may take, by the longest one like it: of its set, else its label, else its method's others.

    0 where nothing like it has ended yet: it is tried.
    """
    group = label.partition(",")[0]
    alike = (
        [e["seconds"] for e in entries if e["entry"] == label and e["set"] == images],
        [e["seconds"] for e in entries if e["entry"] == label],
        [e["seconds"] for e in entries if e["entry"].partition(",")[0] == group],
    )
    longest = max(next((seconds for seconds in alike if seconds), [0.0]))
    return MARGIN * longest + OVERHEAD if longest else 0.0


@dataclass
class Worker:
    """Does plans one after the other, each as a run of its own in a folder."""

    folder: Path
    results: Results
    seconds: float | None
    began: float = field(default_factory=time.monotonic)

    def figures(self, planned: Plan, run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
        """What is kept of a finished run beside its seconds, notes and machine."""
        raise NotImplementedError

    def work(self, plans: Sequence[Plan]) -> tuple[int, int]:
        """Whatever is left of the plans, as far as the time allows; how many are left, and how many of these failed."""
        failed = 0
        todo = [planned for planned in plans if not self.results.has(planned)]
        for number, planned in enumerate(todo):
            self.clear(plans)
            if self.seconds is not None and time.monotonic() - self.began + self.needs(planned) > self.seconds:
                return len(todo) - number + failed, failed
            label = f"{planned.cell.folder}, {planned.entry.label}"
            try:
                found, data = self._finish(planned)
            except WardroundError as error:
                failed += 1
                print(f"{label}: failed: {error}", flush=True)
                continue
            self.results.add(planned, found, data)
            print(f"{label}: {found['seconds']:.0f} s", flush=True)
        self.clear(plans)
        return failed, failed

    def clear(self, plans: Sequence[Plan]) -> None:
        """Remove the runs of entries that are in the results.

        What an earlier start left of entries that this one was not asked for stays.
        """
        for planned in plans:
            if self.results.has(planned):
                shutil.rmtree(self.run(planned), ignore_errors=True)
                with contextlib.suppress(OSError):  # not there, or not empty
                    self.run(planned).parent.rmdir()

    def needs(self, planned: Plan) -> float:
        """Seconds that an entry still takes."""
        seconds = expected_seconds(self.results.entries, planned.cell.source.stem, planned.entry.label)
        checkpoint = RunDir(self.run(planned)).checkpoint() if self.run(planned).exists() else None
        return seconds if checkpoint is None else max(seconds - checkpoint.seconds, 0.0)

    def run(self, planned: Plan) -> Path:
        """The folder of an entry's run."""
        return self.folder / planned.cell.folder / planned.id

    def prepare(self, planned: Plan, run: Path) -> None:
        """Whatever is to be done in a run's folder before it goes on."""

    def _finish(self, planned: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin or go on with a run; its figures, and the cell's data in words."""
        path = self.run(planned)
        job = reopen(path, Silent()) if path.exists() else begin_run(planned.settings, path, Silent())
        self.prepare(planned, path)
        result = job.finish()
        found = {
            **self.figures(planned, path, result),
            "seconds": result["seconds"][planned.record["method"]],
            "notes": [note["text"] for note in result["notes"]],
            "machine": machine(),
        }
        data = {key: result["data"][key] for key in DATA_WORDS}
        return found, {**data, "images": [site["train"] for site in result["data"]["sites"]]}
