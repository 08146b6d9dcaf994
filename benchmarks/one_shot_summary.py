"""From the entries of `one_shot_grid.py` to means over seeds, beside what the papers print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import published
from wardround.papers.one_shot import MEASURES, SECONDS
from wardround.papers.summaries import averaged, cells, grouped, headed

PUBLISHED = {
    "label": published.LABEL,
    "local": "FedBiCross (arXiv 2601.01901v4), Tables 1 and 2, N = 5, in percent, to be put beside local_accuracy; "
    "of its rows K = 2, 3, 4 the highest",
    "shared_global": "E-FedISCA (Medical Image Analysis 2025), Table 3, in percent, to be put beside "
    "shared_global_accuracy",
}
COLUMNS = {
    "local_accuracy": "local",
    "global_accuracy": "global",
    "balance": "balance",
    "worst_site_accuracy": "worst site",
    "shared_global_accuracy": "shared, global",
}
NONE = "–"

Record = Mapping[str, Any]


def summarise(entries: Iterable[Record], sites: int) -> list[dict[str, Any]]:
    """Mean and sample standard deviation over seeds by set, alpha and entry, in the order of first appearance."""
    return [_row(found, sites) for found in grouped(entries, "set", "alpha")]


def _row(found: list[Record], sites: int) -> dict[str, Any]:
    images, alpha, label = (found[0][key] for key in ("set", "alpha", "entry"))
    comparable = sites == published.SITES
    return {
        "set": images,
        "alpha": alpha,
        "entry": label,
        **averaged(found, MEASURES, 6),
        "published": {
            "local": published.local(images, alpha, label) if comparable else None,
            "shared_global": published.shared_global(images, alpha, label) if comparable else None,
        },
    }


def markdown(results: Record) -> str:
    """The summary as Markdown: one table per set and alpha, in percent, and what the columns mean."""
    tables: dict[tuple[str, float], list[str]] = defaultdict(list)
    for row in results["summary"]:
        tables[row["set"], row["alpha"]].append(_line(row))
    head = ["entry", "seeds", *COLUMNS.values(), "seconds", "published, local", "published, global"]
    lines = []
    for (images, alpha), rows in sorted(tables.items()):
        lines += [f"### {images}, α = {alpha:g}", "", *headed(head), *rows, ""]
    lines += [f"- {name}: {MEASURES[key]}" for key, name in COLUMNS.items()]
    lines.append(f"- ± is the sample standard deviation over seeds; seconds: {SECONDS}")
    lines += [f"- published, {key.removeprefix('shared_')}: {PUBLISHED[key]}" for key in ("local", "shared_global")]
    lines.append(f"- {PUBLISHED['label']}")
    sets = dict.fromkeys(images for images, _ in tables)
    lines += [f"- {published.STAND_INS[images]}" for images in sets if images in published.STAND_INS]
    return "\n".join(lines)


def _line(row: Record) -> str:
    figures = [figure(row, key) for key in COLUMNS]
    beside = map(stated, row["published"].values())
    return cells([row["entry"], str(len(row["seeds"])), *figures, f"{row['seconds']:.0f}", *beside])


def figure(row: Record, key: str) -> str:
    """Mean ± sample deviation of a measure, in percent."""
    mean, deviation = row["mean"][key], row["standard_deviation"][key]
    if mean is None:
        return NONE
    return f"{100 * mean:.1f}" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")


def stated(value: float | None) -> str:
    """A published figure."""
    return NONE if value is None else f"{value:.2f}"
