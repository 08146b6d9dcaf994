"""Every chart of a page as files of its own: SVG that needs no page, and PNG for slides and manuscripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.report.page import style_sheet, views
from wardround.report.raster import rasterise
from wardround.report.svg import num

MARGIN = 12.0  # units of white around a chart
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def write_plots(result: dict[str, Any], folder: Path | None, out: Path) -> list[Path]:
    """Write `KEY.svg` and `KEY.png` of every chart into `out`; the files, in the order of the page.

    In the light colours of the page. `folder` is where the files lie that the result names.
    """
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file; give a folder for the plots")
    written = []
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        for chart in charts_of(views(result, folder)):
            name = _file_name(chart)
            alone = standing_alone(chart)
            for path, data in ((out / f"{name}.svg", alone.encode()), (out / f"{name}.png", rasterise(alone))):
                write_atomically(path, data)
                written.append(path)
    return written


def charts_of(view: object) -> Iterator[str]:
    """Every chart within the views of a page, once each, in their order."""
    if isinstance(view, Markup):
        if view.startswith("<svg "):
            yield str(view)
    elif isinstance(view, dict):
        for part in view.values():
            yield from charts_of(part)
    elif isinstance(view, list):
        for part in view:
            yield from charts_of(part)


def standing_alone(chart: str) -> str:
    """A chart with the style it needs, on white, with a margin."""
    x, y, width, height = _box(chart)
    frame = (x - MARGIN, y - MARGIN, width + 2 * MARGIN, height + 2 * MARGIN)
    place = " ".join(map(num, frame))
    ground = f'<rect fill="#ffffff" x="{num(frame[0])}" y="{num(frame[1])}" width="100%" height="100%"/>'
    head = f'xmlns="http://www.w3.org/2000/svg" width="{num(frame[2])}" height="{num(frame[3])}" viewBox="{place}"'
    opened = re.sub(r'viewBox="[^"]*"', lambda _: head, chart, count=1)
    body = opened.index("</desc>") + len("</desc>")
    return f"{opened[:body]}<style>{_rules()}</style>{ground}{opened[body:]}"


@cache
def _rules() -> str:
    """What the page's style sheet says of charts, with the light colours written out."""
    light, _, _ = style_sheet("palette").partition("@media")
    colours = dict(re.findall(r"--([\w-]+): ([^;]+);", light))
    rules = " ".join(style_sheet("chart").splitlines())
    text = re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], rules)
    return f".chart {{ font-size: 12px; font-family: {FONT}; }} {text}"


def _box(chart: str) -> tuple[float, float, float, float]:
    found = re.search(r'viewBox="([-\d.]+) ([-\d.]+) ([-\d.]+) ([-\d.]+)"', chart)
    if found is None:
        raise ValueError("a chart has a viewBox")
    x, y, width, height = map(float, found.groups())
    return x, y, width, height


def _file_name(chart: str) -> str:
    """The key of a chart, which is unique on its page and made by us."""
    found = re.search(r'aria-labelledby="([\w-]+)-t ', chart)
    if found is None:
        raise ValueError("a chart has a key of letters, digits and hyphens")
    return found[1]
