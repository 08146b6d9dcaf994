"""Every one-shot method on every set, level of skew and seed, as one process that can be stopped at any moment.

A cell is a set of images, a Dirichlet alpha and a seed (of the partition, the initial weights and every other draw).
Sites train as FedISCA's clients do, each from weights of its own, and every entry of a cell works on the same site
models. Each entry is a run of its own in the folder `--work`, so a killed one goes on where it stood while that folder
is there; its figures go into `--out` when it ends, and what `--out` holds is never done again. `--seconds` stops before
an entry that would take longer than what is left, judged by earlier entries.

    python benchmarks/one_shot_grid.py bloodmnist.npz dermamnist.npz --preset fast --out one_shot_grid.json
    python benchmarks/one_shot_grid.py --table --out one_shot_grid.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import machine
from one_shot_entries import Cell, Plan, chosen, header, plan, study_tree
from one_shot_summary import MEASURES, PUBLISHED, SECONDS, markdown, summarise
from wardround.errors import BadInput, WardroundError
from wardround.files import disk_errors
from wardround.learn.device import find_device
from wardround.progress import Silent
from wardround.record.rundir import Log, RunDir, lock_directory, write_json
from wardround.run import begin_run, reopen

NAME = "one_shot_grid"
MARGIN, OVERHEAD = 1.1, 5.0  # on the longest earlier entry alike; seconds to read images and write what is found


# Results --------------------------------------------------------------------------------------------------------------


class Results:
    """The file of results: read once, written whole after every entry."""

    def __init__(self, path: Path, preset: str | None, study: dict[str, Any]) -> None:
        self.path = path
        self.tree: dict[str, Any] = {
            "benchmark": NAME,
            "preset": preset,
            "study": study,
            "measures": {**MEASURES, "seconds": SECONDS, "standard_deviation": "of a sample: n - 1"},
            "published": PUBLISHED,
            "recipes": {},
            "cells": [],
            "entries": [],
            "summary": [],
        }
        if path.exists():
            found = read_results(path)
            if (found["preset"], found["study"]) != (preset, study):
                raise BadInput(f"{path} holds results of another preset or other settings; use another --out")
            self.tree |= {key: found[key] for key in ("recipes", "cells", "entries")}
            self._summarise()

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
        self._summarise()
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.tree)

    def _summarise(self) -> None:
        self.tree["summary"] = summarise(self.entries, self.tree["study"]["data"]["sites"])


def read_results(path: Path) -> dict[str, Any]:
    """What an earlier start wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("benchmark") != NAME:
            raise ValueError("it is not of this benchmark")
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path} cannot be used: {error}; give the results of an earlier start, or a new path"
        ) from error
    return found


def _at(line: Mapping[str, Any], place: Mapping[str, Any]) -> bool:
    return all(line[key] == value for key, value in place.items())


# Work -----------------------------------------------------------------------------------------------------------------


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
    """Does plans one after the other in a folder."""

    folder: Path
    results: Results
    seconds: float | None
    began: float = field(default_factory=time.monotonic)

    def work(self, plans: Sequence[Plan]) -> tuple[int, int]:
        """Whatever is left of the plans, as far as the time allows; how many are left, and how many of these failed."""
        failed = 0
        todo = [planned for planned in plans if not self.results.has(planned)]
        for number, planned in enumerate(todo):
            self._clear(plans)
            if self.seconds is not None and time.monotonic() - self.began + self._needs(planned) > self.seconds:
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
        self._clear(plans)
        return failed, failed

    def _clear(self, plans: Sequence[Plan]) -> None:
        """Remove the runs of entries that are in the results, and the site models of cells that are done.

        What an earlier start left of entries that this one was not asked for stays.
        """
        unfinished = {planned.cell for planned in plans if not self.results.has(planned)}
        for planned in plans:
            if self.results.has(planned):
                shutil.rmtree(self._run(planned), ignore_errors=True)
            if planned.cell not in unfinished:
                shutil.rmtree(self._fits(planned), ignore_errors=True)
                with contextlib.suppress(OSError):  # not there, or not empty
                    (self.folder / planned.cell.folder).rmdir()

    def _needs(self, planned: Plan) -> float:
        """Seconds that an entry still takes, with the training of site models where a cell has none."""
        images = planned.cell.source.stem
        seconds = expected_seconds(self.results.entries, images, planned.entry.label)
        run = self._run(planned)
        checkpoint = RunDir(run).checkpoint() if run.exists() else None
        if checkpoint is not None:
            return max(seconds - checkpoint.seconds, 0.0)
        if not self._fits(planned).exists():
            seconds += expected_seconds(self.results.entries, images, "local")
        return seconds

    def _finish(self, planned: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin or go on with a run; its figures, and the cell's data in words."""
        path, fits = self._run(planned), self._fits(planned)
        job = reopen(path, Silent()) if path.exists() else begin_run(planned.settings, path, Silent())
        fits.mkdir(exist_ok=True)
        if not (path / "fits").is_symlink():  # the folder in which a run looks for site models
            (path / "fits").symlink_to(Path("..") / fits.name, target_is_directory=True)
        result = job.finish()
        reused = [row["reused"] for row in Log(path / "events.jsonl").rows() if row["kind"] == "fit"]
        values = {headline["key"]: headline["value"] for headline in result["headlines"]}
        found = {
            "figures": {key: None if values[key] is None else round(values[key], 6) for key in MEASURES},
            "seconds": result["seconds"][planned.record["method"]],
            "fits": {"trained": reused.count(False), "reused": reused.count(True)},
            "work": {row["part"]: {key: row[key] for key in ("steps", "seconds")} for row in result["work"]},
            "clusters": next((len(row["clusters"]) for row in result["clusters"]), None),
            "notes": [note["text"] for note in result["notes"]],
            "machine": machine(),
        }
        words = ("provenance", "partition_rule", "partition_hash", "local_protocol", "global_protocol")
        data = {key: result["data"][key] for key in words}
        return found, {**data, "images": [site["train"] for site in result["data"]["sites"]]}

    def _run(self, planned: Plan) -> Path:
        return self.folder / planned.cell.folder / planned.id

    def _fits(self, planned: Plan) -> Path:
        return self.folder / planned.cell.folder / "fits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of the grid, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="*", help="MedMNIST .npz files")
    parser.add_argument("--out", type=Path, required=True, help="JSON of results; what it holds is not done again")
    parser.add_argument("--table", action="store_true", help="print the table of --out as Markdown and do nothing else")
    parser.add_argument("--preset", help="a named preset or a TOML file; without one, every method's own defaults")
    parser.add_argument("--methods", nargs="+", help="entries by name up to the comma, or any other method")
    parser.add_argument("--ablations", action="store_true", help="also FedBiCross's Table 2 and FedISCA's code")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.3, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sites", type=int)
    parser.add_argument("--model")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, help="folder of unfinished runs (default: a temporary one)")
    parser.add_argument("--seconds", type=float, help="start no entry that would not end within so many seconds")
    options = parser.parse_args(arguments)
    try:
        if options.table:
            print(markdown(read_results(options.out)))
            return 0
        return _run_grid(options)
    except WardroundError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run_grid(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if not options.files:
        raise BadInput("no set is named; give the paths of MedMNIST .npz files")
    device = find_device(options.device)
    given = {"data": {"sites": options.sites}, "model": {"name": options.model}, "train": {"epochs": options.epochs}}
    flags = {table: {k: v for k, v in keys.items() if v is not None} for table, keys in given.items()}
    tree = study_tree(options.preset, {**flags, "device": options.device}, "bf16" if device.is_cuda else "fp32")
    results = Results(options.out, options.preset and Path(options.preset).name, header(tree))
    if len({path.stem for path in options.files}) < len(options.files):
        raise BadInput("two sets have the same name; results go by it, so name each set once")
    hashes = {path: _file_hash(path) for path in options.files}
    # A whole grid of one seed before the next seed.
    seeds, alphas = dict.fromkeys(options.seeds), dict.fromkeys(options.alphas)
    cells = [Cell(path, alpha, seed) for seed in seeds for path in hashes for alpha in alphas]
    entries = chosen(options.methods, options.ablations)
    plans = [plan(tree, entry, cell, hashes[cell.source]) for cell in cells for entry in entries]
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock_directory(folder))
        left, failed = Worker(folder, results, options.seconds, began).work(plans)
    print(f"\n{len(plans) - left} of {len(plans)} entries are done  ({machine()})\n")
    print(markdown(results.tree))
    return 1 if failed else 0


def _file_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; check the path") from error


if __name__ == "__main__":
    sys.exit(main())
