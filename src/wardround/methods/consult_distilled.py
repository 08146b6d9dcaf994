"""`consult-distilled`: the panel of `consult` in one network, distilled without data. Our own method; no paper has it.

Sites send what they do for `consult`, but only the coordinator sees it: a site gets one network home, not everybody's.
A generator (`synthesis/generator.py`) makes images from random codes and a class. In each epoch it takes steps down

    L = mean_c Σ_k W_kc·CE(z_k(x) − log π_k, c) + λ·mean_k Σ_l ‖μ_l(x) − μ_kl‖ + ‖σ²_l(x) − σ²_kl‖

with a class asked of the models that have seen it, and every model k shown the mix of classes that its site had
(`synthesis/deal.py`): its batch-norm statistics are of that mix. Then the student takes steps on new images of it,
equally many of each class, cropped and flipped, towards the panel's probabilities, T²·KL, towards seeing what each
model sees (`synthesis/features.py`) and towards knowing how the panel's votes fall (`synthesis/tally.py`). It begins as
one of the models, which has seen real images. The generator goes on from epoch to epoch; the student's learning rate
falls along a cosine, and what goes home is the mean of the students of the last epochs (`averaged` is their share):
each has learned from images a little different.

At the site the student meets real images for the first time. It is offered with batch-norm statistics taken anew: of
the classes that the site has seen from its own images, of the others from made ones, equally many of each (`retake`);
and as it came. Then as with `consult`: the site's prior, tempered, its validation images the judge, its own model the
bar. What the panel expects of all sites together the student has learned, so it stays, and the site's prior comes on
top. Where it does better there, the network is fine-tuned: `tune_epochs` over the site's images and `replayed`
synthetic ones with the panel's answers, which came home with it, so that what others have seen is not forgotten.

What leaks: the synthetic images go to every site. They are made from all models and resemble their training images as
far as batch-norm statistics and class outputs do; `wardround audit` measures it. `replayed = 0` sends none, and
statistics stay as they came. The student descends from one site's model, so what that remembers of its images may be
left in it; `begin = "random"` avoids it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.data.imageset import ImageSet, merge
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group, Payload
from wardround.learn import nets
from wardround.learn.fit import Fit
from wardround.learn.pairs import harmonic
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member, Predictor, single
from wardround.learn.replay import Replay, each
from wardround.learn.statistics import retaken
from wardround.methods.base import Answer, Context, Work, join_groups
from wardround.methods.class_ensemble import trained_on
from wardround.methods.consult import ConsultSettings, counts_group, panel_of, seen_by_sites, told
from wardround.methods.distilled import LARGE, Distilled, Epochs, Groups, Midway, SynthesisSettings, check_synthesis
from wardround.methods.oneshot import logits_of, trained_models
from wardround.methods.parts import Parts
from wardround.methods.personal_prior import Judge, Offer, accuracy
from wardround.methods.state import State
from wardround.methods.trust import plausible
from wardround.models import Weights
from wardround.settings import Count, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis.deal import deal
from wardround.synthesis.features import FeatureMaps
from wardround.synthesis.gallery import one_of_each, to_pixels, trail_of_epochs
from wardround.synthesis.generator import ImageGenerator, require_finite
from wardround.synthesis.panel import PanelTeachers
from wardround.synthesis.pool import cropped, draw_crops
from wardround.synthesis.student import Student, distillation
from wardround.synthesis.tally import TallyLayer

GENERATOR, FEATURES, TALLY, SUM, SYNTHETIC, OWN = "generator", "features", "tally", "sum", "synthetic", "own"
LAYER = f"{TALLY}."  # before the names of the layer's tensors, where they are among the student's
SEEN, EACH, STATISTICS_BATCH = 5, 128, 256  # images from which on a class is the site's own; of each class; in a batch
RETAKEN = ", its batch-norm statistics taken anew,"
LESSONS = 16  # batches of made images from whose features the head learns at the end
NAMED = 3.0  # how loud a code says its class: of normal numbers beside it, few are as large


class ConsultDistilled(Distilled):
    """One network that answers as the panel would."""

    name = "consult-distilled"
    paper = "ours; docs/consult.md"
    summary = "the panel of `consult` distilled into one network on synthetic images, then adapted by each site"

    class Settings(ConsultSettings):
        """Those of `consult`, of the generator, of the distillation, and how much is replayed at the site."""

        epochs: Count = 16
        shots: Count | None = None  # exchanges with the sites; None: as many as `rounds` says where set, else one
        batch: Annotated[int, Field(ge=2)] | None = None  # None: 256, and 50 for images above 128 pixels
        codes: Count = 100  # random numbers that an image is made from
        generator_steps: Count = 300
        generator_lr: Positive = 1e-3
        bn_weight: NotNegative = 1.0  # λ
        kd_steps: Count = 250
        begin: Literal["member", "random"] = "member"  # the student before its first step
        feature_weight: NotNegative = 3.0  # of G
        tally_weight: NotNegative = 4.0  # of D
        temperature: Positive = 4.0  # of the distillation
        lr: Positive = 0.02
        momentum: Share = 0.9
        weight_decay: NotNegative = 5e-4
        averaged: Annotated[float, Field(ge=0, le=1)] = 0.25  # of the epochs, those at the end; 0: the last one alone
        replayed: Annotated[int, Field(ge=0)] = 512  # synthetic images that go home
        retake: bool = True  # batch-norm statistics at the site
        tune_epochs: Count = 5
        tune_lr: Positive = 2e-3

        def images(self, size: int) -> int:
            """The batch for images of this size."""
            return SynthesisSettings.SIZED["batch"][size > LARGE] if self.batch is None else self.batch

    def check(self, study: Study) -> None:
        """Every teacher must have batch-norm statistics, and a batch must hold every class."""
        check_synthesis(self.name, study, self.settings.images(study.size))
        self.check_shots(study)

    def payload(self, study: Study, site: str) -> Payload:
        """Up a network and counts, home the student and synthetic images."""
        found = super().payload(study, site)
        up = (*found.up, *counts_group(study, self.settings.counts))
        home = (*found.home, *self._synthetic_group(study))
        return replace(found, up=up, home=home)

    def _synthetic_group(self, study: Study) -> tuple[Group, ...]:
        n = self.settings.replayed
        shape = (n, study.channels, study.size, study.size)
        tensors = {"images": (shape, "uint8"), "labels": ((n,), "int64")}
        what = "images that the coordinator made from all models, with the classes that the panel sees in them"
        return (Group(SYNTHETIC, what, math.prod(shape) + 8 * n, tensors),) if n else ()

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train, send the network and the counts of what it was trained on, and remember the network."""
        found = yield from super().answer(ctx, site, request, memory)
        counts = trained_on(site, found.bundle)
        groups = {**found.bundle.groups, **told(self.settings.counts, counts)}
        kept = State({OWN: join_groups(found.bundle)}) if int(counts.sum()) else memory
        return Answer(ctx.bundle("answer", site.name, groups), kept)

    # At the coordinator -----------------------------------------------------------------------------------------------

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """As any distillation, with what each site has seen."""
        models = trained_models(ctx, answers)
        self.counts = seen_by_sites(ctx, State(models), answers)
        yield from super().absorb(ctx, state, {site: answers[site] for site in models})

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """The generator's steps, then the student's on what it makes."""
        work = _AtWork(self, ctx, members, student, state)
        yield from self.through(ctx, state, work, student, begun)

    def begins_as(self, ctx: Context, members: list[Member]) -> Weights:
        """The member that has seen the most pairs of classes, max_k Σ_cd log(1 + h_kcd); a new network where none fits.

        It has seen real images, and what it sees in them is kept.
        """
        fits = [place for place, member in enumerate(members) if member.spec == ctx.study.student_spec]
        if self.settings.begin == "random" or not fits:
            return super().begins_as(ctx, members)
        known = harmonic(plausible(self.counts_of_members().double())).log1p().sum(dim=(1, 2))
        return members[max(fits, key=lambda place: float(known[place]))].weights

    def counts_of_members(self) -> Tensor:
        """What each has seen (members, classes), in the order of the members."""
        return torch.stack([self.counts[site] for site in sorted(self.counts)])

    def rate(self, epoch: int) -> float:
        """Along a cosine."""
        return float(self.settings.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.settings.epochs)))

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """The student and some synthetic images to every site."""
        synthetic = {SYNTHETIC: dict(state.groups[SYNTHETIC])} if SYNTHETIC in state.groups else {}
        return {
            site: ctx.bundle("delivery", site, {**bundle.groups, **synthetic})
            for site, bundle in super().deliver(ctx, state).items()
        }

    # At the site ------------------------------------------------------------------------------------------------------

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The student with the site's prior, or fine-tuned, or the site's own model: what its own images say."""
        came = single(ctx.study.student_spec, join_groups(delivered))
        at_home = self._at_home(ctx, site, came, delivered)
        shared = at_home or came
        judge = Judge(site, self.settings.prior, self.settings.calibrate)
        if len(site.val) == 0:
            predictor, words = judge.unjudged(shared)
            ctx.note(f"{site.name} {words}")
            return predictor
        labels = site.val.labels.cpu()
        own = Member(ctx.study.spec(site.name), dict(memory.groups[OWN])) if OWN in memory.groups else None
        bar = None if own is None else (own, logits_of(ctx, own, site.val.images))
        forms = [(came, "")] if at_home is None else [(at_home, RETAKEN), (came, "")]
        offers = [Offer(form, logits_of(ctx, form.members[0], site.val.images).double(), how) for form, how in forms]
        chosen, words, reached = judge.choose(offers, bar)
        tuned = yield from self._tuned(ctx, site, shared, delivered)
        if tuned is not None:
            said = logits_of(ctx, tuned.members[0], site.val.images).double()
            right, how = accuracy(said, labels), "a fine-tune that replays synthetic images"
            if right > reached:
                better = f"takes the shared predictor after {how}, better than the {reached:.1%} without"
                chosen, words, _ = judge.finished(tuned, said, bar, better)
            else:
                words += f"; {how} is no better ({right:.1%})"
        ctx.note(f"{site.name} {words}")
        return chosen

    def _at_home(self, ctx: Context, site: Site, came: Predictor, delivered: Bundle) -> Predictor | None:
        """The student with statistics of real images as far as the site has them; None where it stays as it came.

        Those of made images are near real ones, but not the same, and every layer adds to the difference. Those of the
        site's images alone would be of its own mix of classes, and the student is to know the others, too.
        """
        synthetic = delivered.group(SYNTHETIC)
        if not self.settings.retake or not synthetic or len(site.train) == 0:
            return None
        draws, device = ctx.streams.torch("statistics", site.name), ctx.device.torch
        seen = site.train.counts().cpu() >= SEEN
        own = evenly(site.train.labels.cpu(), seen, EACH, draws)
        made = evenly(synthetic["labels"].cpu(), ~seen, EACH, draws)
        images = torch.cat([_taken(site.train.images, own), _taken(synthetic["images"], made)])
        images = images[torch.randperm(len(images), generator=draws)]
        batches = [normalise(part.to(device)) for part in torch.split(images, STATISTICS_BATCH) if len(part) > 1]
        if not batches:
            return None
        (student,), precision = came.members, ctx.study.settings.train.precision
        return single(student.spec, retaken(student.spec, student.weights, batches, device, precision))

    def _tuned(self, ctx: Context, site: Site, shared: Predictor, delivered: Bundle) -> Work[Predictor | None]:
        """The student after a few epochs over the site's images and synthetic ones."""
        synthetic = delivered.group(SYNTHETIC)
        if not synthetic or len(site.train) == 0 or self.settings.prior is not None:
            return None
        replay = ImageSet(synthetic["images"], synthetic["labels"], site.train.classes)
        device = site.train.images.device
        replay = replace(replay, images=replay.images.to(device), labels=replay.labels.to(site.train.labels.device))
        plain = replace(site.train, sites=None, patients=None)
        recipe = replace(ctx.study.recipe(0, self.settings.tune_epochs), lr=self.settings.tune_lr, schedule="cosine")
        fitted = yield Fit(
            label=f"{site.name}, fine-tuned",
            spec=ctx.study.student_spec,
            start=shared.members[0].weights,
            data=merge([plain, replay]),
            validation=site.val,
            recipe=recipe,
            seed=ctx.streams.number("tune", site.name),
        )
        return single(ctx.study.student_spec, fitted.weights)


def evenly(labels: Tensor, classes: Tensor, each: int, draws: torch.Generator) -> Tensor:
    """Where in `labels` to find `each` images of every class that is marked and there at all, drawn with repetition."""
    there = [torch.nonzero(labels == c).flatten() for c in torch.nonzero(classes).flatten().tolist()]
    found = [places[torch.randint(len(places), (each,), generator=draws)] for places in there if len(places)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _taken(images: Tensor, places: Tensor) -> Tensor:
    return images[places.to(images.device)].cpu()


class _AtWork:
    """One epoch at a time: the generator, then the student, each able to stop after any step."""

    def __init__(
        self, method: ConsultDistilled, ctx: Context, members: list[Member], student: Student, state: State
    ) -> None:
        study, device, precision = ctx.study, ctx.device.torch, ctx.study.settings.train.precision
        self.student, self.device, self.settings = student, device, method.settings
        self.batch, self.classes = self.settings.images(study.size), len(study.classes)
        counts = method.counts_of_members()
        self.teachers = PanelTeachers(panel_of(tuple(members), counts, self.settings), device, precision)
        self.dealt = deal(counts, self.teachers.shares, self.batch, device)
        self.named = NAMED * F.one_hot(self.dealt.labels, self.classes).float()
        shape = (study.channels, study.size, study.size)
        inputs = self.settings.codes + self.classes
        self.maker = ImageGenerator(shape, inputs, device, lr=self.settings.generator_lr, precision=precision)
        self.maker.begin(ctx.streams.torch("generator", round=ctx.round), "uniform")
        if GENERATOR in state.groups:
            self.maker.restore(state.groups[GENERATOR])
        self.make, self.learn = Replay(self._make, device), Replay(self._learn, device)
        self.maps = self._feature_maps(ctx)
        if self.maps and FEATURES in state.groups:
            self.maps.restore(state.groups[FEATURES])
        self.tally = self._tally_layer(ctx)
        if self.tally and TALLY in state.groups:
            self.tally.restore(state.groups[TALLY])
        self.sum = {name: tensor.to(device) for name, tensor in state.groups.get(SUM, {}).items()}
        self.parts = Parts(ctx, method.watch)
        self.trail = method.trail = trail_of_epochs(study.classes, self.settings.epochs, state)

    def _feature_maps(self, ctx: Context) -> FeatureMaps | None:
        if not self.settings.feature_weight:
            return None
        widths = [net.head.weight.shape[1] for net in self.teachers.nets]
        draws = ctx.streams.torch("features", round=ctx.round)
        return FeatureMaps(self.student, widths, self.settings.momentum, draws)

    def _tally_layer(self, ctx: Context) -> TallyLayer | None:
        if not self.settings.tally_weight:
            return None
        draws = ctx.streams.torch("tally", round=ctx.round)
        return TallyLayer(self.student, self.teachers, self.settings.momentum, draws)

    def begin(self, epoch: int, generator: torch.Generator) -> None:
        """A new epoch."""
        self.epoch, self.generator, self.parts.done = epoch, generator, {}

    def restore(self, epoch: int, state: State, done: dict[str, int], generator: torch.Generator) -> None:
        """An epoch that was stopped: what its steps drew is drawn again."""
        self.begin(epoch, generator)
        for _ in range(done.get("synthesis", 0)):
            self._drawn(len(self.dealt.labels))
        for _ in range(done.get("distillation", 0)):
            self._drawn(len(self.dealt.even))
        self.parts.done = dict(done)

    def rest(self) -> Iterator[Midway]:
        """What is left of the epoch; whenever a checkpoint is due, what it needs."""
        s = self.settings
        for _ in self.parts.run("synthesis", self._one_made, s.generator_steps):
            yield self._midway()
        for _ in self.parts.run("distillation", self._one_learned, s.kd_steps):
            yield self._midway()
        labels = self.dealt.labels[self.dealt.even].tolist()
        self.trail.see(self.epoch, one_of_each(self._some(), labels, self.classes))

    def groups(self) -> Groups:
        """The generator, and of the last epochs the sum of students; after the last, the student is their mean."""
        s = self.settings
        over = max(1, round(s.averaged * s.epochs))  # so many epochs are averaged
        if self.epoch >= s.epochs - over:
            self._add()
        if self.epoch + 1 < s.epochs:
            return self._to_go_on()
        self._load({name: tensor / over for name, tensor in self.sum.items()})
        if self.tally is not None:
            self.tally.teach(self.student.net.head, self._features(), self.generator)
        return self._synthetic(s.replayed)  # no epoch goes on from the generator

    def _add(self) -> None:
        """The student and the layer beside it as they are now to the sum; batch norm's counters do not count."""
        now = {name: tensor for name, tensor in self.student.weights().items() if tensor.is_floating_point()}
        if self.tally is not None:
            now |= {LAYER + name: tensor.detach().clone() for name, tensor in self.tally.trained.items()}
        self.sum = {name: self.sum[name] + tensor if self.sum else tensor for name, tensor in now.items()}

    def _load(self, mean: Mapping[str, Tensor]) -> None:
        """The inverse of `_add`."""
        layer = {name.removeprefix(LAYER): t for name, t in mean.items() if name.startswith(LAYER)}
        student = {name: tensor for name, tensor in mean.items() if not name.startswith(LAYER)}
        nets.load(self.student.net, {**self.student.weights(), **student})
        if self.tally is not None:
            self.tally.restore({**self.tally.state(), **layer})

    def _features(self) -> Tensor:
        """What the student sees in made images, by the statistics that it goes home with."""
        net = self.student.net.eval()
        with torch.no_grad():
            found = [self.student.outputs(self._some())[0] for _ in range(LESSONS)]
        net.train()
        return torch.cat(found)

    def _synthetic(self, n: int) -> Groups:
        """So many images in bytes, as many of each class, and what the panel says of them."""
        if n == 0:
            return {}
        images = torch.cat([self._some() for _ in range(math.ceil(n / len(self.dealt.even)))])[:n]
        labels = torch.cat([self.teachers.logits(part).argmax(dim=1) for part in torch.split(images, self.batch)])
        return {SYNTHETIC: {"images": to_pixels(images).cpu(), "labels": labels.cpu()}}

    def _midway(self) -> Midway:
        return Midway(self._to_go_on(), dict(self.parts.done))

    def _to_go_on(self) -> Groups:
        beside = {FEATURES: self.maps, TALLY: self.tally}
        kept = {name: lesson.state() for name, lesson in beside.items() if lesson}
        return {GENERATOR: self.maker.state(), **kept, **({SUM: dict(self.sum)} if self.sum else {})}

    # Steps ------------------------------------------------------------------------------------------------------------

    def _drawn(self, crops: int) -> tuple[Tensor, Tensor]:
        """Codes of one batch, and how so many of its images are cut out."""
        codes = torch.randn((len(self.dealt.labels), self.settings.codes), generator=self.generator)
        return codes.to(self.device), draw_crops(crops, "crop", self.generator).to(self.device)

    def _one_made(self, number: int) -> None:
        loss = self.make(*self._drawn(len(self.dealt.labels)))
        if number + 1 == self.settings.generator_steps:
            require_finite(loss)

    def _one_learned(self, number: int) -> None:
        self.learn(*self._drawn(len(self.dealt.even)))

    def _some(self) -> Tensor:
        """New images, equally many of each class."""
        codes, _ = self._drawn(0)
        with torch.no_grad():
            return self._images(codes)[self.dealt.even]

    def _images(self, codes: Tensor) -> Tensor:
        return self.maker.images(torch.cat([codes, self.named], dim=1))

    def _make(self, codes: Tensor, crops: Tensor) -> Tensor:
        wrong, gap = self.teachers.opinion(cropped(self._images(codes), crops), self.dealt)
        loss: Tensor = wrong + self.settings.bn_weight * gap
        self.maker.step(loss)
        return loss.detach()

    def _learn(self, codes: Tensor, crops: Tensor) -> None:
        with torch.no_grad():
            pixels = cropped(self._images(codes)[self.dealt.even], crops)
        s = self.settings
        asked: list[Callable[[], tuple[Any, Any]]] = [
            partial(self.student.outputs, pixels),
            partial(self.teachers.outputs, pixels),
        ]
        (mine, said), (theirs, tally) = each(asked)
        loss = distillation(self.teachers.decided(tally), said, s.temperature)
        if self.maps is not None:
            loss = loss + s.feature_weight * self.maps.gap(mine, theirs)
        if self.tally is not None:
            loss = loss + s.tally_weight * self.tally.gap(mine, tally)
        self.student.step(loss)
        for lesson in (self.maps, self.tally):
            if lesson is not None:
                lesson.step()
