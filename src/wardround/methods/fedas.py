"""`fedas`: Yang, Huang and Ye, FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024.

FedPer (the head stays at the site) with two additions:
- **Alignment** (intra-client). Before it trains, a site moves the received body towards what its own head is used to:
  one epoch on the squared distance of each image's features to the mean that its class had under the site's last
  trained body.
- **Weights by Fisher information** (inter-client). After training, a site sends the trace of the Fisher information of
  its network on its images, and weighs in the average by its share of the sum of all traces. The authors mean to hold
  back sites that have trained little. (Made of squared gradients, a trace also falls as a site fits its images.)

What the paper leaves open, and what is done here:
- Alignment is SGD at 0.01 in batches of 16, without momentum; the loss of a batch is the sum over its classes of the
  mean squared difference (over images and features): all as in the public code. That code aligns the coordinator's own
  model in place, so each site starts from what the one before it left; here every site aligns a copy of its own. The
  class means are what a site remembers; its images are the same, so its old body is not needed. At its first round a
  site has none and does not align. Batch norm is in training mode, so running statistics follow the site's images.
- The trace is the sum over mini-batches of the squared norm of the gradient of the mean loss, as in the public code,
  in evaluation mode, over body and head. It grows with the number of batches, so it also weighs sites by size.
  `trace = "mean"` divides by their number. It is a number of its own: the number of images does not travel.
- A trace is at least 1e-30, so that sites of which none has a gradient left weigh alike (the public code divides 0 by
  0). A site that was too small to train sends 0 and has no weight.
- `heads` is as in `fedper`: the public code averages heads to measure a global model, though no site uses the mean.
- A site deploys the body it took home, aligned once more, under its own head. "Local accuracy" in a round is that of
  its network after training.

Batch norm: part of the body; parameters and running statistics are averaged with the weights above, the largest
counter is kept. There is no switch that makes this FedAvg.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.data.federation import Site
from wardround.data.imageset import ImageSet
from wardround.exchange.bundle import SIZE, Bundle
from wardround.exchange.payload import Group
from wardround.learn import nets
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Fitted, Objective, Recipe, Step
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Predictor, single
from wardround.learn.prototypes import class_means
from wardround.methods.base import Context, Work
from wardround.methods.fedper import Fate, KeepsLayers
from wardround.methods.state import State
from wardround.methods.template import Visit, told_weight
from wardround.models import StagedNet, Weights, spec_layout
from wardround.settings import Frozen
from wardround.study import Study

ALIGNMENT = Recipe(epochs=1, batch=16, lr=0.01, momentum=0.0, weight_decay=0.0)
TRACE = "trace"
TRACE_GROUP = Group(
    TRACE,
    "the trace of the Fisher information: the network's squared gradients on this site's images, one number",
    4,
    {"fisher": ((), "float32")},
)
LEAST_TRACE = 1e-30


class FedAS(KeepsLayers):
    """FedPer with bodies that are aligned at the site and weighed by Fisher information."""

    name = "fedas"
    paper = "Yang et al., CVPR 2024"
    summary = "FedPer; sites align the body with their head first, and weigh by Fisher information"

    class Settings(Frozen):
        """`heads` as in `fedper`; `trace` is what becomes of the squared gradients of the mini-batches."""

        heads: Fate = "private"
        trace: Literal["sum", "mean"] = "sum"

    def kept(self, study: Study) -> frozenset[str]:
        """The head."""
        return spec_layout(study.common_spec).head

    def averages_kept(self) -> bool:
        """As the settings say."""
        return bool(self.settings.heads == "averaged")

    def prepare(self, visit: Visit) -> Work[Weights]:
        """The received body, aligned with the site's own class means."""
        return (yield from self.aligned(visit.ctx, visit.site, visit.received, visit.memory, "alignment"))

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The delivered body, aligned, under the site's own head."""
        predictor = yield from super().personal(ctx, site, delivered, memory)
        (member,) = predictor.members
        weights = yield from self.aligned(ctx, site, member.weights, memory, "last alignment")
        return single(member.spec, weights)

    def aligned(self, ctx: Context, site: Site, weights: Weights, memory: State, purpose: str) -> Work[Weights]:
        """One epoch of alignment under a head that does not move; nothing at a site without class means."""
        if "means" not in memory.groups:
            return weights
        fitted = yield Fit(
            label=f"{site.name}, round {ctx.round + 1}, {purpose}",
            spec=ctx.study.spec(site.name),
            start=weights,
            data=site.train,
            recipe=replace(ALIGNMENT, precision=ctx.study.settings.train.precision),
            seed=ctx.streams.number(purpose, site.name, ctx.round),
            objective=Alignment(memory.groups["means"]["features"]),
            frozen=self.kept(ctx.study),
        )
        return fitted.weights

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """The trace in place of the number of images."""
        return (TRACE_GROUP,)

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """The trace, 0 where the site was skipped by rule."""
        more = {name: group for name, group in super().more_up(visit, fit, fitted).items() if name != SIZE}
        trace = torch.zeros(())
        if fitted.trained_on:
            ctx, site = visit.ctx, visit.site
            order = torch.randperm(len(site.train), generator=ctx.streams.torch("fisher", site.name, ctx.round))
            with nets.borrow(fit.spec, ctx.device.torch, fitted.weights) as net:
                squares = squared_gradients(net, site.train, order, fit.recipe.batch)
            trace = (squares.sum() if self.settings.trace == "sum" else squares.mean()).clamp_min(LEAST_TRACE)
        return {**more, TRACE: {"fisher": trace}}

    def weigh(self, answer: Bundle) -> float:
        """The trace; one that is not a positive number counts as 0."""
        return told_weight(answer.group(TRACE)["fisher"])

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        """The head, and the class means of the features that it was trained on."""
        own = super().remember(visit, fit, fitted)
        if not fitted.trained_on:
            return own
        images, device = visit.site.train, visit.ctx.device.torch
        features = network_outputs(fit.spec, fitted.weights, images.images, device, fit.recipe.precision).features
        means = class_means(features, images.labels.to(device), fit.spec.classes).means
        return State({**own.groups, "means": {"features": means}})


class Alignment(Objective):
    """The features of a class are drawn to `means`, one row per class."""

    def __init__(self, means: Tensor) -> None:
        self.means = means

    def to(self, device: str) -> None:
        """The means move with the fit."""
        self.means = self.means.to(device)

    def loss(self, step: Step) -> Tensor:
        """Σ over the classes of the batch of the mean squared difference, over the class's images and all features."""
        distances = (step.outputs.features - self.means[step.labels]).square().mean(dim=1)
        alike = (step.labels.unsqueeze(1) == step.labels).sum(dim=1)
        return (distances / alike).sum()


def squared_gradients(net: StagedNet, images: ImageSet, order: Tensor, batch: int) -> Tensor:
    """For each mini-batch the squared norm of the gradient of its mean loss, over all parameters."""
    net.eval()
    device = net.head.weight.device
    pixels, labels = images.images.to(device), images.labels.to(device)
    found = []
    for index in torch.split(order.to(device), batch):
        loss = F.cross_entropy(net(normalise(pixels[index])), labels[index])
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        found.append(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
    return torch.stack(found)
