"""Rules for slices, and volumes hung as a radiologist hangs them whatever the order in which they are stored."""

import gzip
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicoms import write_dicom
from wardround.data.decode import decode
from wardround.data.nifti import read_nifti
from wardround.data.slices import SliceRule, Volume, planes
from wardround.errors import BadInput

LPS = np.eye(3)
# A head as (z, y, x): bright at the top (head), half bright in front (low y), dim on the patient's left (high x).
HEAD = np.zeros((8, 6, 4), np.uint8)
HEAD[6:] += 100
HEAD[:, :2] += 50
HEAD[:, :, 3] += 20


def nifti(path: Path, values: Any, **fields: Any) -> Path:
    """A file whose first axis is the last of `values`, as both are laid out in memory."""
    header = bytearray(348)
    order = fields.get("order", "<")
    codes = {"u1": 2, "i2": 4, "f4": 16}
    values = np.asarray(values)
    kind = values.dtype.str[1:]
    dim = fields.get("dim", [values.ndim, *values.shape[::-1], 1, 1, 1, 1, 1][:8])
    struct.pack_into(f"{order}i", header, 0, fields.get("size", 348))
    struct.pack_into(f"{order}8h", header, 40, *dim)
    struct.pack_into(f"{order}2h", header, 70, fields.get("code", codes[kind]), values.dtype.itemsize * 8)
    struct.pack_into(f"{order}4f", header, 76, fields.get("handed", 1), *fields.get("spacing", (1, 1, 1)))
    struct.pack_into(f"{order}3f", header, 108, 352, *fields.get("scale", (0, 0)))
    if "sform" in fields:
        struct.pack_into(f"{order}h", header, 254, 1)
        struct.pack_into(f"{order}12f", header, 280, *np.hstack([fields["sform"], np.zeros((3, 1))]).ravel())
    if "quaternion" in fields:
        struct.pack_into(f"{order}h", header, 252, 1)
        struct.pack_into(f"{order}3f", header, 256, *fields["quaternion"])
    header[344:348] = fields.get("magic", b"n+1\0")
    data = bytes(header) + b"\0" * 4 + values.astype(values.dtype.newbyteorder(order)).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refusal(path: Path, rule: str | None = "middle axial") -> str:
    with pytest.raises(BadInput) as caught:
        decode(path, SliceRule.parse(rule) if rule else None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(n=st.integers(1, 300), step=st.integers(1, 400))
def test_a_rule_chooses_from_what_there_is(n: int, step: int) -> None:
    chosen = SliceRule.parse(f"every {step}").chosen(n)
    assert len(chosen) >= 1
    assert 0 <= chosen[0] <= chosen[-1] < n
    assert list(SliceRule.parse("all").chosen(n)) == list(range(n))
    assert list(SliceRule.parse(" Middle ").chosen(n)) == [n // 2]


@pytest.mark.parametrize("text", ["", "every", "every 0", "every -1", "middle up", "first", "all axial coronal"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(BadInput, match="is no rule for slices; write middle"):
        SliceRule.parse(text)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("signs", list(itertools.product((1, -1), repeat=3)))
def test_every_stored_order_hangs_alike(order: tuple[int, ...], signs: tuple[int, ...]) -> None:
    """All 48 ways in which a volume can be stored give the same three pictures."""
    upright = np.eye(3)[:, ::-1]  # axes z, y, x
    turned = np.transpose(HEAD, order)[tuple(slice(None, None, sign) for sign in signs)]
    directions = upright[:, order] * np.array(signs)
    spacing = tuple((3.0, 2.0, 1.0)[axis] for axis in order)
    tilt = np.array([[1, 0.1, 0], [-0.1, 1, 0.1], [0, -0.1, 1]])  # a real scan is never quite straight
    volume = Volume(turned, tilt @ directions, (spacing[0], spacing[1], spacing[2]))
    (axial,) = planes(volume, SliceRule.parse("middle axial"), "x")
    assert (axial.values == HEAD[4]).all()
    assert axial.pixel == (2.0, 1.0)
    (coronal,) = planes(volume, SliceRule.parse("middle coronal"), "x")
    assert (coronal.values == HEAD[::-1, 3]).all()
    assert coronal.pixel == (3.0, 1.0)
    (sagittal,) = planes(volume, SliceRule.parse("middle sagittal"), "x")
    assert (sagittal.values == HEAD[::-1, :, 2]).all()
    assert sagittal.pixel == (3.0, 2.0)


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
@pytest.mark.parametrize("order", "<>")
def test_a_nifti_volume(tmp_path: Path, name: str, order: str) -> None:
    """RAS+, the usual order: x to the right, y to the front."""
    path = nifti(tmp_path / name, HEAD[:, ::-1, ::-1], sform=np.eye(3), order=order)
    (axial,) = decode(path, SliceRule.parse("middle axial"))
    assert (axial == HEAD[4]).all()
    assert len(decode(path, SliceRule.parse("all coronal"))) == 6


def test_a_quaternion_says_the_same(tmp_path: Path) -> None:
    # (0, 0, 1) is half a turn about z: from RAS to LPS
    path = nifti(tmp_path / "v.nii", HEAD, quaternion=(0, 0, 1))
    assert (decode(path, SliceRule.parse("middle axial"))[0] == HEAD[4]).all()
    flipped = nifti(tmp_path / "w.nii", HEAD[::-1], quaternion=(0, 0, 1), handed=-1)
    assert (decode(flipped, SliceRule.parse("middle axial"))[0] == HEAD[4]).all()


def test_values_are_scaled_and_stretched_over_the_whole_volume(tmp_path: Path) -> None:
    values = np.zeros((4, 10, 10), np.int16)
    values[2] = 1000
    path = nifti(tmp_path / "v.nii", values, sform=np.eye(3), scale=(2, -24))
    assert read_nifti(path).values.max() == 1976
    first, *_, last = decode(path, SliceRule.parse("all axial"))
    assert (first.max(), last.max()) == (0, 0)
    assert decode(path, SliceRule.parse("middle axial"))[0].min() == 255


def test_nan_is_black(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 300, dtype=np.float32).reshape(3, 10, 10)
    values[1, 0, 0] = np.nan
    path = nifti(tmp_path / "v.nii", values, sform=np.eye(3))
    picture = decode(path, SliceRule.parse("middle axial"))[0]
    assert (picture == 0).sum() == 1


def test_a_slice_across_thick_slices_is_not_squashed(tmp_path: Path) -> None:
    path = nifti(tmp_path / "v.nii", HEAD, sform=np.eye(3), spacing=(1, 1, 4))
    assert decode(path, SliceRule.parse("middle coronal"))[0].shape == (32, 4)
    assert decode(path, SliceRule.parse("middle axial"))[0].shape == (6, 4)
    mad = nifti(tmp_path / "m.nii", HEAD, sform=np.eye(3), spacing=(1e-6, 1, 4))
    assert "which cannot be; mend the spacing" in refusal(mad, "middle coronal")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"size": 540}, "NIfTI-2"),
        ({"magic": b"ni1\0"}, "in a second file"),
        ({"magic": b"abcd"}, "not a NIfTI-1 file"),
        ({"code": 128}, "NIfTI type 128"),
        ({"dim": [4, 4, 6, 4, 2, 1, 1, 1]}, "several volumes (4 x 6 x 4 x 2)"),
        ({"dim": [3, 4, -6, 8, 1, 1, 1, 1]}, "damaged NIfTI header"),
        ({"dim": [0, 4, 6, 8, 1, 1, 1, 1]}, "damaged NIfTI header"),
        ({"dim": [3, 4, 6, 9, 1, 1, 1, 1]}, "cut short"),
        ({"dim": [3, 32767, 32767, 32767, 1, 1, 1, 1]}, "more than a GiB"),
        ({}, "does not say how it lies in the patient"),
    ],
)
def test_a_nifti_file_that_cannot_be_read(tmp_path: Path, fields: Any, says: str) -> None:
    assert says in refusal(nifti(tmp_path / "v.nii.gz", HEAD, **fields))


def test_rules_are_asked_for(tmp_path: Path) -> None:
    path = nifti(tmp_path / "v.nii", HEAD, sform=np.eye(3))
    assert "is a volume; say which slices" in refusal(path, None)
    assert "name the plane" in refusal(path, "middle")
    assert "cut short" in refusal(_written(tmp_path / "w.nii", b"abc"))
    assert "cut short" in refusal(_written(tmp_path / "w.nii.gz", b"abc" * 200))


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def a_series(folder: Path, spacing: Any = (1, 1)) -> Path:
    """HEAD as axial slices from the feet up, in files whose names say nothing."""
    for z in range(len(HEAD)):
        write_dicom(
            folder / f"{(z * 5) % 8}.dcm", HEAD[z].astype(np.uint16),
            SeriesInstanceUID="1.2.3", ImagePositionPatient=[0, 0, 4.0 * z], ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
            PixelSpacing=list(spacing), InstanceNumber=len(HEAD) - z, WindowCenter=128, WindowWidth=256,
        )  # fmt: skip
    return folder


def test_a_dicom_series(tmp_path: Path) -> None:
    folder = a_series(tmp_path / "s")
    assert (decode(folder, SliceRule.parse("middle axial"))[0] == HEAD[4]).all()
    assert (decode(folder, SliceRule.parse("all"))[7] == HEAD[7]).all()
    assert decode(folder, SliceRule.parse("middle coronal"))[0].shape == (32, 4)
    assert "is a volume; say which slices" in refusal(folder, None)


def test_each_slice_is_rescaled_as_it_says(tmp_path: Path) -> None:
    folder = a_series(tmp_path / "s")
    write_dicom(
        folder / f"{(4 * 5) % 8}.dcm", HEAD[4].astype(np.uint16) * 2, RescaleSlope=0.5, RescaleIntercept=0,
        SeriesInstanceUID="1.2.3", ImagePositionPatient=[0, 0, 16.0], ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
        PixelSpacing=[1, 1], WindowCenter=128, WindowWidth=256,
    )  # fmt: skip
    assert (decode(folder, SliceRule.parse("middle axial"))[0] == HEAD[4]).all()


@pytest.mark.parametrize("spacing", [[0, 1], ["nan", 1]])
def test_a_series_with_a_spacing_that_cannot_be(tmp_path: Path, spacing: Any) -> None:
    folder = a_series(tmp_path / "s", spacing)
    assert "mend the spacing" in refusal(folder)


def test_a_series_that_is_none(tmp_path: Path) -> None:
    folder = a_series(tmp_path / "s")
    write_dicom(folder / "z.dcm", HEAD[0].astype(np.uint16), SeriesInstanceUID="9.9")
    assert "files of several series" in refusal(folder)
    write_dicom(folder / "z.dcm", HEAD[:, 0].astype(np.uint16), SeriesInstanceUID="1.2.3")
    assert "z.dcm is not a slice like the others" in refusal(folder)
    write_dicom(folder / "z.dcm", HEAD[0].astype(np.uint16), SeriesInstanceUID="1.2.3")
    assert "cannot be read as a DICOM picture" in refusal(folder)  # neither a place nor a number
    (folder / "z.dcm").write_text("notes")
    assert "the mark DICM is missing" in refusal(folder)
    (tmp_path / "empty").mkdir()
    assert "is empty" in refusal(tmp_path / "empty")
