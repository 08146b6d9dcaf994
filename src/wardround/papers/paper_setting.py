"""The paper's setting of a cell, and what of a finished entry deviates from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wardround.papers import fedkper, fedmp, multi_round, one_shot
from wardround.papers.cells import Cell, Plan
from wardround.papers.datasets import DATASETS
from wardround.papers.schema import Level, Line, Table
from wardround.settings import overlay

Tree = dict[str, Any]


def kind_of(dataset: str) -> fedmp.Kind:
    """How FedMP makes sites of a set: its places, or five like sites."""
    known = DATASETS.get(dataset)
    return "iid" if known is not None and not known.places else "natural"


def study_tree(
    table: Table,
    source: Path,
    dataset: str,
    sites: int,
    level: Level,
    flags: Mapping[str, Any],
    preset: str | None = None,
    precision: str = "fp32",
) -> Tree:
    """The study of a cell: the family's protocol, the table's own, the data set's, and flags over all of them."""
    known = DATASETS.get(dataset)
    own: Tree = dict(table.study)
    if known is not None and known.size is not None:
        own = overlay(own, {"data": {"size": known.size}})
    elif table.family == "fedmp":  # on images that are not the paper's, the network for small ones
        own = {}
    if table.family == "fedkper":
        return fedkper.study_tree(source, overlay(overlay(own, {"data": {"sites": sites}}), flags))
    if table.family == "fedmp":
        whole = overlay(overlay({"train": {"precision": precision}}, own), flags)
        return fedmp.study_tree(kind_of(dataset), whole)
    partition: Tree = {"sites": sites, "partition": "dirichlet" if isinstance(level, float) else level}
    if known is not None and known.places:
        partition = {"sites": 0, "partition": "natural"}
    return one_shot.study_tree(preset or table.preset, overlay(overlay(own, {"data": partition}), flags), precision)


def cell(table: Table, source: Path, dataset: str, level: Level, seed: int) -> Cell:
    """A cell as its family names it."""
    if table.family == "fedkper":
        return fedkper.cell(source, seed)
    if table.family == "fedmp":
        return fedmp.cell(source, kind_of(dataset), seed)
    return one_shot.cell(source, level, seed)


def plan(table: Table, tree: Tree, line: Line, where: Cell, images: str) -> Plan:
    """A line in a cell, as its family plans it."""
    if table.family == "fedkper":
        return multi_round.plan(tree, line, where, images)
    if table.family == "fedmp":
        return fedmp.plan(tree, line, where, images)
    return one_shot.plan(tree, line, where, images)


def header(table: Table, tree: Tree) -> Tree:
    """The settings that a file of results is headed by."""
    return one_shot.header(tree) if table.family == "one-shot" else multi_round.header(tree)


def study_deviations(table: Table, dataset: str, sites: int, level: Level, study: Mapping[str, Any]) -> list[str]:
    """What of a study is not as the paper has it; images that are not the paper's are held against its first set."""
    held = dataset
    if dataset not in table.axes.datasets:
        held = table.axes.datasets[0]
        sites = table.site_counts(held)[0][1]
    paper = header(table, study_tree(table, Path(f"{held}.npz"), held, sites, level, {}))
    return sorted(_differences(table.whose, paper, study))


def method_deviations(table: Table, line: Line, record: Mapping[str, Any]) -> list[str]:
    """What of a method's settings is not as the paper has it."""
    dataset, level = table.axes.datasets[0], table.axes.levels[0]
    source = Path(f"{dataset}.npz")
    tree = study_tree(table, source, dataset, table.site_counts(dataset)[0][1], level, {})
    paper = plan(table, tree, line, cell(table, source, dataset, level, 0), "").record
    return sorted(_differences(table.whose, paper["settings"], record["settings"]))


def _differences(whose: str, paper: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Keys that both have with other values; one that only one of them has is of another version."""
    for key in paper.keys() & ours.keys():
        if isinstance(paper[key], dict) and isinstance(ours[key], dict):
            yield from _differences(whose, paper[key], ours[key], f"{prefix}{key}.")
        elif paper[key] != ours[key]:
            yield f"{prefix}{key} = {shown(ours[key])} ({whose}: {shown(paper[key])})"


def shown(value: Any) -> str:
    """A setting as a person writes it."""
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
