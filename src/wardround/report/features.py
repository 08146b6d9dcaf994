"""How much of what all sites show each site shows itself: one table for all methods that were asked."""

from __future__ import annotations

from typing import Any

from wardround.report.parts import View, tabulate
from wardround.report.values import as_count, as_number, as_records, as_text, show

HEAD = ("Site", "Images", "Distance", "Times the spread")


def features_view(result: View) -> View:
    """A row for each method and site; empty where features were not compared."""
    table: list[list[Any]] = []
    for entry in as_records(result.get("features")):
        figures = [show(key, as_number(entry.get(key))) for key in ("distance", "relative")]
        name = f"{as_text(entry.get('method'))}, {as_text(entry.get('site'))}"
        table.append([name, f"{as_count(entry.get('images')):,}", *figures])
    return tabulate("Features of each site against those of all sites", HEAD, table)
