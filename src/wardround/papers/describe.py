"""A table in words: what `wardround papers show` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wardround.papers.datasets import DATASETS
from wardround.papers.families import RUNS
from wardround.papers.paper_setting import shown, study_tree
from wardround.papers.schema import Line, Table
from wardround.report.values import dotted


def describe(table: Table) -> str:
    """Title, citation, protocol, settings, axes, lines, deviations."""
    axes = table.axes
    parts = [
        f"{table.title}\n{table.citation}",
        _section("What it measures", [table.measures, *_columns(table), *filter(None, [table.prints, table.see])]),
        _section(f"The {table.whose}'s protocol", table.protocol),
        _section("Axes", list(_axes(table)) if axes.datasets else []),
        _section("Settings of its cells", _settings(table) if table.family else []),
        _section("Lines", [_line(line, table.is_of_a_paper) for line in table.entries]),
        _section(f"Ours is not the {table.whose}'s setting in", table.deviations),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, lines: Any) -> str:
    return "\n".join([title, *(f"- {line}" for line in lines)]) if lines else ""


def _columns(table: Table) -> Iterator[str]:
    words = RUNS[table.family].measures if table.family else {}
    for column in table.columns:
        if column.measure:
            yield f"{column.name}, ours: {words.get(column.measure, column.measure)}"


def _axes(table: Table) -> Iterator[str]:
    axes = table.axes
    for name in axes.datasets:
        known = DATASETS[name]
        counts = "its places" if known.places else ", ".join(str(sites) for _, sites in table.site_counts(name))
        yield f"{name}: {known.title}; sites: {counts}; {known.file} ({known.page})"
    yield f"levels: {', '.join(f'{level:g}' if isinstance(level, float) else level for level in axes.levels)}"
    yield f"seeds: {', '.join(map(str, axes.seeds))}"


def _settings(table: Table) -> list[str]:
    """The study's settings of the first cell, as they are set; what is not named is the default."""
    name = table.axes.datasets[0]
    sites, level = table.site_counts(name)[0][1], table.axes.levels[0]
    tree = study_tree(table, Path(DATASETS[name].file), name, sites, level, {})
    own = tree.pop("set", {})
    tree["data"] = {key: value for key, value in tree["data"].items() if key != "source"}
    methods = {line.method for line in table.entries}
    return [*_flat(tree), *_flat({method: values for method, values in own.items() if method in methods})]


def _flat(tree: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {shown(value)}" for key, value in dotted(tree).items()]


def _line(line: Line, of_a_paper: bool) -> str:
    own = _flat({**line.study, **line.settings})
    beside = f"; beside {', '.join(line.rows)}" if line.rows else "; not in the paper" if of_a_paper else ""
    settings = f" ({', '.join(own)})" if own else ""
    return f"{line.label}: {line.method}{settings}{beside}"
