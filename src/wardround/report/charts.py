"""Charts as inline SVG text: pure functions from numbers to markup, no plotting library.

Every chart scales by its `viewBox`, takes its colours from the page's style sheet through classes (`s1`…`s11` fill,
`l1`…`l11` stroke, `k1`…`k11` letters on a fill), and is named for a screen reader by its title and description. Nothing
is told by colour alone: segments carry letters, lines carry names and dashes, the marked bar carries a word.

Drawn 320 to 360 units wide, so that one unit is about one pixel on a phone and text stays readable there.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

PALETTE = 11  # colours in the style sheet; further series start again, told apart by their letters
MANY_ROWS = 60  # from here on rows have no room for names and are drawn as one block
CHAR = 6.6  # mean width of a character at the charts' 12 units, on the wide side
ROW_GAP = 0.3  # share of a row that stays empty

Format = Callable[[float], str]


@dataclass(frozen=True)
class Label:
    """What a chart is called: `key` is unique on the page, `title` names it, `desc` says in words what it shows."""

    key: str
    title: str
    desc: str


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
    """One line; a point without a value breaks it."""

    name: str
    points: Sequence[tuple[float, float | None]] = field(default_factory=tuple)


def plain(text: str) -> str:
    """Text without what is invisible or forbidden: control characters, direction overrides and lone surrogates.

    They cannot be written as UTF-8 or XML, or make a name read as another; each is shown as U+FFFD instead. Line
    breaks stay, and so do the two zero-width joiners that some scripts need.
    """
    if text.isprintable():
        return text
    return "".join("\ufffd" if _forbidden(c) else c for c in text)


def _forbidden(character: str) -> bool:
    if character in "\n\t\u200c\u200d":
        return False
    return unicodedata.category(character) in {"Cc", "Cf", "Cs"} or character in "\ufffe\uffff"


def bars(
    label: Label, items: Sequence[Bar], show: Format, mark: Format, reference: float | None = None, width: float = 320
) -> str:
    """Horizontal bars from 0 to 1, one per item, with a dashed line at `reference`, their mean.

    `show` writes values, `mark` the marks on the axis. From 60 items on they are sorted and all but the marked one are
    nameless: the picture is then of the spread.
    """
    if len(items) > MANY_ROWS:
        items = sorted(items, key=lambda bar: _finite(bar.value) or 0.0, reverse=True)
    left, right, top = _name_width(b.name for b in items), 50.0, 22.0
    row, many = _row_height(len(items)), len(items) > MANY_ROWS
    span, bottom = width - left - right, top + row * len(items)
    out = [_grid([(left + span * share, mark(share)) for share in (0.0, 0.5, 1.0)], top, bottom)]
    for i, bar in enumerate(items):
        y, thick = top + row * (i + ROW_GAP / 2), row * (1 - ROW_GAP)
        value, middle = _finite(bar.value), y + thick / 2 + 4
        said = "–" if value is None else show(value)
        length = span * min(max(value or 0.0, 0.0), 1.0)
        kind = "bar marked" if bar.mark else "bar"
        title = _title(f"{bar.name}: {said} {bar.mark}".rstrip())
        out.append(f"<g>{title}{_rect(kind, left, y, length, thick)}</g>")
        if not many or bar.mark:
            out.append(_text(0, middle, _short(bar.name, left), "name"))
            out.append(_text(width - 2, middle, said, "value", "end"))
        if bar.mark and not many:
            inside = length > CHAR * len(bar.mark) + 12
            at, kind, anchor = (-6, "mark inside", "end") if inside else (6, "mark", "start")
            out.append(_text(left + length + at, middle, bar.mark, kind, anchor))
    if reference is not None and math.isfinite(reference):
        x = left + span * min(max(reference, 0.0), 1.0)
        out.append(f'<path class="reference" d="M{_n(x)} {_n(top - 6)}V{_n(bottom)}"/>')
        out.append(_text(x, top - 10, "mean", "tick", "middle"))
    return _svg(label, width, bottom + 20, out)


def stacked_bars(
    label: Label, rows: Sequence[Stack], series: Sequence[str], show: Format, *, share: bool, width: float = 360
) -> str:
    """Stacked horizontal bars under a lettered key; with `share` every bar is 100 % wide, else all share one scale.

    From 60 rows on, names go and each series becomes a single path: the picture is then of the whole, and the numbers
    of one row are in the table behind it.
    """
    many = len(rows) > MANY_ROWS
    key, top = _key(series, width)
    left = 8.0 if many else _name_width(r.name for r in rows)
    right = 8.0 if many else 8 + CHAR * max((len(r.note) for r in rows), default=0)
    row, span = _row_height(len(rows)), width - left - right
    longest = max((sum(map(_amount, r.values)) for r in rows), default=0.0)
    out, paths = [key], [""] * len(series)
    for i, stack in enumerate(rows):
        values = [_amount(v) for v in stack.values][: len(series)]
        whole = sum(values) if share else longest
        gap = 0.0 if many else ROW_GAP
        x, y, thick = left, top + row * (i + gap / 2), row * (1 - gap)
        if not many:
            out.append(_text(0, y + thick / 2 + 4, _short(stack.name, left), "name"))
        for j, value in enumerate(values):
            length = span * (value / whole) if whole else 0.0
            if length and many:
                paths[j] += f"M{_n(x)} {_n(y)}h{_n(length)}v{_n(thick)}h-{_n(length)}z"
            elif length:
                out.append(_segment(j, x, y, length, thick, f"{stack.name}, {series[j]}: {show(value)}"))
            x += length
        if not many:
            out.append(_text(x + 6, y + thick / 2 + 4, stack.note, "value"))
    out += [f'<path class="{_color("s", j)}" d="{d}"/>' for j, d in enumerate(paths) if d]
    return _svg(label, width, top + row * len(rows) + 6, out)


def lines(label: Label, series: Sequence[Line], show: Format, mark: Format, x_name: str, width: float = 360) -> str:
    """Lines over whole-numbered x, each named at its right end; the y axis spans the values, not 0 to 1.

    `show` writes values, `mark` the marks on the y axis.
    """
    drawn = [(j, line.name, _runs(line.points)) for j, line in enumerate(series)]
    drawn = [(j, name, runs) for j, name, runs in drawn if runs]
    xs = [x for _, _, runs in drawn for run in runs for x, _ in run]
    ys = [y for _, _, runs in drawn for run in runs for _, y in run]
    left, right, top, bottom = 48.0, 10 + min(_name_width(name for _, name, _ in drawn), 110.0), 12.0, 198.0
    y_ticks = _ticks(min(ys, default=0.0), max(ys, default=1.0), 5)
    x_low, x_high = min(xs, default=0.0), max(xs, default=1.0)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return left + (width - left - right) * along, bottom - (bottom - top) * (y - y_low) / (y_high - y_low)

    out = []
    for tick in y_ticks:
        y = place(x_low, tick)[1]
        out.append(f'<line class="grid" x1="{_n(left)}" x2="{_n(width - right)}" y1="{_n(y)}" y2="{_n(y)}"/>')
        out.append(_text(left - 8, y + 4, mark(tick), "tick", "end"))
    for tick in _ticks(x_low, x_high, 6, whole=True):
        if x_low <= tick <= x_high:
            out.append(_text(place(tick, y_low)[0], bottom + 18, f"{tick:g}", "tick", "middle"))
    out.append(_text(left + (width - left - right) / 2, bottom + 36, x_name, "tick", "middle"))
    ends = []
    for j, name, runs in drawn:
        for run in runs:
            spots = [place(x, y) for x, y in run]
            path = "L".join(f"{_n(x)} {_n(y)}" for x, y in spots)
            out.append(f'<path class="line {_color("l", j)} d{j % 4}" d="M{path}"/>')
            kind = _color("s", j) if len(run) == 1 else "hit"
            for (cx, cy), (x, y) in zip(spots, run, strict=True):
                spot = f'<circle class="{kind}" cx="{_n(cx)}" cy="{_n(cy)}" r="3.5">'
                out.append(f"{spot}{_title(f'{name}, {x_name} {x:g}: {show(y)}')}</circle>")
        ends.append((place(*runs[-1][-1])[1], j, name))
    for y, (_, j, name) in zip(_spread([y for y, _, _ in sorted(ends)], 14, bottom), sorted(ends), strict=True):
        x = width - right + 8
        out.append(f'<circle class="{_color("s", j)}" cx="{_n(x)}" cy="{_n(y)}" r="3.5"/>')
        out.append(_text(x + 8, y + 4, _short(name, right), "name"))
    return _svg(label, width, bottom + 44, out)


def _svg(label: Label, width: float, height: float, body: Sequence[str]) -> str:
    key = escape(plain(label.key))
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {_n(width)} {_n(height)}" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{_esc(label.title)}</title><desc id="{key}-d">{_esc(label.desc)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _key(series: Sequence[str], width: float) -> tuple[str, float]:
    """The lettered key above stacked bars, in as many columns as the longest name allows; and where the bars begin."""
    longest = max((len(name) for name in series), default=0)
    columns = 3 if longest <= 14 and len(series) not in (2, 4) else 2
    cell, out = width / columns, []
    for j, name in enumerate(series):
        x, y = cell * (j % columns), 4 + 20.0 * (j // columns)
        out.append(_segment(j, x, y, 15, 15, name))
        out.append(_text(x + 21, y + 12, _short(name, cell - 14), "name"))
    return "".join(out), 4 + 20.0 * math.ceil(len(series) / columns) + 10


def _segment(j: int, x: float, y: float, length: float, thick: float, title: str) -> str:
    rect = _rect(_color("s", j), x, y, length, thick)
    roomy = length >= 12 and thick >= 10 and j < 26
    letter = _text(x + length / 2, y + thick / 2 + 3.5, chr(ord("A") + j), f"letter {_color('k', j)}", "middle")
    return f"<g>{_title(title)}{rect}{letter if roomy else ''}</g>"


def _rect(kind: str, x: float, y: float, length: float, thick: float) -> str:
    return f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(length)}" height="{_n(thick)}"/>'


def _grid(ticks: Sequence[tuple[float, str]], top: float, bottom: float) -> str:
    return "".join(
        f'<line class="grid" x1="{_n(x)}" x2="{_n(x)}" y1="{_n(top)}" y2="{_n(bottom)}"/>'
        + _text(x, bottom + 15, text, "tick", "middle")
        for x, text in ticks
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{_esc(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{_esc(text)}</title>"


def _esc(text: str) -> str:
    return escape(plain(text))


def _n(value: float) -> str:
    """A coordinate, to a twentieth of a pixel and no longer than needed: pages of many sites stay small."""
    return f"{round(value * 20) / 20:.2f}".rstrip("0").rstrip(".")


def _color(kind: str, j: int) -> str:
    return f"{kind}{j % PALETTE + 1}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _amount(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _name_width(names: Iterable[str]) -> float:
    return 14 + CHAR * min(max(map(len, names), default=0), 14)


def _short(text: str, width: float) -> str:
    room = max(int((width - 8) / CHAR), 3)
    return text if len(text) <= room else text[: room - 1] + "…"


def _row_height(rows: int) -> float:
    """Generous for few rows, tight for many, and never a block taller than a screen."""
    if rows <= 12:
        return 28.0
    return 18.0 if rows <= MANY_ROWS else max(480.0 / rows, 0.5)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The stretches of a line between missing values."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in sorted(points, key=lambda point: point[0]):
        if y is not None and math.isfinite(y):
            runs[-1].append((x, y))
        else:
            runs.append([])
    return [run for run in runs if run]


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers that enclose low to high: about `count` steps of 1, 2 or 5 times a power of ten."""
    raw = max(high - low, 1e-3) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def _spread(wanted: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Heights near the wanted ones (sorted) but at least `gap` apart, so that names beside lines do not overlap."""
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, placed[-1] + gap) if placed else y)
    limit = bottom
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed
