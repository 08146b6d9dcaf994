"""What every chart is drawn with: SVG text from numbers and names, no plotting library.

Every chart scales by its `viewBox`, takes its colours from the page's style sheet through classes (`s1`…`s11` fill,
`l1`…`l11` stroke, `k1`…`k11` letters on a fill), and is named for a screen reader by its title and description. Nothing
is told by colour alone: segments carry letters, lines carry names and dashes, points carry names or shapes.

Drawn 320 to 360 units wide, so that one unit is about one pixel on a phone and text stays readable there.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

PALETTE = 11  # colours in the style sheet; further series start again, told apart by their letters
CHAR = 6.6  # mean width of a character at the charts' 12 units, on the wide side
MOST_OF_A_KEY = 60  # letters of a name in a key

Format = Callable[[float], str]
Spot = tuple[float, float]


@dataclass(frozen=True)
class Label:
    """What a chart is called: `key` is unique on the page, `title` names it, `desc` says in words what it shows."""

    key: str
    title: str
    desc: str


def keyed(what: str, number: int, of: str) -> str:
    """A key that is unique by its number and says of what the chart is, for a file's name, too."""
    return "-".join([what, str(number), *re.findall(r"[a-z0-9]+", of.lower()[:MOST_OF_A_KEY])])


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


def escaped(text: str) -> str:
    """Text for markup."""
    return escape(plain(text))


def drawing(label: Label, width: float, height: float, body: Sequence[str]) -> str:
    """A whole chart."""
    key = escaped(label.key)
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {num(width)} {num(height)}" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escaped(label.title)}</title><desc id="{key}-d">{escaped(label.desc)}</desc>'
        f"{''.join(body)}</svg>"
    )


def num(value: float) -> str:
    """A coordinate, to a twentieth of a pixel and no longer than needed: pages of many sites stay small."""
    return f"{round(value * 20) / 20:.2f}".rstrip("0").rstrip(".")


def words(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    """Text at a place; `anchor` says which of its ends is there."""
    return f'<text class="{kind}" x="{num(x)}" y="{num(y)}" text-anchor="{anchor}">{escaped(text)}</text>'


def tooltip(text: str) -> str:
    """What shows when the pointer rests on the element it is put into."""
    return f"<title>{escaped(text)}</title>"


def box(kind: str, x: float, y: float, length: float, thick: float) -> str:
    """A rectangle from its upper left corner."""
    return f'<rect class="{kind}" x="{num(x)}" y="{num(y)}" width="{num(length)}" height="{num(thick)}"/>'


def dot(kind: str, x: float, y: float, tip: str = "", radius: float = 3.5) -> str:
    """A circle."""
    inside = f">{tooltip(tip)}</circle>" if tip else "/>"
    return f'<circle class="{kind}" cx="{num(x)}" cy="{num(y)}" r="{num(radius)}"{inside}'


def rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{num(x1)}" x2="{num(x2)}" y1="{num(y1)}" y2="{num(y2)}"/>'


def path(kind: str, spots: Sequence[Spot], closed: bool = False) -> str:
    """Straight lines from spot to spot."""
    steps = "L".join(f"{num(x)} {num(y)}" for x, y in spots)
    return f'<path class="{kind}" d="M{steps}{"z" if closed else ""}"/>'


def tone(kind: str, j: int) -> str:
    """The class of the j-th series: `s` fills, `l` draws lines, `k` writes on a fill."""
    return f"{kind}{j % PALETTE + 1}"


def lettered_key(series: Sequence[str], width: float) -> tuple[str, float]:
    """The lettered key above stacked bars, in as many columns as the longest name allows; and where the bars begin."""
    longest = max((len(name) for name in series), default=0)
    columns = 3 if longest <= 14 and len(series) not in (2, 4) else 2
    cell, out = width / columns, []
    for j, name in enumerate(series):
        x, y = cell * (j % columns), 4 + 20.0 * (j // columns)
        out.append(segment(j, x, y, 15, 15, name))
        out.append(words(x + 21, y + 12, shortened(name, cell - 14), "name"))
    return "".join(out), 4 + 20.0 * math.ceil(len(series) / columns) + 10


def segment(j: int, x: float, y: float, length: float, thick: float, tip: str) -> str:
    """A part of a bar, with the letter of its series where there is room."""
    roomy = length >= 12 and thick >= 10 and j < 26
    letter = words(x + length / 2, y + thick / 2 + 3.5, chr(ord("A") + j), f"letter {tone('k', j)}", "middle")
    return f"<g>{tooltip(tip)}{box(tone('s', j), x, y, length, thick)}{letter if roomy else ''}</g>"


def upright_grid(marks: Sequence[tuple[float, str]], top: float, bottom: float) -> str:
    """Vertical lines, each with its mark below."""
    return "".join(rule("grid", x, top, x, bottom) + words(x, bottom + 15, t, "tick", "middle") for x, t in marks)


def finite(value: float | None) -> float | None:
    """A number, or None for what is none."""
    return value if value is not None and math.isfinite(value) else None


def within(value: float) -> float:
    """A share, cut to 0 to 1."""
    return min(max(value, 0.0), 1.0)


def name_width(names: Iterable[str]) -> float:
    """Units that the longest of these names takes beside a chart, up to fourteen letters."""
    return 14 + CHAR * min(max(map(len, names), default=0), 14)


def shortened(text: str, width: float) -> str:
    """Text that fits so many units."""
    room = max(int((width - 8) / CHAR), 3)
    return text if len(text) <= room else text[: room - 1] + "…"


def runs_of(points: Sequence[tuple[float, float | None]]) -> list[list[Spot]]:
    """The stretches of a line between missing values."""
    runs: list[list[Spot]] = [[]]
    for x, y in sorted(points, key=lambda point: point[0]):
        if y is not None and math.isfinite(y):
            runs[-1].append((x, y))
        else:
            runs.append([])
    return [run for run in runs if run]


def round_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers that enclose low to high: about `count` steps of 1, 2 or 5 times a power of ten.

    No step is too small to tell two of so large numbers apart.
    """
    raw = max(high - low, 1e-3, 1e-12 * max(abs(low), abs(high))) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def ticks_within(low: float, high: float, count: int, whole: bool = False, unit: float = 1.0) -> list[float]:
    """About `count` round multiples of `unit` from low to high; two at least, since one mark tells no scale."""
    found: list[float] = []
    for wanted in range(count, 4 * count):
        ticks = [tick * unit for tick in round_ticks(low / unit, high / unit, wanted, whole)]
        found = [tick for tick in ticks if low <= tick <= high]
        if len(found) > 1:
            break
    return found


def spread_out(wanted: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Heights near the wanted ones (sorted) but at least `gap` apart, so that names beside lines do not overlap."""
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, placed[-1] + gap) if placed else y)
    limit = bottom
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed
