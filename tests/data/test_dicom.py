"""DICOM: from stored values to grey as the standard says, what is refused, and that no patient's tag gets out."""

import builtins
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.encaps import encapsulate
from pydicom.pixels.decoders.base import Decoder
from pydicom.uid import MPEG2MPML, JPEGLSLossless, RLELossless

from dicoms import BIRTH, NAME, PATIENT, a_dicom, item, lookup, write_dicom
from wardround.data import dicom
from wardround.data.decode import decode, decode_whole
from wardround.data.dicom import is_dicom, patient_key
from wardround.data.greys import stretched
from wardround.data.slices import SliceRule
from wardround.errors import BadInput

RAMP = np.arange(16, dtype=np.uint16).reshape(4, 4) * 100


def seen(path: Path, values: Any, **tags: Any) -> Any:
    (picture,) = decode(write_dicom(path / "x.dcm", values, **tags))
    assert picture.dtype == np.uint8
    return picture


def refusal(path: Path, rule: SliceRule | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        decode(path, rule)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    for secret in (NAME, PATIENT, BIRTH, "Doe"):
        assert secret not in message
    return message


def test_a_linear_window_counts_whole_values(tmp_path: Path) -> None:
    # PS3.3 C.11.2.1.2: x <= c - 0.5 - (w-1)/2 is black, x > c - 0.5 + (w-1)/2 is white
    picture = seen(tmp_path, np.array([[0, 50, 100], [150, 151, 300]], np.uint16), WindowCenter=101, WindowWidth=101)
    assert picture.tolist() == [[0, 0, 126], [254, 255, 255]]


def test_an_exact_window_and_a_sigmoid(tmp_path: Path) -> None:
    values = np.array([[0, 50, 100, 150, 200]], np.uint16)
    exact = seen(tmp_path, values, WindowCenter=100, WindowWidth=100, VOILUTFunction="LINEAR_EXACT")
    assert exact.tolist() == [[0, 0, 128, 255, 255]]
    sigmoid = seen(tmp_path, values, WindowCenter=100, WindowWidth=100, VOILUTFunction="SIGMOID")
    expected = 255 / (1 + np.exp(-4 * (values - 100.0) / 100))
    assert np.abs(sigmoid - expected).max() <= 0.5 + 1e-3


def test_the_window_is_in_rescaled_units_and_the_first_one_counts(tmp_path: Path) -> None:
    stored = np.array([[1024 - 160, 1024 + 40, 1024 + 240]], np.uint16)  # -160, 40 and 240 Hounsfield units
    picture = seen(
        tmp_path, stored, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=[40, 600], WindowWidth=[400, 1500]
    )
    assert picture.tolist() == [[0, 128, 255]]


def test_signed_values(tmp_path: Path) -> None:
    picture = seen(tmp_path, np.array([[-1000, 0, 1000]], np.int16), WindowCenter=0.5, WindowWidth=2001)
    assert picture.tolist() == [[0, 128, 255]]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_floating_point_pixels(tmp_path: Path, kind: Any) -> None:
    """A parametric map: rescaled and windowed like whole values, but a linear window reaches to both its ends."""
    values = np.array([[-1.0, 0.0, 0.25, 0.5, 1.0, 9.0]], kind)
    window = {"WindowCenter": 0.5, "WindowWidth": 1}
    assert seen(tmp_path, values, **window).tolist() == [[0, 0, 64, 128, 255, 255]]
    doubled = seen(tmp_path, values, RescaleSlope=2, RescaleIntercept=0, **window)
    assert doubled.tolist() == [[0, 0, 128, 255, 255, 255]]
    narrow = seen(tmp_path, values, WindowCenter=0.25, WindowWidth=0.5)
    assert narrow.tolist() == [[0, 0, 128, 255, 255, 255]]
    inverted = seen(tmp_path, values, PhotometricInterpretation="MONOCHROME1", **window)
    assert inverted.tolist() == [[255, 255, 191, 127, 0, 0]]
    assert decode_whole(tmp_path / "x.dcm").bits == np.dtype(kind).itemsize * 8


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_floating_point_padding_and_what_is_no_number(tmp_path: Path, kind: Any) -> None:
    values = np.linspace(0, 1, 100, dtype=kind).reshape(10, 10)
    values[0, 0] = -1000  # black either way, and no part of the percentiles
    tag = "FloatPixelPaddingValue" if kind is np.float32 else "DoubleFloatPixelPaddingValue"
    padded = seen(tmp_path, values, **{tag: -1000.0})
    assert (padded == stretched(values, values > -1000)).all()
    assert padded[0, :3].tolist() == [0, 0, 1]
    values[0, 0] = np.nan
    assert (seen(tmp_path, values, **{tag: float("nan")}) == padded).all()
    assert (seen(tmp_path, values) == padded).all()


def test_frames_and_a_series_of_floating_point_pixels(tmp_path: Path) -> None:
    frames = np.stack([np.full((2, 2), value, np.float32) for value in (0.0, 0.5, 1.0)])
    film = write_dicom(tmp_path / "film.dcm", frames, WindowCenter=0.5, WindowWidth=1)
    assert [picture[0, 0] for picture in decode(film, SliceRule(1))] == [0, 128, 255]
    for number, value in enumerate((1.0, 0.0)):
        tags = {"SeriesInstanceUID": "1.2.3", "InstanceNumber": 2 - number, "WindowCenter": 0.5, "WindowWidth": 1}
        write_dicom(tmp_path / "series" / f"{number}.dcm", np.full((2, 2), value, np.float64), **tags)
    assert [picture[0, 0] for picture in decode(tmp_path / "series", SliceRule(1))] == [0, 255]


def test_floating_point_pixels_that_are_cut_off_or_compressed(tmp_path: Path) -> None:
    cut = a_dicom(np.ones((4, 4), np.float32))
    cut.FloatPixelData = cut.FloatPixelData[:-4]
    cut.save_as(tmp_path / "cut.dcm", enforce_file_format=True)
    assert "cannot be read as a DICOM picture" in refusal(tmp_path / "cut.dcm")
    packed = a_dicom(np.ones((4, 4), np.float32))
    packed.file_meta.TransferSyntaxUID = RLELossless
    packed.save_as(tmp_path / "rle.dcm", enforce_file_format=True)
    assert "cannot be read as a DICOM picture" in refusal(tmp_path / "rle.dcm")


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    tags = {"WindowCenter": 750, "WindowWidth": 1500}
    bright = seen(tmp_path, RAMP, PhotometricInterpretation="MONOCHROME1", **tags)
    assert (bright == 255 - seen(tmp_path, RAMP, **tags)).all()


def test_without_a_window_percentiles_and_padding_left_out(tmp_path: Path) -> None:
    values = np.full((100, 100), 1000, np.int16)
    values[50:] = 2000
    values[0, 0] = 30000  # one hot pixel
    assert np.unique(seen(tmp_path, values)).tolist() == [0, 255]
    values[:, 40:] = -2000
    picture = seen(tmp_path, values, PixelPaddingValue=-2000)
    assert (picture[10, 10], picture[90, 10], picture[10, 90]) == (0, 255, 0)


def test_a_window_that_cannot_be_is_passed_over(tmp_path: Path) -> None:
    assert (seen(tmp_path, RAMP, WindowCenter=5, WindowWidth=0) == seen(tmp_path, RAMP)).all()


def test_eight_bits_without_a_window_stay(tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.uint8).reshape(4, 4) + 7
    assert (seen(tmp_path, values) == values).all()


def test_a_lookup_table_wins_over_a_window(tmp_path: Path) -> None:
    values = np.array([[0, 9, 10, 11, 12, 500]], np.uint16)
    table = lookup(10, [0, 32768, 65535])
    picture = seen(tmp_path, values, VOILUTSequence=table, WindowCenter=1, WindowWidth=2)
    assert picture.tolist() == [[0, 0, 0, 128, 255, 255]]


def test_a_modality_lookup_table(tmp_path: Path) -> None:
    values = np.array([[0, 1, 2]], np.uint16)
    picture = seen(tmp_path, values, ModalityLUTSequence=lookup(0, [200, 100, 0]), WindowCenter=100.5, WindowWidth=201)
    assert picture.tolist() == [[255, 128, 0]]


def test_colour(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    assert (seen(tmp_path, values) == values).all()
    deep = values.astype(np.uint16) * 257
    assert (seen(tmp_path, deep) == values).all()


def test_ybr_becomes_rgb(tmp_path: Path) -> None:
    grey = np.full((2, 2, 3), 128, np.uint8)
    grey[0, 0, 0] = 50
    picture = seen(tmp_path, grey, PhotometricInterpretation="YBR_FULL")
    assert picture[0, 0].tolist() == [50, 50, 50]
    assert picture[1, 1].tolist() == [128, 128, 128]


def test_frames_by_a_rule(tmp_path: Path) -> None:
    film = np.stack([np.full((4, 4), 10 * i, np.uint8) for i in range(5)])
    path = write_dicom(tmp_path / "film.dcm", film)
    assert [int(p[0, 0]) for p in decode(path, SliceRule.parse("all"))] == [0, 10, 20, 30, 40]
    assert [int(p[0, 0]) for p in decode(path, SliceRule.parse("middle"))] == [20]
    assert [int(p[0, 0]) for p in decode(path, SliceRule.parse("every 2"))] == [0, 20, 40]
    assert "has 5 frames; say which" in refusal(path)
    assert "leave 'axial' out" in refusal(path, SliceRule.parse("middle axial"))


def test_each_frame_of_an_enhanced_file_may_have_its_own_window(tmp_path: Path) -> None:
    film = np.full((2, 2, 2), 100, np.uint16)
    groups = [item(FrameVOILUTSequence=item(WindowCenter=centre, WindowWidth=101))[0] for centre in (1000, 10)]
    shared = item(PixelValueTransformationSequence=item(RescaleSlope=2, RescaleIntercept=0, RescaleType="US"))
    path = write_dicom(
        tmp_path / "e.dcm", film, PerFrameFunctionalGroupsSequence=groups, SharedFunctionalGroupsSequence=shared
    )
    assert [int(p[0, 0]) for p in decode(path, SliceRule.parse("all"))] == [0, 255]


def test_a_compressed_file_with_a_decoder(tmp_path: Path) -> None:
    made = a_dicom(RAMP, WindowCenter=750, WindowWidth=1500)
    made.compress(RLELossless)
    made.save_as(tmp_path / "rle.dcm", enforce_file_format=True)
    assert (decode(tmp_path / "rle.dcm")[0] == seen(tmp_path, RAMP, WindowCenter=750, WindowWidth=1500)).all()


@pytest.mark.parametrize(
    ("syntax", "says"), [(JPEGLSLossless, "JPEG-LS Lossless"), (MPEG2MPML, "store it uncompressed")]
)
def test_a_compressed_file_without_a_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syntax: Any, says: str
) -> None:
    monkeypatch.setattr(Decoder, "is_available", property(lambda _: False))
    made = a_dicom(RAMP)
    made.file_meta.TransferSyntaxUID = syntax
    made.PixelData = encapsulate([b"\0\1\2\3"])
    made["PixelData"].is_undefined_length = True
    path = tmp_path / "c.dcm"
    made.save_as(path, enforce_file_format=True)
    message = refusal(path)
    assert says in message
    assert str(syntax) in message


def broken(path: Path, kind: str) -> Path:
    whole = write_dicom(path / "x.dcm", RAMP)
    data = whole.read_bytes()
    if kind == "cut":
        whole.write_bytes(data[:-8])
    elif kind == "no mark":
        whole.write_bytes(b"\0" * 200)
    elif kind == "empty":
        whole.write_bytes(b"")
    elif kind == "deflated":
        whole.write_bytes(data.replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.1.99", 1))
    elif kind == "no pixels":
        made = a_dicom(RAMP)
        del made.PixelData
        made.save_as(whole, enforce_file_format=True)
    elif kind == "giant":
        write_dicom(whole, RAMP, Rows=65535, Columns=65535)
    elif kind == "no rows":
        made = a_dicom(RAMP)
        del made.Rows
        made.save_as(whole, enforce_file_format=True)
    elif kind == "no photometric":
        made = a_dicom(RAMP)
        del made.PhotometricInterpretation
        made.save_as(whole, enforce_file_format=True)
    return whole


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("cut", "cannot be read as a DICOM picture"),
        ("no mark", "the mark DICM is missing"),
        ("empty", "the mark DICM is missing"),
        ("deflated", "deflated"),
        ("no pixels", "holds no picture"),
        ("giant", "far too many pixels"),
        ("no rows", "Rows is missing"),
        ("no photometric", "cannot be read as a DICOM picture"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, kind: str, says: str) -> None:
    assert says in refusal(broken(tmp_path, kind))


@pytest.mark.parametrize("tag", [b"\x28\x00\x11\x00", b"\x28\x00\x50\x10"], ids=["Columns", "WindowCenter"])
def test_an_element_of_no_known_kind_is_damage(tmp_path: Path, tag: bytes) -> None:
    """Two letters behind a tag say what kind of value follows; pydicom knows no U."""
    data = write_dicom(tmp_path / "x.dcm", RAMP, WindowCenter=1, WindowWidth=2).read_bytes()
    place = data.index(tag) + 4
    (tmp_path / "y.dcm").write_bytes(data[:place] + b"U." + data[place + 2 :])
    assert "cannot be read as a DICOM picture" in refusal(tmp_path / "y.dcm")


def test_damage_anywhere_ends_in_one_line(tmp_path: Path) -> None:
    whole = write_dicom(tmp_path / "x.dcm", RAMP, WindowCenter=1, WindowWidth=2).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        for place in rng.integers(132, len(data), 3):
            data[place] = rng.integers(0, 256)
        path = tmp_path / "y.dcm"
        path.write_bytes(data)
        try:
            decode(path)
        except BadInput as error:
            assert "\n" not in str(error)  # noqa: PT017 - most damage is to pixels, and harmless


def test_patients_are_told_apart_but_not_named(tmp_path: Path) -> None:
    one = patient_key(write_dicom(tmp_path / "a.dcm", RAMP))
    same = patient_key(write_dicom(tmp_path / "b.dcm", RAMP))
    other = patient_key(write_dicom(tmp_path / "c.dcm", RAMP, PatientID="4711"))
    assert one == same != other
    assert PATIENT not in one
    assert patient_key(write_dicom(tmp_path / "d.dcm", RAMP, PatientID="")) == ""


def test_nothing_is_said_or_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    path = write_dicom(tmp_path / "x.dcm", RAMP)
    data = path.read_bytes().replace(b"19700102", b"19709999").replace(b"Doe^Jane", b"\xff\xfeo^Jane")
    path.write_bytes(data)
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        decode(path)
        patient_key(path)
    assert not [record for record in caplog.records if "pydicom" in record.name]
    assert told == []
    assert capfd.readouterr() == ("", "")


def test_the_mark_tells_a_dicom_file(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "IM0001", RAMP)
    assert is_dicom(path)
    assert len(decode(path)) == 1
    assert not is_dicom(tmp_path / "none")


def test_without_pydicom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dicom(tmp_path / "x.dcm", RAMP)
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("pydicom"):
            raise ImportError(name)
        return real(name, *rest, **more)

    dicom._silent_reader.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    assert "pip install 'wardround[dicom]'" in refusal(path)
