from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from deploy.samples import TASK, grain, picture
from dicoms import write_dicom
from wardround.data.decode import decode
from wardround.data.folder import read_folder
from wardround.data.reading import Source, Wish, read_all
from wardround.deploy.about import Task
from wardround.deploy.pictures import Failure, Pictures, named
from wardround.errors import BadInput

COLOUR = Task(classes=("a", "b"), channels=3, size=4)


def read(task: Task, *files: Path) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """Images by name, failures by name, notes."""
    pictures = Pictures(files, task)
    items = list(pictures)
    failed = {item.file: item.reason for item in items if isinstance(item, Failure)}
    return dict(item for item in items if not isinstance(item, Failure)), failed, list(pictures.notes())


# Which files ----------------------------------------------------------------------------------------------------------


def test_files_and_folders_in_the_order_named_and_then_of_names(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.png", "b/deep/er/0.png", "a/x.png", "b/.hidden.png", "b/Thumbs.db", "b/notes.txt"):
        picture(tmp_path / "made.png", 0).with_name("made.png")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((tmp_path / "made.png").read_bytes())
    found = named([tmp_path / "made.png", tmp_path / "b", tmp_path / "a"])
    relative = [file.relative_to(tmp_path).as_posix() for file in found]
    assert relative == ["made.png", "b/1.png", "b/2.png", "b/deep/er/0.png", "b/notes.txt", "a/x.png"]


def test_links_that_go_round_end(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "x.png", 0)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "b").symlink_to(tmp_path / "a", target_is_directory=True)
    assert [file.name for file in named([tmp_path / "a", tmp_path / "b"])] == ["x.png"]


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there are no files in"):
        named([tmp_path])
    with pytest.raises(BadInput, match=r"none\.png does not exist"):
        named([tmp_path, tmp_path / "none.png"])


# Their pixels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "JPG"])
def test_a_picture_as_it_is(suffix: str, tmp_path: Path) -> None:
    file = picture(tmp_path / f"x.{suffix}", 200)
    images, failed, notes = read(TASK, file)
    assert torch.equal(images[str(file)], torch.full((1, 4, 4), 200, dtype=torch.uint8))
    assert (failed, notes) == ({}, [])


@settings(deadline=None, max_examples=25)
@given(height=st.integers(1, 40), width=st.integers(1, 40), colour=st.booleans(), side=st.integers(1, 20))
def test_a_model_sees_what_the_reader_of_folders_reads(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, colour: bool, side: int
) -> None:
    """The resizing here is the one of training."""
    shape = (height, width, 3) if colour else (height, width)
    file = grain(tmp_path_factory.getbasetemp() / "grain.png", shape)
    task = Task(classes=("a", "b"), channels=3 if colour else 1, size=side)
    images, _, notes = read(task, file)
    (wanted,) = read_all([Source(file)], Wish(side))
    expected = wanted.pictures[0].reshape(side, side, -1)
    assert np.array_equal(images[str(file)].permute(1, 2, 0).numpy(), expected)
    assert bool(notes) == ((height, width) != (side, side))


def test_a_folder_that_was_trained_on_is_seen_alike(tmp_path: Path) -> None:
    for i, name in enumerate(("a/0", "a/1", "b/0", "b/1")):
        grain(tmp_path / f"{name}.png", (9, 12) if i else (9, 12, 3), seed=i)
    data = read_folder(tmp_path, size=4)
    images, failed, notes = read(COLOUR, *named([tmp_path]))
    trained = {bytes(image.numpy().tobytes()) for part in (data.train, data.test) for image in part.images}
    assert {bytes(image.contiguous().numpy().tobytes()) for image in images.values()} == trained
    assert failed == {}
    assert notes == [
        "cut to the central square and resized to 4×4 pixels: 4 images",
        "grey, and shown to a model that was trained on colour: 3 images",
    ]


def test_a_grey_picture_for_a_model_of_colour(tmp_path: Path) -> None:
    images, _, notes = read(COLOUR, picture(tmp_path / "x.png", 7))
    assert [image.flatten().unique().tolist() for image in images.values()] == [[7]]
    assert next(iter(images.values())).shape == (3, 4, 4)
    assert notes == ["grey, and shown to a model that was trained on colour: 1 image"]


def test_a_colour_picture_for_a_model_of_grey_is_refused_unless_its_colours_are_grey(tmp_path: Path) -> None:
    grey, red = picture(tmp_path / "grey.png", (9, 9, 9)), picture(tmp_path / "red.png", (9, 9, 10))
    images, failed, notes = read(TASK, red, grey)
    assert torch.equal(images[str(grey)], torch.full((1, 4, 4), 9, dtype=torch.uint8))
    assert failed == {
        str(red): f"{red} is a colour picture, but the model was trained on grey ones; convert it if that is right"
    }
    assert notes == []


def test_what_cannot_be_read_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.png", "b.dcm", "c.png", "d.npz", "e.npz"):
        (tmp_path / name).write_bytes(b"no picture")
    picture(tmp_path / "f.png", 1)
    (tmp_path / "g.nii").write_bytes(b"no volume")
    picture(tmp_path / "h.png", 1, (20, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    images, failed, _ = read(TASK, *named([tmp_path]), tmp_path / "gone.png")
    assert list(images) == [str(tmp_path / "f.png")]
    assert {Path(name).name: reason.replace(str(tmp_path), "") for name, reason in failed.items()} == {
        "a.png": "/a.png cannot be read as a picture; mend it or move it out",
        "b.dcm": "/b.dcm is not a DICOM file: the mark DICM is missing; export it again or move it out",
        "c.png": "/c.png cannot be read as a picture; mend it or move it out",
        "d.npz": "/d.npz is not an .npz file (a zip of arrays), or is cut short; write or copy it again",
        "e.npz": "/e.npz is not an .npz file (a zip of arrays), or is cut short; write or copy it again",
        "g.nii": "/g.nii is a volume; a model judges pictures: export the slice that counts",
        "gone.png": "/gone.png is not a file; name a picture, a folder or an .npz file",
        "h.png": "/h.png unpacks to far too many pixels; shrink it first",
    }


def test_dicom_and_deep_grey_are_shown_as_in_training(tmp_path: Path) -> None:
    ramp = np.arange(16, dtype=np.uint16).reshape(4, 4) * 100
    windowed = write_dicom(tmp_path / "a.dcm", ramp, WindowCenter=750, WindowWidth=1501)
    Image.fromarray(ramp).save(tmp_path / "b.png")
    film = write_dicom(tmp_path / "c.dcm", np.zeros((2, 4, 4), np.uint8))
    images, failed, _ = read(TASK, *named([tmp_path]))
    assert (
        images[str(windowed)].tolist() == [decode(windowed)[0].tolist()] == [(ramp * 0.17 + 0.5).astype(int).tolist()]
    )
    assert images[str(tmp_path / "b.png")].flatten().tolist()[::15] == [0, 255]
    assert list(failed) == [str(film)]
    assert "has 2 frames" in failed[str(film)]


# Arrays ---------------------------------------------------------------------------------------------------------------


def arrays(path: Path, **parts: Any) -> Path:
    np.savez_compressed(path, **parts)
    return path


def test_every_image_of_an_npz_file(tmp_path: Path) -> None:
    file = arrays(
        tmp_path / "scans.npz",
        train_images=np.full((2, 4, 4), 5, np.uint8),
        test_images=np.full((1, 8, 8, 1), 6, np.uint8),
        test_labels=np.zeros(1, np.int64),
    )
    images, failed, notes = read(TASK, file)
    assert {name: image.unique().tolist() for name, image in images.items()} == {
        f"{file}[train_images 0]": [5],
        f"{file}[train_images 1]": [5],
        f"{file}[test_images 0]": [6],
    }
    assert failed == {}
    assert notes == ["cut to the central square and resized to 4×4 pixels: 1 image"]


def test_one_odd_image_of_an_npz_file_does_not_take_the_others_along(tmp_path: Path) -> None:
    stack = np.full((3, 4, 4, 3), 5, np.uint8)
    stack[1, 0, 0, 0] = 6
    file = arrays(tmp_path / "scans.npz", images=stack)
    images, failed, _ = read(TASK, file)
    assert list(images) == [f"{file}[images 0]", f"{file}[images 2]"]
    assert list(failed) == [f"{file}[images 1]"]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"pictures": np.zeros((1, 4, 4), np.uint8)}, "has no array called images"),
        ({"images": np.zeros((1, 4, 4))}, "are no 8-bit images"),
        ({"images": np.zeros((4, 4), np.uint8)}, "are no 8-bit images"),
        ({"images": np.zeros((1, 4, 4, 2), np.uint8)}, "are no 8-bit images"),
        ({"images": np.zeros((0, 4, 4), np.uint8)}, "are no 8-bit images"),
        ({"images": np.array([{"code": 1}], dtype=object)}, "cannot be read as arrays of images"),
    ],
)
def test_arrays_that_are_no_images(parts: dict[str, Any], says: str, tmp_path: Path) -> None:
    images, failed, _ = read(TASK, arrays(tmp_path / "scans.npz", **parts))
    assert images == {}
    assert says in failed[str(tmp_path / "scans.npz")]


def test_an_npz_file_cut_short(tmp_path: Path) -> None:
    file = arrays(tmp_path / "scans.npz", images=np.random.default_rng(0).integers(0, 256, (9, 4, 4), np.uint8))
    content = file.read_bytes()
    file.write_bytes(content[:60] + content[80:])
    _, failed, _ = read(TASK, file)
    assert list(failed) == [str(file)]
