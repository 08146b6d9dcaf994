"""What a model tells of its site's label counts, told or not: how near the guess is, and what a panel makes of it.

In each cell (a set, a level of skew, a seed) the sites train once. Their models alone then say how many images of each
class each had (`methods/trust.py`), and `consult` is asked with counts and without.

    python benchmarks/counts_from_models.py bloodmnist.npz --preset fast --out papers/counts_from_models.json
    python benchmarks/counts_from_models.py --table --out papers/counts_from_models.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from experiments import Experiment, Rows, by_place, main_of, means
from trained_cells import Cell
from wardround.exchange.bundle import LABEL_COUNTS, Bundle
from wardround.methods.base import join_groups
from wardround.methods.trust import guessed, held_to_model
from wardround.papers.summaries import cells, headed

NAME = "counts_from_models"
METHOD = "consult"
FIGURES = {
    "off": "half of the sum of |guessed share − share| over classes, averaged over sites",
    "unseen": "the largest guessed share of a class that a site never had",
    "cut": "share of the sites' own, true counts that is not believed, averaged over sites",
    "told": "global accuracy of the shared predictor with exact counts",
    "untold": "the same with no counts told",
}


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row: what all models of a cell tell."""
    off, unseen, cut = [], [0.0], []
    for site in cell.data.sites:
        counts, weights = site.train.counts().cpu().double(), join_groups(cell.answers[site.name])
        shares, guess = counts / counts.sum(), guessed(weights, 1)
        off.append(float((guess - shares).abs().sum()) / 2)
        unseen += guess[counts == 0].tolist()
        cut.append(1 - float(held_to_model(counts, weights).sum() / counts.sum()))
    silent = {name: _without_counts(answer) for name, answer in cell.answers.items()}
    told, untold = (cell.tally(cell.shared(METHOD, answers)[-1]).accuracy() for answers in (cell.answers, silent))
    figures = {"off": mean(off), "unseen": max(unseen), "cut": mean(cut), "told": told, "untold": untold}
    yield {**place, "figures": {name: round(value, 6) for name, value in figures.items()}}
    cell.forget()


def _without_counts(answer: Bundle) -> Bundle:
    return replace(answer, groups={name: group for name, group in answer.groups.items() if name != LABEL_COUNTS})


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """Means over seeds; of what was never there, the most."""
    return [
        {**head, **means(found, FIGURES), "unseen": max(row["figures"]["unseen"] for row in found)}
        for head, found in by_place(rows, ("set", "alpha"))
    ]


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set and alpha, in percent."""
    head = ["set", "α", "seeds", "shares off by", "most for a class not there", "true counts cut", "told", "not told"]
    lines = headed(head)
    for row in record["summary"]:
        figures = [f"{100 * row[name]:.1f}" for name in FIGURES]
        lines.append(cells([row["set"], f"{row['alpha']:g}", str(len(row["seeds"])), *figures]))
    return "\n".join(lines)


EXPERIMENT = Experiment(NAME, FIGURES, (METHOD,), entries, summarise, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
