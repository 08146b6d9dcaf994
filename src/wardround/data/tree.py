"""A folder of class folders whose files are DICOM or NIfTI (or any other kind that is read), as rows.

`folder/CLASS/file` or `folder/train/CLASS/file` as for pictures. Inside a class, files may lie in further folders, as a
PACS exports them: without a rule for slices every file is an image; with a rule that names a plane, a folder of DICOM
files is one series, a volume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wardround.data.dicom import SUFFIXES, is_dicom
from wardround.data.folder import part_folders
from wardround.data.listing import Row
from wardround.data.nifti import is_nifti
from wardround.data.picture import SUFFIXES as PICTURES
from wardround.data.picture import entries
from wardround.data.slices import SliceRule
from wardround.data.table import with_patient_keys
from wardround.errors import BadInput

INDEX_FILE = "dicomdir"  # a table of contents that exports carry along; it holds no picture


def is_medical_tree(path: Path) -> bool:
    """Whether a file below is DICOM or NIfTI; a folder of plain pictures has a reader of its own."""
    others = (file for file in _files(path) if file.suffix.lower() not in PICTURES)
    return any(is_nifti(file) or file.suffix.lower() in SUFFIXES or is_dicom(file) for file in others)


def read_tree(path: Path, slices: str | None = None) -> list[Row]:
    """A row for every file, or series, below the class folders."""
    rule = SliceRule.parse(slices) if slices else None
    parts = part_folders(path)
    rows = [row for part in parts for row in _classes(path / part, part, rule)] or list(_classes(path, "", rule))
    return with_patient_keys(rows)


def _classes(path: Path, part: str, rule: SliceRule | None) -> Iterator[Row]:
    for place in entries(path):
        if place.name.lower() == INDEX_FILE:
            continue
        if not place.is_dir():
            raise BadInput(f"{place} lies beside the class folders; move it into one, or out")
        found = list(_series(place)) if rule is not None and rule.plane else list(_files(place))
        if not found:
            raise BadInput(f"{place} holds no files; add some or remove the folder")
        for file in found:
            yield Row(file, place.name, part=part, rule=rule)


def _files(path: Path) -> Iterator[Path]:
    for entry in entries(path):
        if entry.is_dir():
            yield from _files(entry)
        elif entry.name.lower() != INDEX_FILE:
            yield entry


def _series(path: Path) -> Iterator[Path]:
    """NIfTI files, and the folders that directly hold DICOM files."""
    listed = entries(path)
    if any(is_dicom(entry) for entry in listed if entry.is_file()):
        yield path
        return
    for entry in listed:
        if entry.is_dir():
            yield from _series(entry)
        else:
            yield entry
