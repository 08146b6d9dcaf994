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
from typing import Any

import numpy as np

from experiments import Experiment, main_of
from predictors import measured, over_seeds, row, table
from trained_cells import Cell, shared_predictor
from wardround.errors import BadInput
from wardround.methods.consult import CLASSES
from wardround.methods.state import State

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
COLUMNS = {
    "own": "own models",
    "class_ensemble": f"`{OTHER}`",
    "shared": "shared",
    "deployed": "deployed",
    "shared_as_eight": "shared, β = 5",
    "deployed_as_eight": "deployed, β = 5",
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
        found["own"] = cell.accuracies(cell.alone(shared))
        found[f"shared{end}"] = cell.accuracies(dict.fromkeys(names, shared))
        found[f"deployed{end}"] = cell.at_sites(method, ctx, state)
    yield row(place, {name: found[name] for name in WHO})


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set and alpha, and a last one, of all."""
    return table(record["summary"], COLUMNS, all_sets=True)


EXPERIMENT = Experiment(NAME, measured(WHO), (METHOD, OTHER), entries, over_seeds(WHO), markdown, images=merged)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
