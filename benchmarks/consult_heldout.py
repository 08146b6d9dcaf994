"""Whether `consult` knows what it does not know: images of a class that no site has trained on.

In each cell (a set, a level of skew, a seed, a class) the images of one class are taken from all sites before they
train. Then the test images of that class are shown among the others. The score is a predictor's familiarity
(`Predictor.familiarity`), beside it its highest probability. Figures are the area under the ROC curve with which it
tells known from held-out images and, of what sites deploy, the shares of known and of held-out test images that are
marked as unfamiliar. A cell is kept in `--out` when it is done and is not done again; trained models wait in `--work`.

    python benchmarks/consult_heldout.py bloodmnist.npz --preset fast --device cuda --out papers/consult_heldout.json
    python benchmarks/consult_heldout.py bloodmnist.npz --smoke --classes 0 1 --seeds 0 --alphas 0.3 --out smoke.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from experiments import Experiment, main_of
from trained_cells import Cell
from wardround.audit.roc import roc
from wardround.data.federation import Site
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.methods.state import State
from wardround.papers.summaries import cells, headed

NAME = "consult_heldout"
METHODS = ("consult", "class-ensemble", "ensemble")
FIGURES = {
    "auroc": "area under the ROC curve with which the shared predictor's familiarity tells test images of classes that "
    "sites have seen from those of the held-out class",
    "probability_auroc": "the same of its highest probability",
    "personal_auroc": "that of the familiarity of what sites deploy, averaged over sites",
    "marked_known": "share of test images of known classes below the site's floor, averaged over sites that have one",
    "marked_held_out": "the same of the held-out class",
}


def without(site: Site, part: Mapping[str, Any]) -> Site:
    """The site as if it had never seen the class."""
    most = len(site.train.classes) - 1
    if not 0 <= part["class"] <= most:
        raise BadInput(f"there is no class {part['class']} to hold out; name some of 0 to {most} with --classes")

    def rest(images: ImageSet) -> ImageSet:
        return images.take(torch.nonzero(images.labels != part["class"]).flatten())

    return replace(site, train=rest(site.train), val=rest(site.val))


def figures(cell: Cell, method: str, held_out: Tensor) -> dict[str, float | None]:
    """How well one method tells them apart; None where no site has a floor."""
    ctx, made, state, shared = cell.shared(method, cell.answers)
    delivered = made.deliver(ctx, state)
    works = {s.name: made.personal(ctx, s, delivered[s.name], State()) for s in cell.data.sites if len(s.train)}
    own = [*cell.personal(works).values()]

    def area(familiar: Tensor) -> float:
        return roc(familiar[~held_out], familiar[held_out]).auc

    found: dict[str, float | None] = {
        "auroc": area(shared.familiarity(cell.logits(shared))),
        "probability_auroc": area(cell.scores(shared).softmax(dim=1).amax(dim=1)),
        "personal_auroc": mean(area(predictor.familiarity(cell.logits(predictor))) for predictor in own),
    }
    marks = [below for p in own if (below := p.unfamiliar(cell.logits(p))) is not None]
    for name, images in (("marked_known", ~held_out), ("marked_held_out", held_out)):
        found[name] = mean(float(below[images].double().mean()) for below in marks) if marks else None
    return {name: None if value is None else round(value, 6) for name, value in found.items()}


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every method on the same models."""
    held_out = cell.data.test.labels.cpu() == place["class"]
    for method in METHODS:
        yield {**place, "method": method, "figures": figures(cell, method, held_out)}


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds and classes, and the lowest area of a class."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["alpha"], row["method"]), []).append(row["figures"])
    summary = []
    for key, found in groups.items():
        means = {}
        for name in FIGURES:
            values = [each[name] for each in found if each[name] is not None]
            means[name] = round(mean(values), 6) if values else None
        lowest = min(each["auroc"] for each in found)
        head = dict(zip(("set", "alpha", "method"), key, strict=True))
        summary.append({**head, "n": len(found), "mean": means, "lowest_auroc": lowest})
    return summary


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set, alpha and method."""
    head = ["set", "α", "classes", "method", "AUROC", "lowest", "by probability", "deployed"]
    lines = headed([*head, "known marked", "held out marked"])
    for row in record["summary"]:
        words = [row["set"], f"{row['alpha']:g}", str(row["n"]), row["method"]]
        first, *others = ["–" if row["mean"][key] is None else f"{row['mean'][key]:.3f}" for key in FIGURES]
        lines.append(cells([*words, first, f"{row['lowest_auroc']:.3f}", *others]))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    *(NAME, FIGURES, METHODS, entries, summarise, markdown),
    parts=lambda options: [{"class": number} for number in options.classes],
    change=without,
)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--classes", type=int, nargs="+", default=[0, 1, 2], help="numbers of the classes held out")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments, _options)


if __name__ == "__main__":
    sys.exit(main())
