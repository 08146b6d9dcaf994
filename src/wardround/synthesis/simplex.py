"""Weights that are shares: steps that stay on the probability simplex."""

from __future__ import annotations

import torch
from torch import Tensor


def project(point: Tensor) -> Tensor:
    """The nearest point (Euclidean) with no negative entry and sum 1.

    Exact, by sorting (Held, Wolfe and Crowder, Mathematical Programming 1974): subtract the one number that makes what
    stays above zero sum to 1. Worked out in double precision.
    """
    wide = point.double()
    falling = wide.sort(descending=True).values
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(wide) + 1, device=wide.device)
    kept = int((falling > excess).sum())
    return (wide - excess[kept - 1]).clamp_min(0).to(point.dtype)


def descend(weights: Tensor, gradient: Tensor, rate: float, normalise: bool) -> Tensor:
    """A projected gradient step (FedBiCross Eq. 8).

    `normalise` divides the gradient by its largest entry first, so that the rate is a share of weight that may move,
    whatever the scale of the loss; a gradient of zero moves nothing.
    """
    if normalise:
        gradient = gradient / gradient.abs().max().clamp_min(torch.finfo(gradient.dtype).tiny)
    return project(weights - rate * gradient)
