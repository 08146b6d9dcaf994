"""The runs of FedMP's tables: which settings, and what is kept of a run.

Section 4. Local epochs and rounds are not in the paper; they are those of its first author's public benchmark
(LMIAPC/Medical-FL-Benchmark). The paper's network is a ResNet-50 trained on ImageNet, on images of 256 pixels, which
the files of its tables say; the protocol here is the one for small images, a ResNet-18 from scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from wardround.learn.stages import stage_name, stage_width
from wardround.measure.forgetting import WINDOW
from wardround.papers import multi_round
from wardround.papers.cells import Cell, Plan, images_source, is_drawn
from wardround.papers.runs import SECONDS, Runs, headlines, short
from wardround.papers.schema import Line
from wardround.record import deployed
from wardround.settings import overlay, validate

NAME = "fedmp_tables"
SAME = ("studies",)
Kind = Literal["natural", "iid", "shifted"]
PROTOCOL: dict[str, Any] = {
    "rounds": 100,
    "evaluate_features": True,
    "model": {"name": "resnet18"},  # its stem is the small one
    "train": {
        "epochs": 5,
        "batch": 64,
        "optimiser": "adam",
        "lr": 1e-4,
        "weight_decay": 5e-4,
        "schedule": "constant",
        "round_decay": 1.0,
    },
}
DATA: dict[Kind, dict[str, Any]] = {
    # Each place of acquisition is a site, as in TB and DR; the test images of all are merged.
    "natural": {
        "partition": "natural",
        "sites": 0,
        "test": "natural",
        "merge_val": True,
        "val_share": 0.0,
        "by_patient": False,
    },
    # Five like sites, as COVID-QU-Ex, BUSI and NeoJaundice become.
    "iid": {"partition": "iid", "sites": 5, "test": "weighted", "val_share": 0.0, "by_patient": False},
    # Five sites with like labels, each with a fixed acquisition shift: a stand-in on any set.
    "shifted": {
        "partition": "iid",
        "sites": 5,
        "shift": "fixed",
        "test": "weighted",
        "val_share": 0.0,
        "by_patient": False,
    },
}
PHANTOM_SITES = 4  # drawn images belong to no place unless they are told how many there are
MEASURES = {
    "shared_global_accuracy": "the shared model on the merged test after the last round",
    "best_round_shared_global_accuracy": "the same in its best round, chosen on the test set and so optimistic",
    "mean_shared_global_accuracy": "the same, mean over rounds",
    "global_balanced_accuracy": "mean recall of the classes of what sites deploy on the merged test, mean over sites",
    "shared_local_accuracy": "the shared model on each site's own test, mean over sites",
    "worst_site_accuracy": "what a site deploys on its own test, the lowest of the sites",
    "rounds_to_convergence": "first round from which the running mean of five stays within a point of its final value; "
    "a run of fewer than five rounds counts whole",
    "bytes": "up and down in all rounds, without what sites take home",
    "bytes_to_convergence": "the same up to the round of convergence",
    "feature_distance": "FedMP's Eq. 4 at the end: the distance of a site's features to all sites' of the class over "
    "their spread, mean over classes and sites",
    "embedding_width": "numbers in one embedding that sites share",
}
SERIES = {
    "shared_global_accuracy": "the shared model on the merged test after each round",
    "seconds": "of work from the beginning to the round's end, without measuring",
    "bytes": "from the beginning to the round's end",
}


def cell(source: Path, kind: Kind, seed: int) -> Cell:
    """One set of images, how it becomes sites, and a seed; sites are the same for all seeds."""
    return Cell(source, {"set": set_name(source, kind), "seed": seed}, f"{source.stem}-{kind}-seed{seed}")


def set_name(source: Path, kind: Kind) -> str:
    """The name of a set in the results."""
    return f"{source.stem}, shifted" if kind == "shifted" else source.stem


def study_tree(kind: Kind, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol for sites of one kind, with flags over it; the images are the cell's."""
    tree = overlay({**PROTOCOL, "data": DATA[kind]}, flags)
    validate(tree)
    return tree


def plan(tree: Mapping[str, Any], entry: Line, where: Cell, images: str) -> Plan:
    """An entry on the cell's images, which are not the file's: a file of results holds several sets."""
    data: dict[str, Any] = {"source": images_source(where.source)}
    if is_drawn(where.source) and tree["data"]["partition"] == "natural":
        data["sites"] = PHANTOM_SITES
    return multi_round.plan(tree, entry, where, images, data)


def head(studies: Mapping[str, Any]) -> dict[str, Any]:
    """What begins a file of results; it holds several sets of images."""
    return {"benchmark": NAME, "studies": studies, "measures": {**MEASURES, "seconds": SECONDS}, "series": SERIES}


class FedMP(Runs):
    """Entries with their figures, and the rounds themselves."""

    family = "fedmp"
    benchmark, same, measures = NAME, SAME, MEASURES

    def figures(self, planned: Plan, run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
        """Every measure, and a list by round of every series."""
        values = headlines(result)
        rounds = multi_round.by_round(result, SERIES)
        bytes_by_round = {point["round"] + 1: point["bytes"] for point in result["rounds"]}
        reaches = [row["relative"] for row in result["features"] if row["relative"] is not None]
        values |= to_convergence(values.get("rounds_to_convergence"), bytes_by_round)
        values |= {
            "bytes": rounds["bytes"][-1],
            "feature_distance": sum(reaches) / len(reaches) if reaches else None,
            "embedding_width": _embedding_width(run, planned.record["settings"]),
        }
        return {"figures": {key: short(values.get(key)) for key in MEASURES}, "rounds": rounds}


def to_convergence(converged: float | None, bytes_by_round: Mapping[int, int]) -> dict[str, Any]:
    """The rounds until convergence and the bytes up to then; rounds count from 1, as `converged` does.

    A run that is too short for the rule to ever hold, as few-shot FedMP's three rounds are, counts whole: its end was
    set beforehand, and what it cost is all that it sent.
    """
    last = max(bytes_by_round)
    if last < WINDOW:
        converged = float(last)
    reached = None if converged is None else bytes_by_round[int(converged)]
    return {"rounds_to_convergence": converged, "bytes_to_convergence": reached}


def _embedding_width(run: Path, settings: Mapping[str, Any]) -> int | None:
    """How many numbers a shared embedding has, where the method shares some."""
    shared = deployed.read(run, deployed.SHARED) if "stage" in settings else None
    if shared is None:
        return None
    spec = shared.members[0].spec
    return stage_width(spec, stage_name(spec, settings["stage"]))
