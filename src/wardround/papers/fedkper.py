"""The runs of FedKPer's tables: which settings, and what is kept of a run.

Section 4.1 and Table 1. What the paper does not say is taken from its public code (olivesgatech/FedKPer): batch 12,
momentum, weight decay, the rate's decay by round, the partition on the official training part, one partition and one
sequence of participants for all seeds and methods, the roughly class-balanced local test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.papers.cells import Cell, Plan, images_source
from wardround.papers.library import table
from wardround.papers.multi_round import by_round
from wardround.papers.runs import SECONDS, Runs, headlines, short
from wardround.settings import overlay, validate

NAME = "fedkper_table1"
SAME = ("set", "study")
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
        "by_patient": False,
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
OTHER_SITES = 20  # of a set that is not in the table
MEASURES = {
    "mean_shared_global_accuracy": "the shared model on the global test, mean over rounds",
    "backward_transfer": "change of the shared model on sites' local tests since they last took part, mean over rounds",
    "shared_global_consistency": "consistency of the shared model on the global test",
    "mean_trained_local_accuracy": "asked sites right after their training on their local tests, mean over rounds",
    "worst_trained_local_accuracy": "the lowest of these in a round, mean over rounds",
    "trained_local_consistency": "consistency of these by round",
    "balance_over_rounds": "the mean of global and local",
    "deviation_shared_global": "standard deviation over rounds of the first",
    "deviation_backward_transfer": "standard deviation over rounds of the second",
    "deviation_trained_local": "standard deviation over rounds of the fourth",
    "bottom_decile_trained_local_accuracy": "sites' means over their rounds, the lowest tenth of the sites",
    "rounds_to_convergence": "first round from which the running mean of five stays within a point of its final value",
    "shared_global_accuracy": "the shared model on the global test after the last round",
    "shared_local_accuracy": "the shared model on sites' local tests after the last round",
    "local_accuracy": "what sites deploy at the end on their local tests",
    "global_accuracy": "what sites deploy at the end on the global test",
}
SERIES = {
    "shared_global_accuracy": "the shared model on the global test after each round",
    "trained_local_accuracy": "the round's sites right after their training on their local tests",
    "backward_transfer": "by round",
    "seconds": "of work from the beginning to the round's end, without measuring",
    "bytes": "from the beginning to the round's end",
}


def sites_of(images: str) -> int | None:
    """How many sites the paper makes of a set; none where the set is not in its table."""
    axes = table("fedkper-1").axes
    return axes.sites_where.get(images, axes.sites)[0] if images in axes.datasets else None


def cell(source: Path, seed: int) -> Cell:
    """One set of images under one seed; the partition is the same for all seeds."""
    return Cell(source, {"set": source.stem, "seed": seed}, f"{source.stem}-seed{seed}")


def study_tree(source: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol on a set of images, with flags over it."""
    images = {"source": images_source(source), "sites": sites_of(source.stem) or OTHER_SITES}
    tree = overlay(overlay(PROTOCOL, {"data": images}), flags)
    validate(tree)
    return tree


def head(images: str, study: dict[str, Any]) -> dict[str, Any]:
    """What begins a file of results."""
    measures = {**MEASURES, "seconds": SECONDS}
    return {"benchmark": NAME, "set": images, "study": study, "measures": measures, "series": SERIES}


class FedKPer(Runs):
    """Entries with their figures over rounds, and the rounds themselves."""

    family = "fedkper"
    benchmark, same, measures = NAME, SAME, MEASURES

    def figures(self, planned: Plan, run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
        """Every measure, and a list by round of every series."""
        values = headlines(result)
        return {"figures": {key: short(values.get(key)) for key in MEASURES}, "rounds": by_round(result, SERIES)}
