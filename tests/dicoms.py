"""DICOM files for tests, made here: no patient was ever in one."""

from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

NAME, PATIENT, BIRTH = "Doe^Jane", "HOSPITAL-0815", "19700102"


def a_dicom(values: Any, **tags: Any) -> FileDataset:
    """A dataset with these stored values and any other tags, by keyword; grey unless there are three samples.

    Floating-point values are stored as the standard has it: under a tag of their own, without bits and signs.
    """
    values = np.asarray(values)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    meta.MediaStorageSOPInstanceUID = generate_uid()
    made = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    made.PatientName, made.PatientID, made.PatientBirthDate = NAME, PATIENT, BIRTH
    colour = values.ndim >= 3 and values.shape[-1] == 3
    if values.ndim == 3 + colour:
        made.NumberOfFrames = len(values)
    made.Rows, made.Columns = values.shape[-3:-1] if colour else values.shape[-2:]
    made.SamplesPerPixel = 3 if colour else 1
    made.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        made.PlanarConfiguration = 0
    made.BitsAllocated = bits = values.dtype.itemsize * 8
    data = values.tobytes()
    if values.dtype.kind == "f":
        setattr(made, "FloatPixelData" if bits == 32 else "DoubleFloatPixelData", data)
    else:
        made.BitsStored, made.HighBit, made.PixelRepresentation = bits, bits - 1, int(values.dtype.kind == "i")
        made.PixelData = data + b"\0" * (len(data) % 2)
    for tag, value in tags.items():
        setattr(made, tag, value)
    return made


def write_dicom(path: Path, values: Any, **tags: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    a_dicom(values, **tags).save_as(path, enforce_file_format=True)
    return path


def item(**tags: Any) -> list[Dataset]:
    """A sequence of one item."""
    made = Dataset()
    for tag, value in tags.items():
        setattr(made, tag, value)
    return [made]


def lookup(first: int, entries: list[int], bits: int = 16) -> list[Dataset]:
    made = Dataset()
    made.add_new("LUTDescriptor", "US", [len(entries), first, bits])
    made.add_new("LUTData", "US", entries)
    return [made]
