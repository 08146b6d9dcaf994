"""The lines and cells of `one_shot_grid.py`: which methods, under which settings, on which partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resumable import Entry, Plan, record_hash
from wardround.methods.registry import find, make, own_settings
from wardround.settings import overlay, read_preset, validate

# FedISCA's clients: its public code, `train_classifier.py`; the model sent is the best one on the site's own tenth.
CLIENTS: dict[str, Any] = {
    "rounds": 1,
    "init": "own",
    "data": {"partition": "dirichlet", "capped": True, "sites": 5, "merge_val": True, "val_share": 0.1},
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


ENTRIES = (
    Entry("majority", "majority"),
    Entry("local", "local"),
    Entry("ensemble", "ensemble"),
    Entry("confidence-ensemble", "confidence-ensemble"),
    Entry("class-ensemble", "class-ensemble"),
    Entry("fedavg, own init", "fedavg"),
    Entry("fedavg, common init", "fedavg", study={"init": "common"}),
    Entry("dafl", "dafl"),
    Entry("dense", "dense"),
    Entry("coboosting", "coboosting"),
    Entry("deepinversion", "deepinversion"),
    Entry("fedisca", "fedisca"),
    Entry("efedisca", "efedisca"),
    Entry("fedbicross", "fedbicross"),
)
ABLATIONS = (  # FedBiCross's Table 2, and FedISCA as its public code adapts the teachers
    Entry("fedbicross, intra-cluster", "fedbicross", {"cross": "intra"}),
    Entry("fedbicross, uniform cross", "fedbicross", {"cross": "uniform"}),
    Entry("fedbicross, similarity-weighted", "fedbicross", {"cross": "similarity"}),
    Entry("fedbicross, not personalised", "fedbicross", {"personal": False}),
    Entry("fedbicross, one cluster", "fedbicross", {"clusters": 1}),
    Entry("fedbicross, one cluster, not personalised", "fedbicross", {"clusters": 1, "personal": False}),
    Entry("fedisca, batch adaptation", "fedisca", {"adaptation": "batch"}),
)


@dataclass(frozen=True)
class Cell:
    """One partition of one set."""

    source: Path
    alpha: float
    seed: int

    @property
    def place(self) -> dict[str, Any]:
        """The cell as the results name it."""
        return {"set": self.source.stem, "alpha": self.alpha, "seed": self.seed}

    @property
    def folder(self) -> str:
        """The cell as a folder's name."""
        return f"{self.source.stem}-alpha{self.alpha:g}-seed{self.seed}"


# Settings -------------------------------------------------------------------------------------------------------------


def study_tree(preset: str | None, flags: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Settings that all entries share: flags over the preset, the preset over FedISCA's clients."""
    tree = overlay(CLIENTS, {"train": {"precision": precision}})
    if preset is not None:
        tree = overlay(tree, read_preset(preset))
    tree = overlay(tree, flags)
    validate(tree)
    return tree


def chosen(methods: Sequence[str] | None, ablations: bool) -> list[Entry]:
    """The entries of the table that are named, or all; a method that is in no table is an entry of its own."""
    table = [*ENTRIES, *(ABLATIONS if ablations else ())]
    if methods is None:
        return table
    found: list[Entry] = []
    for name in dict.fromkeys(methods):
        found += [entry for entry in table if entry.group == name] or [Entry(find(name).name, name)]
    return found


def plan(tree: Mapping[str, Any], entry: Entry, cell: Cell, images: str) -> Plan:
    """Check an entry's settings and name it by everything its figures depend on; `images` is the file's hash."""
    method = find(entry.method)
    compared = [find(other.method).name for other in ENTRIES]
    own = {**own_settings(tree.get("set", {}), method.name, compared), **entry.own}
    place = {"source": str(cell.source.resolve()), "alpha": cell.alpha, "partition_seed": cell.seed}
    common = {key: value for key, value in tree.items() if key != "set"}
    whole = overlay(overlay(common, entry.study), {"method": entry.method, "seed": cell.seed, "data": place})
    settings = validate({**whole, "set": own})
    record = {
        "entry": entry.label,
        "method": method.name,
        "study": dict(entry.study),
        "settings": make(entry.method, own).settings.model_dump(mode="json"),
    }
    recipe = record_hash(record)
    depends = {"study": header(tree), "recipe": recipe, "images": images, **cell.place}
    return Plan(cell, entry, settings, record, recipe, record_hash(depends))


def header(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The study's settings in full, but for what a cell, an entry or the machine decides."""
    found = validate({key: value for key, value in tree.items() if key != "set"}).model_dump(mode="json")
    for key in ("name", "method", "seed", "device", "workers", "set"):
        del found[key]
    for key in ("source", "folder", "alpha", "partition_seed"):
        del found["data"][key]
    return found
