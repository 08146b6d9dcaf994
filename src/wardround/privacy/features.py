"""Embeddings and class means that leave: cut to a norm, then noised.

Cutting bounds what one image says; the noise drowns what is small beside it. An embedding is one image's own, so what
this gives it is local: with `noise` σ, two embeddings differ by at most 2·clip, and the Gaussian mechanism's (ε, δ) for
that is large at any σ that leaves something to learn. It makes a decoder's work harder, which the audit shows, and
promises no (ε, δ).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from wardround.errors import BadInput


def clipped(rows: Tensor, clip: float) -> Tensor:
    """Rows `(n, width)` with no norm above `clip`; shorter ones stay as they are."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    shorter: Tensor = rows * (clip / norms.clamp_min(torch.finfo(rows.dtype).tiny)).clamp(max=1.0)
    return shorter


def protected(rows: Tensor, clip: float, noise: float, generator: np.random.Generator) -> Tensor:
    """Clipped, with normal noise of deviation `noise`·`clip` on every number."""
    if not (math.isfinite(clip) and clip > 0 and math.isfinite(noise) and noise >= 0):
        raise BadInput(f"features cannot be cut to {clip} and noised by {noise}; use numbers above 0")
    draw = generator.standard_normal(tuple(rows.shape), dtype=np.float32)
    return clipped(rows, clip) + noise * clip * torch.from_numpy(draw).to(rows)
