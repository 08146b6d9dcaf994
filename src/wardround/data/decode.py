"""One file, whatever it is, as 8-bit pictures: PNG, JPEG, BMP, TIFF, DICOM, NIfTI, or a folder with a DICOM series."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from wardround.data import dicom, nifti, picture
from wardround.data.greys import Pixels, stretched
from wardround.data.slices import EXAMPLES, Plane, SliceRule, Volume, planes
from wardround.errors import BadInput

MOST_UNEVEN = 50  # slices of 10 mm with pixels of 0.2 mm


def is_volume(path: Path) -> bool:
    """Whether a file needs a rule for slices, as far as its name tells; a DICOM file may still have frames."""
    return nifti.is_nifti(path) or path.is_dir()


@dataclass(frozen=True)
class Decoded:
    """The pictures in a file, `(h, w)` or `(h, w, 3)`, and with how many bits a value was stored."""

    pictures: list[Pixels]
    bits: int


def decode(path: Path, rule: SliceRule | None = None, size: int | None = None) -> list[Pixels]:
    """The pictures in a file; with `size` each cut to its central square and resized.

    `rule` says which pictures of a volume or a film; a file of one picture refuses none but needs none.
    """
    pictures = decode_whole(path, rule).pictures
    return pictures if size is None else [fitted(one, size) for one in pictures]


def decode_whole(path: Path, rule: SliceRule | None = None) -> Decoded:
    """The pictures in a file, whole."""
    if not path.exists():
        raise BadInput(f"{path} does not exist; correct the path or leave the line out")
    if not (path.is_file() or path.is_dir()):
        raise BadInput(f"{path} is a pipe or a device, which has no end; move it out")
    if is_volume(path):
        volume = _series(path) if path.is_dir() else nifti.read_nifti(path)
        return Decoded(_slices(path, volume, rule), volume.values.dtype.itemsize * 8)
    if path.suffix.lower() in picture.SUFFIXES:
        deep = _deep_grey(path)
        return Decoded([picture.read_picture(path)], 8) if deep is None else Decoded([deep], 16)
    if path.suffix.lower() in dicom.SUFFIXES or dicom.is_dicom(path):
        return Decoded(*dicom.read_dicom(path, rule))
    raise BadInput(f"{path} is no PNG, JPEG, BMP, TIFF, DICOM or NIfTI file; convert it or leave it out")


def fitted(whole: Pixels, size: int) -> Pixels:
    """The central square, resized."""
    if whole.shape[:2] == (size, size):
        return whole
    square = ImageOps.fit(Image.fromarray(whole), (size, size), method=Image.Resampling.BICUBIC)  # wider when shrinking
    return np.asarray(square, dtype=np.uint8)


def _series(path: Path) -> Volume:
    files = picture.entries(path)
    if not files:
        raise BadInput(f"{path} is empty; a folder in the place of a file holds the slices of one DICOM series")
    return dicom.read_series(path, files)


def _slices(path: Path, volume: Volume, rule: SliceRule | None) -> list[Pixels]:
    if rule is None:
        raise BadInput(f"{path} is a volume; say which slices to use by data.slices or a column slices: {EXAMPLES}")
    if nifti.is_nifti(path) and volume.directions is not None and not rule.plane:
        # Stored NIfTI slices lie upside down or on their side, each scanner's in its own way.
        raise BadInput(f"{path} is a volume; name the plane of its slices, as in 'middle axial'")
    if volume.values.dtype != np.uint8:
        volume = Volume(stretched(volume.values), volume.directions, volume.spacing)
    return [_square_pixels(path, plane) for plane in planes(volume, rule, str(path))]


def _square_pixels(path: Path, plane: Plane) -> Pixels:
    """A slice across a stack of thick slices would look squashed: its coarser side is stretched to the finer one's."""
    values = np.ascontiguousarray(plane.values, dtype=np.uint8)
    height, width = values.shape
    rows, columns = plane.pixel
    fine = min(rows, columns)
    if not (fine > 0 and max(rows, columns) <= MOST_UNEVEN * fine):
        raise BadInput(f"{path} has slices with pixels of {rows:g} x {columns:g} mm, which cannot be; mend the spacing")
    seen = (max(round(width * columns / fine), 1), max(round(height * rows / fine), 1))
    if seen == (width, height):
        return values
    return np.asarray(Image.fromarray(values).resize(seen, Image.Resampling.BICUBIC), dtype=np.uint8)


def _deep_grey(path: Path) -> Pixels | None:
    """A grey picture of more than 8 bits, stretched between percentiles as a DICOM without a window; None if it is not.

    Everything else is read by `picture.read_picture`, with all its checks.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=picture.FORMATS) as image:
                if not image.mode.startswith(("I", "F")) or getattr(image, "n_frames", 1) > 1:
                    return None
                return stretched(np.asarray(ImageOps.exif_transpose(image)))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError, *picture.DAMAGE):
        return None
