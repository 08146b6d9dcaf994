"""How alike two images are: SSIM and the root mean square difference, both of pixels from 0 to 1."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 11
DEVIATION = 1.5
C1, C2 = 0.01**2, 0.03**2
AT_ONCE = 32  # images in a filter at a time; more leave the cache
ROWS = 512  # and columns of a table of distances held at once


def unit(images: Tensor) -> Tensor:
    """8-bit images as float32 from 0 to 1; others are taken to be so already."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def l2(a: Tensor, b: Tensor) -> Tensor:
    """√(mean over pixels and channels of (a − b)²) of each pair of `(n, channels, h, w)`: float64 `(n,)`, from 0 to 1.

    Divided by the number of values, so that one threshold means the same at every size.
    """
    return (unit(a).double() - unit(b).double()).square().flatten(1).mean(dim=1).sqrt()


def nearest(of: Tensor, to: Tensor, apart_from: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For each image its nearest of `to` by L2: distance and index; but never `to[apart_from[i]]` for image i.

    Found through inner products in float64, and measured again pair by pair, so that equal images are 0 apart.
    """
    index = []
    for begun in range(0, len(of), ROWS):
        rows = unit(of[begun : begun + ROWS]).double().flatten(1)
        least = torch.full((len(rows),), torch.inf, dtype=torch.float64)
        place = torch.zeros(len(rows), dtype=torch.int64)
        for start in range(0, len(to), ROWS):
            columns = unit(to[start : start + ROWS]).double().flatten(1)
            # Squared distances, less each row's own norm, which changes no order.
            squares = columns.square().sum(dim=1) - 2 * rows @ columns.T
            if apart_from is not None:
                own = apart_from[begun : begun + ROWS].unsqueeze(1) == torch.arange(start, start + len(columns))
                squares = squares.masked_fill(own, torch.inf)
            here = squares.min(dim=1)
            place = torch.where(here.values < least, here.indices + start, place)
            least = torch.minimum(here.values, least)
        index.append(place)
    found = torch.cat(index)
    return l2(of, to[found]), found


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Wang et al.'s index (IEEE Trans. Image Processing 2004) of each pair: float64 `(n,)`, 1 for equal images.

    Gaussian window of 11×11 with deviation 1.5, K₁ = 0.01, K₂ = 0.03, a dynamic range of 1, only windows that lie
    inside the image, weighted moments without Bessel's correction; the mean over windows, then channels. An image
    smaller than the window gets the largest odd window that fits.
    """
    pairs = zip(torch.split(unit(a), AT_ONCE), torch.split(unit(b), AT_ONCE), strict=True)
    return torch.cat([_ssim(x.double(), y.double()) for x, y in pairs])


def best_ssim(of: Tensor, to: Tensor, apart_from: Tensor | None = None) -> Tensor:
    """For each image the highest SSIM with any of `to` but `to[apart_from[i]]`; every pair is measured."""
    found = []
    for place, image in enumerate(of):
        values = ssim(image.expand_as(to), to)
        if apart_from is not None:
            values[apart_from[place]] = -torch.inf
        found.append(values.max())
    return torch.stack(found)


def _ssim(x: Tensor, y: Tensor) -> Tensor:
    side = min(x.shape[-1], x.shape[-2])
    down, across = _gauss(x.shape[-2], side), _gauss(x.shape[-1], side)

    def blur(images: Tensor) -> Tensor:
        return down @ images @ across.T

    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    light = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    structure = (2 * covariance + C2) / (var_x + var_y + C2)
    return (light * structure).mean(dim=(2, 3)).mean(dim=1)


def _gauss(length: int, smallest: int) -> Tensor:
    """The window slid along one axis, as a matrix `(places, length)`: faster than a convolution with one map."""
    width = min(WINDOW, smallest if smallest % 2 else smallest - 1)
    away = torch.arange(width, dtype=torch.float64) - width // 2
    weights = torch.exp(-(away**2) / (2 * DEVIATION**2))
    places = length - width + 1
    rows = torch.zeros(places, length, dtype=torch.float64)
    for place in range(places):
        rows[place, place : place + width] = weights / weights.sum()
    return rows
