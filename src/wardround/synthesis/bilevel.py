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

from wardround.learn.replay import Replay
from wardround.models import StagedNet
from wardround.synthesis.student import Student, mixed_distillation


class Lesson(NamedTuple):
    """One cluster's images at one step and what its teachers F and F̃ say to them; any model may learn from it."""

    images: Tensor
    original: Tensor
    adapted: Tensor
    noise: Tensor  # λ = 1 − t/T

    def part(self, rows: slice) -> Lesson:
        """Some of the images."""
        return self._replace(images=self.images[rows], original=self.original[rows], adapted=self.adapted[rows])

    def loss(self, model: Student, temperature: float) -> Tensor:
        """Eq. 5."""
        return mixed_distillation(self.original, self.adapted, model.logits(self.images), self.noise, temperature)


class ClusterModel:
    """G_k: a model that learns from every cluster's lessons, the last of whose images are for validation.

    Steps are begun and waited for apart, so that the models of all clusters can learn side by side.
    """

    def __init__(self, student: Student, own: int, training: int, temperature: float, device: torch.device) -> None:
        self.student, self.own, self.training, self.temperature = student, own, training, temperature
        self.device = device
        self.steps: dict[tuple[int, ...], Replay[Tensor]] = {}
        self.begun: Replay[Tensor]

    def start(self, lessons: Sequence[Lesson], weights: Tensor, rate: float, outer: bool) -> None:
        """Eq. 7, and where `outer`, Eq. 8's gradient with it. Else clusters without weight are not looked at."""
        self.student.set_rate(rate)
        taught = range(len(lessons)) if outer else [j for j, share in enumerate(weights.tolist()) if share > 0]
        key = (outer, *taught)
        if key not in self.steps:
            self.steps[key] = Replay(self._outer if outer else self._inner, self.device)
        self.begun = self.steps[key]
        shares = weights[list(taught)].to(self.device, self.student.rate.dtype)
        self.begun.start(shares, *(tensor for j in taught for tensor in lessons[j]))

    def wait(self) -> Tensor:
        """Eq. 8's gradient by cluster, on the device; without `outer`, nothing of use."""
        return self.begun.wait()

    def _inner(self, weights: Tensor, *tensors: Tensor) -> Tensor:
        lessons = [lesson.part(slice(self.training)) for lesson in _lessons(tensors)]
        inner_update(self.student, lessons, weights, self.temperature)
        return weights

    def _outer(self, weights: Tensor, *tensors: Tensor) -> Tensor:
        lessons = _lessons(tensors)
        training = [lesson.part(slice(self.training)) for lesson in lessons]
        validation = lessons[self.own].part(slice(self.training, None))
        return bilevel_update(self.student, training, validation, weights, self.temperature)


def inner_update(model: Student, lessons: Sequence[Lesson], weights: Tensor, temperature: float) -> None:
    """Eq. 7 in one backward pass, at the model's rate."""
    losses = [lesson.loss(model, temperature) for lesson in lessons]
    model.step((torch.stack(losses) * weights).sum())


def bilevel_update(
    model: Student, lessons: Sequence[Lesson], validation: Lesson, weights: Tensor, temperature: float
) -> Tensor:
    """Eq. 7 with each cluster's gradient g_j apart; returns Eq. 8's gradient −η_G ⟨∇L_val(G^(t)), g_j⟩ by cluster."""
    parameters = list(model.net.parameters())
    gradients = [torch.autograd.grad(lesson.loss(model, temperature), parameters) for lesson in lessons]
    for place, parameter in enumerate(parameters):
        # In the parameter's memory format, which a fused step relies on.
        parameter.grad = torch.zeros_like(parameter)
        for share, gradient in zip(weights, gradients, strict=True):
            parameter.grad.addcmul_(gradient[place], share.to(parameter.dtype))
    model.optimiser.step()
    with _statistics_left_alone(model.net):
        slope = torch.autograd.grad(validation.loss(model, temperature), parameters)
    products = [torch.stack([(a * b).sum() for a, b in zip(slope, g, strict=True)]).sum() for g in gradients]
    return -model.rate * torch.stack(products)


def _lessons(tensors: Sequence[Tensor]) -> list[Lesson]:
    """The inverse of laying lessons out one tensor after the other."""
    width = len(Lesson._fields)
    return [Lesson(*tensors[place : place + width]) for place in range(0, len(tensors), width)]


def sampled_steps(steps: int, samples: int, generator: torch.Generator) -> frozenset[int]:
    """Eq. 9: of S equal intervals of 1..T, one step each."""
    bounds = [(s * steps // samples + 1, (s + 1) * steps // samples) for s in range(samples)]
    return frozenset(int(torch.randint(first, last + 1, (), generator=generator)) for first, last in bounds)


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
