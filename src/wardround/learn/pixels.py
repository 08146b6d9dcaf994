"""From uint8 pixels to what a network sees, on the device the images live on."""

from __future__ import annotations

import torch
from torch import Tensor

CROP_PADDING = 4


def normalise(images: Tensor) -> Tensor:
    """Pixels 0..255 as -1..1 (mean 0.5, deviation 0.5: what FedISCA, FedBiCross and FedKPer use), channels last."""
    floats = images.to(torch.float32, memory_format=torch.channels_last)
    return floats.mul_(1 / 127.5).sub_(1.0)


def draw_augmentation(n: int, generator: torch.Generator) -> Tensor:
    """For each of n images the row offset, column offset and flip of one epoch: int64 `(n, 3)`.

    Drawn on the CPU for a whole epoch at once, so that every device and batch size sees the same draws.
    """
    offsets = torch.randint(0, 2 * CROP_PADDING + 1, (n, 2), generator=generator)
    flips = torch.randint(0, 2, (n, 1), generator=generator)
    return torch.cat([offsets, flips], dim=1)


def augment(images: Tensor, draws: Tensor) -> Tensor:
    """Random crop out of an edge-padded image and horizontal flip, by one gather (uint8 in, uint8 out)."""
    n, channels, height, width = images.shape
    device = images.device
    rows = (torch.arange(height, device=device) + draws[:, 0:1] - CROP_PADDING).clamp_(0, height - 1)
    columns = torch.arange(width, device=device).expand(n, width)
    columns = torch.where(draws[:, 2:3] == 1, width - 1 - columns, columns)
    columns = (columns + draws[:, 1:2] - CROP_PADDING).clamp_(0, width - 1)
    return images[
        torch.arange(n, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
