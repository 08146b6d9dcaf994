"""`centralised`: all images in one place, the bound that federated learning is measured against.

It is written as what it would be: every site sends its images. So the ledger shows the price, a site's policy refuses
it, and no code reads across sites behind anyone's back. Trains one network on the union for the study's whole budget
of epochs; the union has as many optimiser steps as all sites together when they train alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from wardround.data.federation import Site
from wardround.data.imageset import ImageSet
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group, Payload, network_groups
from wardround.learn.fit import Fit
from wardround.learn.predictor import Predictor, single
from wardround.methods.base import Answer, Context, Method, Work, join_groups, split_groups
from wardround.methods.state import State
from wardround.study import Study

IMAGES = "images"
UNBOUNDED = 2**62


class Centralised(Method):
    """One network on everyone's images."""

    name = "centralised"
    family = "bar"
    paper = "-"
    summary = "the upper bound: every site sends its images"

    def check(self, study: Study) -> None:
        """One network, so one architecture."""
        _ = study.common_spec

    def payload(self, study: Study, site: str) -> Payload:
        """The images themselves go up; a network comes home."""
        images = Group(IMAGES, "the patients' images and labels themselves", UNBOUNDED)
        return Payload(up=(images,), home=network_groups(study.spec(site)))

    def begin(self, ctx: Context) -> State:
        """Nothing yet."""
        return State()

    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        """Every site once."""
        return {site: ctx.bundle("request", site, {}) for site in ctx.study.sites} if ctx.round == 0 else None

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """All training and validation images."""
        groups = {
            IMAGES: {
                "train_images": site.train.images,
                "train_labels": site.train.labels,
                "val_images": site.val.images,
                "val_labels": site.val.labels,
            }
        }
        return Answer(ctx.bundle("answer", site.name, groups), memory)
        yield  # a Work that asks for no fit

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """Train on the union."""
        study = ctx.study
        fit = Fit(
            label="all sites' images",
            spec=study.common_spec,
            start=study.initial(),
            data=_union(study, answers, "train"),
            validation=_union(study, answers, "val"),
            recipe=study.recipe(0, study.total_epochs),
            seed=ctx.streams.number("fit", "centralised", 0),
            reusable=True,
        )
        (fitted,) = ctx.train([fit])
        yield State({"model": fitted.weights})

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """The network to every site."""
        groups = split_groups(ctx, ctx.study.sites[0], dict(state.groups["model"]))
        return {site: ctx.bundle("delivery", site, groups) for site in ctx.study.sites}

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The delivered network."""
        return single(ctx.study.spec(site.name), join_groups(delivered))
        yield  # a Work that asks for no fit

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The same network."""
        return single(ctx.study.common_spec, dict(state.groups["model"]))


def _union(study: Study, answers: Mapping[str, Bundle], part: str) -> ImageSet:
    parts = [answers[site].group(IMAGES) for site in sorted(answers)]
    return ImageSet(
        torch.cat([group[f"{part}_images"] for group in parts]),
        torch.cat([group[f"{part}_labels"] for group in parts]),
        study.classes,
    )
