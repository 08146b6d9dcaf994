"""The trajectory as FedISCA keeps it: every iterate of a synthesis, on the device where they fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wardround.synthesis.teachers import Precision

IMAGES, LOGITS = "memory", "memory_logits"
SHARE_OF_FREE = 0.5  # of a GPU's free memory that the images may take


def placed(batch: Tensor, device: torch.device) -> Tensor:
    """On the device, and in memory as a synthesis leaves it: a batch that comes out of a file has another layout."""
    return batch.to(device, memory_format=torch.channels_last)


class Memory:
    """Batches of images in order, and what the teachers said to them where that is known.

    Kept in the precision that networks compute in. 500 batches of 256 colour images of 28 pixels take 1.2 GB in fp32;
    where they would take more than half of what a GPU has free they are kept on the CPU.
    """

    def __init__(self, device: torch.device, batches: int, shape: tuple[int, ...], precision: Precision) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        wanted = batches * torch.Size(shape).numel() * self.dtype.itemsize
        fits = device.type != "cuda" or wanted < SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0]
        self.place = device if fits else torch.device("cpu")
        self._images: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, images: Tensor, logits: Tensor | None = None) -> None:
        """One more batch; what is given must be the memory's own from now on."""
        self._images.append(images.to(self.place, self.dtype, memory_format=torch.channels_last))
        if logits is not None:
            self._logits.append(logits)

    def images(self, place: int) -> Tensor:
        """A batch, in float32 on the device."""
        return self._images[place].to(self.device, torch.float32)

    def logits(self, place: int) -> Tensor:
        """What the teachers said to it."""
        return self._logits[place]

    def clear(self) -> None:
        """Forget everything."""
        self._images.clear()
        self._logits.clear()

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """For a state."""
        kept = {IMAGES: self._images, LOGITS: self._logits}
        return {name: {f"{i:06d}": t for i, t in enumerate(tensors)} for name, tensors in kept.items() if tensors}

    def restore(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The inverse of `groups`."""
        self.clear()
        for _, batch in sorted(groups.get(IMAGES, {}).items()):
            self._images.append(placed(batch, self.place))
        self._logits += [logits.to(self.device) for _, logits in sorted(groups.get(LOGITS, {}).items())]
