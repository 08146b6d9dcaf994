"""`elastic`: Chen et al., Elastic Aggregation for Federated Optimization, CVPR 2023.

The coordinator moves a parameter the less, the more the model's output depends on it. Before it trains, a site
measures on unlabelled images x how sensitive the output f of the received model is to each parameter: Ω is the
exponential moving average over batches, Ω ← μ·Ω + (1 − μ)·|∂ mean ‖f(x)‖² / ∂θ|. The coordinator averages the sites'
Ω and models with the same weights, and takes w ← w + ζ·(mean − w), where ζ = 1 + τ − Ω/max Ω lies between τ and 1 + τ,
parameter by parameter.

What the paper leaves open, and what is here:
- f are the logits, without softmax; the network is in evaluation mode, so measuring changes nothing.
- The average starts from nothing, so it is divided by 1 − μ^batches: else a site with more batches would count for
  more. The largest Ω is taken over all parameters of the network.
- τ = 0.5, μ = 0.95 and 30 % of the site's images, drawn anew in every round and as many at once as in training, are
  those of the public version in FL-bench. That version measures the gradient of the cross-entropy, per tensor, adds up
  what other sites left, and takes the 30 % from the training. None of this is here: the site trains on all images.
- Batch norm: weights and biases of its layers are parameters like others. Running statistics are averaged as in
  FedAvg, since a step beyond the mean could carry a variance below zero; counters take the largest.

With `share = 0` no sensitivity is measured or sent: every ζ is 1, and this is FedAvg bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from wardround.errors import SiteDiverged
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group
from wardround.learn import nets
from wardround.learn.fit import Fit, Fitted
from wardround.learn.pixels import normalise
from wardround.methods.base import Context
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit, like_parameters
from wardround.models import NetSpec, Weights
from wardround.settings import Frozen, NotNegative, Share
from wardround.study import Study

SENSITIVITY = "sensitivity"


class Elastic(Averaging):
    """FedAvg whose step is shorter for parameters on which the output depends much."""

    name = "elastic"
    paper = "Chen et al., CVPR 2023"
    summary = "FedAvg that moves parameters the less, the more the output depends on them"

    class Settings(Frozen):
        """`tau` and `mu` are τ and μ; `share` is how much of its images a site measures the sensitivity on."""

        tau: NotNegative = 0.5
        mu: Share = 0.95
        share: Annotated[float, Field(ge=0, le=1)] = 0.3

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """The number of images, and Ω."""
        what = "how much the output of the received network depends on each weight, on images of this site"
        omega = like_parameters(study, SENSITIVITY, what)
        return (*super().more_up_groups(study), *((omega,) if self.settings.share > 0 else ()))

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """Ω of the model as it was received, where the site could train."""
        found = super().more_up(visit, fit, fitted)
        if self.settings.share == 0 or fitted.trained_on == 0:
            return found
        batches = torch.split(self._images(visit), fit.recipe.batch)
        omega = sensitivity(fit.spec, visit.received, batches, self.settings.mu, visit.ctx.device.torch)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in omega.values()):
            raise SiteDiverged("the output of the received model is not finite; use a smaller train.lr or elastic.tau")
        return {**found, SENSITIVITY: omega}

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """FedAvg's mean of everything; parameters then go ζ of the way to it."""
        for averaged in super().absorb(ctx, state, answers):
            omega = self._mean_sensitivity(answers)
            moved = elastic_step(state.groups["model"], averaged.groups["model"], omega, self.settings.tau)
            yield State({**averaged.groups, "model": {**averaged.groups["model"], **moved}}, averaged.facts)

    def _images(self, visit: Visit) -> Tensor:
        images = visit.site.train.images
        count = math.ceil(self.settings.share * len(images))
        draw = visit.ctx.streams.torch("sensitivity", visit.site.name, visit.ctx.round)
        return images[torch.randperm(len(images), generator=draw)[:count].to(images.device)]

    def _mean_sensitivity(self, answers: Mapping[str, Bundle]) -> Weights:
        """Σ_k p_k·Ω_k with the weights of the models, in the order of site names; empty where none was sent."""
        mean: Weights = {}
        weights = {site: self.weigh(answers[site]) for site in sorted(answers)}
        total = sum(weights.values())
        for site, weight in weights.items():
            share = weight / total
            for name, omega in answers[site].group(SENSITIVITY).items():
                mean[name] = mean[name] + share * omega.to(mean[name].device) if name in mean else share * omega
        return mean


def sensitivity(
    spec: NetSpec, weights: Weights, batches: tuple[Tensor, ...], mu: float, device: torch.device
) -> Weights:
    """The moving average over batches of |∂ mean ‖f(x)‖² / ∂θ|, free of the bias of its start, in fp32."""
    with nets.borrow(spec, device, weights) as net:
        net.eval()
        names, parameters = zip(*net.named_parameters(), strict=True)
        omega = [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in parameters]
        for batch in batches:
            output = net(normalise(batch.to(device)))
            gradients = torch.autograd.grad(output.square().sum(dim=1).mean(), parameters)
            torch._foreach_mul_(omega, mu)
            torch._foreach_add_(omega, [gradient.abs() for gradient in gradients], alpha=1 - mu)
    unbiased = 1 - mu ** len(batches)
    return {name: tensor / unbiased for name, tensor in zip(names, omega, strict=True)}


def elastic_step(model: Mapping[str, Tensor], mean: Mapping[str, Tensor], omega: Weights, tau: float) -> Weights:
    """For every parameter that has an Ω, w + ζ·(mean − w). Where all are 0, ζ is 1 + τ throughout."""
    if not omega:
        return {}
    largest = torch.stack([tensor.max() for tensor in omega.values()]).max().clamp_min(torch.finfo(torch.float32).tiny)
    moved = {}
    for name, tensor in omega.items():
        before = model[name].to(mean[name].device)
        zeta = 1 + tau - (tensor / largest).to(before.device)
        moved[name] = before + zeta * (mean[name] - before)
    return moved
