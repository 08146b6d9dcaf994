"""What can be said of one picture alone, in the moment it is decoded: size, greys, a fingerprint, a thumbnail.

`wardround data check` compares these over a set. They are small and plain, so that the processes that decode can hand
them over. Clear of torch, as those processes are.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from wardround.data.greys import Pixels

SIDE = 16
CORNERS = ("top left", "top right", "bottom left", "bottom right")
DARK, BRIGHT = 60, 150  # of 255: the ground and the strokes of text that a scanner writes into a picture
SMALLEST_FOR_TEXT = 64  # pixels
LEAST_BRIGHT, MOST_BRIGHT = 0.004, 0.3  # share of a corner that strokes cover
LEAST_DARK = 0.6
LEAST_EDGES = 0.25  # edges along rows per bright pixel: strokes are a few pixels wide, bones and lamps are not
LEAST_ROWS = 4  # rows of a corner with two strokes or more


@dataclass(frozen=True)
class Look:
    """One picture. `black` and `white` are the shares of pixels at 0 and 255; `text` names written corners."""

    width: int
    height: int
    channels: int
    bits: int
    low: int
    high: int
    mean: float
    spread: float
    black: float
    white: float
    text: tuple[str, ...]
    sha256: str  # of the pixels and their shape
    thumb: bytes  # 16×16 grey

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "thumb": base64.b64encode(self.thumb).decode()}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Look:
        """What `as_json` gave."""
        return Look(**{**record, "text": tuple(record["text"]), "thumb": base64.b64decode(record["thumb"])})


def look_at(picture: Pixels, bits: int) -> Look:
    """All of it, for a picture `(h, w)` or `(h, w, 3)` that was stored with so many bits."""
    height, width = picture.shape[:2]
    grey = picture if picture.ndim == 2 else np.asarray(Image.fromarray(picture).convert("L"))
    counts = np.array(Image.fromarray(grey).histogram(), dtype=np.float64)
    shares, levels = counts / counts.sum(), np.arange(256)
    present = np.flatnonzero(counts)
    mean = float(shares @ levels)
    digest = hashlib.sha256(str(picture.shape).encode())
    digest.update(np.ascontiguousarray(picture).data)
    return Look(
        width=width,
        height=height,
        channels=1 if picture.ndim == 2 else 3,
        bits=bits,
        low=int(present[0]),
        high=int(present[-1]),
        mean=round(mean, 3),
        spread=round(float(shares @ (levels - mean) ** 2) ** 0.5, 3),
        black=round(float(shares[0]), 4),
        white=round(float(shares[255]), 4),
        text=written_corners(grey),
        sha256=digest.hexdigest(),
        thumb=thumbnail(grey).tobytes(),
    )


def as_picture(image: Pixels) -> Pixels:
    """One image of a set, `(channels, side, side)`, as a picture: `(side, side)` or `(side, side, 3)`."""
    return image[0] if len(image) == 1 else np.ascontiguousarray(np.moveaxis(image, 0, 2))


def thumbnail(picture: Pixels) -> Pixels:
    """A picture as 16×16 grey pixels, each the mean of what it covers."""
    small = Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(small if small.mode == "L" else small.convert("L"), dtype=np.uint8)


def written_corners(grey: Pixels) -> tuple[str, ...]:
    """The corners (a third of the width, a quarter of the height) with thin bright strokes on a dark ground."""
    height, width = grey.shape
    if min(height, width) < SMALLEST_FOR_TEXT:
        return ()
    h, w = height // 4, width // 3
    corners = (grey[:h, :w], grey[:h, -w:], grey[-h:, :w], grey[-h:, -w:])
    return tuple(name for name, corner in zip(CORNERS, corners, strict=True) if _is_written(corner))


def _is_written(corner: Pixels) -> bool:
    bright, dark = corner >= BRIGHT, corner <= DARK
    strokes = int(np.count_nonzero(bright))
    if not LEAST_BRIGHT * corner.size <= strokes <= MOST_BRIGHT * corner.size:
        return False
    if np.count_nonzero(dark) < LEAST_DARK * corner.size:
        return False
    edges = np.count_nonzero(bright[:, 1:] != bright[:, :-1], axis=1)
    return bool(edges.sum() >= LEAST_EDGES * strokes and np.count_nonzero(edges >= 4) >= LEAST_ROWS)
