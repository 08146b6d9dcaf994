"""Bars and lines as inline SVG: pure functions from numbers to markup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from wardround.report.svg import (
    CHAR,
    Format,
    Label,
    Spot,
    box,
    dot,
    drawing,
    finite,
    lettered_key,
    name_width,
    num,
    path,
    round_ticks,
    rule,
    runs_of,
    segment,
    shortened,
    spread_out,
    ticks_within,
    tone,
    tooltip,
    upright_grid,
    within,
    words,
)

MANY_ROWS = 60  # from here on rows have no room for names and are drawn as one block
ROW_GAP = 0.3  # share of a row that stays empty


@dataclass(frozen=True)
class Bar:
    """One bar; `mark` is a word that sets it apart (the worst site)."""

    name: str
    value: float | None
    mark: str = ""


@dataclass(frozen=True)
class Stack:
    """One stacked bar: a value per series, and a note at its end (its total, in words)."""

    name: str
    values: Sequence[float]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """One line; a point without a value breaks it. `lost` are pairs of places between which a record stood unreached.

    Between two such points the area under the first one's value is shaded.
    """

    name: str
    points: Sequence[tuple[float, float | None]] = field(default_factory=tuple)
    lost: Sequence[tuple[int, int]] = field(default_factory=tuple)


def bars(
    label: Label, items: Sequence[Bar], show: Format, mark: Format, reference: float | None = None, width: float = 320
) -> str:
    """Horizontal bars from 0 to 1, one per item, with a dashed line at `reference`, their mean.

    `show` writes values, `mark` the marks on the axis. From 60 items on they are sorted and all but the marked one are
    nameless: the picture is then of the spread.
    """
    if len(items) > MANY_ROWS:
        items = sorted(items, key=lambda bar: finite(bar.value) or 0.0, reverse=True)
    left, right, top = name_width(b.name for b in items), 50.0, 22.0
    row, many = row_height(len(items)), len(items) > MANY_ROWS
    span, bottom = width - left - right, top + row * len(items)
    out = [upright_grid([(left + span * share, mark(share)) for share in (0.0, 0.5, 1.0)], top, bottom)]
    for i, bar in enumerate(items):
        y, thick = top + row * (i + ROW_GAP / 2), row * (1 - ROW_GAP)
        value, middle = finite(bar.value), y + thick / 2 + 4
        said = "–" if value is None else show(value)
        length = span * within(value or 0.0)
        kind = "bar marked" if bar.mark else "bar"
        tip = tooltip(f"{bar.name}: {said} {bar.mark}".rstrip())
        out.append(f"<g>{tip}{box(kind, left, y, length, thick)}</g>")
        if not many or bar.mark:
            out.append(words(0, middle, shortened(bar.name, left), "name"))
            out.append(words(width - 2, middle, said, "value", "end"))
        if bar.mark and not many:
            inside = length > CHAR * len(bar.mark) + 12
            at, kind, anchor = (-6, "mark inside", "end") if inside else (6, "mark", "start")
            out.append(words(left + length + at, middle, bar.mark, kind, anchor))
    if reference is not None and math.isfinite(reference):
        x = left + span * within(reference)
        out.append(rule("reference", x, top - 6, x, bottom))
        out.append(words(x, top - 10, "mean", "tick", "middle"))
    return drawing(label, width, bottom + 20, out)


def stacked_bars(
    label: Label, rows: Sequence[Stack], series: Sequence[str], show: Format, *, share: bool, width: float = 360
) -> str:
    """Stacked horizontal bars under a lettered key; with `share` every bar is 100 % wide, else all share one scale.

    From 60 rows on, names go and each series becomes a single path: the picture is then of the whole, and the numbers
    of one row are in the table behind it.
    """
    many = len(rows) > MANY_ROWS
    key, top = lettered_key(series, width)
    left = 8.0 if many else name_width(r.name for r in rows)
    right = 8.0 if many else 8 + CHAR * max((len(r.note) for r in rows), default=0)
    row, span = row_height(len(rows)), width - left - right
    longest = max((sum(map(_amount, r.values)) for r in rows), default=0.0)
    out, paths = [key], [""] * len(series)
    for i, stack in enumerate(rows):
        values = [_amount(v) for v in stack.values][: len(series)]
        whole = sum(values) if share else longest
        gap = 0.0 if many else ROW_GAP
        x, y, thick = left, top + row * (i + gap / 2), row * (1 - gap)
        if not many:
            out.append(words(0, y + thick / 2 + 4, shortened(stack.name, left), "name"))
        for j, value in enumerate(values):
            length = span * (value / whole) if whole else 0.0
            if length and many:
                paths[j] += f"M{num(x)} {num(y)}h{num(length)}v{num(thick)}h-{num(length)}z"
            elif length:
                out.append(segment(j, x, y, length, thick, f"{stack.name}, {series[j]}: {show(value)}"))
            x += length
        if not many:
            out.append(words(x + 6, y + thick / 2 + 4, stack.note, "value"))
    out += [f'<path class="{tone("s", j)}" d="{d}"/>' for j, d in enumerate(paths) if d]
    return drawing(label, width, top + row * len(rows) + 6, out)


def lines(
    label: Label,
    series: Sequence[Line],
    show: Format,
    mark: Format,
    x_name: str,
    width: float = 360,
    x_show: Format | None = None,
    x_unit: float = 1.0,
) -> str:
    """Lines, each named at its right end; the y axis spans the values, not 0 to 1.

    `show` writes values, `mark` the marks on the y axis, `x_show` those on the x axis, which are round multiples of
    `x_unit`; without `x_show` x counts something.
    """
    drawn = [(j, line, runs_of(line.points)) for j, line in enumerate(series)]
    drawn = [(j, line, runs) for j, line, runs in drawn if runs]
    xs = [x for _, _, runs in drawn for run in runs for x, _ in run]
    ys = [y for _, _, runs in drawn for run in runs for _, y in run]
    left, right, top, bottom = 48.0, 10 + min(name_width(line.name for _, line, _ in drawn), 110.0), 12.0, 198.0
    y_ticks = round_ticks(min(ys, default=0.0), max(ys, default=1.0), 5)
    x_low, x_high = min(xs, default=0.0), max(xs, default=1.0)
    y_low, y_high = y_ticks[0], y_ticks[-1]
    x_write, x_count = x_show or "{:g}".format, 6 if x_show is None else 3

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return left + (width - left - right) * along, bottom - (bottom - top) * (y - y_low) / (y_high - y_low)

    out = []
    for tick in y_ticks:
        y = place(x_low, tick)[1]
        out.append(rule("grid", left, y, width - right, y))
        out.append(words(left - 8, y + 4, mark(tick), "tick", "end"))
    for tick in ticks_within(x_low, x_high, x_count, x_show is None, x_unit):
        out.append(words(place(tick, y_low)[0], bottom + 18, x_write(tick), "tick", "middle"))
    out.append(words(left + (width - left - right) / 2, bottom + 36, x_name, "tick", "middle"))
    ends = []
    for j, line, runs in drawn:
        known = [spot for run in runs for spot in run]
        for peak, end in line.lost:
            area = [place(x, y) for x, y in _below(known, peak, end)]
            out.append(path(f"lost {tone('s', j)}", area, closed=True))
        for run in runs:
            spots = [place(x, y) for x, y in run]
            out.append(path(f"line {tone('l', j)} d{j % 4}", spots))
            kind = tone("s", j) if len(run) == 1 else "hit"
            for (cx, cy), (x, y) in zip(spots, run, strict=True):
                out.append(dot(kind, cx, cy, f"{line.name}, {x_name} {x_write(x)}: {show(y)}"))
        ends.append((place(*runs[-1][-1])[1], j, line.name))
    for y, (_, j, name) in zip(spread_out([y for y, _, _ in sorted(ends)], 14, bottom), sorted(ends), strict=True):
        x = width - right + 8
        out.append(dot(tone("s", j), x, y))
        out.append(words(x + 8, y + 4, shortened(name, right), "name"))
    return drawing(label, width, bottom + 44, out)


def _below(spots: Sequence[Spot], peak: int, end: int) -> list[Spot]:
    """The outline of what a line lost between a record and the first spot that is as high again."""
    level, (x0, y0), (x1, y1) = spots[peak][1], spots[end - 1], spots[end]
    back = x0 + (x1 - x0) * (level - y0) / (y1 - y0) if y1 > y0 else x1
    return [*spots[peak:end], (back, level)]


def row_height(rows: int) -> float:
    """Generous for few rows, tight for many, and never a block taller than a screen."""
    if rows <= 12:
        return 28.0
    return 18.0 if rows <= MANY_ROWS else max(480.0 / rows, 0.5)


def _amount(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
