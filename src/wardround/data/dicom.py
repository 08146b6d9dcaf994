"""DICOM files as 8-bit pictures, through `pydicom` (an extra: `pip install 'wardround[dicom]'`).

Only the tags that say how pixels become grey are read, listed below; names, dates and numbers of a patient are never
read, with one exception: `patient_key` reads the patient's id, and gives it back as a keyed hash whose key is drawn
anew in every process and kept nowhere. pydicom's own messages may quote what a file holds, so none of them is passed
on.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from wardround.data.dicom_grey import FLOATS, GREY_TAGS, as_picture, counted, has_floats, rescaled, shown
from wardround.data.greys import Pixels, Values
from wardround.data.slices import EXAMPLES, SliceRule, Volume
from wardround.errors import BadInput

if TYPE_CHECKING:
    from pydicom import Dataset

SUFFIXES = (".dcm", ".dicom", ".ima")
MOST_PIXELS = 2**27  # of one frame; a mammogram has about 2**24
MOST_SERIES = 2**27  # of all slices of a series together: 512 slices of 512 x 512
DEFLATED = b"1.2.840.10008.1.2.1.99"
PIXEL_TAGS = (
    "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit",
    "PixelRepresentation", "PlanarConfiguration", "NumberOfFrames", "PixelData", *FLOATS,
    "ExtendedOffsetTable", "ExtendedOffsetTableLengths",
)  # fmt: skip
PLACE_TAGS = ("SeriesInstanceUID", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "InstanceNumber")
# Which packages decode what pydicom and Pillow do not, by the end of the transfer syntax's number.
DECODERS = (
    (("4.50", "4.51", "4.57", "4.70"), "pylibjpeg pylibjpeg-libjpeg"),
    (("4.80", "4.81"), "pyjpegls"),
    (("4.90", "4.91", "4.201", "4.202", "4.203"), "pylibjpeg pylibjpeg-openjpeg"),
)

_KEY = secrets.token_bytes(32)


def is_dicom(path: Path) -> bool:
    """By the mark behind the first 128 bytes, since many DICOM files have no suffix; a pipe is not waited for."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def read_dicom(path: Path, rule: SliceRule | None) -> tuple[list[Pixels], int]:
    """The pictures of one file, `(rows, columns)` or `(rows, columns, 3)` in colour; and the bits of a stored value.

    A file of several frames needs a rule that says which; without one it is refused.
    """
    found = _open(path, (*PIXEL_TAGS, *GREY_TAGS))
    frames = _frames(path, found)
    if frames > 1 and rule is None:
        raise BadInput(f"{path} has {frames} frames; say which to use by data.slices or a column slices: {EXAMPLES}")
    if rule is not None and rule.plane:
        raise BadInput(f"{path} is one file, whose frames are used as stored; leave {rule.plane!r} out of the rule")
    chosen = rule.chosen(frames) if rule is not None else range(1)
    pictures = [_guarded(path, as_picture, _pixels(path, found, frame), found, frame) for frame in chosen]
    return pictures, _whole(path, found, "BitsAllocated" if has_floats(found) else "BitsStored")


def read_series(path: Path, files: Sequence[Path]) -> Volume:
    """The slices of one series as a grey volume, in the order of their places in the patient.

    Each slice is rescaled as it says itself; the middle one says how all of them are shown.
    """
    slices = [_open(file, (*PIXEL_TAGS, *GREY_TAGS, *PLACE_TAGS)) for file in files]
    if len({found.get("SeriesInstanceUID") for found in slices}) > 1:
        raise BadInput(f"{path} holds files of several series; keep each series in a folder of its own")
    _refuse_unlike(path, files, slices)
    directions, places = _guarded(path, _places, slices)
    order = np.argsort(places, kind="stable")
    slices, files = [slices[i] for i in order], [files[i] for i in order]
    stored = [_pixels(file, found, 0) for file, found in zip(files, slices, strict=True)]
    if any(plane.ndim != 2 for plane in stored):
        raise BadInput(f"{path} holds a series in colour, which cannot be a volume; name single files instead")
    grey = _guarded(path, _shown_alike, stored, slices)
    rows, columns = _guarded(path, lambda: [float(mm) for mm in slices[0].get("PixelSpacing") or (1, 1)])
    gap = float(np.median(np.diff(np.sort(places)))) if directions is not None and len(places) > 1 else 1.0
    return Volume(grey, directions, (gap or 1.0, rows, columns))


def _refuse_unlike(path: Path, files: Sequence[Path], slices: Sequence[Dataset]) -> None:
    shape = [_whole(path, slices[0], side) for side in ("Rows", "Columns")]
    for file, found in zip(files, slices, strict=True):
        if [_whole(file, found, side) for side in ("Rows", "Columns")] != shape or _frames(file, found) > 1:
            raise BadInput(f"{file} is not a slice like the others in its folder; move it out")
    if len(files) * shape[0] * shape[1] > MOST_SERIES:
        raise BadInput(f"{path} holds a series of far too many pixels; store fewer or smaller slices")


def _shown_alike(stored: list[Values], slices: list[Dataset]) -> Pixels:
    middle = slices[len(slices) // 2]
    values = np.stack([rescaled(plane, found, 0) for plane, found in zip(stored, slices, strict=True)])
    return shown(values, counted(np.stack(stored), middle), middle, 0)


def patient_key(path: Path) -> str:
    """Which patient a file is of, as a hash that means nothing outside this process; empty where it does not say."""
    patient = str(_open(path, ("PatientID",), pixels=False).get("PatientID") or "").strip()
    return hashlib.blake2b(patient.encode(), key=_KEY, digest_size=16).hexdigest() if patient else ""


def _open(path: Path, tags: Sequence[str], pixels: bool = True) -> Dataset:
    try:
        read = _silent_reader()
    except ImportError as error:
        raise BadInput(f"{path} is DICOM, which needs pydicom: pip install 'wardround[dicom]'") from error
    try:
        with path.open("rb") as file:
            start = file.read(4096)
            if start[128:132] != b"DICM":
                raise BadInput(f"{path} is not a DICOM file: the mark DICM is missing; export it again or move it out")
            if DEFLATED in start:
                raise BadInput(f"{path} is a deflated DICOM file, which could unpack without end; store it otherwise")
            file.seek(0)
            found: Dataset = _guarded(path, _elements, read, file, tags, pixels)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    return found


@cache
def _silent_reader() -> Callable[..., Dataset]:
    """The reader of pydicom, told to be quiet: what it would warn of may quote a patient's tags."""
    from pydicom import config, dcmread

    config.settings.reading_validation_mode = config.IGNORE
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    return dcmread


def _elements(read: Callable[..., Dataset], file: IO[bytes], tags: Sequence[str], pixels: bool) -> Dataset:
    """These tags, each looked at once: pydicom makes sense of one only when it is asked for, and may fall over it."""
    found = read(file, specific_tags=list(tags), stop_before_pixels=not pixels)
    for _ in found:
        pass
    return found


def _guarded(path: Path, work: Any, *arguments: Any) -> Any:
    """What `work` gives; whatever it falls over in a damaged file becomes one line, without the file's own words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(*arguments)
    except BadInput:
        raise
    except Exception:  # noqa: BLE001 - pydicom raises nearly everything over what a file says
        raise BadInput(f"{path} cannot be read as a DICOM picture; export it again or move it out") from None


def _pixels(path: Path, found: Dataset, frame: int) -> Values:
    """The stored values of one frame, decoded; colour is RGB."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.pixels.utils import pixel_array

    if "PixelData" not in found and not has_floats(found):
        raise BadInput(f"{path} holds no picture (a report, a plan or a structure set?); move it out")
    if _whole(path, found, "Rows") * _whole(path, found, "Columns") > MOST_PIXELS:
        raise BadInput(f"{path} announces far too many pixels; store a smaller picture")
    syntax = found.file_meta.get("TransferSyntaxUID")
    if syntax is None:
        raise BadInput(f"{path} does not say how its pixels are stored (no transfer syntax); export it again")
    try:
        has_decoder = get_decoder(syntax).is_available
    except NotImplementedError:
        has_decoder = False
    packages = next((names for ends, names in DECODERS if syntax.removeprefix("1.2.840.10008.1.2.") in ends), "")
    what = f"pip install {packages}, or store it uncompressed" if packages else "store it uncompressed"
    if not has_decoder:
        raise BadInput(f"{path} is compressed as {syntax.name} ({syntax}), which nothing here decodes; {what}")
    try:
        values: Values = _guarded(path, lambda: pixel_array(found, index=frame))
    except BadInput:
        if not packages:
            raise
        raise BadInput(f"{path}: its {syntax.name} ({syntax}) pixels are damaged, or need a decoder: {what}") from None
    return values


def _frames(path: Path, found: Dataset) -> int:
    return _whole(path, found, "NumberOfFrames") if found.get("NumberOfFrames") is not None else 1


def _whole(path: Path, found: Dataset, tag: str) -> int:
    try:
        value = int(found[tag].value)
    except (KeyError, TypeError, ValueError):
        value = 0
    if value < 1:
        raise BadInput(f"{path} holds no picture, or is damaged ({tag} is missing or no number); move it out")
    return value


def _places(slices: Sequence[Dataset]) -> tuple[Any, list[float]]:
    """Where the axes of the stack point, and how far along it each slice lies; by number where places are missing."""
    if any(not (s.get("ImagePositionPatient") and s.get("ImageOrientationPatient")) for s in slices):
        return None, [float(s.InstanceNumber) for s in slices]
    along_columns, along_rows = np.array(slices[0].ImageOrientationPatient, dtype=np.float64).reshape(2, 3)
    normal = np.cross(along_columns, along_rows)
    directions = np.stack([normal, along_rows, along_columns], axis=1)
    if not np.isfinite(directions).all() or abs(np.linalg.det(directions)) < 1e-6:
        raise ValueError
    return directions, [float(np.dot(normal, np.array(s.ImagePositionPatient, dtype=np.float64))) for s in slices]
