"""How much one bad site among several can do to the others: `consult` beside the panels that it grew out of.

In each cell (a set, a level of skew, a seed) the sites train once. Then each site in turn is the bad one:

- few: it is honest, but has a handful of images of what is its commonest class, and trained on them (one more training)
- labels: it calls every class by the name of the next, in its model and its counts, as after a shifted column
- noise: its model was never trained
- shuffled: the numbers within each tensor of its model are in random order
- counts: its model is good, and it claims a million images of every class
- both: wrong labels, and a million images of every class

Figures are of the other sites: what they deploy (personal) and the shared predictor, on their local tests and on the
global one, averaged over them. Beside them `honest`, where nothing is wrong, and `without`, where the bad site sends
nothing. A cell is kept in `--out` when it is done and is not done again; trained models wait in `--work`.

    python benchmarks/consult_robust.py bloodmnist.npz --preset fast --device cuda --out papers/consult_robust.json
    python benchmarks/consult_robust.py phantoms.npz --smoke --out smoke.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from experiments import Experiment, main_of
from trained_cells import Cell
from wardround.data.federation import Site
from wardround.exchange.bundle import LABEL_COUNTS, SIZE, Bundle
from wardround.methods.base import layout_groups
from wardround.methods.state import State
from wardround.papers.summaries import cells, headed

NAME = "consult_robust"
METHODS = ("consult", "class-ensemble", "ensemble")
KINDS = ("honest", "without", "few", "labels", "noise", "shuffled", "counts", "both")
GROUP = ("set", "alpha", "kind", "method")
HANDFUL, CLAIMED = 5, 1_000_000
FIGURES = {
    "personal_local": "what the good sites deploy, on their local tests, averaged over them",
    "personal_global": "the same on the global test",
    "shared_local": "the shared predictor on the good sites' local tests, averaged over them",
    "shared_global": "the shared predictor on the global test",
}


# What a bad site sends ------------------------------------------------------------------------------------------------


def answers_of(cell: Cell, bad: Site, kind: str) -> dict[str, Bundle]:
    """All answers, that of the bad site changed."""
    own = cell.answers[bad.name]
    if kind == "without":
        return {name: bundle for name, bundle in cell.answers.items() if name != bad.name}
    if kind == "few":
        own = cell.train([with_few(bad)])[bad.name]
    if kind in ("labels", "both"):
        own = with_wrong_labels(own)
    if kind == "noise":
        weights = cell.study.fresh_weights(cell.study.spec(bad.name), "noise", bad.name)
        own = replace(own, groups={**own.groups, **layout_groups(cell.study.spec(bad.name), weights)})
    if kind == "shuffled":
        own = shuffled(own, torch.Generator().manual_seed(0))
    if kind in ("counts", "both"):
        claimed = torch.full_like(own.group(LABEL_COUNTS)["counts"], CLAIMED)
        lies = {LABEL_COUNTS: {"counts": claimed}, SIZE: {"images": claimed.sum()}}
        own = replace(own, groups={**own.groups, **lies})
    return {**cell.answers, bad.name: own}


def with_few(site: Site) -> Site:
    """The site with a handful of training images of what was its commonest class."""
    labels = site.train.labels
    common = int(site.train.counts().argmax())
    rank = torch.cumsum(labels == common, dim=0)
    kept = (labels != common) | (rank <= HANDFUL)
    return replace(site, train=site.train.take(torch.nonzero(kept).flatten()))


def with_wrong_labels(bundle: Bundle) -> Bundle:
    """The model and the counts of a site whose labels are all one class too far, as if trained on them."""
    groups: dict[str, dict[str, Tensor]] = {name: dict(tensors) for name, tensors in bundle.groups.items()}
    for name in ("head.weight", "head.bias"):
        groups["parameters"][name] = groups["parameters"][name].roll(1, dims=0)
    groups[LABEL_COUNTS]["counts"] = groups[LABEL_COUNTS]["counts"].roll(1)
    return replace(bundle, groups=groups)


def shuffled(bundle: Bundle, draw: torch.Generator) -> Bundle:
    """The model with the numbers of each tensor in random order: nothing is odd about any of them, nor any use."""

    def mixed(tensor: Tensor) -> Tensor:
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=draw)].reshape(tensor.shape)

    network = ("parameters", "statistics")
    groups = {
        name: {key: mixed(tensor) for key, tensor in tensors.items()} if name in network else tensors
        for name, tensors in bundle.groups.items()
    }
    return replace(bundle, groups=groups)


# What it does to the others -------------------------------------------------------------------------------------------


def measured(cell: Cell, method: str, answers: Mapping[str, Bundle], good: Sequence[Site]) -> dict[str, float]:
    """The figures of the good sites."""
    ctx, made, state, shared = cell.shared(method, answers)
    delivered = made.deliver(ctx, state)
    works = {site.name: made.personal(ctx, site, delivered[site.name], State()) for site in good}
    deployed, together = cell.personal(works), cell.tally(shared)
    tallies = [(site, cell.tally(deployed[site.name])) for site in good]
    weights = {site.name: site.test.class_weights for site in good}
    return {
        "personal_local": mean(found.accuracy(weights[site.name]) for site, found in tallies),
        "personal_global": mean(found.accuracy() for _, found in tallies),
        "shared_local": mean(together.accuracy(weights[site.name]) for site in good),
        "shared_global": together.accuracy(),
    }


def entries(cell: Cell, place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every kind of bad site, at every site, under every method."""
    for bad in cell.data.sites:
        good = [site for site in cell.data.sites if site.name != bad.name]
        for kind in KINDS:
            answers = answers_of(cell, bad, kind)
            for method in METHODS:
                figures = {key: round(value, 6) for key, value in measured(cell, method, answers, good).items()}
                yield {**place, "bad": bad.name, "kind": kind, "method": method, "figures": figures}


# The table ------------------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds and over which site is bad; beside them the worst, and the most that was lost by one bad site.

    What is lost is against a study `without` it, on the same images with the same good sites.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in GROUP), []).append(row)
    without = {_study_of(row): row["figures"] for row in rows if row["kind"] == "without"}
    summary = []
    for key, found in groups.items():
        figures = [row["figures"] for row in found]
        summary.append(
            {
                **dict(zip(GROUP, key, strict=True)),
                "n": len(found),
                "mean": {name: round(mean(each[name] for each in figures), 6) for name in FIGURES},
                "lowest": {name: min(each[name] for each in figures) for name in FIGURES},
                "most_lost": {
                    name: round(max(without[_study_of(row)][name] - row["figures"][name] for row in found), 6)
                    for name in FIGURES
                },
            }
        )
    return summary


def _study_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("set", "alpha", "seed", "bad", "method"))


def markdown(record: Mapping[str, Any]) -> str:
    """Tables for each set and alpha, in percent: personal local / global, shared global; their means, then losses."""
    lines: list[str] = []
    for images, alpha in dict.fromkeys((row["set"], row["alpha"]) for row in record["summary"]):
        here = {(r["kind"], r["method"]): r for r in record["summary"] if (r["set"], r["alpha"]) == (images, alpha)}
        for what, kinds in (("mean", KINDS), ("most_lost", KINDS[2:])):
            title = f"### {images}, α = {alpha:g}" + ("" if what == "mean" else ": the most that one bad site cost")
            lines += [title, "", *headed(["bad site", *METHODS])]
            for kind in kinds:
                found = [here.get((kind, method)) for method in METHODS]
                lines.append(cells([kind, *("–" if row is None else _figures(row[what]) for row in found)]))
            lines.append("")
    lines.append(
        "Local / global accuracy of what the good sites deploy; in brackets the shared predictor's global one. Costs: "
        "points against a study without the bad site, the largest of each over seeds and bad sites; below 0, a gain."
    )
    return "\n".join(lines)


def _figures(found: Mapping[str, float]) -> str:
    local, everywhere, shared = (100 * found[key] for key in ("personal_local", "personal_global", "shared_global"))
    return f"{local:.1f} / {everywhere:.1f} ({shared:.1f})"


EXPERIMENT = Experiment(NAME, FIGURES, METHODS, lambda cell, place, options: entries(cell, place), summarise, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
