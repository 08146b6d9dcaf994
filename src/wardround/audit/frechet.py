"""How far two sets of images are apart as a whole: Fréchet's distance between the features of a stated network.

FedMP's FID uses an Inception network trained on ImageNet, which a hospital behind an air gap does not have and which
has never seen a medical image. Here the network is fixed and random, the same on every machine. Its values and the
papers' FID cannot be compared with one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.audit.similarity import unit
from wardround.errors import BadInput
from wardround.learn.evaluate import batch_size
from wardround.streams import Streams

WIDTHS = (16, 32, 64)


@dataclass(frozen=True)
class FeatureNetwork:
    """What looks at the images: a name for the record, and 8-bit images to float `(n, width)`."""

    name: str
    features: Callable[[Tensor], Tensor]


def frechet(a: Tensor, b: Tensor) -> float:
    """‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½) of two sets of features, with unbiased covariances, in float64.

    The trace of the root is the sum of the roots of the eigenvalues of Σ₁^½ Σ₂ Σ₁^½, which is symmetric: no complex
    numbers come in, whatever the rank.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] < 2:
        raise ValueError(
            f"features must be rows of the same two numbers or more, not {tuple(a.shape)}, {tuple(b.shape)}"
        )
    if len(a) < 2 or len(b) < 2:
        raise BadInput(f"Fréchet's distance needs two images or more on each side, not {len(a)} and {len(b)}")
    a, b = a.double().cpu(), b.double().cpu()
    first, second = torch.cov(a.T), torch.cov(b.T)
    root = _root(first)
    crossed = torch.linalg.eigvalsh(root @ second @ root).clamp_min(0).sqrt().sum()
    between = (a.mean(dim=0) - b.mean(dim=0)).square().sum()
    return max(0.0, float(between + first.trace() + second.trace() - 2 * crossed))


def random_network(channels: int, seed: int = 0) -> FeatureNetwork:
    """Three 3×3 convolutions with fixed random weights; the features are the mean of every map of every layer.

    Random convolutions with pooling tell images apart by colour, contrast and texture. The seed is the network's own
    and no study's, so that distances compare between sites and studies with images of as many channels.
    """
    streams, inputs, layers = Streams(seed), channels, []
    for number, width in enumerate(WIDTHS):
        noise = torch.randn(width, inputs, 3, 3, generator=streams.torch("audit feature network", index=number))
        layers.append(noise * math.sqrt(2 / (9 * inputs)))
        inputs = width

    def look(images: Tensor) -> Tensor:
        found = []
        for batch in torch.split(images, batch_size(images.device)):
            maps, means = unit(batch) * 2 - 1, []
            for number, weights in enumerate(layers):
                maps = F.relu(F.conv2d(maps, weights.to(maps.device), stride=1 if number == 0 else 2, padding=1))
                means.append(maps.mean(dim=(2, 3)))
            found.append(torch.cat(means, dim=1))
        return torch.cat(found)

    what = "-".join(map(str, WIDTHS))
    return FeatureNetwork(f"random convolutions {what}, seed {seed} ({sum(WIDTHS)} features; not Inception)", look)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = vectors * values.clamp_min(0).sqrt() @ vectors.T
    return root
