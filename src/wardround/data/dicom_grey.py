"""From the stored values of a DICOM picture to 8-bit grey or colour, in the order of the standard (PS3.3, C.11).

Stored values are first rescaled (modality), then shown through the file's own lookup table or, without one, its first
window. A file without either is stretched between percentiles (see `greys`), pixels that only pad left out; plain 8-bit
values stay as they are. Of floating-point pixels, as parametric maps have them, a linear window is taken as an exact
one: there are no whole values to count. MONOCHROME1 shows low values bright, so it is inverted at the end. An enhanced
file may say all this for each frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.greys import Pixels, Values, Window, between, stretched

if TYPE_CHECKING:
    from pydicom import Dataset

Counted = NDArray[np.bool_] | None
GREY_TAGS = (
    "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "VOILUTSequence", "WindowCenter", "WindowWidth",
    "VOILUTFunction", "PixelPaddingValue", "PixelPaddingRangeLimit", "FloatPixelPaddingValue",
    "FloatPixelPaddingRangeLimit", "DoubleFloatPixelPaddingValue", "DoubleFloatPixelPaddingRangeLimit",
    "RedPaletteColorLookupTableDescriptor",
    "GreenPaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableDescriptor",
    "RedPaletteColorLookupTableData", "GreenPaletteColorLookupTableData", "BluePaletteColorLookupTableData",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
)  # fmt: skip
FLOATS = {"FloatPixelData": "Float", "DoubleFloatPixelData": "DoubleFloat"}  # the pixels, and how their padding begins


def as_picture(stored: Values, found: Dataset, frame: int) -> Pixels:
    """What a viewer would show first."""
    if stored.ndim == 3:
        return _eight_bits(stored, int(found.BitsStored))
    if found.PhotometricInterpretation == "PALETTE COLOR":
        from pydicom.pixels.processing import apply_color_lut

        coloured = apply_color_lut(stored, found)
        return _eight_bits(coloured, coloured.dtype.itemsize * 8)
    return shown(rescaled(stored, found, frame), counted(stored, found), found, frame)


def shown(values: Values, counted: Counted, found: Dataset, frame: int) -> Pixels:
    """Grey for rescaled values of any shape; `counted` are those that percentiles are taken of (None: all)."""
    voi = _group(found, frame, "FrameVOILUTSequence")
    if voi.get("VOILUTSequence"):
        table = voi.VOILUTSequence[0]
        grey = between(_looked_up(np.rint(values), table, found), 0, 2 ** int(table.LUTDescriptor[2]) - 1)
    elif (window := _window(voi, has_floats(found))) is not None and window.is_usable:
        grey = window.grey(values)
    elif values.dtype == np.uint8 and found.BitsStored == 8:
        grey = values.copy()
    else:
        grey = stretched(values, counted)
    return 255 - grey if found.PhotometricInterpretation == "MONOCHROME1" else grey


def rescaled(stored: Values, found: Dataset, frame: int) -> Values:
    """Stored values in the modality's own unit, such as Hounsfield's."""
    if found.get("ModalityLUTSequence"):
        return _looked_up(stored, found.ModalityLUTSequence[0], found)
    how = _group(found, frame, "PixelValueTransformationSequence")
    slope, intercept = how.get("RescaleSlope"), how.get("RescaleIntercept")
    slope = 1.0 if slope is None else float(slope)
    intercept = 0.0 if intercept is None else float(intercept)
    if (slope, intercept) == (1.0, 0.0):
        return stored
    values = stored.astype(np.float32)
    values *= np.float32(slope)
    values += np.float32(intercept)
    return values


def _group(found: Dataset, frame: int, name: str) -> Dataset:
    """Where an enhanced file keeps what belongs to a frame, else what is common to its frames, else the file itself."""
    per_frame, shared = found.get("PerFrameFunctionalGroupsSequence"), found.get("SharedFunctionalGroupsSequence")
    places = [*(per_frame[frame : frame + 1] if per_frame else []), *(shared[:1] if shared else [])]
    for place in places:
        if place.get(name):
            return place[name].value[0]  # type: ignore[no-any-return]
    return found


def has_floats(found: Dataset) -> bool:
    """Whether the stored values are floating-point numbers."""
    return any(tag in found for tag in FLOATS)


def _window(voi: Dataset, exact: bool) -> Window | None:
    """The first window, if there is one; `exact`: a linear one reaches to both its ends."""
    centre, width = (_first(voi.get(tag)) for tag in ("WindowCenter", "WindowWidth"))
    if centre is None or width is None:
        return None
    function = str(voi.get("VOILUTFunction") or "LINEAR")
    return Window(float(centre), float(width), "LINEAR_EXACT" if exact and function == "LINEAR" else function)


def _first(value: Any) -> Any:
    return value if value is None or isinstance(value, str | float | int) else next(iter(value), None)


def counted(stored: Values, found: Dataset) -> Counted:
    """Which pixels show something: all but those with the padding value, or between it and its limit."""
    kind = next((kind for tag, kind in FLOATS.items() if tag in found), "")
    padding, limit = found.get(f"{kind}PixelPaddingValue"), found.get(f"{kind}PixelPaddingRangeLimit")
    if padding is None or np.isnan(padding):  # what is no number never counts
        return None
    number = float if kind else int
    low, high = sorted((number(padding), number(padding if limit is None else limit)))
    return (stored < low) | (stored > high)


def _looked_up(values: Values, table: Dataset, found: Dataset) -> Values:
    """Through a lookup table: values before its first entry get the first, values behind its last the last."""
    count, first, bits = (int(entry) for entry in table.LUTDescriptor)
    data = table.LUTData
    if isinstance(data, bytes):
        order = "<" if found.original_encoding[1] else ">"
        wide = len(data) >= 2 * (count or 2**16)
        entries = np.frombuffer(data, f"{order}u2" if wide else "u1")
    else:
        entries = np.atleast_1d(np.asarray(data, dtype=np.int64))
    entries = entries[: count or 2**16].astype(np.int64) & (2**bits - 1)
    places = np.clip(values.astype(np.int64) - first, 0, len(entries) - 1)
    result: Values = entries[places]
    return result


def _eight_bits(colours: Values, bits: int) -> Pixels:
    return colours.astype(np.uint8) if bits <= 8 else (colours >> (bits - 8)).astype(np.uint8)
