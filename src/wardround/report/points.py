"""Points as inline SVG: methods in the plane, sites on a strip, shares with their intervals, features by group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wardround.report.charts import row_height
from wardround.report.svg import (
    CHAR,
    Format,
    Label,
    Spot,
    dot,
    drawing,
    finite,
    name_width,
    num,
    path,
    round_ticks,
    rule,
    shortened,
    tone,
    tooltip,
    upright_grid,
    within,
    words,
)

NAME_GAP = 13.0  # units from one name to the next below it
SHAPES: tuple[tuple[Spot, ...], ...] = (  # six shapes against eleven colours: 66 groups differ in one or the other
    ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    ((0, -1.2), (1.2, 1), (-1.2, 1)),
    ((-1.2, -1), (1.2, -1), (0, 1.2)),
    ((-1.4, -0.5), (1.4, -0.5), (1.4, 0.5), (-1.4, 0.5)),
    ((-0.5, -1.4), (0.5, -1.4), (0.5, 1.4), (-0.5, 1.4)),
)


@dataclass(frozen=True)
class Axis:
    """What an axis is called, how its marks and values are written, where it begins at the latest, what it spans."""

    name: str
    mark: Format
    show: Format
    low: float = math.inf
    span: float = 0.0
    unit: Callable[[float], float] = lambda _: 1.0  # of which marks are round numbers, by what the axis spans

    def ticks(self, values: Sequence[float], count: int) -> list[float]:
        """Round numbers that enclose the values."""
        low = min([*values, self.low])
        high = max([*values, low + self.span])
        unit = self.unit(high - low)
        return [tick * unit for tick in round_ticks(low / unit, high / unit, count)]


@dataclass(frozen=True)
class Strip:
    """Values on one row: all of them by name, their mean, and the name of the one that is marked."""

    name: str
    values: Mapping[str, float]
    mean: float | None
    marked: str = ""


@dataclass(frozen=True)
class Range:
    """A share with the interval it lies in."""

    name: str
    value: float
    low: float
    high: float


def scatter(
    label: Label, spots: Mapping[str, Spot], across: Axis, up: Axis, *, diagonals: bool = False, width: float = 360
) -> str:
    """Named points; with `diagonals`, dashed lines of equal mean of both, each marked with that mean.

    Both axes span the values. Names stand to the right of their point, moved apart where they would meet.
    """
    left, right, top, bottom = 48.0, 10 + min(name_width(spots), 110.0), 26.0, 246.0
    x_ticks = across.ticks([x for x, _ in spots.values()], 3)
    y_ticks = up.ticks([y for _, y in spots.values()], 5)
    (x0, x1), (y0, y1) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def place(x: float, y: float) -> Spot:
        return (
            left + (width - left - right) * (x - x0) / (x1 - x0),
            bottom - (bottom - top) * (y - y0) / (y1 - y0),
        )

    out = []
    for tick in y_ticks:
        y = place(x0, tick)[1]
        out += [rule("grid", left, y, width - right, y), words(left - 8, y + 4, up.mark(tick), "tick", "end")]
    out.append(upright_grid([(place(tick, y0)[0], across.mark(tick)) for tick in x_ticks], top, bottom))
    if diagonals:
        out += _balance_lines((x0, x1), (y0, y1), place, up.mark)
    out.append(words(left + (width - left - right) / 2, bottom + 34, across.name, "tick", "middle"))
    out.append(words(0, 10, up.name, "tick"))
    shown = [(*place(*spot), shortened(name, right)) for name, spot in spots.items()]
    heights = _beside(shown, top, bottom)
    for j, ((name, spot), (x, y, said), height) in enumerate(zip(spots.items(), shown, heights, strict=True)):
        tip = f"{name}: {across.name} {across.show(spot[0])}, {up.name} {up.show(spot[1])}"
        out += [dot(tone("s", j), x, y, tip, 5), words(x + 9, height + 4, said, "name")]
    return drawing(label, width, bottom + 42, out)


def _beside(named: Sequence[tuple[float, float, str]], top: float, bottom: float) -> list[float]:
    """A height for the name to the right of each point: its own, or the nearest at which it meets no other name."""
    taken: list[tuple[float, float, float]] = []  # from, to, height
    steps = sorted((NAME_GAP * n for n in range(-len(named), len(named) + 1)), key=abs)
    for x, y, text in named:
        end = x + CHAR * len(text)
        free = (
            y + step
            for step in steps
            if top <= y + step <= bottom
            and all(abs(y + step - height) >= NAME_GAP or x > right or end < left for left, right, height in taken)
        )
        taken.append((x, end, next(free, y)))
    return [height for _, _, height in taken]


def _balance_lines(xs: Spot, ys: Spot, place: Callable[[float, float], Spot], mark: Format) -> list[str]:
    """Where (x + y) / 2 is a round number, cut to the frame."""
    out = []
    (x0, x1), (y0, y1) = xs, ys
    for b in round_ticks((x0 + y0) / 2, (x1 + y1) / 2, 5)[1:-1]:
        begin, end = max(x0, 2 * b - y1), min(x1, 2 * b - y0)
        if begin < end:
            (ax, ay), (bx, by) = place(begin, 2 * b - begin), place(end, 2 * b - end)
            top = 2 * b - y1 >= x0  # it leaves through the upper edge, where no point's name is in the way
            at = (ax, ay - 4, mark(b), "tick faint", "middle") if top else (ax + 3, ay + 10, mark(b), "tick faint")
            out += [rule("reference faint", ax, ay, bx, by), words(*at)]
    return out


def strips(label: Label, rows: Sequence[Strip], show: Format, mark: Format, width: float = 360) -> str:
    """A row for each method: a ring for each site from 0 to 1, a tick and a number at their mean, one site marked."""
    left, right, top, row = name_width(r.name for r in rows), 50.0, 8.0, 34.0
    span, bottom = width - left - right, top + row * len(rows)
    out = [upright_grid([(left + span * s, mark(s)) for s in (0.0, 0.25, 0.5, 0.75, 1.0)], top, bottom)]
    for i, strip in enumerate(rows):
        y = top + row * (i + 0.5)
        out.append(words(0, y + 4, shortened(strip.name, left), "name"))
        out.append(rule("grid", left, y, left + span, y))
        for name, value in strip.values.items():
            kind = "ring low" if name == strip.marked else "ring"
            out.append(dot(kind, left + span * within(value), y, f"{strip.name}, {name}: {show(value)}", 5))
        if strip.marked:
            x = left + span * within(strip.values[strip.marked])
            out.append(words(max(x, left + 14), y + 16, shortened(strip.marked, 80), "mark small", "middle"))
        if (mean := finite(strip.mean)) is not None:
            x = left + span * within(mean)
            out.append(rule("mean", x, y - 9, x, y + 9))
            out.append(words(width - 2, y + 4, show(mean), "value strong", "end"))
    return drawing(label, width, bottom + 20, out)


def intervals(label: Label, items: Sequence[Range], show: Format, mark: Format, width: float = 320) -> str:
    """A point on its interval for each item, from 0 to 1."""
    left, right, top = name_width(r.name for r in items), 58.0, 6.0
    row, span = min(row_height(len(items)), 24.0), width - left - right
    bottom = top + row * len(items)
    out = [upright_grid([(left + span * s, mark(s)) for s in (0.0, 0.5, 1.0)], top, bottom)]
    for i, item in enumerate(items):
        y = top + row * (i + 0.5)
        low, high = (left + span * within(v) for v in (item.low, item.high))
        tip = tooltip(f"{item.name}: {show(item.value)}, {show(item.low)} to {show(item.high)}")
        ends = rule("whisker", low, y - 4, low, y + 4) + rule("whisker", high, y - 4, high, y + 4)
        centre = dot("bar", left + span * within(item.value), y, "", 4)
        out.append(f"<g>{tip}{rule('whisker', low, y, high, y)}{ends}{centre}</g>")
        out.append(words(0, y + 4, shortened(item.name, left), "name"))
        out.append(words(width - 2, y + 4, show(item.value), "value", "end"))
    return drawing(label, width, bottom + 20, out)


def reliability(label: Label, bins: Sequence[tuple[float, float, int]], mark: Format, width: float = 320) -> str:
    """How often answers are right (up) by how sure they are (across): (confidence, accuracy, images) for each bin.

    A point's area goes with its images. On the dashed line a predictor is right as often as it says.
    """
    left, top, side = 48.0, 26.0, width - 48.0 - 40.0
    most = max((images for _, _, images in bins), default=1)

    def place(x: float, y: float) -> Spot:
        return left + side * within(x), top + side * (1 - within(y))

    out = []
    for share in (0.0, 0.5, 1.0):
        y = place(0, share)[1]
        out += [rule("grid", left, y, left + side, y), words(left - 8, y + 4, mark(share), "tick", "end")]
    out.append(upright_grid([(place(s, 0)[0], mark(s)) for s in (0.0, 0.5, 1.0)], top, top + side))
    out.append(rule("reference", *place(0, 0), *place(1, 1)))
    out.append(path("line l1", [place(c, a) for c, a, _ in bins]) if len(bins) > 1 else "")
    for confidence, accuracy, images in bins:
        tip = f"sure {mark(round(confidence, 3))}, right {mark(round(accuracy, 3))}, {images:,} answers"
        out.append(dot("s1", *place(confidence, accuracy), tip, 2 + 6 * math.sqrt(images / most)))
    out.append(words(left + side / 2, top + side + 34, "how sure", "tick", "middle"))
    out.append(words(0, 10, "how often right", "tick"))
    return drawing(label, width, top + side + 42, out)


def clouds(label: Label, groups: Mapping[str, Sequence[Spot]], width: float = 360) -> str:
    """Points in groups, each of a shape and colour of its own, under a key; one path for each group.

    Both axes have the same scale and no marks: only nearness means something.
    """
    columns = 3 if max(map(len, groups), default=0) <= 14 else 2
    cell, top = width / columns, 20 + 18.0 * math.ceil(len(groups) / columns)
    spots = [spot for found in groups.values() for spot in found]
    (left, right), (low, high) = ((min(v), max(v)) for v in ([spot[axis] for spot in spots] for axis in (0, 1)))
    scale = (width - 12) / max(right - left, high - low, 1e-9)
    inset = (width - scale * (right - left)) / 2
    out = []
    for j, (name, found) in enumerate(groups.items()):
        x, y = cell * (j % columns) + 8, 10 + 18.0 * (j // columns)
        out.append(f'<path class="{tone("s", j)}" d="{_shape(j, x, y, 5)}"/>')
        out.append(words(x + 12, y + 4, shortened(name, cell - CHAR), "name"))
        d = "".join(_shape(j, inset + scale * (a - left), top + scale * (high - b), 3) for a, b in found)
        out.append(f'<path class="cloud {tone("s", j)}" d="{d}"/>' if d else "")
    return drawing(label, width, top + scale * (high - low) + 8, out)


def _shape(j: int, x: float, y: float, r: float) -> str:
    corners = SHAPES[j % len(SHAPES)]
    return f"M{'L'.join(f'{num(x + r * a)} {num(y + r * b)}' for a, b in corners)}z"
