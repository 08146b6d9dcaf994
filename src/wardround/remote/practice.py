"""Drawn images as the hospitals of a practice study would have them: a folder of class folders for each.

For trying the commands of a study between sites before any real image is touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from wardround.data.imageset import ImageSet
from wardround.data.phantoms import phantoms
from wardround.errors import BadInput
from wardround.files import disk_errors
from wardround.progress import NO_PROGRESS, Silent


def draw_hospitals(
    folder: Path, names: Sequence[str], images: int, size: int = 28, seed: int = 0, progress: Silent = NO_PROGRESS
) -> list[str]:
    """Draw `images` training images and a quarter as many test images for each hospital; the class names in order."""
    if images < 32:
        raise BadInput(f"{images} images are too few for eight classes; draw 32 or more for each hospital")
    drawn = phantoms(images * len(names), 0, images * len(names) // 4, size, seed, len(names), progress)
    for place, name in enumerate(names):
        target = folder / name
        if target.exists():
            raise BadInput(f"{target} exists already; choose another folder")
        begun = folder / f".{name}.part"
        with disk_errors(target):
            shutil.rmtree(begun, ignore_errors=True)
            for part, whole in (("train", drawn.train), ("test", drawn.test)):
                _write(begun / part, _of_site(whole, place))
            begun.rename(target)
    return list(drawn.train.classes)


def _of_site(images: ImageSet, site: int) -> ImageSet:
    if images.sites is None:
        raise BadInput("these images have no sites")
    return images.take(torch.nonzero(images.sites == site).flatten())


def _write(folder: Path, images: ImageSet) -> None:
    for number, (pixels, label) in enumerate(zip(images.images, images.labels.tolist(), strict=True)):
        place = folder / images.classes[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(place / f"{number:05d}.png")
