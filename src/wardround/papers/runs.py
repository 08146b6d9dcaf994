"""Plans as runs, each in a folder of its own, and what is kept of a finished one."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from wardround.errors import WardroundError
from wardround.papers.cells import Plan
from wardround.papers.datasets import is_official
from wardround.papers.results import Results
from wardround.progress import Silent
from wardround.record.rundir import RunDir
from wardround.run import begin_run, reopen

MARGIN, OVERHEAD = 1.1, 5.0  # on the longest earlier entry alike; seconds to read images and write what is found
DATA_WORDS = ("provenance", "partition_rule", "partition_hash", "local_protocol", "global_protocol")
SECONDS = "of the run, measuring included, without the time it lay stopped; `jobs` entries shared the machine"
Outcome = Sequence[dict[str, Any]] | str  # an entry's figures and its cell's data, or why there are none


@dataclass(frozen=True)
class Runs:
    """How the entries of a family of tables are run. It holds no results, so that another process can make it anew."""

    family: ClassVar[str]
    benchmark: ClassVar[str]  # what a file of their results calls itself
    same: ClassVar[tuple[str, ...]]  # keys of such a file's head that tell one from another
    measures: ClassVar[Mapping[str, str]]  # what is kept of a run, in words
    folder: Path
    workers: int | None = None  # sites that train at once; None: as many as a machine of its own bears

    def task(self, planned: Plan) -> dict[str, Any]:
        """A plan as JSON with all that another process needs to finish it (`worker.do`)."""
        where = {"family": self.family, "folder": str(self.folder.resolve()), "workers": self.workers}
        return {**where, "plan": planned.as_json()}

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
        seconds = expected_seconds(entries, planned.cell.place["set"], planned.label)
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
        data["official"] = is_official(planned.cell.source)
        return found, {**data, "images": [site["train"] for site in result["data"]["sites"]]}


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


def headlines(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run of one method, by key."""
    return {headline["key"]: headline["value"] for headline in result["headlines"]}


def short(value: Any) -> Any:
    """A figure as results keep it; counts stay whole."""
    return round(value, 5) if isinstance(value, float) else value


def machine() -> str:
    """The machine in one line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, torch {torch.__version__}, Python {platform.python_version()}"
