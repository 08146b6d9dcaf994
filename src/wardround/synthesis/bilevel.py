"""A model that learns from several clusters' images, and how much each of them should count: FedBiCross's Stage 2.

One step of the model on the weighted losses of all clusters (Eq. 7), and the exact gradient of its loss on held-out
images in these weights (for Eq. 8). The step is G − η_G Σ w_j g_j, so ∂L_val/∂w_j = −η_G ⟨∇L_val(G^(t)), g_j⟩: K + 1
backward passes of first order and no Hessian. What momentum and weight decay add to a step does not depend on w, so the
formula holds with them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.models import StagedNet
from wardround.synthesis.student import Student, distillation


class Lesson(NamedTuple):
    """One cluster's images at one step and what its teachers F and F̃ say to them; any model may learn from it."""

    images: Tensor
    original: Tensor
    adapted: Tensor
    noise: float  # λ = 1 − t/T
    temperature: float

    def part(self, rows: slice) -> Lesson:
        """Some of the images."""
        return self._replace(images=self.images[rows], original=self.original[rows], adapted=self.adapted[rows])

    def loss(self, model: Student) -> Tensor:
        """Eq. 5."""
        logits = model.logits(self.images)
        near = distillation(self.original, logits, self.temperature)
        return torch.lerp(near, distillation(self.adapted, logits, self.temperature), self.noise)


def inner_update(model: Student, lessons: Sequence[Lesson], weights: Tensor, rate: float) -> None:
    """Eq. 7 in one backward pass. Clusters without weight are not looked at."""
    pairs = zip(weights.tolist(), lessons, strict=True)
    model.learn(torch.stack([weight * lesson.loss(model) for weight, lesson in pairs if weight > 0]).sum(), rate)


def bilevel_update(
    model: Student, lessons: Sequence[Lesson], validation: Lesson, weights: Tensor, rate: float
) -> Tensor:
    """Eq. 7 with each cluster's gradient g_j apart; returns Eq. 8's gradient −η_G ⟨∇L_val(G^(t)), g_j⟩ by cluster."""
    parameters = list(model.net.parameters())
    gradients = [torch.autograd.grad(lesson.loss(model), parameters) for lesson in lessons]
    shares = weights.tolist()
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.zeros_like(parameter)  # in the parameter's memory format, which a fused step relies on
        for share, gradient in zip(shares, gradients, strict=True):
            parameter.grad.add_(gradient[place], alpha=share)
    for group in model.optimiser.param_groups:
        group["lr"] = rate
    model.optimiser.step()
    with _statistics_left_alone(model.net):
        slope = torch.autograd.grad(validation.loss(model), parameters)
    products = [torch.stack([(a * b).sum() for a, b in zip(slope, g, strict=True)]).sum() for g in gradients]
    return -rate * torch.stack(products).double().cpu()


def sampled_steps(steps: int, samples: int, generator: torch.Generator) -> frozenset[int]:
    """Eq. 9: of S equal intervals of 1..T, one step each."""
    bounds = [(s * steps // samples + 1, (s + 1) * steps // samples) for s in range(samples)]
    return frozenset(int(torch.randint(first, last + 1, (), generator=generator)) for first, last in bounds)


def recalibrate(net: StagedNet, batches: Sequence[Tensor]) -> None:
    """Running statistics anew: the mean over these batches."""
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    kept = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean
    with torch.no_grad():
        for images in batches:
            net(images)
    for layer, momentum in zip(layers, kept, strict=True):
        layer.momentum = momentum


@contextmanager
def _statistics_left_alone(net: StagedNet) -> Iterator[None]:
    """Within the block, batch norm uses the batch's statistics and does not remember them."""
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
