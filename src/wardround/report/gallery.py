"""Galleries on the page: what a method made, from noise to image, as small PNGs inside the HTML.

All images of a page together stay under a megabyte. Where more were kept there are fewer steps on the page, then fewer
images, then fewer galleries, and each caption says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from wardround.embedded import data_uri
from wardround.errors import BadInput
from wardround.record.gallery import Gallery, read
from wardround.report.parts import View, tabulate
from wardround.report.real import PER_COLUMN, RealImages
from wardround.report.values import as_dict, as_records, as_text, as_texts, plural
from wardround.synthesis.gallery import ONE, spread

BUDGET = 1_000_000  # bytes of the page that galleries may take
CELL_MARKUP = 300  # bytes of the table around one image, with a class name of a hundred characters
PNG_FRAME = 200  # bytes of a PNG beyond its pixels, when these do not compress
FIGURE_MARKUP = 4_000  # bytes of one gallery's caption and headings
MOST_SIDE = 64  # pixels; larger images are shown smaller
NAMED = 12  # classes left out that are named
MOST_STOPS = 12  # of a slider; the style sheet knows as many
LEAST_CELLS = 2  # one image, at its first and its last step
ORIGIN = "Made by the coordinator from the models alone; no patient's image."
BESIDE = (
    "The steps were made by the coordinator from the models alone. Rows marked “real” are patients’ images: training "
    "images of the class, from {whose} in turn."
)


def galleries_view(result: View, folder: Path | None, real: RealImages | None = None) -> View:
    """The galleries that a result names, from the directory it lies in; what cannot be shown is said in words.

    `real` puts real images beside them: there are none unless the user asked.
    """
    found: list[tuple[str, str, Gallery]] = []
    problems: list[str] = []
    for entry in as_records(result.get("galleries")) if folder else []:
        method = as_text(entry.get("method"))
        try:
            gallery = _open(folder or Path(), as_text(entry.get("file")))
        except BadInput as error:
            problems.append(f"The images of {method} cannot be shown: {error}.")
        else:
            found += [(method, title, gallery) for title in sorted(gallery.pictures, key=_in_order)]
    classes = as_texts(as_dict(result.get("data")).get("classes"))
    size = max((_most_bytes(gallery.pictures[title]) for _, title, gallery in found), default=1)
    least = LEAST_CELLS + (PER_COLUMN if real else 0)
    cells = max((BUDGET // max(len(found), 1) - FIGURE_MARKUP) // size, least)
    shown = found[: BUDGET // (cells * size + FIGURE_MARKUP)]
    more = len(found) - len(shown)
    return {
        "figures": [
            _figure(method, title, gallery, classes, cells, real and real.behind(result, method, title))
            for method, title, gallery in shown
        ],
        "real": real is not None,
        "left_out": plural(more, "more gallery is", "more galleries are") if more else "",
        "problems": problems,
    }


def _open(folder: Path, file: str) -> Gallery:
    """A result may come from anyone: what it names is read only where the result itself lies."""
    path = folder / file
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # a name that no file can have
        inside = False
    if not inside or not file:
        raise BadInput(f"{file[:80]!r} is no file of this directory")
    return read(path)


def _most_bytes(pictures: Tensor) -> int:
    """What one of these images takes on the page at most: noise does not compress."""
    channels, height, width = pictures.shape[2:]
    factor = _shrink(pictures)
    pixels = math.ceil(height / factor) * (math.ceil(width / factor) * channels + 1)
    return 4 * math.ceil((pixels + PNG_FRAME) / 3) + CELL_MARKUP


def _shrink(pictures: Tensor) -> int:
    """By how much images of this height and width are made smaller."""
    return math.ceil(max(pictures.shape[-2:]) / MOST_SIDE)


def _figure(
    method: str, title: str, gallery: Gallery, classes: Sequence[str], cells: int, real: RealImages | None
) -> View:
    """One gallery: a row for each step, a column for each image, headed by its class; real images below, if any."""
    pictures, names = gallery.pictures[title], _columns(gallery.labels, classes)
    all_frames, all_images = len(gallery.steps), len(names)
    below = PER_COLUMN if real else 0
    frames = spread(all_frames, max(cells // all_images - below, 2))
    images = range(min(all_images, max(cells // (len(frames) + below), 1)))
    rows = [
        [
            f"step {gallery.steps[f]:,}",
            *({"picture": _picture(pictures[f, i], f"{names[i]}, step {gallery.steps[f]:,}")} for i in images),
        ]
        for f in frames
    ]
    name = method if title == ONE else f"{method}, {title}"
    notes = [BESIDE.format(whose=real.whose) if real else ORIGIN]
    if len(frames) < all_frames or len(images) < all_images:
        notes.append(
            f"To keep this page small, {len(frames)} of {all_frames} steps and {len(images)} of {all_images} images "
            "are here; all are in the gallery file."
        )
    if (factor := _shrink(pictures)) > 1:
        notes.append(f"Shown at 1/{factor} of {pictures.shape[4]} × {pictures.shape[3]} pixels.")
    if gallery.left_out:
        names_left = [_class_name(c, classes) for c in gallery.left_out[:NAMED]]
        more = len(gallery.left_out) - len(names_left)
        notes.append(f"Not shown: {', '.join(names_left)}{f' and {more} more' if more else ''}.")
    caption = f"Images made by {name}, by step and class{', and real ones' if real else ''}"
    head = ("Step", *(names[i] for i in images))
    return {
        "name": name,
        "words": " ".join(notes),
        "stops": [f"{gallery.steps[f]:,}" for f in frames] if 1 < len(frames) <= MOST_STOPS else [],
        "table": tabulate(caption, head, rows, _real_rows(real, gallery.labels[: len(images)], names) if real else ()),
    }


def _real_rows(real: RealImages, labels: Sequence[int], names: Sequence[str]) -> list[list[Any]]:
    """The real images below each column; a cell says so where the sites have no more of its class."""
    return [
        [
            f"real {number}",
            *(
                {"picture": _picture(image.pixels, f"{name}, real image {number}, of {image.site}")}
                if image
                else "none"
                for name, image in zip(names, row, strict=False)
            ),
        ]
        for number, row in enumerate(real.below(labels), 1)
    ]


def _columns(labels: Sequence[int], classes: Sequence[str]) -> list[str]:
    """The class of each column; a class that comes again is numbered."""
    names: list[str] = []
    for i, label in enumerate(labels):
        again = labels[:i].count(label)
        names.append(_class_name(label, classes) + (f" ({again + 1})" if again else ""))
    return names


def _class_name(label: int, classes: Sequence[str]) -> str:
    return classes[label][:100] if label < len(classes) else f"class {label}"


def _picture(pixels: Tensor, alt: str) -> View:
    """One image of `(channels, height, width)` as a data URI."""
    array = pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(array).reduce(_shrink(pixels))
    return {"uri": data_uri(image), "alt": alt, "width": image.width, "height": image.height}


def _in_order(title: str) -> list[tuple[int, str]]:
    """Cluster 2 before cluster 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", title)]
