"""What each step of a site's choice under `consult` is worth, on the same site models.

A site that finds the panel less often right on its validation images than its own model expects less of classes that
the panel names too readily, and where that is not enough takes more of its own prior. Here a site may do both, or the
second alone; beside them the panel as it is, and with a fixed quarter of the prior, which asks no validation images.

    python benchmarks/consult_site_choice.py bloodmnist.npz dermamnist.npz oct3.npz --smoke --seeds 0 1 2 3 4 5
    python benchmarks/consult_site_choice.py --table --page docs/consult.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from experiments import Experiment, main_of
from predictors import measured, over_seeds, row, table
from trained_cells import Cell
from wardround.methods import personal_prior

NAME = "consult_site_choice"
METHOD = "consult"
QUARTER = 0.25
WHO = {
    "own": "the sites' own models",
    "shared": "the shared predictor",
    "quarter": "the shared predictor with a quarter of each site's prior",
    "prior": "what sites deploy where they may take more of their prior and lower no class",
    "deployed": "what sites deploy",
}
COLUMNS = {
    "own": "own models",
    "shared": "shared",
    "quarter": "a fixed ¼ of the prior",
    "prior": "more of the prior",
    "deployed": "classes lowered, too",
}


def _nothing(scores: Tensor, *_: object) -> Tensor:
    """In the place of `lowering`: no class is moved. No setting does it, as nobody but this table would want it."""
    return torch.zeros(scores.shape[1], dtype=torch.float64)


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row: all predictors of a cell."""
    names = sorted(cell.answers)
    ctx, method, state, shared = cell.shared(METHOD, cell.answers)
    alone, everywhere = cell.alone(shared), dict.fromkeys(names, shared)
    found = {"own": cell.accuracies(alone), "shared": cell.accuracies(everywhere)}
    found["quarter"] = cell.at_sites(cell.make(METHOD, prior=QUARTER), ctx, state)
    with mock.patch.object(personal_prior, "lowering", _nothing):
        found["prior"] = cell.at_sites(method, ctx, state)
    found["deployed"] = cell.at_sites(method, ctx, state)
    yield row(place, found)


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set and alpha, and a last one, of all."""
    return table(record["summary"], COLUMNS, all_sets=True)


EXPERIMENT = Experiment(NAME, measured(WHO), (METHOD,), entries, over_seeds(WHO), markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
