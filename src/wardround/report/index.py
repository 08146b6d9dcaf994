"""The rows of a result, found by method and by what they measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from wardround.report.parts import View
from wardround.report.values import as_count, as_number, as_records, as_text, as_texts, mean_of


class Measure(NamedTuple):
    """What a row of the result measures."""

    split: str
    model: str
    metric: str
    per_site: bool


OWN = Measure("local", "personal", "accuracy", True)
EVERYONE = Measure("global", "personal", "accuracy", True)
Rounds = dict[int, dict[str, list[float | None]]]  # round -> site -> one value per seed
Index = dict[str, dict[Measure, Rounds]]  # by method


def index_rows(rows: Sequence[View]) -> Index:
    """Every value where it belongs."""
    index: Index = {}
    for row in rows:
        site, metric = as_text(row.get("site")), as_text(row.get("metric"))
        measure = Measure(as_text(row.get("split")), as_text(row.get("model")), metric, bool(site))
        rounds = index.setdefault(as_text(row.get("method")), {}).setdefault(measure, {})
        rounds.setdefault(as_count(row.get("round")), {}).setdefault(site, []).append(as_number(row.get("value")))
    return index


def at_the_end(index: Index, method: str, measure: Measure) -> dict[str, float | None]:
    """A measure of each site after the last round that has any, mean over seeds."""
    rounds = index.get(method, {}).get(measure)
    return {site: mean_of(values) for site, values in rounds[max(rounds)].items()} if rounds else {}


def pool(sites: Mapping[str, Iterable[float | None]]) -> list[float | None]:
    """All values of a round."""
    return [value for seeds in sites.values() for value in seeds]


def methods_of(result: View) -> list[str]:
    """The methods in the order they were asked for, then any that only figures name."""
    parts = [*as_records(result.get("headlines")), *as_records(result.get("rows"))]
    named = (as_text(part.get("method")) for part in parts if part.get("method"))
    return list(dict.fromkeys([*as_texts(result.get("methods")), *named])) or ["–"]
