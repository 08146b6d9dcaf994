"""NIfTI-1 volumes (`.nii`, `.nii.gz`): the 348 bytes of its header, and the voxels behind them.

The header's fields and the two ways to say where the volume lies in the patient (sform, qform) are those of `nifti1.h`
(https://nifti.nimh.nih.gov/nifti-1). A compressed file is never unpacked further than its header announces.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from wardround.data.slices import Volume
from wardround.errors import BadInput

SUFFIXES = (".nii", ".nii.gz")
HEADER, MOST_BYTES, MOST_BEFORE = 348, 2**30, 2**24
TYPES = {
    2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8",
}  # fmt: skip
RAS_TO_LPS = np.diag([-1.0, -1.0, 1.0])  # NIfTI counts to the right and the front, DICOM to the left and the back


def is_nifti(path: Path) -> bool:
    """By the file's name."""
    return path.name.lower().endswith(SUFFIXES)


def read_nifti(path: Path) -> Volume:
    """The volume, with its values scaled as the header says; pictures are stored along its third axis."""
    try:
        with path.open("rb") as plain:
            if path.name.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=plain) as unpacked:
                    return _read(path, unpacked)
            return _read(path, plain)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise BadInput(f"{path} cannot be read as NIfTI, or is cut short; copy or write it again") from error


def _read(path: Path, file: BinaryIO | gzip.GzipFile) -> Volume:
    header = file.read(HEADER)
    order = _byte_order(path, header)
    dim = struct.unpack_from(f"{order}8h", header, 40)
    shape = _shape(path, dim)
    (code,) = struct.unpack_from(f"{order}h", header, 70)
    if code not in TYPES:
        raise BadInput(f"{path} stores voxels of NIfTI type {code}, not plain numbers; store whole or real numbers")
    kind = np.dtype(order + TYPES[code])
    count = shape[0] * shape[1] * shape[2]
    before, slope, shift = struct.unpack_from(f"{order}3f", header, 108)
    if count * kind.itemsize > MOST_BYTES or not HEADER <= before <= MOST_BEFORE:
        raise BadInput(f"{path} announces {shape} voxels, more than a GiB or damaged; store a smaller volume")
    file.read(int(before) - HEADER)
    data = file.read(count * kind.itemsize)
    if len(data) < count * kind.itemsize:
        raise EOFError
    values: NDArray[np.generic] = np.frombuffer(data, kind).reshape(shape[::-1])  # the first axis runs fastest
    if np.isfinite(slope) and slope != 0 and (slope, shift) != (1, 0):
        values = values.astype(np.float32) * np.float32(slope) + np.float32(shift)
    spacing = struct.unpack_from(f"{order}3f", header, 80)
    k, r, c = (abs(mm) if np.isfinite(mm) and mm != 0 else 1.0 for mm in spacing[::-1])
    return Volume(values, _directions(header, order), (k, r, c))


def _byte_order(path: Path, header: bytes) -> str:
    if len(header) < HEADER:
        raise EOFError
    for order in "<>":
        (size,) = struct.unpack_from(f"{order}i", header)
        if size == HEADER and header[344:348] == b"n+1\0":
            return order
        if size == 540:
            raise BadInput(f"{path} is NIfTI-2, which is not read; save it as NIfTI-1")
    if header[344:348] == b"ni1\0":
        raise BadInput(f"{path} keeps its voxels in a second file; save it as one .nii file")
    raise BadInput(f"{path} is not a NIfTI-1 file; write it again or move it out")


def _shape(path: Path, dim: tuple[int, ...]) -> tuple[int, int, int]:
    axes = dim[0]
    if not 1 <= axes <= 7 or min(dim[1 : axes + 1]) < 1:
        raise BadInput(f"{path} has a damaged NIfTI header; write it again")
    sides = [*dim[1 : axes + 1], 1, 1][: max(axes, 3)]
    if any(side != 1 for side in sides[3:]):
        raise BadInput(f"{path} holds several volumes ({' x '.join(map(str, sides))}); store one volume per file")
    return sides[0], sides[1], sides[2]


def _directions(header: bytes, order: str) -> NDArray[np.float64] | None:
    """Where the axes of `(k, r, c)` point in DICOM's terms, or None where the header does not say."""
    qform, sform = struct.unpack_from(f"{order}2h", header, 252)
    if sform > 0:
        rows = np.array(struct.unpack_from(f"{order}12f", header, 280)).reshape(3, 4)[:, :3]
    elif qform > 0:
        rows = _rotation(*struct.unpack_from(f"{order}3f", header, 256))
        (handedness,) = struct.unpack_from(f"{order}f", header, 76)
        rows[:, 2] *= -1 if handedness < 0 else 1
    else:
        return None
    usable = np.isfinite(rows).all() and abs(np.linalg.det(rows)) > 1e-12
    return RAS_TO_LPS @ rows[:, ::-1] if usable else None


def _rotation(b: float, c: float, d: float) -> NDArray[np.float64]:
    """The rotation of a unit quaternion whose first part is left out, since it follows from the others."""
    a = max(0.0, 1.0 - (b * b + c * c + d * d)) ** 0.5
    return np.array(
        [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
        ]
    )
