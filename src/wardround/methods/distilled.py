"""One network out of many, without images: the coordinator makes its own and distils the uploaded models on them.

What DeepInversion, FedISCA and their kin share: teachers are the sites' models, work goes in epochs that each yield a
state which can be saved and continued from, the student goes home to every site. A subclass says what one epoch does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Payload, network_groups
from wardround.learn.predictor import Member, Predictor, single
from wardround.methods.base import Context, Work, join_groups, layout_groups
from wardround.methods.oneshot import OneShot, trained_models
from wardround.methods.state import State
from wardround.models import spec_layout
from wardround.settings import Count, Frozen, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis.inversion import Inversion
from wardround.synthesis.student import Student

STUDENT, MOMENTUM = "student", "momentum"


class SynthesisSettings(Frozen):
    """Synthesis, and how a student learns from it; the defaults are FedISCA's for images of 28 pixels."""

    steps: Count = 500  # of one synthesis
    batch: Annotated[int, Field(ge=2)] = 256
    synthesis_lr: Positive = 0.05
    bn_weight: NotNegative = 10.0
    tv_weight: NotNegative = 2.5e-5
    jitter: Annotated[int, Field(ge=0)] = 2
    bn_over: Literal["mean", "sum"] = "mean"
    classify: Literal["together", "each"] = "together"
    temperature: Positive = 20.0
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4

    def inversion(self) -> Inversion:
        """What the synthesis needs of it."""
        return Inversion(
            self.steps,
            self.batch,
            self.synthesis_lr,
            self.bn_weight,
            self.tv_weight,
            self.jitter,
            self.bn_over,
            self.classify,
        )


class DistilledSettings(SynthesisSettings):
    """One student, in epochs."""

    epochs: Count = 100  # each with a synthesis of its own
    lr: Positive = 1e-3  # of the student; a tenth after half of the epochs, a hundredth after three quarters


class Distilled(OneShot):
    """Teachers up, one student home."""

    class Settings(DistilledSettings):
        """None beyond the common ones."""

    def check(self, study: Study) -> None:
        """Every teacher must have batch-norm statistics, and a batch must hold every class."""
        check_synthesis(self.name, study, self.settings.batch)

    def payload(self, study: Study, site: str) -> Payload:
        """Up one network, home the student."""
        return Payload(up=super().payload(study, site).up, home=network_groups(study.student_spec))

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """One state per epoch. Everything drawn derives from the epoch's number, so that a resume changes nothing."""
        models = trained_models(answers)
        members = [Member(ctx.study.spec(site), models[site]) for site in sorted(models)]
        student = self._student(ctx, state)
        begun = int(state.facts.get("epoch", 0))
        with ctx.progress.task(f"{self.name}: synthesis and distillation", self.settings.epochs, begun) as advance:
            for epoch, extra in self.epochs(ctx, state, members, student, begun):
                groups = {STUDENT: student.weights(), MOMENTUM: student.momentum(), **extra}
                if not all(bool(t.isfinite().all()) for t in groups[STUDENT].values()):
                    raise RunFailed(f"{self.name}: the student diverged in epoch {epoch + 1}; use a smaller lr")
                advance()
                yield State(groups, {"epoch": epoch + 1})

    @abstractmethod
    def epochs(
        self, ctx: Context, state: State, members: list[Member], student: Student, begun: int
    ) -> Iterator[tuple[int, dict[str, dict[str, Tensor]]]]:
        """Train the student; after each epoch its number and what else must be kept. `begun` epochs are done."""

    def rate(self, epoch: int) -> float:
        """The student's learning rate: a tenth after half of the epochs, a hundredth after three quarters.

        FedISCA's code, which counts from 1, steps one epoch earlier; a single epoch would then learn at a hundredth.
        """
        passed = sum(epoch / self.settings.epochs >= share for share in (0.5, 0.75))
        return float(self.settings.lr * 0.1**passed)

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """The student to every site."""
        groups = layout_groups(ctx.study.student_spec, dict(state.groups[STUDENT]))
        return {site: ctx.bundle("delivery", site, groups) for site in ctx.study.sites}

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The student as it came."""
        return single(ctx.study.student_spec, join_groups(delivered))
        yield  # a Work that asks for no fit

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The student."""
        return single(ctx.study.student_spec, dict(state.groups[STUDENT]))

    def _student(self, ctx: Context, state: State) -> Student:
        spec, s = ctx.study.student_spec, self.settings
        weights = dict(state.groups.get(STUDENT) or ctx.study.fresh_weights(spec, "student"))
        student = Student(spec, weights, ctx.device.torch, s.momentum, s.weight_decay)
        student.restore_momentum(state.groups.get(MOMENTUM, {}))
        return student


def check_synthesis(method: str, study: Study, batch: int) -> None:
    """Refuse a site whose network has no statistics to make images from, and a batch too small for every class."""
    for site in study.sites:
        if not spec_layout(study.spec(site)).has_batch_norm:
            raise BadInput(
                f"{method} makes images from batch-norm statistics, and {study.spec(site).name} has none; "
                "use small, a resnet, wrn16-2 or a vgg"
            )
    if batch < len(study.classes):
        raise BadInput(
            f"{method}.batch is {batch}, too small for each of {len(study.classes)} classes to be "
            f"in it; use {len(study.classes)} or more"
        )
