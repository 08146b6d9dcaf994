"""A file that is a plain picture (PNG, JPEG, BMP, TIFF of 8 bits) as pixels, and what a folder holds.

This module and all that it uses stay clear of torch: the processes that decode files (see `reading`) start in a moment
and are small.
"""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps

from wardround.data.greys import Pixels
from wardround.errors import BadInput

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "TIFF")
LITTER = ("thumbs.db", "desktop.ini")  # what Windows leaves in folders and does not show
GREY_MODES = ("1", "L", "LA")
# What Pillow's readers raise for a damaged file; they follow what the file says and fall over in many ways.
DAMAGE = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    struct.error,
)


def entries(path: Path) -> list[Path]:
    """What a folder holds, in the order of names, so that a disk's own order changes nothing."""
    try:
        return sorted(e for e in path.iterdir() if not e.name.startswith(".") and e.name.lower() not in LITTER)
    except OSError as error:
        raise BadInput(f"{path} cannot be listed ({error.strerror}); check its permissions") from error


def read_picture(path: Path) -> Pixels:
    """One picture, whole."""
    try:
        with warnings.catch_warnings():
            # A small file that unpacks to a giant picture is an attack or an accident; Pillow only warns at first.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                _check_depth(path, image)
                # Cameras store how they were held; a picture is read as it is meant to be seen.
                upright = ImageOps.exif_transpose(image)
                plain = upright.convert("L" if upright.mode in GREY_MODES else "RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadInput(f"{path} unpacks to far too many pixels; shrink it first") from error
    except DAMAGE as error:
        raise BadInput(f"{path} cannot be read as a picture; mend it or move it out") from error
    return np.asarray(plain, dtype=np.uint8)


def _check_depth(path: Path, image: ImageFile.ImageFile) -> None:
    # Pillow reads 16-bit colour as 8-bit without a word; only the raw mode of the stored data still tells.
    stored = str(image.tile[0].args) if image.tile else ""
    if image.mode.startswith(("I", "F")) or ";16" in stored:
        raise BadInput(f"{path} has more than 8 bits per channel, which are read of grey pictures alone; store 8 bits")
    if getattr(image, "n_frames", 1) > 1:
        raise BadInput(f"{path} holds several pictures in one file; store each as its own file")
