"""The runs of the one-shot tables (FedBiCross, FedISCA): which settings, and what is kept of a run.

A cell is a set of images, a level of skew and a seed (of the partition, the initial weights and every other draw).
Sites train as FedISCA's clients do, each from weights of its own, and every entry of a cell works on the same site
models.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.methods.registry import find, make, own_settings
from wardround.papers.cells import Cell, Plan, images_source, named, study_record
from wardround.papers.results import Results
from wardround.papers.runs import Runs, expected_seconds, headlines
from wardround.papers.schema import Level, Line
from wardround.record.rundir import Log
from wardround.settings import overlay, read_preset, validate

NAME = "one_shot_grid"
SAME = ("preset", "study")
# FedISCA's clients: its public code, `train_classifier.py`; the model sent is the best one on the site's own tenth. Of
# equally good epochs it is the last; the code takes the first, as the preset `paper` does.
CLIENTS: dict[str, Any] = {
    "rounds": 1,
    "init": "own",
    "data": {
        "partition": "dirichlet",
        "capped": True,
        "sites": 5,
        "merge_val": True,
        "val_share": 0.1,
        "by_patient": False,
    },
    "model": {"name": "resnet18"},  # its stem is the small one
    "train": {
        "epochs": 100,
        "batch": 128,
        "optimiser": "sgd",
        "lr": 1e-3,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "schedule": "step",
        "keep": "best",
    },
}
MEASURES = {
    "local_accuracy": "each site's personal predictor on that site's local test, averaged over sites",
    "global_accuracy": "the same personal predictors on the global test, averaged over sites",
    "balance": "the mean of local and global accuracy",
    "worst_site_accuracy": "the lowest accuracy of a personal predictor on its own site's local test",
    "shared_global_accuracy": "the one shared model on the global test; none where there is no such model",
    "shared_local_accuracy": "the one shared model on each site's local test, averaged over sites",
    "global_balanced_accuracy": "mean recall of the classes of what sites deploy on the global test, averaged over "
    "sites; where there is a shared model and nothing personal, that model's",
}
SECONDS = (
    "of the run, without the time it lay stopped; an entry under which site models were trained (fits.trained) "
    "includes that, and the others of its cell reused them"
)


def cell(source: Path, level: Level, seed: int) -> Cell:
    """One partition of one set; of sites that are all alike, the results' alpha is null."""
    alpha = level if isinstance(level, float) else None
    name = f"alpha{alpha:g}" if alpha is not None else str(level)
    place = {"set": source.stem, "alpha": alpha, "seed": seed}
    return Cell(source, place, f"{source.stem}-{name}-seed{seed}")


# Settings -------------------------------------------------------------------------------------------------------------


def study_tree(preset: str | None, flags: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Settings that all entries share: flags over the preset, the preset over FedISCA's clients."""
    tree = overlay(CLIENTS, {"train": {"precision": precision}})
    if preset is not None:
        tree = overlay(tree, read_preset(preset))
    tree = overlay(tree, flags)
    validate(tree)
    return tree


def plan(tree: Mapping[str, Any], entry: Line, where: Cell, images: str) -> Plan:
    """Check an entry's settings and name it by everything its figures depend on; `images` is the file's hash."""
    method = find(entry.method)
    own = {**own_settings(tree.get("set", {}), method.name), **entry.settings}
    seed, alpha = where.place["seed"], where.place["alpha"]
    place: dict[str, Any] = {"source": images_source(where.source), "partition_seed": seed}
    if alpha is not None:
        place["alpha"] = alpha
    common = {key: value for key, value in tree.items() if key != "set"}
    whole = overlay(overlay(common, entry.study), {"method": entry.method, "seed": seed, "data": place})
    settings = validate({**whole, "set": own})
    record = {
        "entry": entry.label,
        "method": method.name,
        "study": dict(entry.study),
        "settings": make(entry.method, own).settings.model_dump(mode="json"),
    }
    return named(where, settings, record, header(tree), images)


def header(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The study's settings in full, but for what a cell, an entry or the machine decides."""
    settings = validate({key: value for key, value in tree.items() if key != "set"})
    return study_record(settings, ("data.alpha", "data.partition_seed"))


def head(preset: str | None, study: dict[str, Any]) -> dict[str, Any]:
    """What begins a file of results."""
    return {
        "benchmark": NAME,
        "preset": preset,
        "study": study,
        "measures": {**MEASURES, "seconds": SECONDS, "standard_deviation": "of a sample: n - 1"},
    }


# Runs -----------------------------------------------------------------------------------------------------------------


class OneShot(Runs):
    """One-shot entries: those of a cell share the models that its sites trained."""

    family = "one-shot"
    benchmark, same, measures = NAME, SAME, MEASURES

    def figures(self, planned: Plan, run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
        """Accuracies, and how the work was spent."""
        reused = [row["reused"] for row in Log(run / "events.jsonl").rows() if row["kind"] == "fit"]
        values = headlines(result)
        return {
            "figures": {key: None if values[key] is None else round(values[key], 6) for key in MEASURES},
            "fits": {"trained": reused.count(False), "reused": reused.count(True)},
            "work": {row["part"]: {key: row[key] for key in ("steps", "seconds")} for row in result["work"]},
            "clusters": next((len(row["clusters"]) for row in result["clusters"]), None),
        }

    def apart(self, planned: Plan) -> str:
        """One entry of a cell at a time until its site models are there: the others wait for them."""
        trained = any(self._fits(planned).glob("*.safetensors"))
        return planned.id if trained else planned.cell.folder

    def clear(self, plans: Sequence[Plan], results: Results) -> None:
        """Also remove the site models of cells that are done."""
        unfinished = {planned.cell.folder for planned in plans if not results.has(planned)}
        for planned in plans:
            if planned.cell.folder not in unfinished:
                shutil.rmtree(self._fits(planned), ignore_errors=True)
        super().clear(plans, results)

    def needs(self, planned: Plan, entries: Sequence[Mapping[str, Any]]) -> float:
        """With the training of site models where a cell has none."""
        seconds = super().needs(planned, entries)
        if self.path(planned).exists() or self._fits(planned).exists():
            return seconds
        return seconds + expected_seconds(entries, planned.cell.source.stem, "local")

    def prepare(self, planned: Plan, run: Path) -> None:
        """Put the cell's site models where the run looks for them."""
        fits = self._fits(planned)
        fits.mkdir(exist_ok=True)
        if not (run / "fits").is_symlink():
            (run / "fits").symlink_to(Path("..") / fits.name, target_is_directory=True)

    def _fits(self, planned: Plan) -> Path:
        return self.folder / planned.cell.folder / "fits"
