"""How far `consult`'s probabilities can be taken at their word, before and after a site's calibration.

In each cell (a set, a level of skew, a seed) the sites train once. Figures are expected calibration errors on the test
images, as each site's patients are mixed and as everybody's are, of the sites' own models, of the shared predictor, and
of what sites deploy with the factor that their validation images ask for and without it (`consult.calibrate`).

    python benchmarks/consult_calibration.py bloodmnist.npz --preset fast --out papers/consult_calibration.json
    python benchmarks/consult_calibration.py --table --out papers/consult_calibration.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from experiments import Experiment, main_of
from predictors import measured, over_seeds, row, table
from trained_cells import Cell
from wardround.learn.predictor import Predictor
from wardround.measure import BINS, calibration_gap_in_mix
from wardround.methods.state import State

NAME = "consult_calibration"
METHOD = "consult"
WHO = {
    "own": "the sites' own models",
    "shared": "the shared predictor",
    "before": "what sites deploy, not calibrated",
    "after": "what sites deploy, calibrated",
}
COLUMNS = {
    "own": "own models",
    "shared": "shared",
    "before": "deployed, not calibrated",
    "after": "deployed, calibrated",
}


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row: all predictors of a cell."""
    yield row(place, {who: _errors(cell, of_site) for who, of_site in _predictors(cell).items()})
    cell.forget()


def _errors(cell: Cell, of_site: Mapping[str, Predictor]) -> tuple[float, float]:
    """Local and global, averaged over sites."""
    labels = cell.data.test.labels.cpu()
    everybody = labels.bincount(minlength=len(cell.data.classes)).double()
    found = []
    for site in cell.data.sites:
        own = everybody if site.test.class_weights is None else site.test.class_weights.cpu()
        scores = cell.scores(of_site[site.name])
        found.append([calibration_gap_in_mix(scores, labels, mix) for mix in (own, everybody)])
    local, shared = (mean(errors) for errors in zip(*found, strict=True))
    return local, shared


def _predictors(cell: Cell) -> dict[str, dict[str, Predictor]]:
    """By who they are, then by site."""
    ctx, method, state, shared = cell.shared(METHOD, cell.answers)
    home, names = method.deliver(ctx, state), sorted(cell.answers)
    deployed = {}
    for who, calibrate in (("before", False), ("after", True)):
        made = cell.make(METHOD, calibrate=calibrate)
        works = {s.name: made.personal(cell.context(made), s, home[s.name], State()) for s in cell.data.sites}
        deployed[who] = cell.personal(works)
    return {"own": cell.alone(shared), "shared": dict.fromkeys(names, shared), **deployed}


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set and alpha."""
    return table(record["summary"], COLUMNS)


EXPERIMENT = Experiment(
    NAME,
    measured(WHO, f"expected calibration error ({BINS} equal bins)"),
    (METHOD,),
    entries,
    over_seeds(WHO),
    markdown,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
