"""Images made so far: a pool that only grows, and passes over it.

One byte per value, as the public code of DENSE and Co-Boosting, which keeps its pool as 8-bit pictures: a quarter of
the memory and of every checkpoint. The block is made once for the whole run, so that a captured step always finds it in
the same place, and rows once written never change, so a state may point into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from wardround.learn.pixels import CROP_PADDING, augment, draw_augmentation, normalise, sources
from wardround.synthesis.gallery import to_pixels

Augmentation = Literal["crop", "flip", "none"]


class Pool:
    """Images and the labels they were made for; never more than `capacity`."""

    def __init__(self, capacity: int, shape: tuple[int, int, int], device: torch.device) -> None:
        self.images = torch.empty((capacity, *shape), dtype=torch.uint8, device=device)
        self.labels = torch.empty(capacity, dtype=torch.int64, device=device)
        self.count = 0

    def add(self, images: Tensor, labels: Tensor) -> None:
        """Put images of the networks' value range in, rounded to bytes."""
        end = self.count + len(images)
        self.images[self.count : end] = to_pixels(images)
        self.labels[self.count : end] = labels
        self.count = end

    def pixels(self, index: Tensor, crops: Tensor) -> Tensor:
        """Some images, cut and flipped, as a network sees them; can be captured."""
        return normalise(augment(self.images[index], crops))

    def one_pass(
        self, batch: int, most: int, how: Augmentation, generator: torch.Generator
    ) -> list[tuple[Tensor, Tensor]]:
        """All images in random order: indices and crops of each whole batch; `most` > 0 ends it after so many."""
        order = torch.randperm(self.count, generator=generator).to(self.images.device)
        crops = draw_crops(self.count, how, generator).to(self.images.device)
        batches = self.count // batch
        count = min(batches, most) if most else batches
        bounds = [slice(i * batch, (i + 1) * batch) for i in range(count)]
        return [(order[part], crops[part]) for part in bounds]

    def state(self) -> dict[str, Tensor]:
        """What is in it, to be kept in a state."""
        return {"images": self.images[: self.count], "labels": self.labels[: self.count]}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`; of nothing, an empty pool."""
        self.count = len(state["images"]) if state else 0
        if state:
            self.images[: self.count] = state["images"].to(self.images.device)
            self.labels[: self.count] = state["labels"].to(self.labels.device)


def draw_crops(n: int, how: Augmentation, generator: torch.Generator) -> Tensor:
    """For each of n images where it is cut out of its padded self and whether it is flipped; see `learn.pixels`.

    `crop`: both; `flip`: no cut; `none`: the image as it is.
    """
    draws = draw_augmentation(n, generator)
    if how != "crop":
        draws[:, :2] = CROP_PADDING
    if how == "none":
        draws[:, 2] = 0
    return draws


def cropped(images: Tensor, crops: Tensor) -> Tensor:
    """The same on images of the networks' value range, differentiable in them.

    By `gather`: indexing as `augment` does would sort all pixels on the way back, on a GPU for as long as a network
    takes.
    """
    n, channels, height, width = images.shape
    rows, columns = sources(crops, height, width)
    places = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1)
    found = images.flatten(2).gather(2, places.unsqueeze(1).expand(n, channels, height * width))
    return found.view(images.shape).contiguous(memory_format=torch.channels_last)
