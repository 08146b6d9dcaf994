"""Experiments that hold several predictors of one cell against each other: two figures of each, and a table of them.

A predictor is asked on each site's local test and on the global one, and the table has a column for each predictor:
local / global, in percent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from experiments import Rows, by_place, means
from wardround.papers.summaries import cells, headed

Who = Mapping[str, str]  # a predictor's name, and in words what it is
MIXES = {"local": "each site's local test", "global": "the global test"}


def measured(who: Who, what: str = "accuracy") -> dict[str, str]:
    """What each figure means."""
    return {
        f"{name}_{test}": f"{what} of {words} on {mix}, averaged over sites"
        for name, words in who.items()
        for test, mix in MIXES.items()
    }


def row(place: Mapping[str, Any], found: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Of one cell, from the local and global figure of each predictor."""
    figures = {f"{name}_{test}": value for name, pair in found.items() for test, value in zip(MIXES, pair, strict=True)}
    return {**place, "figures": {name: round(value, 6) for name, value in figures.items()}}


def over_seeds(who: Who) -> Callable[[Rows], list[dict[str, Any]]]:
    """Means by set and alpha."""
    return lambda rows: [{**head, **means(found, measured(who))} for head, found in by_place(rows, ("set", "alpha"))]


def table(rows: Sequence[Mapping[str, Any]], columns: Who, all_sets: bool = False) -> str:
    """One line for each set and alpha, and where asked for a last one, of all; `columns` are heads by predictor."""
    lines = headed(["set", "α", "seeds", *columns.values()])
    for each in rows:
        lines.append(cells([each["set"], f"{each['alpha']:g}", str(len(each["seeds"])), *_pairs(each, columns)]))
    if all_sets and rows:
        everything = {name: mean(each[name] for each in rows) for name in measured(columns)}
        lines.append(cells(["all", "", "", *_pairs(everything, columns)]))
    return "\n".join(lines)


def _pairs(figures: Mapping[str, float], who: Who) -> list[str]:
    return [" / ".join(f"{100 * figures[f'{name}_{test}']:.1f}" for test in MIXES) for name in who]
