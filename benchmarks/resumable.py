"""A grid of runs that can be stopped at any moment: its file of results, and how it is worked off.

A grid brings along a `Plan` for every entry in every cell, how a finished run becomes figures (`Runs.figures`), and how
figures become a summary. `begin` and `fill` are what the scripts have in common.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from common import machine
from jobs import Alone, Crew, Lost, Processes, threads_each
from wardround.errors import BadInput, WardroundError
from wardround.files import disk_errors, write_atomically
from wardround.learn.device import find_device
from wardround.progress import Silent
from wardround.record.rundir import RunDir, lock_directory
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


def is_drawn(source: Path) -> bool:
    """Whether images are drawn, as `phantoms:N`, and not read from a file."""
    return source.name.startswith("phantoms")


def images_hash(source: Path) -> str:
    """What the images are known by: a file's content, or the name of drawn ones."""
    return source.name if is_drawn(source) else file_hash(source)


def images_source(source: Path) -> str:
    """What a study calls the images."""
    return source.name if is_drawn(source) else str(source.resolve())


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


Outcome = tuple[dict[str, Any], dict[str, Any]] | str  # an entry's figures and its cell's data, or why there are none


@dataclass(frozen=True)
class Runs:
    """Plans as runs, each in a folder of its own. It holds no results, so that it can go to another process."""

    folder: Path
    workers: int | None = None  # sites that train at once; None: as many as a machine of its own bears

    def figures(self, planned: Plan, run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
        """What is kept of a finished run beside its seconds, notes and machine."""
        raise NotImplementedError

    def prepare(self, planned: Plan, run: Path) -> None:
        """Whatever is to be done in a run's folder before it goes on."""

    def apart(self, planned: Plan) -> str:
        """Plans for which this is the same are never done at once."""
        return planned.id

    def path(self, planned: Plan) -> Path:
        """The folder of an entry's run."""
        return self.folder / planned.cell.folder / planned.id

    def needs(self, planned: Plan, entries: Sequence[Mapping[str, Any]]) -> float:
        """Seconds that an entry still takes, judged by earlier entries."""
        seconds = expected_seconds(entries, planned.cell.place["set"], planned.entry.label)
        run = self.path(planned)
        checkpoint = RunDir(run).checkpoint() if run.exists() else None
        return seconds if checkpoint is None else max(seconds - checkpoint.seconds, 0.0)

    def clear(self, plans: Sequence[Plan], results: Results) -> None:
        """Remove the runs of entries that are in the results.

        What an earlier start left of entries that this one was not asked for stays.
        """
        for planned in plans:
            if results.has(planned):
                shutil.rmtree(self.path(planned), ignore_errors=True)
                with contextlib.suppress(OSError):  # not there, or not empty
                    self.path(planned).parent.rmdir()

    def finish(self, planned: Plan) -> Outcome:
        """Begin or go on with a run, to its end."""
        path = self.path(planned)
        settings = planned.settings.model_copy(update={"workers": self.workers})
        try:
            job = reopen(path, Silent()) if path.exists() else begin_run(settings, path, Silent())
            self.prepare(planned, path)
            result = job.finish()
        except WardroundError as error:
            return str(error)
        found = {
            **self.figures(planned, path, result),
            "seconds": result["seconds"][planned.record["method"]],
            "notes": [note["text"] for note in result["notes"]],
            "machine": machine(),
        }
        data = {key: result["data"][key] for key in DATA_WORDS}
        return found, {**data, "images": [site["train"] for site in result["data"]["sites"]]}


@dataclass
class Work:
    """Whatever is left of some plans, as far as the time allows."""

    runs: Runs
    results: Results
    plans: Sequence[Plan]
    seconds: float | None
    began: float
    jobs: int = 1

    def do(self, crew: Crew[Plan, Outcome]) -> tuple[int, int]:
        """How many plans are left in the end, and how many of these failed."""
        failed = 0
        todo = [planned for planned in self.plans if not self.results.has(planned)]
        self.runs.clear(self.plans, self.results)
        while (planned := self._next(todo, crew)) is not None or crew.busy:
            if planned is not None:
                todo.remove(planned)
                crew.start(planned)
                continue
            ended, outcome = crew.wait()
            label = f"{ended.cell.folder}, {ended.entry.label}"
            if isinstance(outcome, Lost | str):
                failed += 1
                said = f"failed: {outcome}" if isinstance(outcome, str) else f"lost: {outcome.why}"
            else:
                found, data = outcome
                self.results.add(ended, {**found, "jobs": self.jobs}, data)
                said = f"{found['seconds']:.0f} s"
            print(f"{label}: {said}", flush=True)
            self.runs.clear(self.plans, self.results)
        return len(todo) + failed, failed

    def _next(self, todo: Sequence[Plan], crew: Crew[Plan, Outcome]) -> Plan | None:
        """The first that can begin now; none where it would not end in time."""
        if not crew.has_room:
            return None
        taken = {self.runs.apart(planned) for planned in crew.busy}
        planned = next((planned for planned in todo if self.runs.apart(planned) not in taken), None)
        if planned is None or self.seconds is None:
            return planned
        ends = time.monotonic() - self.began + self.runs.needs(planned, self.results.entries)
        return planned if ends <= self.seconds else None


# What the scripts have in common --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where results go, where it runs, and how long."""
    parser.add_argument("--out", type=Path, required=True, help="JSON of results; what it holds is not done again")
    parser.add_argument("--table", action="store_true", help="print the table of --out as Markdown and do nothing else")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, help="folder of unfinished runs (default: a temporary one)")
    parser.add_argument("--seconds", type=float, help="start no entry that would not end within so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="so many entries at once, each in a process of its own")


def begin(
    options: argparse.Namespace,
    name: str,
    markdown: Callable[[Mapping[str, Any]], str],
    start: Callable[[argparse.Namespace], int],
) -> int:
    """Print the table, or start; what a person can mend becomes one line and an exit code."""
    try:
        if options.table:
            print(markdown(read_results(options.out, name)))
            return 0
        if options.jobs < 1:
            raise BadInput(f"--jobs {options.jobs} cannot be used; it should be 1 or more")
        return start(options)
    except WardroundError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on, with the same --work where each entry stood", file=sys.stderr)
        return 130


def fill(
    options: argparse.Namespace,
    runs: type[Runs],
    results: Results,
    plans: Sequence[Plan],
    markdown: Callable[[Mapping[str, Any]], str],
    began: float,
) -> int:
    """Do what is left of the plans, print the table, and 1 where an entry failed. On a CPU, jobs share the cores."""
    shared = options.jobs > 1 and not find_device(options.device).is_cuda
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock_directory(folder))
        does = runs(folder, threads_each(options.jobs) if shared else None)
        crew: Crew[Plan, Outcome] = Alone(does.finish)
        if options.jobs > 1:
            crew = stack.enter_context(Processes(does.finish, options.jobs))
        left, failed = Work(does, results, plans, options.seconds, began, options.jobs).do(crew)
    print(f"\n{len(plans) - left} of {len(plans)} entries are done  ({machine()})\n")
    print(markdown(results.tree))
    return 1 if failed else 0
