"""From entries to means over seeds, and a row of them as Markdown."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def grouped(entries: Iterable[Record], *keys: str) -> list[list[Record]]:
    """Entries that differ in their seed alone, in the order of first appearance.

    Entries of one label under different settings are never put together: their recipes differ.
    """
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for entry in entries:
        groups[*(entry[key] for key in keys), entry["entry"], entry["recipe"]].append(entry)
    return list(groups.values())


def averaged(found: Sequence[Record], measures: Iterable[str], digits: int) -> dict[str, Any]:
    """Mean and sample standard deviation of every measure over the seeds of one group, and its seconds."""
    means: dict[str, float | None] = {}
    deviations: dict[str, float | None] = {}
    for measure in measures:
        values = [entry["figures"][measure] for entry in found if entry["figures"].get(measure) is not None]
        means[measure] = round(statistics.fmean(values), digits) if values else None
        deviations[measure] = round(statistics.stdev(values), digits) if len(values) > 1 else None
    return {
        "recipe": found[0]["recipe"],
        "seeds": sorted(entry["seed"] for entry in found),
        "mean": means,
        "standard_deviation": deviations,
        "seconds": round(statistics.fmean(entry["seconds"] for entry in found), 1),
    }


def cells(texts: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def headed(names: Sequence[str]) -> list[str]:
    """The first two rows of a Markdown table, which name its columns."""
    return [cells(names), cells(["---"] * len(names))]
