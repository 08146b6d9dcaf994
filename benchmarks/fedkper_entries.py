"""FedKPer's Table 1 as data: its protocol, its twelve methods with their settings, and the figures it prints.

Z. Fowler and G. AlRegib, "FedKPer", ICIP 2026 (arXiv 2605.00698), section 4.1 and Table 1. What the paper does not say
is taken from its public code (olivesgatech/FedKPer): batch 12, momentum, weight decay, the rate's decay by round, the
partition on the official training part, one partition and one sequence of participants for all seeds and methods, the
roughly class-balanced local test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resumable import Entry, Plan, images_source, record_hash
from wardround.errors import BadInput
from wardround.methods.registry import find, make
from wardround.settings import overlay, validate

PROTOCOL: dict[str, Any] = {
    "rounds": 100,
    "participants": 0.1,
    "evaluate_trained": True,
    "data": {
        "partition": "dirichlet",
        "alpha": 0.1,
        "capped": True,
        "min_size": 10,
        "partition_seed": 0,
        "merge_val": False,
        "val_share": 0.0,
        "test": "balanced",
        "test_share": 0.2,
    },
    "model": {"name": "cnn4"},
    "train": {
        "epochs": 5,
        "batch": 12,
        "optimiser": "sgd",
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-5,
        "schedule": "constant",
        "round_decay": 0.99,
    },
}
SITES = {"bloodmnist": 20, "organcmnist": 30, "organsmnist": 50}
OTHER_SITES = 20  # of a set that is not in the table

# The baselines' settings are not in the paper. Those of the first five are FedNTD's published configurations, of which
# FedKPer's code is a fork; those of the others are each method's own default, which its file gives the source of. The
# figure on the global test needs a head where heads stay at the sites: their mean.
ENTRIES = (
    Entry("fedavg", "fedavg"),
    Entry("fedcurv", "fedcurv", {"lam": 1.0, "images": 500}),
    Entry("moon", "moon", {"mu": 0.1, "tau": 0.5}),
    Entry("fedprox", "fedprox", {"mu": 1.0}),
    Entry("fedntd", "fedntd", {"beta": 1.0, "tau": 1.0}),
    Entry("fedas", "fedas", {"heads": "averaged"}),
    Entry("fedala", "fedala"),
    Entry("ditto", "ditto", {"lam": 1.0}),
    Entry("fedper", "fedper", {"heads": "averaged"}),
    Entry("fedkd", "fedkd"),
    Entry("fedbabu", "fedbabu"),
    Entry("fedkper", "fedkper"),
)
ABLATIONS = (  # its Figure 4; its public code; the cap on λ and what λ is taken over
    Entry("fedkper, KD only", "fedkper", {"score": False}),
    Entry("fedkper, aggregation only", "fedkper", {"knowledge": False}),
    Entry("fedkper, as the code", "fedkper", {"profile": "code"}),
    Entry("fedkper, no cap", "fedkper", {"cap": 1e9}),
    Entry("fedkper, cap 1", "fedkper", {"cap": 1.0}),
    Entry("fedkper, λ of the site", "fedkper", {"lambda_over": "site"}),
)

COLUMNS = {  # a figure's key: its column in the table, in the paper's order
    "mean_shared_global_accuracy": "global",
    "backward_transfer": "transfer",
    "shared_global_consistency": "consistency",
    "mean_trained_local_accuracy": "local",
    "worst_trained_local_accuracy": "worst",
    "trained_local_consistency": "local consistency",
    "balance_over_rounds": "balance",
}
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {  # Table 1 by set and method, in the order of COLUMNS
    "bloodmnist": {
        "fedavg": (0.409, -0.255, 0.721, 0.775, 0.664, 0.747, 0.592),
        "fedcurv": (0.472, -0.243, 0.733, 0.806, 0.705, 0.742, 0.639),
        "moon": (0.426, -0.251, 0.710, 0.787, 0.677, 0.756, 0.606),
        "fedprox": (0.431, -0.280, 0.717, 0.828, 0.729, 0.718, 0.629),
        "fedntd": (0.589, -0.191, 0.807, 0.849, 0.766, 0.767, 0.719),
        "fedas": (0.315, -0.260, 0.594, 0.773, 0.638, 0.688, 0.544),
        "fedala": (0.516, -0.225, 0.695, 0.899, 0.831, 0.857, 0.708),
        "ditto": (0.450, -0.233, 0.696, 0.794, 0.674, 0.710, 0.622),
        "fedper": (0.325, -0.286, 0.597, 0.782, 0.653, 0.692, 0.554),
        "fedkd": (0.426, -0.216, 0.693, 0.811, 0.686, 0.773, 0.618),
        "fedbabu": (0.523, -0.248, 0.743, 0.870, 0.792, 0.793, 0.696),
        "fedkper": (0.645, -0.127, 0.823, 0.868, 0.796, 0.796, 0.757),
    },
    "organcmnist": {
        "fedavg": (0.568, -0.077, 0.818, 0.844, 0.717, 0.747, 0.706),
        "fedcurv": (0.551, -0.081, 0.806, 0.830, 0.691, 0.803, 0.690),
        "moon": (0.559, -0.082, 0.805, 0.840, 0.712, 0.792, 0.700),
        "fedprox": (0.544, -0.073, 0.847, 0.836, 0.701, 0.768, 0.690),
        "fedntd": (0.618, -0.066, 0.838, 0.868, 0.754, 0.859, 0.743),
        "fedas": (0.371, -0.162, 0.685, 0.810, 0.656, 0.794, 0.591),
        "fedala": (0.523, -0.129, 0.809, 0.884, 0.803, 0.807, 0.703),
        "ditto": (0.564, -0.113, 0.811, 0.841, 0.716, 0.819, 0.702),
        "fedper": (0.415, -0.174, 0.711, 0.818, 0.682, 0.813, 0.616),
        "fedkd": (0.328, -0.179, 0.692, 0.731, 0.570, 0.741, 0.530),
        "fedbabu": (0.557, -0.090, 0.836, 0.855, 0.732, 0.835, 0.706),
        "fedkper": (0.660, -0.013, 0.924, 0.889, 0.797, 0.868, 0.774),
    },
    "organsmnist": {
        "fedavg": (0.445, -0.103, 0.811, 0.686, 0.430, 0.809, 0.565),
        "fedcurv": (0.428, -0.111, 0.777, 0.681, 0.429, 0.824, 0.555),
        "moon": (0.445, -0.102, 0.783, 0.684, 0.430, 0.796, 0.564),
        "fedprox": (0.453, -0.099, 0.826, 0.696, 0.452, 0.837, 0.575),
        "fedntd": (0.514, -0.072, 0.851, 0.729, 0.490, 0.798, 0.622),
        "fedas": (0.294, -0.093, 0.651, 0.654, 0.391, 0.745, 0.474),
        "fedala": (0.375, -0.172, 0.719, 0.750, 0.584, 0.757, 0.563),
        "ditto": (0.438, -0.089, 0.790, 0.675, 0.398, 0.757, 0.557),
        "fedper": (0.332, -0.117, 0.668, 0.668, 0.424, 0.767, 0.500),
        "fedkd": (0.224, -0.182, 0.650, 0.569, 0.372, 0.662, 0.396),
        "fedbabu": (0.459, -0.095, 0.806, 0.739, 0.491, 0.823, 0.599),
        "fedkper": (0.517, -0.024, 0.899, 0.736, 0.511, 0.862, 0.626),
    },
}


@dataclass(frozen=True)
class Cell:
    """One set of images under one seed; the partition is the same for all seeds."""

    source: Path
    seed: int

    @property
    def place(self) -> dict[str, Any]:
        """The cell as the results name it."""
        return {"set": self.source.stem, "seed": self.seed}

    @property
    def folder(self) -> str:
        """The cell as a folder's name."""
        return f"{self.source.stem}-seed{self.seed}"


def study_tree(source: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol on a set of images, with flags over it."""
    images = {"source": images_source(source), "sites": SITES.get(source.stem, OTHER_SITES)}
    tree = overlay(overlay(PROTOCOL, {"data": images}), flags)
    validate(tree)
    return tree


def chosen(methods: Sequence[str] | None, ablations: bool) -> list[Entry]:
    """The entries of the table that are named, or all; with ablations, those of a method that is named, too."""
    table = [*ENTRIES, *(ABLATIONS if ablations else ())]
    for name in methods or ():
        if all(entry.group != name for entry in table):
            raise BadInput(f"{name!r} is not in the table; choose from {', '.join(e.label for e in ENTRIES)}")
    return [entry for entry in table if methods is None or entry.group in methods]


def plan(tree: Mapping[str, Any], entry: Entry, cell: Cell, images: str) -> Plan:
    """Check an entry's settings and name it by everything its figures depend on; `images` is the file's hash."""
    settings = validate({**tree, "method": entry.method, "seed": cell.seed, "set": dict(entry.own)})
    record = {
        "entry": entry.label,
        "method": find(entry.method).name,
        "settings": make(entry.method, dict(entry.own)).settings.model_dump(mode="json"),
    }
    recipe = record_hash(record)
    depends = {"study": header(tree), "recipe": recipe, "images": images, **cell.place}
    return Plan(cell, entry, settings, record, recipe, record_hash(depends))


def header(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The study's settings in full, but for what an entry, a seed or the machine decides."""
    found = validate(tree).model_dump(mode="json")
    for key in ("name", "method", "seed", "device", "workers", "set"):
        del found[key]
    for key in ("source", "folder"):
        del found["data"][key]
    return found
