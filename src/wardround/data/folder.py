"""A folder of pictures, one sub-folder per class: how a hospital's own images usually lie on a disk.

Either `folder/CLASS/picture` and a test share is drawn per class, or `folder/train/CLASS/picture` with `test` (and
`val`) beside `train`, and these are the parts. Pictures are PNG, JPEG, BMP or TIFF with 8 bits per channel.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from wardround.data.greys import Pixels
from wardround.data.imageset import Dataset, ImageSet
from wardround.data.picture import entries, read_picture
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent
from wardround.streams import Streams

PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class _Pictures:
    """The pictures of one part, channels last: `(s, s)` where a file is grey, `(s, s, 3)` where it is colour."""

    pixels: list[Pixels]
    labels: list[int]


def read_folder(
    path: Path, size: int | None = None, test_share: float = 0.2, seed: int = 0, progress: Silent = NO_PROGRESS
) -> Dataset:
    """Read all pictures; grey if every file is grey, else colour.

    Without `size` all pictures must be squares of one size; with it each is cut to its central square and resized.
    `test_share` and `seed` matter only where the folder has no parts of its own.
    """
    if size is not None and size < 1:
        raise BadInput(f"pictures cannot be resized to {size} pixels; choose a size such as 28 or 64")
    if not 0 < test_share < 1:
        raise BadInput(f"the test share must lie between 0 and 1, not {test_share}")
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give the folder that holds one sub-folder per class")
    names = [folder.name for folder in _folders(path)]
    if {"train", "test"} <= set(names):
        classes, parts = _read_parts(path, names, size, progress)
        how = "parts as the folder has them"
    else:
        classes = names
        parts = _held_out(path, classes, _read_classes(path, classes, classes, size, progress), test_share, seed)
        how = f"test share {test_share:g} drawn per class with data seed {seed}"
    _check_one_size(path, parts)
    colour = any(picture.ndim == 3 for part in parts.values() for picture in part.pixels)
    sets = {name: _image_set(part, tuple(classes), colour) for name, part in parts.items()}
    counts = ", ".join(f"{len(part)} {name}" for name, part in sets.items())
    name, side = path.resolve().name, sets["train"].size
    return Dataset(
        name=name,
        train=sets["train"],
        val=sets.get("val"),
        test=sets["test"],
        provenance=f"folder {name}: {counts} images of {side}x{side}; {how}",
    )


def _folders(path: Path) -> list[Path]:
    folders = [entry for entry in entries(path) if entry.is_dir()]
    if not folders:
        raise BadInput(f"{path} holds no folders; put the pictures of each class into a sub-folder named as the class")
    return folders


def _read_parts(
    path: Path, names: list[str], size: int | None, progress: Silent
) -> tuple[list[str], dict[str, _Pictures]]:
    others = [name for name in names if name not in PARTS]
    if others:
        raise BadInput(f"{path} holds {others[0]} beside train and test; move it out, or put all classes side by side")
    classes = [folder.name for folder in _folders(path / "train")]
    parts = {}
    for part in (p for p in PARTS if p in names):
        present = [folder.name for folder in _folders(path / part)]
        strange = [name for name in present if name not in classes]
        if strange:
            raise BadInput(f"{path / part / strange[0]} has no class of that name in train; name the folders alike")
        parts[part] = _read_classes(path / part, present, classes, size, progress)
    return classes, parts


def _read_classes(path: Path, present: list[str], classes: list[str], size: int | None, progress: Silent) -> _Pictures:
    if len(classes) < 2:
        raise BadInput(f"{path} holds the one class {classes[0]}; a classifier needs at least two class folders")
    pixels: list[Pixels] = []
    labels: list[int] = []
    for name in present:
        files = entries(path / name)
        if not files:
            raise BadInput(f"{path / name} holds no pictures; add some or remove the folder")
        pixels += [read_picture(file, size) for file in progress.track(files, f"reading {path.name}/{name}")]
        labels += [classes.index(name)] * len(files)
    return _Pictures(pixels, labels)


def _held_out(
    path: Path, classes: list[str], pictures: _Pictures, test_share: float, seed: int
) -> dict[str, _Pictures]:
    """Train and test, each with its pictures in order."""
    test = drawn_test(path, classes, np.array(pictures.labels), test_share, seed)
    return {
        part: _Pictures([pictures.pixels[i] for i in chosen], [pictures.labels[i] for i in chosen])
        for part, chosen in (("train", np.flatnonzero(~test)), ("test", np.flatnonzero(test)))
    }


def drawn_test(
    path: Path, classes: list[str], labels: NDArray[np.int64], test_share: float, seed: int
) -> NDArray[np.bool_]:
    """Which pictures are for testing: of each class the same share, at least one picture and never all."""
    test = np.zeros(len(labels), dtype=bool)
    for c, name in enumerate(classes):
        members = np.flatnonzero(labels == c)
        if len(members) < 2:
            raise BadInput(f"{path / name} holds one picture; two are needed, one to train on and one to test on")
        share = min(max(int(test_share * len(members) + 0.5), 1), len(members) - 1)
        test[Streams(seed).numpy("folder test share", index=c).permutation(members)[:share]] = True
    return test


def _check_one_size(path: Path, parts: dict[str, _Pictures]) -> None:
    shapes = sorted({picture.shape[:2] for part in parts.values() for picture in part.pixels})
    if len(shapes) > 1 or shapes[0][0] != shapes[0][1]:
        found = " and ".join(f"{width}x{height}" for height, width in shapes[:2])
        raise BadInput(f"{path} holds pictures of {found}; pass a size such as 28 to cut and resize all to one square")


def _image_set(part: _Pictures, classes: tuple[str, ...], colour: bool) -> ImageSet:
    stack = np.stack([_as_colour(p) if colour else p[..., None] for p in part.pixels])
    return ImageSet(
        torch.from_numpy(np.ascontiguousarray(np.moveaxis(stack, 3, 1))),
        torch.tensor(part.labels, dtype=torch.int64),
        classes,
    )


def _as_colour(picture: Pixels) -> Pixels:
    return picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=2)
