"""Labelled images as they live in memory: uint8, channels first, with the ids that splits must respect."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wardround.data.mapped import gather, join
from wardround.errors import BadInput


@dataclass(frozen=True)
class ImageSet:
    """Images of one kind and size, with integer labels into `classes`.

    `images` is uint8 `(n, channels, size, size)`; `labels` is int64 `(n,)`. `sites` and `patients` hold integer ids
    (int64) where the source has them: `sites` says where an image was taken, `patients` which images belong together
    (a patient or a lesion) and must not be split.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    sites: Tensor | None = None
    patients: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.images)
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise BadInput(
                f"images must be uint8 (n, channels, height, width), not {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}; convert them to 8-bit first"
            )
        if self.images.shape[-1] != self.images.shape[-2]:
            raise BadInput(f"images must be square, not {tuple(self.images.shape[-2:])}; crop or resize them first")
        for name, ids in (("labels", self.labels), ("site ids", self.sites), ("patient ids", self.patients)):
            if ids is not None and (ids.shape != (n,) or ids.dtype != torch.int64):
                raise BadInput(
                    f"{name} must be {n} whole numbers, one per image, not shape {tuple(ids.shape)} {ids.dtype}"
                )
        if n and not (0 <= int(self.labels.min()) and int(self.labels.max()) < len(self.classes)):
            raise BadInput(
                f"labels run from {int(self.labels.min())} to {int(self.labels.max())} but there are "
                f"{len(self.classes)} classes (0 to {len(self.classes) - 1}); correct the labels or name every class"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return self.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width in pixels."""
        return self.images.shape[2]

    def counts(self) -> Tensor:
        """How many images each class has: int64 `(classes,)`."""
        return torch.bincount(self.labels, minlength=len(self.classes))

    def take(self, index: Tensor) -> ImageSet:
        """The images at `index` (int64), in that order, as a copy."""
        return replace(
            self,
            images=gather(self.images, index),
            labels=self.labels[index],
            sites=None if self.sites is None else self.sites[index],
            patients=None if self.patients is None else self.patients[index],
        )

    def to(self, device: torch.device | str) -> ImageSet:
        """The same images and labels on a device; ids stay where they are."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def sha256(self) -> str:
        """A hash of shape, pixels, labels and class names; the same content gives the same hash on any machine."""
        digest = hashlib.sha256(f"{tuple(self.images.shape)}|{self.classes}".encode())
        digest.update(self.images.contiguous().cpu().numpy().data)
        digest.update(self.labels.contiguous().cpu().numpy().data)
        return digest.hexdigest()


def merge(parts: list[ImageSet]) -> ImageSet:
    """Several sets one after the other; ids are kept only where every part has them."""
    first = parts[0]
    for part in parts[1:]:
        if part.classes != first.classes or part.images.shape[1:] != first.images.shape[1:]:
            raise BadInput(
                f"sets of different kinds cannot merge: {len(first.classes)} classes {tuple(first.images.shape[1:])} "
                f"and {len(part.classes)} classes {tuple(part.images.shape[1:])}; use the same classes and image size"
            )

    def kept(ids: list[Tensor | None]) -> Tensor | None:
        present = [i for i in ids if i is not None]
        return torch.cat(present) if len(present) == len(ids) else None

    return ImageSet(
        join([p.images for p in parts]),
        torch.cat([p.labels for p in parts]),
        first.classes,
        kept([p.sites for p in parts]),
        kept([p.patients for p in parts]),
    )


@dataclass(frozen=True)
class Dataset:
    """A named source with its official parts. `val` may be None; `provenance` says in words where it came from.

    `notes` are what a reader of any figure on these images must know. `site_names[i]` is what the source itself calls
    the site of id i; it is empty where the source has no names for them.
    """

    name: str
    train: ImageSet
    val: ImageSet | None
    test: ImageSet
    provenance: str
    notes: tuple[str, ...] = ()
    site_names: tuple[str, ...] = ()
