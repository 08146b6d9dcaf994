"""From what a user names (files, folders, .npz files) to images as a model sees them, one after the other.

Pictures and DICOM files are decoded as they are for training, so that a model sees at work what it would have seen
there. A volume or a film is refused: which slice counts is no matter to guess. What cannot be read is told by name, and
the others go on.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wardround.data.decode import decode, fitted, is_volume
from wardround.data.greys import Pixels
from wardround.data.medmnist import DAMAGE
from wardround.data.picture import entries
from wardround.deploy.about import Task
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent

ARRAYS = ".npz"


@dataclass(frozen=True)
class Failure:
    """An image without an answer."""

    file: str
    reason: str


@dataclass
class Pictures:
    """The images in files, made as a task wants them. `notes` are complete when all have been read."""

    files: Sequence[Path]
    task: Task
    progress: Silent = NO_PROGRESS
    resized: int = field(default=0, init=False)
    coloured: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[str, Tensor] | Failure]:
        """Name and image (uint8, channels first) of each, or why there is none."""
        for file in self.progress.track(self.files, "images"):
            if file.suffix.lower() != ARRAYS:
                yield self._seen_or_failed(str(file), file)
                continue
            try:
                _refuse_unless_plain(file)
                stacks = _stacks(file)
            except BadInput as error:
                yield Failure(str(file), str(error))
                continue
            for key, stack in stacks.items():
                for number, pixels in enumerate(self.progress.track(list(stack), f"{file.name}, {key}")):
                    yield self._seen_or_failed(f"{file}[{key} {number}]", pixels)

    def notes(self) -> Iterator[str]:
        """How many images were not as the model takes them, and what was done."""
        side = f"{self.task.size}×{self.task.size}"
        if self.resized:
            yield f"cut to the central square and resized to {side} pixels: {_images(self.resized)}"
        if self.coloured:
            yield f"grey, and shown to a model that was trained on colour: {_images(self.coloured)}"

    def _seen_or_failed(self, name: str, source: Path | Pixels) -> tuple[str, Tensor] | Failure:
        try:
            return name, self._as_seen(_decoded(source) if isinstance(source, Path) else source, name)
        except BadInput as error:
            return Failure(name, str(error))

    def _as_seen(self, pixels: Pixels, name: str) -> Tensor:
        if self.task.channels == 1 or pixels.shape[2:] == (1,):
            pixels = _as_grey(pixels, name)
        side = self.task.size
        if pixels.shape[:2] != (side, side):
            pixels = fitted(pixels, side)
            self.resized += 1
        if self.task.channels == 3 and pixels.ndim == 2:
            pixels = np.repeat(pixels[..., None], 3, axis=2)
            self.coloured += 1
        channels_last = pixels if pixels.ndim == 3 else pixels[..., None]
        return torch.from_numpy(np.moveaxis(channels_last, 2, 0).copy())


def named(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant: those named, and all in the named folders and below, in the order of their names.

    A folder that is met again (by a link, or named twice) is not read again. Files of other kinds are among them, and
    will be refused by name: an image that is silently left out may be a patient who is left out.
    """
    found: list[Path] = []
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path} does not exist; name pictures, folders or .npz files")
        found += _below(path, seen) if path.is_dir() else [path]
    if not found:
        raise BadInput(f"there are no files in {', '.join(map(str, paths))}; name pictures or folders of pictures")
    return found


def _images(count: int) -> str:
    return f"{count:,} image" if count == 1 else f"{count:,} images"


def _below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    real = folder.resolve()
    if real in seen:
        return
    seen.add(real)
    for entry in entries(folder):
        if entry.is_dir():
            yield from _below(entry, seen)
        else:
            yield entry


def _decoded(file: Path) -> Pixels:
    _refuse_unless_plain(file)
    if is_volume(file):
        raise BadInput(f"{file} is a volume; a model judges pictures: export the slice that counts")
    return decode(file)[0]


def _refuse_unless_plain(file: Path) -> None:
    """A pipe would be waited for without end."""
    if not file.is_file():
        raise BadInput(f"{file} is not a file; name a picture, a folder or an .npz file")


def _stacks(file: Path) -> dict[str, Pixels]:
    """The arrays `images` and `*_images` of a file: the layout of MedMNIST, or one without parts."""
    try:
        if not zipfile.is_zipfile(file):
            raise BadInput(f"{file} is not an .npz file (a zip of arrays), or is cut short; write or copy it again")
        with np.load(file, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files if key == "images" or key.endswith("_images")}
    except (*DAMAGE, MemoryError) as error:
        raise BadInput(f"{file} cannot be read as arrays of images; write or copy it again") from error
    if not found:
        raise BadInput(f"{file} has no array called images, nor one such as test_images; name it so")
    for key, stack in found.items():
        is_images = isinstance(stack, np.ndarray) and stack.dtype == np.uint8 and stack.ndim in (3, 4) and stack.size
        if not is_images or stack.shape[3:] not in ((), (1,), (3,)):
            raise BadInput(f"{key} in {file} are no 8-bit images; store uint8 (n, s, s) or (n, s, s, 3)")
    return found


def _as_grey(pixels: Pixels, name: str) -> Pixels:
    """A grey picture that is stored as colour is grey; a coloured one is not made grey without anyone's knowing."""
    if pixels.ndim == 2:
        return pixels
    first = pixels[..., 0]
    if (pixels == first[..., None]).all():
        return first
    raise BadInput(f"{name} is a colour picture, but the model was trained on grey ones; convert it if that is right")
