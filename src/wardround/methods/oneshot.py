"""Train alone, upload once: how every one-shot method begins.

A subclass says what the coordinator makes of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import Diverged
from wardround.exchange.bundle import SIZE, Bundle
from wardround.exchange.payload import SIZE_GROUP, Payload, network_groups
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit
from wardround.learn.predictor import Member
from wardround.methods.alone import local_fit
from wardround.methods.base import Answer, Context, Method, Work, join_groups, split_groups
from wardround.methods.state import State
from wardround.models import Weights, spec_layout
from wardround.study import Study

OWN = "own"  # in a site's memory: the network that it sent
PROBES = 16  # images of noise that a model must have an answer to
ABSURD = 1e6  # a logit or a feature that no training ends with: a synthesis from such a model would diverge


class OneShot(Method):
    """One round: every site trains for the whole budget and sends its network; architectures may differ."""

    family = "one-shot"

    def payload(self, study: Study, site: str) -> Payload:
        """The site's network and its number of images go up."""
        return Payload(up=(*network_groups(study.spec(site)), SIZE_GROUP))

    def begin(self, ctx: Context) -> State:
        """Nothing yet."""
        return State()

    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        """Every site once, with an empty request: a site draws its own initial weights."""
        return {site: ctx.bundle("request", site, {}) for site in ctx.study.sites} if ctx.round == 0 else None

    def fit(self, ctx: Context, site: Site, request: Bundle) -> Fit:
        """What a site trains: alone, for the whole budget."""
        return local_fit(ctx, site)

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train, send the network."""
        fitted = yield self.fit(ctx, site, request)
        groups: dict[str, dict[str, Tensor]] = split_groups(ctx, site.name, fitted.weights)
        groups[SIZE] = {"images": torch.tensor(fitted.trained_on)}
        return Answer(ctx.bundle("answer", site.name, groups), memory)


def remembering(found: Answer) -> Answer:
    """The same answer of a site that remembers the network it sends, where it was trained."""
    trained = int(found.bundle.group(SIZE)["images"]) > 0
    return replace(found, memory=State({OWN: join_groups(found.bundle)})) if trained else found


def own_model(ctx: Context, site: Site, memory: State) -> Member | None:
    """At the site: the network that it sent, where it remembers one."""
    return Member(ctx.study.spec(site.name), dict(memory.groups[OWN])) if OWN in memory.groups else None


def trained_models(ctx: Context, answers: Mapping[str, Bundle]) -> dict[str, Weights]:
    """The uploaded networks by site, without those of sites too small to train.

    One that holds NaN or infinite values, answers noise with them, or has absurd batch-norm statistics is refused with
    a note that names the site; the rest go on. Finite weights can have infinite outputs, a distance from finite
    statistics can overflow, and one such model would be the end of a synthesis.
    """
    models = {}
    for site in sorted(answers):
        if int(answers[site].group(SIZE)["images"]) == 0:
            continue
        weights = join_groups(answers[site])
        reason = refused(ctx, Member(ctx.study.spec(site), weights))
        if reason:
            ctx.note(f"the model of {site} is refused: {reason}")
        else:
            models[site] = weights
    if not models:
        raise Diverged(  # to go on would lead here again
            "no site sent a usable model: all were too small to train, or not finite, or had no epochs; give more "
            "images, one epoch or more, and where training diverged a smaller train.lr"
        )
    return models


def refused(ctx: Context, member: Member) -> str:
    """Why a network cannot be used, in words; empty where it can."""
    if not all(bool(torch.isfinite(t).all()) for t in member.weights.values() if t.is_floating_point()):
        return "it holds NaN or infinite values"
    largest = largest_feature(member)
    if largest > ABSURD:
        return f"its batch-norm statistics are of feature maps as large as {largest:.0e}"
    said = of_noise(ctx, member)
    if not bool(said.isfinite().all()):
        return "its answers are NaN or infinite"
    if float(said.abs().amax()) > ABSURD:
        return f"its answers to noise are as large as {float(said.abs().amax()):.0e}"
    return ""


def largest_feature(member: Member) -> float:
    """How large feature maps must have been for its running statistics: |mean| or the root of the variance."""
    groups = spec_layout(member.spec).groups
    found = [
        tensor.abs().sqrt() if name.endswith("running_var") else tensor.abs()
        for name, tensor in member.weights.items()
        if groups[name] == "statistics"
    ]
    return max((float(tensor.amax()) for tensor in found), default=0.0)


def of_noise(ctx: Context, member: Member) -> Tensor:
    """One network's logits of white noise, the same for every network: nobody's images are needed to try it."""
    shape = (PROBES, *ctx.study.image_shape)
    noise = torch.randint(256, shape, generator=ctx.streams.torch("probe"), dtype=torch.uint8)
    return logits_of(ctx, member, noise)


def logits_of(ctx: Context, member: Member, images: Tensor) -> Tensor:
    """One network's logits of uint8 images, on the CPU."""
    precision = ctx.study.settings.train.precision
    return network_outputs(member.spec, member.weights, images, ctx.device.torch, precision).logits.float().cpu()
