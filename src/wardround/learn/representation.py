"""FRAug's objective: the head also learns from embeddings that nobody's image gave.

A generator G, common to all sites, makes an embedding out of noise and a label; a transformation R, a site's own, makes
of it what is added to an embedding f of this site: f~ = f + R(G(noise, y), y). Three things are trained at once, each
with an optimiser of its own:

    the network    (1 − q)·CE(real) + q·CE(head(f~))          f~ is a constant here, so its term trains the head
    G              CE(head(G(noise, y))) − a·MMD(G(noise, y), f)      of its class, but not where this site is
    R              −entropy(head(f~)) + b·MSE(f~, f)                  undecided, but near

f is this batch's embeddings under their labels, and as many class means under labels drawn from the site's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn.fit import Objective, Outputs, Step
from wardround.learn.prototypes import Prototypes, class_means
from wardround.learn.trainer import optimiser_state, restore_optimiser
from wardround.models import StagedNet, Weights
from wardround.tensorfile import flatten, unflatten

KERNELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # bandwidths of the MMD, in mean squared distances
SMALLEST = 1e-6


@dataclass(frozen=True)
class Strengths:
    """What a site trains with: the share q of what is made, a, b, learning rates, momenta."""

    share: float
    generator_distance: float
    transform_distance: float
    generator_lr: float
    transform_lr: float
    momentum: float
    means_momentum: float


def two_layers(inputs: int, hidden: int, outputs: int, generator: torch.Generator) -> Weights:
    """A small network as its tensors, drawn as PyTorch draws linear layers."""
    tensors = {}
    for name, rows, columns in (("hidden", hidden, inputs), ("out", outputs, hidden)):
        for part, shape in (("weight", (rows, columns)), ("bias", (rows,))):
            tensors[f"{name}.{part}"] = torch.empty(shape).uniform_(-1, 1, generator=generator) / columns**0.5
    return tensors


def run_layers(tensors: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
    """What that network gives for inputs put side by side."""
    hidden = F.relu(F.linear(torch.cat(inputs, dim=1), tensors["hidden.weight"], tensors["hidden.bias"]))
    return F.linear(hidden, tensors["out.weight"], tensors["out.bias"])


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """The squared maximum mean discrepancy of two clouds of points under a sum of Gaussian kernels.

    It is bounded, whereas to maximise a plain distance has no end.
    """
    both = torch.cat([a, b])
    lengths = both.square().sum(dim=1)
    squares = (lengths.unsqueeze(0) + lengths.unsqueeze(1) - 2 * both @ both.T).clamp_min(0)
    unit = squares.detach().mean().clamp_min(SMALLEST)
    kernel = torch.stack([torch.exp(-squares / (unit * scale)) for scale in KERNELS]).sum(dim=0)
    n = len(a)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


class Augmented(Objective):
    """The network is the fit's; `generator`, `transform` and `means` are this objective's, and are read after it."""

    capturable = False

    def __init__(
        self,
        generator: Weights,
        transform: Weights,
        means: Prototypes,
        present: Tensor,
        strengths: Strengths,
        draws: torch.Generator,
    ) -> None:
        self.generator, self.transform, self.means = generator, transform, means
        self.present, self.strengths, self.draws = present, strengths, draws
        self.classes = len(means.known)
        self.noise = generator["hidden.weight"].shape[1] - self.classes

    def to(self, device: str) -> None:
        """Copies on the device: what was received stays as it was."""
        self.generator, self.transform = (_live(tensors, device) for tensors in (self.generator, self.transform))
        self.means = self.means.to(device)
        momentum, s = self.strengths.momentum, self.strengths
        self.trains_generator = torch.optim.SGD(self.generator.values(), s.generator_lr, momentum)
        self.trains_transform = torch.optim.SGD(self.transform.values(), s.transform_lr, momentum)

    def outputs(self, net: StagedNet, pixels: Tensor) -> Outputs:
        """The network's own; the head is needed again."""
        self.head = net.head
        return Outputs(*net.outputs(pixels))

    def loss(self, step: Step) -> Tensor:
        """The network's loss."""
        features, labels = step.outputs.features.detach(), step.labels
        self.means = self.means.moved(class_means(features, labels, self.classes), self.strengths.means_momentum)
        drawn = self.present[torch.randint(len(self.present), (len(labels),), generator=self.draws)].to(labels.device)
        bases, targets = torch.cat([features, self.means.means[drawn]]), torch.cat([labels, drawn])
        counts = torch.cat([torch.ones_like(labels, dtype=torch.bool), self.means.known[drawn]]).float()
        self.seen = (features, labels, bases, targets)
        with torch.no_grad():
            made = bases + self._residual(targets)
        each = F.cross_entropy(self.head(made), targets, reduction="none")
        synthetic = (each * counts).sum() / counts.sum()
        share = self.strengths.share
        return (1 - share) * super().loss(step) + share * synthetic

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        """A step of G and one of R, judged by the head as it was in this step."""
        features, labels, bases, targets = self.seen
        weight, bias = self.head.weight.detach(), self.head.bias.detach()
        del self.seen, self.head
        made = self._generated(labels)
        judged = F.cross_entropy(F.linear(made, weight, bias), labels)
        self._step(
            self.trains_generator, self.generator, judged - self.strengths.generator_distance * mmd(made, features)
        )
        moved = self._residual(targets)
        undecided = torch.special.entr(F.linear(bases + moved, weight, bias).softmax(1)).sum(dim=1).mean()
        near = moved.square().mean()
        self._step(self.trains_transform, self.transform, self.strengths.transform_distance * near - undecided)

    def state(self) -> dict[str, Tensor]:
        """G, R, the class means, what the two optimisers carry, and how far the draws are."""
        return flatten(
            {
                "generator": self.generator,
                "transform": self.transform,
                "means": self.means.tensors(),
                "trains generator": optimiser_state(self.trains_generator),
                "trains transform": optimiser_state(self.trains_transform),
                "draws": {"state": self.draws.get_state()},
            }
        )

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Into the live tensors, which the optimisers train."""
        found = unflatten(state)
        with torch.no_grad():
            for name, tensors in (("generator", self.generator), ("transform", self.transform)):
                for part, tensor in tensors.items():
                    tensor.copy_(found[name][part])
        self.means = Prototypes.of(found["means"]).to(str(self.means.means.device))
        restore_optimiser(self.trains_generator, found.get("trains generator", {}))
        restore_optimiser(self.trains_transform, found.get("trains transform", {}))
        self.draws.set_state(found["draws"]["state"])

    def finish(self) -> None:
        """What was trained, as plain tensors."""
        self.generator, self.transform = (
            {name: tensor.detach() for name, tensor in tensors.items()} for tensors in (self.generator, self.transform)
        )

    def _generated(self, labels: Tensor) -> Tensor:
        """G, whose embeddings are not negative, as the networks' are not."""
        noise = torch.rand(len(labels), self.noise, generator=self.draws).to(labels.device)
        return F.relu(run_layers(self.generator, noise, self._one_hot(labels)))

    def _residual(self, labels: Tensor) -> Tensor:
        return run_layers(self.transform, self._generated(labels).detach(), self._one_hot(labels))

    def _one_hot(self, labels: Tensor) -> Tensor:
        return F.one_hot(labels, self.classes).float()

    def _step(self, optimiser: torch.optim.Optimizer, tensors: Weights, loss: Tensor) -> None:
        for tensor, gradient in zip(tensors.values(), torch.autograd.grad(loss, list(tensors.values())), strict=True):
            tensor.grad = gradient
        optimiser.step()


def _live(tensors: Weights, device: str) -> Weights:
    return {name: tensor.detach().to(device, copy=True).requires_grad_(True) for name, tensor in tensors.items()}
