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

from experiments import Experiment, Rows, by_place, main_of, means
from trained_cells import Cell
from wardround.learn.predictor import Predictor
from wardround.measure import BINS, calibration_gap_in_mix
from wardround.methods.state import State
from wardround.papers.summaries import cells, headed

NAME = "consult_calibration"
METHOD = "consult"
WHO = {
    "own": "the sites' own models",
    "shared": "the shared predictor",
    "before": "what sites deploy, not calibrated",
    "after": "what sites deploy, calibrated",
}
FIGURES = {
    f"{who}_{test}": f"expected calibration error ({BINS} equal bins) of {words} on {mix}, averaged over sites"
    for who, words in WHO.items()
    for test, mix in (("local", "each site's local test"), ("global", "the global test"))
}


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row: all predictors of a cell."""
    labels = cell.data.test.labels.cpu()
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    predictors = _predictors(cell)
    for site in cell.data.sites:
        everybody = labels.bincount(minlength=len(cell.data.classes)).double()
        own = everybody if site.test.class_weights is None else site.test.class_weights.cpu()
        for who, of_site in predictors.items():
            scores = cell.scores(of_site[site.name])
            found[f"{who}_local"].append(calibration_gap_in_mix(scores, labels, own))
            found[f"{who}_global"].append(calibration_gap_in_mix(scores, labels, everybody))
    yield {**place, "figures": {name: round(mean(errors), 6) for name, errors in found.items()}}
    cell.forget()


def _predictors(cell: Cell) -> dict[str, dict[str, Predictor]]:
    """By who they are, then by site."""
    ctx, method, state, shared = cell.shared(METHOD, cell.answers)
    home, names = method.deliver(ctx, state), sorted(cell.answers)
    deployed = {}
    for who, calibrate in (("before", False), ("after", True)):
        made = cell.make(METHOD, calibrate=calibrate)
        works = {s.name: made.personal(cell.context(made), s, home[s.name], State()) for s in cell.data.sites}
        deployed[who] = cell.personal(works)
    own = {name: Predictor(shared.classes, (shared.members[i],)) for i, name in enumerate(names)}
    return {"own": own, "shared": dict.fromkeys(names, shared), **deployed}


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """Means over seeds."""
    return [{**head, **means(found, FIGURES)} for head, found in by_place(rows, ("set", "alpha"))]


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set and alpha: local / global, in percent."""
    head = ["set", "α", "seeds", "own models", "shared", "deployed, not calibrated", "deployed, calibrated"]
    lines = headed(head)
    for row in record["summary"]:
        figures = [f"{100 * row[f'{who}_local']:.1f} / {100 * row[f'{who}_global']:.1f}" for who in WHO]
        lines.append(cells([row["set"], f"{row['alpha']:g}", str(len(row["seeds"])), *figures]))
    return "\n".join(lines)


EXPERIMENT = Experiment(NAME, FIGURES, (METHOD,), entries, summarise, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
