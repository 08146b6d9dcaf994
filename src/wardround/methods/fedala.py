"""`fedala`: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023.

A site does not start from the received model w, but takes of it what helps on its own images (the ALA module). In the
last p layers it starts from θ + (w − θ) ⊙ W, with θ what these layers were after its last training and one weight in
[0, 1] per parameter; below them it starts from w. W is learned on a share of the site's images, all else fixed:
W ← clip(W − η · ∂L/∂start ⊙ (w − θ), 0, 1), the chain rule written out. The first time it begins at 1 and is learned to
convergence; later one pass over the images is enough. Then training, and averaging, are FedAvg's.

Because all below the last p layers is fixed, what comes out of it is computed once per round; learning W runs the last
p layers alone. For p = 1, the default, that is one linear layer on cached features, whatever the network.

What the paper leaves open, and what is done here:
- p counts the parts that a network is named by, from the end, as `fedper.layers` does: the head, then its last stage,
  and so on. The paper's p = 1 is the head. (The public code counts tensors: its default of 2 is the head's weight and
  bias.)
- Converged: the standard deviation of the mean losses of the last ten passes is below 0.01 (the public code: 0.1), or
  there were 20 passes. Public versions have no such cap, and may never end.
- Each round draws its own images, 80 % of them and at least one, in an order of its own. A last, smaller batch counts:
  the public code drops it, and with it every site that has no full batch.
- At its first round a site has no θ, so it starts from w, as it does until it has once been able to train. W and θ are
  the site's and stay in its memory. Nothing is computed for sites that are not asked.
- What a site deploys is the delivered model, mixed in the same way with what it last trained; a site that never
  trained deploys the delivered model. "Local accuracy" in a round is that of the network after local training.

Batch norm: weights and biases in the last p layers are mixed, as they are parameters; running statistics and counters
are never mixed but w's, and W is learned in evaluation mode. All of it is averaged as in FedAvg. With `layers = 0` this
is FedAvg bit for bit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.exchange.bundle import PARAMETERS, Bundle
from wardround.learn import nets
from wardround.learn.evaluate import batch_size
from wardround.learn.fit import Fit, Fitted
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Predictor, single
from wardround.methods.base import Answer, Context, Work
from wardround.methods.fedper import last_layers, layers_of
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.models import NetSpec, StagedNet, Weights, spec_layout
from wardround.settings import Count, Frozen, NotNegative, Positive
from wardround.study import Study, round_half_up

RECENT = 10  # passes whose losses must hardly differ


class FedALA(Averaging):
    """FedAvg in which a site starts from a learned mix of its own last layers and the received ones."""

    name = "fedala"
    paper = "Zhang et al., AAAI 2023"
    summary = "FedAvg; a site mixes the received head with its own, weight by weight, as its images tell it"

    class Settings(Frozen):
        """p, η, the share of images that W is learned on, and when it has converged."""

        layers: Annotated[int, Field(ge=0)] = 1
        eta: Positive = 1.0
        share: Annotated[float, Field(gt=0, le=1)] = 0.8
        threshold: NotNegative = 0.01
        passes: Count = 20

    def check(self, study: Study) -> None:
        """No more layers than there are."""
        super().check(study)
        count = len(layers_of(study.common_spec))
        if self.settings.layers > count:
            raise BadInput(
                f"fedala.layers = {self.settings.layers} is too many: {study.common_spec.name} has {count} layers; "
                f"use 0 to {count}"
            )

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Learn W on the received model; what follows finds it in the memory and is FedAvg's."""
        learned = self.learn(ctx, site, self.assemble(ctx, site, request, memory), memory, "mixing")
        return (yield from super().answer(ctx, site, request, learned))

    def prepare(self, visit: Visit) -> Work[Weights]:
        """The received model with the mix in its last layers."""
        return mixed(visit.received, visit.memory)
        yield  # a Work that asks for no fit

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        """W, and the last layers as they are after training."""
        if not fitted.trained_on:
            return visit.memory
        local = {name: fitted.weights[name] for name in self.adapted(visit.ctx.study)}
        return State({**visit.memory.groups, "local": local}) if local else visit.memory

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The delivered model, mixed with what the site last trained."""
        received = self.assemble(ctx, site, delivered, memory)
        learned = self.learn(ctx, site, received, memory, "mixing what was delivered")
        return single(ctx.study.spec(site.name), mixed(received, learned))
        yield  # a Work that asks for no fit

    def adapted(self, study: Study) -> tuple[str, ...]:
        """The parameters that are mixed."""
        parameters = spec_layout(study.common_spec).in_group(PARAMETERS)
        last = last_layers(study.common_spec, self.settings.layers)
        return tuple(name for name in parameters if name in last)

    def learn(self, ctx: Context, site: Site, received: Weights, memory: State, purpose: str) -> State:
        """The memory with W learned: to convergence where it had none, untouched where it has no θ."""
        if "local" not in memory.groups:
            return memory
        device, spec = ctx.device.torch, ctx.study.spec(site.name)
        images = drawn(site.train, self.settings.share, ctx.streams.torch(purpose, site.name, ctx.round))
        local = {name: tensor.to(device) for name, tensor in memory.groups["local"].items()}
        gap = {name: received[name].to(device) - tensor for name, tensor in local.items()}
        mix = memory.groups.get("mix") or {name: torch.ones_like(tensor) for name, tensor in local.items()}
        with nets.borrow(spec, device, received) as net:
            problem = Problem(net, cut_below(spec, self.settings.layers), images, ctx.study.settings.train.batch)
            passes = 1 if "mix" in memory.groups else self.settings.passes
            mix = problem.solve(local, gap, mix, self.settings.eta, passes, self.settings.threshold)
        return State({**memory.groups, "mix": mix})


class Problem:
    """Which mix of two sets of last layers has the least cross-entropy on a site's images.

    What reaches these layers is computed once, in evaluation mode. `net` is worked on, and left with other weights.
    """

    def __init__(self, net: StagedNet, cut: str | None, images: ImageSet, batch: int) -> None:
        self.net, self.cut = net.eval().requires_grad_(False), cut
        device = net.head.weight.device
        shown = torch.split(images.images.to(device), batch_size(device))
        with torch.no_grad():
            below = torch.cat([self._below(normalise(part)) for part in shown])
        labels = images.labels.to(device)
        self.batches = tuple(zip(torch.split(below, batch), torch.split(labels, batch), strict=True))
        self.count = len(images)

    def solve(
        self, local: Weights, gap: Weights, mix: Mapping[str, Tensor], eta: float, passes: int, threshold: float
    ) -> Weights:
        """W after so many passes, or fewer where it has converged; local + gap ⊙ W are the layers it stands for."""
        live = dict(self.net.named_parameters())
        found = {name: mix[name].to(local[name].device) for name in local}
        layers = [live[name].requires_grad_(True) for name in found]
        losses: list[float] = []
        while len(losses) < passes and not converged(losses, threshold):
            total = torch.zeros((), device=layers[0].device)
            for below, labels in self.batches:
                with torch.no_grad():
                    for name in found:
                        live[name].copy_(local[name] + gap[name] * found[name])
                loss = F.cross_entropy(self._above(below), labels)
                gradients = torch.autograd.grad(loss, layers)
                found = {
                    name: (found[name] - eta * gradient * gap[name]).clamp(0, 1)
                    for name, gradient in zip(found, gradients, strict=True)
                }
                total += loss.detach() * len(labels)
            losses.append(float(total) / self.count)
        return found

    def _below(self, pixels: Tensor) -> Tensor:
        return pixels if self.cut is None else self.net.upto(self.cut, pixels)

    def _above(self, below: Tensor) -> Tensor:
        logits: Tensor = self.net(below) if self.cut is None else self.net.after(self.cut, below)[1]
        return logits


def mixed(received: Weights, memory: State) -> Weights:
    """θ + (w − θ) ⊙ W in the last layers; all of w where the site has no W."""
    local, mix = memory.groups.get("local", {}), memory.groups.get("mix", {})

    def start(name: str) -> Tensor:
        w = received[name]
        own = local[name].to(w.device)
        return own + (w - own) * mix[name].to(w.device)

    return {**received, **{name: start(name) for name in mix}}


def drawn(images: ImageSet, share: float, draw: torch.Generator) -> ImageSet:
    """A share of a site's images, at least one, in a random order."""
    count = max(1, round_half_up(share * len(images)))
    return images.take(torch.randperm(len(images), generator=draw)[:count].to(images.labels.device))


def cut_below(spec: NetSpec, layers: int) -> str | None:
    """The stage whose output reaches the last layers; None where they begin with the first stage."""
    last, cut = last_layers(spec, layers), None
    for stage in spec_layout(spec).stages:
        if any(name.startswith(f"stages.{stage}.") for name in last):
            break
        cut = stage
    return cut


def converged(losses: list[float], threshold: float) -> bool:
    """Whether the last losses hardly differ: their standard deviation (over n, not n − 1) is below the threshold."""
    last = losses[-RECENT:]
    return len(last) == RECENT and all(map(math.isfinite, last)) and statistics.pstdev(last) < threshold
