"""The sites' features: how much of what all sites show each site shows itself, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from wardround.report.parts import View, figure, tabulate
from wardround.report.points import clouds
from wardround.report.svg import Label, Spot, keyed
from wardround.report.values import as_count, as_dict, as_list, as_number, as_records, as_text, as_texts, percent, show

HEAD = ("Site", "Images", "Distance", "Times the spread")
WAYS = {
    "pca": ("Principal components", "The two directions along which features differ most."),
    "tsne": ("t-SNE", "Neighbours stay neighbours; distances between far groups and their sizes mean nothing."),
}


def features_view(result: View) -> View:
    """A row for each method and site; empty where features were not compared."""
    table: list[list[Any]] = []
    for entry in as_records(result.get("features")):
        figures = [show(key, as_number(entry.get(key))) for key in ("distance", "relative")]
        name = f"{as_text(entry.get('method'))}, {as_text(entry.get('site'))}"
        table.append([name, f"{as_count(entry.get('images')):,}", *figures])
    return tabulate("Features of each site against those of all sites", HEAD, table)


def projections_view(result: View) -> list[View]:
    """Two figures for each picture, by site and by class."""
    classes = as_texts(as_dict(result.get("data")).get("classes"))
    found = []
    for i, entry in enumerate(as_records(result.get("projections"))):
        points = _points(as_list(entry.get("points")))
        way, words = WAYS.get(as_text(entry.get("way")), (as_text(entry.get("way")), ""))
        shares = [percent(share) for share in map(as_number, as_list(entry.get("shares"))) if share is not None]
        if shares:
            words += f" They hold {' and '.join(shares)} of the variance."
        method, sites = as_text(entry.get("method")), as_texts(entry.get("sites"))
        for by, names, place in (("site", sites, 2), ("class", classes, 3)):
            if names and points:
                found.append(
                    _cloud(
                        keyed("features", i, f"{method} {entry.get('way')} by {by}"),
                        f"{method}: {way}, by {by}",
                        words,
                        by,
                        names,
                        points,
                        place,
                    )
                )
    return found


def _points(rows: Sequence[Any]) -> list[tuple[float, float, int, int]]:
    found = []
    for row in map(as_list, rows):
        numbers = [as_number(value) for value in row]
        if len(numbers) == 4 and None not in numbers:
            x, y, site, label = (value or 0.0 for value in numbers)
            found.append((x, y, int(site), int(label)))
    return found


def _cloud(
    key: str,
    title: str,
    words: str,
    by: str,
    names: Sequence[str],
    points: Sequence[tuple[float, float, int, int]],
    place: int,
) -> View:
    groups: dict[str, list[Spot]] = {name: [] for name in names}
    for point in points:
        if 0 <= point[place] < len(names):
            groups[names[int(point[place])]].append((point[0], point[1]))
    shown = {name: spots for name, spots in groups.items() if spots}
    rows = []
    for name, spots in shown.items():
        x, y = (sum(spot[axis] for spot in spots) / len(spots) for axis in (0, 1))
        spread = math.sqrt(sum((a - x) ** 2 + (b - y) ** 2 for a, b in spots) / len(spots))
        rows.append([name, f"{len(spots):,}", f"{x:.3f}", f"{y:.3f}", f"{spread:.3f}"])
    label = Label(key, title, f"{len(points):,} images as points, marked by {by}: {', '.join(shown)}.")
    table = tabulate(f"{title}: centres", (by.capitalize(), "Images", "Across", "Up", "Spread"), rows)
    return figure(title, words, clouds(label, shown), table)
