"""From uint8 pixels to what a network sees, on the device the images live on."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

CROP_PADDING = 4
LEAST_AREA, MOST_ASPECT, MOST_DEGREES = 0.5, 4 / 3, 15.0


def normalise(images: Tensor) -> Tensor:
    """Pixels 0..255 as -1..1 (mean 0.5, deviation 0.5: what FedISCA, FedBiCross and FedKPer use), channels last."""
    floats = images.to(torch.float32, memory_format=torch.channels_last, copy=images.is_floating_point())
    return floats.mul_(1 / 127.5).sub_(1.0)


def draw_augmentation(n: int, generator: torch.Generator, kind: str = "shift") -> Tensor:
    """What happens to each of n images in one epoch. `shift`: row offset, column offset and flip, int64 `(n, 3)`.

    `zoom` is for larger images: the 2×3 matrices, float32 `(n, 2, 3)`, of a part of the image (half of its area to all
    of it, sides 3:4 to 4:3, anywhere) turned by up to 15 degrees and flipped. Drawn on the CPU for a whole epoch at
    once, so that every device and batch size sees the same draws.
    """
    if kind == "zoom":
        return _draw_zoom(n, generator)
    offsets = torch.randint(0, 2 * CROP_PADDING + 1, (n, 2), generator=generator)
    flips = torch.randint(0, 2, (n, 1), generator=generator)
    return torch.cat([offsets, flips], dim=1)


def _draw_zoom(n: int, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(n, 6, generator=generator)
    area = LEAST_AREA + (1 - LEAST_AREA) * uniform[:, 0]
    aspect = torch.exp((2 * uniform[:, 1] - 1) * math.log(MOST_ASPECT))
    wide, high = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    angle = (2 * uniform[:, 2] - 1) * math.radians(MOST_DEGREES)
    flip = torch.where(uniform[:, 3] < 0.5, 1.0, -1.0)
    across, down = (1 - wide) * (2 * uniform[:, 4] - 1), (1 - high) * (2 * uniform[:, 5] - 1)
    cos, sin = angle.cos(), angle.sin()
    rows = [wide * cos * flip, -high * sin, across, wide * sin * flip, high * cos, down]
    return torch.stack(rows, dim=1).reshape(n, 2, 3)


def augment(images: Tensor, draws: Tensor) -> Tensor:
    """What the draws say. `shift`: a crop out of the edge-padded image and a flip, by one gather (uint8 out).

    `zoom`: sampled between pixels (float32 out, 0..255); what lies outside the image repeats its edge.
    """
    if draws.is_floating_point():
        grid = F.affine_grid(draws, list(images.shape), align_corners=False)
        return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    rows, columns = sources(draws, images.shape[2], images.shape[3])
    n, channels = images.shape[:2]
    return images[
        torch.arange(n, device=images.device)[:, None, None, None],
        torch.arange(channels, device=images.device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def sources(draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Of `shift`: which row and which column of its image each pixel comes from, `(n, height)` and `(n, width)`."""
    rows = (torch.arange(height, device=draws.device) + draws[:, 0:1] - CROP_PADDING).clamp_(0, height - 1)
    columns = torch.arange(width, device=draws.device).expand(len(draws), width)
    columns = torch.where(draws[:, 2:3] == 1, width - 1 - columns, columns)
    return rows, (columns + draws[:, 1:2] - CROP_PADDING).clamp_(0, width - 1)
