"""Label counts that may leave: coarser, or with noise of a stated strength.

`noised` is ε-differentially private (δ = 0) for one image added or removed: such a change moves one count by one, and
noise with P(k) ∝ e^(−ε·|k|), the two-sided geometric distribution (Ghosh, Roughgarden, Sundararajan, STOC 2009), makes
any published table at most e^ε times likelier. A patient with k images is protected by k·ε. Clipping at zero
and `binned` come after the noise and cost nothing. `binned` alone promises nothing: whoever knows all images but one
may still see a count cross an edge.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from wardround.errors import BadInput

EDGES = (0, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


def binned(counts: Tensor) -> Tensor:
    """Each count as the lower edge of the bin that holds it; whatever is above the last edge is the last edge."""
    _refuse_uncountable(counts)
    table = torch.tensor(EDGES, dtype=torch.int64, device=counts.device)
    return table[torch.bucketize(counts.to(torch.int64), table, right=True) - 1]


def noised(counts: Tensor, epsilon: float, generator: np.random.Generator) -> Tensor:
    """Counts with two-sided geometric noise, none below zero; `generator` is a `Secret`'s, never the study's."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise BadInput(f"counts cannot be noised with ε = {epsilon}; use a number above 0, such as 1")
    _refuse_uncountable(counts)
    success = -math.expm1(-epsilon)
    # Both geometric draws begin at 1, which their difference does not see.
    draws = generator.geometric(success, (2, *counts.shape)).astype(np.int64)
    noise = torch.from_numpy(draws[0] - draws[1]).to(counts.device)
    return (counts.to(torch.int64) + noise).clamp_min(0)


def _refuse_uncountable(counts: Tensor) -> None:
    if not bool(((counts >= 0) & (counts == counts.floor())).all()):
        raise BadInput("counts must be whole numbers from 0 up; count the site's labels")
