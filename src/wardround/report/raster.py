"""Our own charts as PNG, with Pillow alone: no browser, no plotting library, nothing to install.

Knows what `svg.py` draws and no more: rectangles, circles, lines, paths of straight strokes, text, and style rules by
tag and class. Letters come from a font of the system where a usual one is found, else from Pillow's own, which has
Latin letters only; names in other scripts need the SVG.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree

from PIL import Image, ImageColor, ImageDraw, ImageFont

SCALE = 3  # pixels of a unit
FINER = 2  # drawn so many times larger and then reduced, which smooths every edge
FONTS = ("DejaVuSans.ttf", "Arial.ttf", "LiberationSans-Regular.ttf", "Helvetica.ttc")
BOLD = ("DejaVuSans-Bold.ttf", "Arial Bold.ttf", "LiberationSans-Bold.ttf", "arialbd.ttf")
STYLE = "{http://www.w3.org/2000/svg}style"
HALF = 550  # font weight from which on letters are bold

Colour = tuple[int, int, int, int]
Style = dict[str, str]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Rule(NamedTuple):
    """Which elements a rule is for, and what it says."""

    tag: str
    classes: frozenset[str]
    beginning: str  # of the class attribute
    style: Style


def rasterise(svg: str) -> bytes:
    """A chart that stands alone, as the bytes of a PNG."""
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own markup, which declares no entity
    x, y, width, height = (float(part) for part in root.attrib["viewBox"].split())
    pen = _Pen(width, height, (x, y), _rules(root.findtext(STYLE) or ""))
    for element in root:
        pen.draw(element)
    file = BytesIO()
    pen.image.reduce(FINER).save(file, "PNG", optimize=True)
    return file.getvalue()


class _Pen:
    """An image and how to draw elements on it."""

    def __init__(self, width: float, height: float, corner: tuple[float, float], rules: Sequence[Rule]) -> None:
        self.unit, self.corner, self.rules = SCALE * FINER, corner, rules
        size = (math.ceil(width * SCALE) * FINER, math.ceil(height * SCALE) * FINER)
        self.image = Image.new("RGB", size, "white")
        self.canvas = ImageDraw.Draw(self.image, "RGBA")

    def draw(self, element: ElementTree.Element) -> None:
        tag = element.tag.rpartition("}")[2]
        if tag == "g":
            for inner in element:
                self.draw(inner)
        elif tag in ("rect", "circle", "line", "path", "text") and "%" not in element.get("width", ""):
            getattr(self, f"_{tag}")(element, self._style(tag, element.get("class", "")))

    def _style(self, tag: str, named: str) -> Style:
        classes, style = set(named.split()), Style()
        for rule in self.rules:
            if rule.tag in ("", tag) and rule.classes <= classes and named.startswith(rule.beginning):
                style |= rule.style
        return style

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return (x - self.corner[0]) * self.unit, (y - self.corner[1]) * self.unit

    def _rect(self, element: ElementTree.Element, style: Style) -> None:
        x, y, width, height = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
        if width > 0 and height > 0:
            corners = [*self._at(x, y), *self._at(x + width, y + height)]
            self.canvas.rectangle(corners, _fill(style), _stroke(style), self._width(style))

    def _circle(self, element: ElementTree.Element, style: Style) -> None:
        x, y, r = (float(element.get(name, "0")) for name in ("cx", "cy", "r"))
        if (fill := _fill(style)) is not None or _stroke(style) is not None:
            box = [*self._at(x - r, y - r), *self._at(x + r, y + r)]
            self.canvas.ellipse(box, fill, _stroke(style), self._width(style))

    def _line(self, element: ElementTree.Element, style: Style) -> None:
        x1, y1, x2, y2 = (float(element.get(name, "0")) for name in ("x1", "y1", "x2", "y2"))
        self._strokes([(x1, y1), (x2, y2)], {"stroke-width": "1", **style})

    def _path(self, element: ElementTree.Element, style: Style) -> None:
        for spots, closed in _outlines(element.get("d", "")):
            fill = _fill(style) if closed else None
            if fill is not None and len(spots) > 2:
                self.canvas.polygon([self._at(*spot) for spot in spots], fill)
            self._strokes(spots, style)

    def _strokes(self, spots: Sequence[tuple[float, float]], style: Style) -> None:
        stroke = _stroke(style)
        if stroke is None:
            return
        dashes = [float(part) for part in style.get("stroke-dasharray", "").split()]
        for piece in _dashed(spots, dashes) if dashes else [spots]:
            self.canvas.line([self._at(*spot) for spot in piece], stroke, self._width(style), joint="curve")

    def _text(self, element: ElementTree.Element, style: Style) -> None:
        size = float(style.get("font-size", "12px").removesuffix("px"))
        font = _font(size * self.unit, float(style.get("font-weight", "400")) >= HALF)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[element.get("text-anchor", "start")]
        place = self._at(float(element.get("x", "0")), float(element.get("y", "0")))
        self.canvas.text(place, element.text or "", _fill(style) or (0, 0, 0, 255), font, anchor)

    def _width(self, style: Style) -> int:
        return max(round(float(style.get("stroke-width", "1")) * self.unit), 1) if _stroke(style) else 0


def _rules(sheet: str) -> list[Rule]:
    found = []
    for selector, body in re.findall(r"\.chart\s*([^{},]*)\{([^}]*)\}", sheet):
        tag, beginning = re.match(r"\s*([a-z]*)", selector), re.search(r'\[class\^="(\w+)"\]', selector)
        style = dict(part.split(":", 1) for part in body.split(";") if ":" in part)
        style = {name.strip(): value.strip() for name, value in style.items()}
        classes = frozenset(re.findall(r"\.([\w-]+)", selector))
        found.append(Rule(tag[1] if tag else "", classes, beginning[1] if beginning else "", style))
    return found


def _fill(style: Style) -> Colour | None:
    return _colour(style.get("fill", "#000"), style, "fill-opacity")


def _stroke(style: Style) -> Colour | None:
    return _colour(style.get("stroke", "none"), style, "stroke-opacity")


def _colour(name: str, style: Style, opacity: str) -> Colour | None:
    if name in ("none", "transparent"):
        return None
    share = float(style.get("opacity", "1")) * float(style.get(opacity, "1"))
    red, green, blue = ImageColor.getrgb(name)[:3]
    return red, green, blue, round(255 * share)


def _outlines(d: str) -> list[tuple[list[tuple[float, float]], bool]]:
    """The strokes of a path of M, L, h, v and z, each with whether it is closed."""
    found: list[tuple[list[tuple[float, float]], bool]] = []
    for part in re.findall(r"M[^M]*", d):
        spots: list[tuple[float, float]] = []
        for letter, numbers in re.findall(r"([MLhv])([-\d. ]+)", part):
            values = [float(value) for value in numbers.split()]
            if letter in "ML":
                spots.append((values[0], values[1]))
            else:
                x, y = spots[-1]
                spots.append((x + values[0], y) if letter == "h" else (x, y + values[0]))
        found.append((spots, part.endswith("z")))
    return found


def _dashed(spots: Sequence[tuple[float, float]], dashes: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The parts of a line that a dash pattern draws."""
    pieces: list[list[tuple[float, float]]] = []
    turn, left, drawing = 0, dashes[0], True
    for (x0, y0), (x1, y1) in pairwise(spots):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > 1e-9:
            step = min(left, length - done)
            ends = [(x0 + (x1 - x0) * at / length, y0 + (y1 - y0) * at / length) for at in (done, done + step)]
            if drawing:
                pieces.append(ends)
            done, left = done + step, left - step
            if left <= 1e-9:
                turn, drawing = turn + 1, not drawing
                left = dashes[turn % len(dashes)]
    return pieces


@cache
def _font(size: float, bold: bool) -> Font:
    for name in (*(BOLD if bold else ()), *FONTS):
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
