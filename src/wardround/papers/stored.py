"""Results that are at hand, whoever wrote them: every finished entry with the settings and the images it was run on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.errors import BadInput
from wardround.papers.cells import at, record_hash
from wardround.papers.datasets import DATASETS, stands_for
from wardround.papers.families import RUNS
from wardround.papers.results import read_results
from wardround.papers.schema import Family, Level, Line, Table

FOLDERS = (Path("papers"), Path("benchmarks") / "results")  # where results are looked for, from where one stands
SHIFTED = ", shifted"
PLACE = ("set", "alpha", "seed")  # what names a cell, as far as its family has it


@dataclass(frozen=True)
class Finished:
    """One entry of a file of results."""

    file: Path
    entry: dict[str, Any]
    study: dict[str, Any]
    preset: str | None
    record: dict[str, Any]  # the method with all its settings
    cell: dict[str, Any]  # where the images came from, and how they became sites
    family: Family

    @property
    def level(self) -> Level:
        """How images became sites."""
        if self.family == "fedmp":
            return "natural"
        if self.family == "fedkper":
            return float(self.study["data"]["alpha"])
        alpha = self.entry["alpha"]
        return "iid" if alpha is None else float(alpha)

    @property
    def settings(self) -> str:
        """Entries for which this is the same differ in cell and seed alone."""
        return record_hash({"study": self.study, "preset": self.preset, "recipe": self.entry["recipe"]})

    def is_of(self, table: Table, line: Line, dataset: str, sites: int, level: Level) -> bool:
        """Whether it is a seed of this cell and line."""
        model: dict[str, Any] = table.study.get("model", {})
        of_places = self.family == "fedmp" or (dataset in DATASETS and DATASETS[dataset].places)
        return (
            self.family == table.family
            and self.entry["entry"] == line.label
            and stands_for(self.entry["set"]) == dataset
            and (of_places or self.study["data"]["sites"] == sites)
            and self.level == level
            and self.study["model"]["per_site"] == model.get("per_site", {})
        )

    def was_run_on(self, images: str) -> bool:
        """Whether its images were those that are known by this hash."""
        place: dict[str, Any] = {key: self.entry[key] for key in PLACE if key in self.entry}
        depends: dict[str, Any] = {"study": self.study, "recipe": self.entry["recipe"], "images": images, **place}
        return bool(record_hash(depends) == self.entry["id"])


def result_files(given: Sequence[Path]) -> list[Path]:
    """The files that are named, those of folders that are named, or those of the usual folders."""
    if absent := list(dict.fromkeys(str(path) for path in given if not path.exists())):
        raise BadInput(f"there is no {', '.join(absent)}; give files of results or folders of them")
    found: list[Path] = []
    for path in given or FOLDERS:
        found += sorted(path.glob("*.json")) if path.is_dir() else [path] if path.exists() else []
    return found


def read_finished(files: Sequence[Path], family: Family) -> list[Finished]:
    """Every finished entry of a family; files of other benchmarks are passed over."""
    return [found for file in files_of(files, RUNS[family].benchmark) for found in _read(file, family)]


def files_of(files: Sequence[Path], benchmark: str) -> list[Path]:
    """Those that this benchmark wrote."""
    return [file for file in files if _benchmark(file) == benchmark]


def _benchmark(file: Path) -> str | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read as results: {error}; name the file to use with --results") from error
    return found.get("benchmark") if isinstance(found, dict) else None


def _read(file: Path, family: Family) -> Iterator[Finished]:
    tree = read_results(file, RUNS[family].benchmark)
    try:
        for entry in tree["entries"]:
            yield Finished(
                file, entry, _study(tree, entry), tree.get("preset"), tree["recipes"][entry["recipe"]],
                _cell(tree, entry), family,
            )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} is not as this version writes results (no {error}); run its table again") from error


def _study(tree: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    if "studies" not in tree:
        return dict(tree["study"])
    if entry["set"].endswith(SHIFTED):
        return dict(tree["studies"]["shifted"])
    known = DATASETS.get(entry["set"])
    kind = "iid" if known is not None and not known.places and "iid" in tree["studies"] else "natural"
    return dict(tree["studies"][kind])


def _cell(tree: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    place: dict[str, Any] = {key: entry[key] for key in PLACE if key in entry}
    return next((dict(cell) for cell in tree["cells"] if at(cell, place)), {})
