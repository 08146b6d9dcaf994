"""One network out of many, without images: the coordinator makes its own and distils the uploaded models on them.

What DeepInversion, FedISCA and their kin share: teachers are the sites' models, work goes in epochs that each yield a
state which can be saved and continued from, the student goes home to every site. A subclass says what one epoch does.

With `--rounds` above 1 all this is done again (FedISCA's Figure 6): sites go on from the student, and the student from
where it was.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from pydantic import Field
from torch import Generator, Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput, Diverged
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Payload, network_groups
from wardround.learn.fit import Fit
from wardround.learn.predictor import Member, Predictor, single
from wardround.methods.base import Context, Work, join_groups, layout_groups
from wardround.methods.oneshot import OneShot, trained_models
from wardround.methods.state import State
from wardround.models import Weights, spec_layout
from wardround.settings import Count, Frozen, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis.gallery import Trail
from wardround.synthesis.inversion import Inversion
from wardround.synthesis.stopwatch import Stopwatch
from wardround.synthesis.student import Student, exploded

STUDENT, MOMENTUM = "student", "momentum"
LARGE = 128  # pixels above which FedISCA has other values

Groups = dict[str, dict[str, Tensor]]


class Sized(Frozen):
    """Settings some of which depend on the size of the images where nothing is set."""

    SIZED: ClassVar[dict[str, tuple[int, int]]]  # for images up to `LARGE` pixels, and above

    def at(self, size: int) -> Self:
        """These settings with the values that depend on the size of the images filled in."""
        filled = {name: values[size > LARGE] for name, values in self.SIZED.items() if getattr(self, name) is None}
        return self.model_copy(update=filled)


class SynthesisSettings(Sized):
    """Synthesis, and how a student learns from it; the defaults are FedISCA's, which depend on the images' size."""

    SIZED: ClassVar[dict[str, tuple[int, int]]] = {"steps": (500, 1000), "batch": (256, 50), "jitter": (2, 30)}

    steps: Count | None = None  # of one synthesis; None: 500, and 1000 for images above 128 pixels
    batch: Annotated[int, Field(ge=2)] | None = None  # None: 256, and 50 for images above 128 pixels
    synthesis_lr: Positive = 0.05
    bn_weight: NotNegative = 10.0
    tv_weight: NotNegative = 2.5e-5
    jitter: Annotated[int, Field(ge=0)] | None = None  # None: 2, and 30 for images above 128 pixels
    bn_over: Literal["mean", "sum"] = "mean"
    classify: Literal["together", "each"] = "together"
    temperature: Positive = 20.0
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4

    def inversion(self) -> Inversion:
        """What the synthesis needs of it, once filled in."""
        names = ("steps", "batch", "bn_weight", "tv_weight", "jitter", "bn_over", "classify")
        return Inversion(lr=self.synthesis_lr, **{name: getattr(self, name) for name in names})


class DistilledSettings(SynthesisSettings):
    """One student, in epochs."""

    epochs: Count = 100  # each with a synthesis of its own
    lr: Positive = 1e-3  # of the student; a tenth after half of the epochs, a hundredth after three quarters
    shots: Count | None = None  # exchanges with the sites; None: as many as `rounds` says where it is set, else one


class Midway(NamedTuple):
    """What must be kept to go on in the middle of an epoch, beside the student."""

    groups: Groups
    facts: dict[str, Any]


Epochs = Iterator[tuple[int, Groups] | Midway]


class EpochWork(Protocol):
    """What an epoch that begins with a synthesis is made of, able to stop after any step."""

    def begin(self, epoch: int, generator: Generator) -> None:
        """A new epoch; all that it draws comes from the generator."""

    def restore(self, epoch: int, state: State, done: dict[str, int], generator: Generator) -> None:
        """An epoch that was stopped after so many steps of each part."""

    def rest(self) -> Iterator[Midway]:
        """What is left of the epoch; whenever a checkpoint is due, what it needs."""

    def groups(self) -> Groups:
        """What must be kept of the epoch when it has ended, beside the student."""


class Distilled(OneShot):
    """Teachers up, one student home."""

    watch: Stopwatch  # where `epochs` notes how long its parts take
    trail: Trail | None = None  # where it shows its images for the report

    class Settings(DistilledSettings):
        """None beyond the common ones."""

    def check(self, study: Study) -> None:
        """Every teacher must have batch-norm statistics, and a batch must hold every class."""
        check_synthesis(self.name, study, self.settings.at(study.size).batch)
        self.check_shots(study)

    def check_shots(self, study: Study) -> None:
        """To go on from the student a site must have its architecture."""
        if self.shots(study) > 1 and any(study.spec(site) != study.student_spec for site in study.sites):
            raise BadInput(
                f"{self.name} in several rounds needs one model at all sites, the student's; remove model.per_site, "
                "or use one round"
            )

    def shots(self, study: Study) -> int:
        """How often models go up."""
        return int(self.settings.shots or study.settings.rounds or 1)

    def rounds(self, study: Study) -> int:
        """As many as shots."""
        return self.shots(study)

    def payload(self, study: Study, site: str) -> Payload:
        """Up one network, home the student; before another shot it comes down, too."""
        student = network_groups(study.student_spec)
        later = tuple(replace(group, occasional=True) for group in student)  # in the first round nothing goes down
        down = later if self.shots(study) > 1 else ()
        return Payload(up=super().payload(study, site).up, down=down, home=student)

    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        """At first nothing goes down; then the student, for the sites to go on from."""
        if ctx.round >= self.shots(ctx.study):
            return None
        groups = layout_groups(ctx.study.student_spec, dict(state.groups[STUDENT])) if ctx.round else {}
        return {site: ctx.bundle("request", site, groups) for site in ctx.study.sites}

    def fit(self, ctx: Context, site: Site, request: Bundle) -> Fit:
        """The whole budget alone; of several shots, this one's share of it, from the student where there is one."""
        alone = super().fit(ctx, site, request)
        if self.shots(ctx.study) == 1:
            return alone
        return replace(
            alone,
            label=f"{site.name}, round {ctx.round + 1}",
            start=join_groups(request) if ctx.round else alone.start,
            recipe=ctx.study.recipe(ctx.round, self.epochs_of(ctx)),
            seed=ctx.streams.number("fit", site.name, ctx.round),
            reusable=ctx.round == 0,
        )

    def epochs_of(self, ctx: Context) -> int:
        """Local epochs of a shot: the round's where there are as many as rounds, else an even share of the budget."""
        study, shots = ctx.study, self.shots(ctx.study)
        if shots == study.rounds:
            return study.epochs(ctx.round)
        return study.total_epochs // shots + (ctx.round < study.total_epochs % shots)

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """One state per epoch. Everything drawn derives from the epoch's number, so that a resume changes nothing."""
        models = trained_models(ctx, answers)
        members = [Member(ctx.study.spec(site), models[site]) for site in sorted(models)]
        student = self._student(ctx, state, members)
        facts = dict(state.facts)
        if facts.get("round") != ctx.round:
            facts = {"round": ctx.round, "epoch": 0, "work": facts.get("work")}
            kept = (STUDENT, MOMENTUM)
            state = State({name: group for name, group in state.groups.items() if name in kept}, facts)
        self.watch, self.trail = Stopwatch(ctx.device.torch, facts["work"]), None
        try:
            yield from self._states(ctx, state, members, student, facts)
        except Diverged as error:
            error.made = State(*self._shown())
            raise

    def _states(
        self, ctx: Context, state: State, members: list[Member], student: Student, facts: dict[str, Any]
    ) -> Iterator[State]:
        with ctx.progress.task(self.name, self.settings.epochs, facts["epoch"]) as advance:
            for found in self.epochs(ctx, state, members, student, facts["epoch"]):
                if isinstance(found, Midway):
                    groups, facts = found.groups, {**facts, "midway": found.facts}
                else:
                    epoch, groups = found
                    facts = {"round": ctx.round, "epoch": epoch + 1}
                    advance()
                groups = {STUDENT: student.weights(), MOMENTUM: student.momentum(), **groups}
                if exploded(groups[STUDENT]):
                    number = facts["epoch"] + isinstance(found, Midway)  # of the epoch that is being done
                    raise Diverged(f"{self.name}: the student diverged in epoch {number}; use a smaller lr")
                shown, told = self._shown()
                yield State({**groups, **shown}, {**facts, **told})

    def _shown(self) -> tuple[Groups, dict[str, Any]]:
        """For the report: images on their way, and how long the parts have taken."""
        groups, facts = ({}, {}) if self.trail is None else (self.trail.groups(), self.trail.facts())
        return groups, {**facts, "work": self.watch.record()}

    @abstractmethod
    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """Train the student; after each epoch its number and what else must be kept. `begun` epochs are done.

        Where an epoch takes long, `Midway` as often as `ctx.due()` says; it comes back as groups of the state, and
        its facts as `state.facts["midway"]`.
        """

    def through(self, ctx: Context, state: State, work: EpochWork, student: Student, begun: int) -> Epochs:
        """Epoch after epoch of such work."""
        for epoch in range(begun, self.settings.epochs):
            student.set_rate(self.rate(epoch))
            generator = ctx.streams.torch("synthesis", round=ctx.round, index=epoch)
            midway = state.facts.get("midway") if epoch == begun else None
            if midway is None:
                work.begin(epoch, generator)
            else:
                work.restore(epoch, state, midway, generator)
            yield from work.rest()
            yield epoch, work.groups()

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

    def begins_as(self, ctx: Context, members: list[Member]) -> Weights:
        """The student before it has learned anything."""
        return ctx.study.fresh_weights(ctx.study.student_spec, "student")

    def _student(self, ctx: Context, state: State, members: list[Member]) -> Student:
        spec, s = ctx.study.student_spec, self.settings
        weights = dict(state.groups.get(STUDENT) or self.begins_as(ctx, members))
        precision = ctx.study.settings.train.precision
        student = Student(spec, weights, ctx.device.torch, s.momentum, s.weight_decay, precision)
        student.restore_momentum(state.groups.get(MOMENTUM, {}))
        return student


def check_synthesis(method: str, study: Study, batch: int) -> None:
    """Refuse a site whose network has no statistics to make images from, and a batch too small for every class."""
    for site in study.sites:
        if not spec_layout(study.spec(site)).has_batch_norm:
            raise BadInput(
                f"{method} makes images from batch-norm statistics, and {study.spec(site).name} ({site}) has none; "
                "use small, a resnet, wrn16-2 or a vgg"
            )
    if batch < len(study.classes):
        raise BadInput(
            f"{method}.batch is {batch}, too small for each of {len(study.classes)} classes to be "
            f"in it; use {len(study.classes)} or more"
        )
