"""`consult` where there are only two classes, and why its sharpness depends on how many there are.

The classes of a set are merged into two before sites are dealt their images. Beside what sites have alone and
`class-ensemble`, `consult` is asked with its sharpness, and with that of eight classes, whatever their number.

    python benchmarks/consult_two_classes.py bloodmnist.npz dermamnist.npz oct3.npz --smoke
    python benchmarks/consult_two_classes.py --table --page docs/consult.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from experiments import Experiment, Rows, by_place, main_of, means
from trained_cells import Cell, shared_predictor
from wardround.errors import BadInput
from wardround.learn.predictor import Predictor
from wardround.methods.consult import CLASSES
from wardround.methods.state import State
from wardround.papers.summaries import cells, headed

NAME = "consult_two_classes"
METHOD, OTHER = "consult", "class-ensemble"
SECOND = {  # classes that become the second one
    "bloodmnist": (2, 4, 5, 7),  # what is no granulocyte
    "dermamnist": (0, 1, 2, 3, 4, 6),  # what is no naevus
    "oct3": (2,),  # normal
}
WHO = {
    "own": "the sites' own models",
    "class_ensemble": f"the shared predictor of `{OTHER}`",
    "shared": f"the shared predictor of `{METHOD}`",
    "deployed": f"what sites deploy by `{METHOD}`",
    "shared_as_eight": "the shared predictor with the sharpness of eight classes",
    "deployed_as_eight": "what sites deploy with that",
}
FIGURES = {
    f"{who}_{test}": f"accuracy of {words} on {on}, averaged over sites"
    for who, words in WHO.items()
    for test, on in (("local", "each site's local test"), ("global", "the global test"))
}


def merged(source: Path, folder: Path) -> Path:
    """The set with two classes; one that has two already is taken as it is."""
    arrays = dict(np.load(source))
    labels = {name: array for name, array in arrays.items() if name.endswith("_labels")}
    if source.stem in SECOND:
        arrays |= {name: np.isin(array, SECOND[source.stem]).astype(np.uint8) for name, array in labels.items()}
    elif any(array.max() > 1 for array in labels.values()):
        raise BadInput(f"{source} has more than two classes; use {', '.join(SECOND)}, or a set of two")
    target = folder / f"{source.stem}-2.npz"
    np.savez(target, **arrays)
    return target


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row: all predictors of a cell."""
    names, found = sorted(cell.answers), {}
    _, _, _, other = cell.shared(OTHER, cell.answers)
    found["class_ensemble"] = cell.accuracies(dict.fromkeys(names, other))
    sharpness = float(cell.make(METHOD).settings.sharpness)
    for end, given in {"": sharpness, "_as_eight": sharpness * len(cell.data.classes) / CLASSES}.items():
        method = cell.make(METHOD, sharpness=given)
        ctx = cell.context(method)
        *_, state = method.absorb(ctx, State(), cell.answers)
        shared = shared_predictor(method, ctx, state)
        own = {name: Predictor(shared.classes, (shared.members[i],)) for i, name in enumerate(names)}
        found["own"] = cell.accuracies(own)
        found[f"shared{end}"] = cell.accuracies(dict.fromkeys(names, shared))
        found[f"deployed{end}"] = cell.at_sites(method, ctx, state)
    figures = {f"{who}_{test}": found[who][i] for who in WHO for i, test in enumerate(("local", "global"))}
    yield {**place, "figures": {name: round(value, 6) for name, value in figures.items()}}


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """Means over seeds."""
    return [{**head, **means(found, FIGURES)} for head, found in by_place(rows, ("set", "alpha"))]


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set and alpha: local / global, in percent; and a last one, of all."""
    asked = ["own models", "`class-ensemble`", "shared", "deployed", "shared, β = 5", "deployed, β = 5"]
    lines = headed(["set", "α", "seeds", *asked])
    rows = record["summary"]
    for row in rows:
        lines.append(cells([row["set"], f"{row['alpha']:g}", str(len(row["seeds"])), *_figures(row)]))
    if rows:
        all_rows = {name: mean(row[name] for row in rows) for name in FIGURES}
        lines.append(cells(["all", "", "", *_figures(all_rows)]))
    return "\n".join(lines)


def _figures(row: Mapping[str, float]) -> list[str]:
    return [f"{100 * row[f'{who}_local']:.1f} / {100 * row[f'{who}_global']:.1f}" for who in WHO]


EXPERIMENT = Experiment(NAME, FIGURES, (METHOD, OTHER), entries, summarise, markdown, images=merged)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
