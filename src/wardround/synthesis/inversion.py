"""Images by inversion: noise is moved until the teachers take it for what they were trained on.

DeepInversion (Yin et al., CVPR 2020) as FedISCA uses it (its Eq. 5): cross-entropy to a drawn label, batch-norm
statistics (Eq. 6), and total variation. The images live in the networks' own value range and are never clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.errors import RunFailed
from wardround.synthesis.teachers import Teachers, View


@dataclass(frozen=True)
class Inversion:
    """How to invert; the defaults are FedISCA's.

    `bn_over` says whether the batch-norm distances of several teachers are averaged (Eq. 6) or summed (FedISCA's
    code, which makes the term as many times heavier as there are sites). `classify` says whether the label is asked
    of the mean logits (the code, and FedBiCross) or of each teacher (FedISCA §3.1.3).
    """

    steps: int = 500
    batch: int = 256
    lr: float = 0.05
    bn_weight: float = 10.0
    tv_weight: float = 2.5e-5
    jitter: int = 2
    bn_over: Literal["mean", "sum"] = "mean"
    classify: Literal["together", "each"] = "together"


class Iterate(NamedTuple):
    """One point of a trajectory: images after `step` + 1 updates, and the loss before the last of them."""

    step: int
    images: Tensor
    loss: Tensor


def balanced_labels(batch: int, classes: int) -> Tensor:
    """0..C−1 repeated: as many of each class as the batch allows."""
    return torch.arange(batch) % classes


def total_variation(images: Tensor) -> Tensor:
    """The sum of four L2 norms: differences to the right, down, and along both diagonals, over the whole batch."""
    right = images[..., :, 1:] - images[..., :, :-1]
    down = images[..., 1:, :] - images[..., :-1, :]
    falling = images[..., 1:, 1:] - images[..., :-1, :-1]
    rising = images[..., 1:, :-1] - images[..., :-1, 1:]
    return torch.stack([d.norm() for d in (right, down, falling, rising)]).sum()


def inversion_loss(view: View, images: Tensor, labels: Tensor, how: Inversion) -> Tensor:
    """Eq. 5 of the images that the teachers have just viewed."""
    if how.classify == "together":
        label = F.cross_entropy(view.mean, labels)
    else:
        label = torch.stack([F.cross_entropy(logits, labels) for logits in view.logits]).mean()
    gaps = torch.stack(view.gaps)
    distance = gaps.mean() if how.bn_over == "mean" else gaps.sum()
    return label + how.bn_weight * distance + how.tv_weight * total_variation(images)


def invert(
    teachers: Teachers, labels: Tensor, shape: tuple[int, int, int], how: Inversion, generator: torch.Generator
) -> Iterator[Iterate]:
    """The trajectory from N(0, 1) to images, one Adam step at a time; each iterate is a copy of its own.

    Every step sees the images shifted by a few pixels, the same for the whole batch. A loss that is no longer finite
    ends it with a clear error.
    """
    device = labels.device
    images = torch.randn((how.batch, *shape), generator=generator).to(device, memory_format=torch.channels_last)
    shifts = torch.randint(-how.jitter, how.jitter + 1, (how.steps, 2), generator=generator).tolist()
    images.requires_grad_(True)
    optimiser = torch.optim.Adam([images], lr=how.lr)
    for step, shift in enumerate(shifts):
        moved = torch.roll(images, shift, dims=(2, 3))
        loss = inversion_loss(teachers.view(moved), moved, labels, how)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        yield Iterate(step, images.detach().clone(), loss.detach())
    if not bool(torch.isfinite(loss)):
        raise RunFailed("the synthesis diverged: its loss is no longer finite; use a smaller synthesis learning rate")
