"""The picture and the tables of docs/consult.md, from the results of `one_shot_grid.py`.

Local against global accuracy of every method, a panel for each level of skew, means over the seeds that a file holds;
below, the upper right corner of each panel larger. What sites deploy is a disc, a shared predictor where sites deploy
something else a ring; a line joins the two.

    python benchmarks/consult_picture.py papers/one_shot_grid.json docs/consult.md --more papers/one_shot_ten_sites.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from consult_balance import balance_table
from one_shot_entries import ENTRIES
from pages import fill
from wardround.papers.summaries import cells, headed

OURS = ("consult", "consult-distilled")
WHOLE, BALANCE, MORE = "consult_picture.py", "consult_picture.py, balance", "consult_picture.py, more sites"  # marks
SIDE, GAP, LEFT, TOP, LINE = 250, 52, 46, 34, 17
RANGES = ((0, 20, 40, 60, 80, 100), (60, 70, 80, 90, 100))  # of the panels in the two rows, by their ticks


class Point(NamedTuple):
    """One predictor of a method: where it stands, in percent."""

    local: float
    everywhere: float
    shared: bool

    @property
    def balance(self) -> float:
        """The mean of the two."""
        return (self.local + self.everywhere) / 2


def points(row: Mapping[str, Any]) -> list[Point]:
    """What sites deploy and, where it is another, the shared predictor."""
    mean = row["mean"]
    keys = (("local_accuracy", "global_accuracy"), ("shared_local_accuracy", "shared_global_accuracy"))
    found = [
        Point(100 * mean[local], 100 * mean[everywhere], shared=number == 1)
        for number, (local, everywhere) in enumerate(keys)
        if mean.get(local) is not None and mean.get(everywhere) is not None
    ]
    same = len(found) == 2 and all(abs(a - b) < 0.05 for a, b in zip(found[0][:2], found[1][:2], strict=True))
    return found[:1] if same else found


def whole_methods(tree: Mapping[str, Any], images: str) -> list[Mapping[str, Any]]:
    """What a file has of a set, but for parts and variants of a method."""
    whole = {line.label for line in ENTRIES} | {*OURS}
    return [row for row in tree["summary"] if row["set"] == images and row["entry"] in whole]


def chosen(rows: Iterable[Mapping[str, Any]]) -> dict[float, dict[str, list[Point]]]:
    """By level of skew and method; methods in one order, ours first, then by what they reach at the first level."""
    by: dict[float, dict[str, list[Point]]] = {}
    for row in rows:
        if row["alpha"] is not None:
            by.setdefault(row["alpha"], {})[row["entry"]] = points(row)
    levels = sorted(by)

    def best(name: str) -> tuple[int, float, str]:
        everywhere = [max(p.balance for p in by[level][name]) for level in levels if name in by[level]]
        return OURS.index(name) if name in OURS else len(OURS), -everywhere[0], name

    names = sorted({name for level in levels for name in by[level]}, key=best)
    return {level: {name: by[level][name] for name in names if name in by[level]} for level in levels}


# The picture ----------------------------------------------------------------------------------------------------------


def picture(by: Mapping[float, Mapping[str, Sequence[Point]]], title: str) -> str:
    """All panels and, below, what the numbers stand for."""
    names = list(dict.fromkeys(name for methods in by.values() for name in methods))
    number = {name: place for place, name in enumerate(names, 1)}
    rows = -(-len(names) // 3)
    bottom = TOP + len(RANGES) * (SIDE + 2 * TOP)
    width, height = len(by) * (SIDE + GAP) + LEFT - 20, bottom + rows * LINE + 8
    body = [
        part
        for row, ticks in enumerate(RANGES)
        for place, level in enumerate(by)
        for part in _panel(place, row, ticks, level, by[level], number)
    ]
    for name, place in number.items():
        column, line = divmod(place - 1, rows)
        x, y = LEFT + column * (SIDE + GAP), bottom + line * LINE
        weight = ' font-weight="bold"' if name in OURS else ""
        body.append(f'<text x="{x}" y="{y}"{weight}>{place}  {escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" '
        f'font-size="12" fill="#222"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(
    place: int,
    row: int,
    ticks: Sequence[int],
    level: float,
    methods: Mapping[str, Sequence[Point]],
    number: Mapping[str, int],
) -> Iterable[str]:
    left, top = LEFT + place * (SIDE + GAP), TOP + row * (SIDE + 2 * TOP)
    bottom, least, unit = top + SIDE, ticks[0], SIDE / (ticks[-1] - ticks[0])

    def spot(local: float, everywhere: float) -> tuple[float, float]:
        return round(left + unit * (local - least), 1), round(bottom - unit * (everywhere - least), 1)

    yield f'<text x="{left + SIDE / 2}" y="{top - 14}" text-anchor="middle" font-weight="bold">α = {level:g}</text>'
    for tick in ticks:
        x, y = spot(tick, tick)
        yield f'<path d="M{left} {y}H{left + SIDE}M{x} {top}V{bottom}" stroke="#ddd" fill="none"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick}</text>'
        if place == 0:
            yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick}</text>'
    yield f'<text x="{left + SIDE / 2}" y="{bottom + 34}" text-anchor="middle">local accuracy, %</text>'
    if place == 0:
        middle = top + SIDE / 2
        turned = f'transform="rotate(-90 12 {middle})"'
        yield f'<text x="12" y="{middle}" text-anchor="middle" {turned}>global accuracy, %</text>'
    inside = {name: [p for p in of if min(p[:2]) >= least] for name, of in methods.items()}
    for name, found in reversed(inside.items()):
        colour = "#b3261e" if name in OURS else "#3a5a80"
        spots = [spot(point.local, point.everywhere) for point in found]
        if len(spots) == 2:
            (x1, y1), (x2, y2) = spots
            yield f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{colour}" stroke-dasharray="3 3"/>'
        for point, (x, y) in zip(found, spots, strict=True):
            fill, ink = ("#fff", colour) if point.shared else (colour, "#fff")
            yield f'<circle cx="{x}" cy="{y}" r="8" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
            text = f'<text x="{x}" y="{y + 3.5}" text-anchor="middle" font-size="10" fill="{ink}">{number[name]}</text>'
            yield text


# The table ------------------------------------------------------------------------------------------------------------


def table(by: Mapping[float, Mapping[str, Sequence[Point]]]) -> str:
    """Local / global accuracy, of the shared predictor in a line of its own where sites deploy another."""
    lines = headed(["method", *(f"α = {level:g}" for level in by)])
    for name in dict.fromkeys(name for methods in by.values() for name in methods):
        of = [methods.get(name, []) for methods in by.values()]
        both = any(len(found) == 2 for found in of)
        for shared in (True, False) if both else (None,):
            what = {None: "", True: ", shared", False: ", at the site"}[shared]
            line = [name if "," in name else f"`{name}`{what}"]
            for found in of:
                p = next((p for p in found if shared is None or p.shared == shared or len(found) == 1), None)
                line.append("–" if p is None else f"{p.local:.1f} / {p.everywhere:.1f}")
            lines.append(cells(line))
    return "\n".join(lines)


def of_fewer_seeds(rows: Iterable[Mapping[str, Any]], seeds: Sequence[int]) -> str:
    """Which means are of fewer seeds than the caption says, in words."""
    found = {f"{row['entry']} of {', '.join(map(str, row['seeds']))}": 0 for row in rows if row["seeds"] != seeds}
    return f" Of fewer seeds so far: {'; '.join(found)}." if found else ""


def figures(tree: Mapping[str, Any], images: str, picture_name: str) -> tuple[str, str]:
    """The picture, and what stands between the marks of the page."""
    rows = whole_methods(tree, images)
    by = chosen(rows)
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    data = tree["study"]
    what = (
        f"{images}, {data['data']['sites']} sites, {data['model']['name']}, partition seeds "
        f"{', '.join(map(str, seeds))}"
    )
    title = f"Local against global accuracy of every one-shot method: {what}"
    caption = (
        f"*{title}. Discs: what sites deploy; rings: the shared predictor, where sites deploy something else. From "
        f"`papers/one_shot_grid.json`, by `benchmarks/consult_picture.py`.{of_fewer_seeds(rows, seeds)}*"
    )
    text = f"![{title}]({picture_name})\n\n{caption}\n\nLocal / global accuracy, in percent:\n\n{table(by)}"
    return picture(by, title), text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture beside the page, and the page's figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--set", default="bloodmnist")
    parser.add_argument("--more", type=Path, help="results with more sites, for a table of balance of their own")
    given = parser.parse_args(arguments)
    tree = json.loads(given.results.read_text(encoding="utf-8"))
    drawn, text = figures(tree, given.set, f"{given.page.stem}.svg")
    parts = {WHOLE: text, BALANCE: balance_table(tree["entries"])}
    if given.more is not None:
        parts[MORE] = balance_table(json.loads(given.more.read_text(encoding="utf-8"))["entries"])
    return fill(given.page, parts, drawn)


if __name__ == "__main__":
    sys.exit(main())
