"""`consult-distilled`: the panel of `consult` in one network, distilled without data. Our own method; no paper has it.

Sites send what they do for `consult`, but only the coordinator sees it: a site gets one network home, not everybody's.
Each epoch inverts one batch of images, a class asked of the teachers that have seen it (`synthesis/panel.py`; `classify
= "panel"` asks the panel as a whole; batch-norm distances are averaged over teachers, FedISCA Eq. 6; labels go around
the classes that any site has seen), keeps it at `snapshots` of its steps, and takes `kd_steps` steps on batches drawn
from what was kept last, cropped and flipped, towards the panel's probabilities. The learning rate falls along a cosine.

At the site, as with `consult`: the site's prior, tempered, its validation images the judge, its own model the bar.
Where it does better there, the network is fine-tuned: `tune_epochs` over the site's images and `replayed` synthetic
ones with the panel's answers, which came home with it, so that what others have seen is not forgotten.

What leaks: the synthetic images go to every site. They are made from all models and resemble their training images as
far as batch-norm statistics and class outputs do; `wardround audit` measures it. `replayed = 0` sends none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.data.imageset import ImageSet, merge
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group, Payload
from wardround.learn.fit import Fit
from wardround.learn.pixels import augment
from wardround.learn.predictor import Member, Predictor, single
from wardround.learn.replay import Replay, each
from wardround.methods.base import Answer, Context, Work, join_groups
from wardround.methods.class_ensemble import trained_on
from wardround.methods.consult import ConsultSettings, counts_group, panel_of, seen_by_sites, told
from wardround.methods.distilled import Distilled, DistilledSettings, Epochs, Groups, Midway
from wardround.methods.oneshot import logits_of, trained_models
from wardround.methods.parts import Parts
from wardround.methods.personal_prior import Judge, Offer, accuracy
from wardround.methods.state import State
from wardround.settings import Count, NotNegative, Positive
from wardround.study import Study
from wardround.synthesis.gallery import Trail, spread, to_pixels
from wardround.synthesis.inversion import Synthesis
from wardround.synthesis.memory import placed
from wardround.synthesis.panel import Ask, PanelTeachers
from wardround.synthesis.pool import draw_crops
from wardround.synthesis.student import Student, distillation

KEPT, SYNTHESIS, SYNTHETIC, OWN = "kept", "synthesis", "synthetic", "own"


class ConsultDistilled(Distilled):
    """One network that answers as the panel would."""

    name = "consult-distilled"
    paper = "ours; docs/consult.md"
    summary = "the panel of `consult` distilled into one network on synthetic images, then adapted by each site"

    class Settings(ConsultSettings, DistilledSettings):
        """Those of `consult` and of any distillation, and how much is kept and replayed."""

        epochs: Count = 16
        steps: Count | None = 300  # of one synthesis
        bn_weight: NotNegative = 1.0
        classify: Ask = "experts"  # type: ignore[assignment]
        temperature: Positive = 1.0  # of the distillation
        lr: Positive = 0.05
        kd_steps: Count = 250
        snapshots: Count = 4  # of a synthesis, the last among them
        kept: Count = 64  # batches, the oldest go first
        replayed: Annotated[int, Field(ge=0)] = 512  # synthetic images that go home
        tune_epochs: Count = 5
        tune_lr: Positive = 2e-3

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
        """A synthesis, then distillation on what was kept of the last ones."""
        work = _AtWork(self, ctx, members, student, state)
        yield from self.through(ctx, state, work, student, begun)

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
        shared = single(ctx.study.student_spec, join_groups(delivered))
        judge = Judge(site, self.settings.prior, self.settings.calibrate)
        if len(site.val) == 0:
            predictor, words = judge.unjudged(shared)
            ctx.note(f"{site.name} {words}")
            return predictor
        labels = site.val.labels.cpu()
        own = Member(ctx.study.spec(site.name), dict(memory.groups[OWN])) if OWN in memory.groups else None
        bar = None if own is None else (own, logits_of(ctx, own, site.val.images))
        scores = logits_of(ctx, shared.members[0], site.val.images).double()
        chosen, words, reached = judge.choose([Offer(shared, scores)], bar)
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


class _AtWork:
    """One epoch at a time: synthesis, distillation, each able to stop after any step."""

    def __init__(
        self, method: ConsultDistilled, ctx: Context, members: list[Member], student: Student, state: State
    ) -> None:
        study, device, precision = ctx.study, ctx.device.torch, ctx.study.settings.train.precision
        self.student, self.device = student, device
        self.settings = s = method.settings.at(study.size)
        counts = torch.stack([method.counts[site] for site in sorted(method.counts)])
        self.teachers = PanelTeachers(panel_of(tuple(members), counts, s), device, precision, s.classify)
        seen = torch.nonzero((counts > 0).any(dim=0)).flatten()  # a sum could overflow: a site may claim anything
        seen = seen if len(seen) else torch.arange(counts.shape[1])  # coarse bins make nothing of small sites
        self.labels = seen[torch.arange(s.batch) % len(seen)].to(device)
        shape = (study.channels, study.size, study.size)
        self.synthesis = Synthesis(self.teachers, self.labels, shape, s.inversion(), self.teachers.label_loss)
        self.learn = Replay(self._learn, device)
        self.parts = Parts(ctx, method.watch)
        self.trail = method.trail = Trail(self.labels, study.classes, s.steps)
        self.trail.load(state)
        self.frames = {s.steps - 1 - place for place in spread(s.steps, s.snapshots + 1)[: s.snapshots]}
        self.kept = {name: placed(batch, device) for name, batch in state.groups.get(KEPT, {}).items()}

    def begin(self, epoch: int, generator: torch.Generator) -> None:
        """A new epoch."""
        self.epoch, self.generator = epoch, generator
        self.synthesis.begin(generator)
        self.parts.done = {}

    def restore(self, epoch: int, state: State, done: dict[str, int], generator: torch.Generator) -> None:
        """An epoch that was stopped."""
        self.epoch, self.generator = epoch, generator
        kept = {name: t.to(self.device) for name, t in state.groups[SYNTHESIS].items()}
        self.synthesis.restore(kept, done["synthesis"], generator)
        self.parts.done = dict(done)

    def rest(self) -> Iterator[Midway]:
        """What is left of the epoch; whenever a checkpoint is due, what it needs."""
        s = self.settings
        for _ in self.parts.run("synthesis", self._synthesise, s.steps):
            yield self._midway()
        images = torch.cat([batch for _, batch in sorted(self.kept.items())])
        shape = (s.kd_steps, s.batch)
        rows = torch.randint(len(images), shape, generator=self.generator).to(self.device)
        crops = draw_crops(s.kd_steps * s.batch, "crop", self.generator).view(*shape, 3).to(self.device)
        for _ in self.parts.run(
            "distillation", lambda number: self.learn(images[rows[number]], crops[number]), s.kd_steps
        ):
            yield self._midway()

    def groups(self) -> Groups:
        """The batches and, after the last epoch, images to go home."""
        last = self.epoch + 1 == self.settings.epochs
        return {KEPT: dict(self.kept), **(self._synthetic(self.settings.replayed) if last else {})}

    def _synthetic(self, n: int) -> Groups:
        """So many images of the last batches in bytes, and what the panel says of them."""
        if n == 0:
            return {}
        images = torch.cat([batch for _, batch in sorted(self.kept.items(), reverse=True)])[:n].float()
        images = images[torch.arange(n, device=self.device) % len(images)]
        labels = torch.cat(
            [self.teachers.logits(part).argmax(dim=1) for part in torch.split(images, self.settings.batch)]
        )
        return {SYNTHETIC: {"images": to_pixels(images).cpu(), "labels": labels.cpu()}}

    def _midway(self) -> Midway:
        return Midway({SYNTHESIS: self.synthesis.state(), KEPT: dict(self.kept)}, dict(self.parts.done))

    def _synthesise(self, number: int) -> None:
        self.synthesis.start()
        iterate = self.synthesis.wait()
        self.trail.see(number, iterate.images)
        if number in self.frames:
            dtype = torch.bfloat16 if self.teachers.bf16 else torch.float32
            self.kept[f"{self.epoch:06d}.{number:06d}"] = iterate.images.to(dtype)
            while len(self.kept) > self.settings.kept:
                del self.kept[min(self.kept)]

    def _learn(self, images: Tensor, crops: Tensor) -> None:
        pixels = augment(images, crops).float().contiguous(memory_format=torch.channels_last)
        said, wanted = each([partial(of.logits, pixels) for of in (self.student, self.teachers)])
        self.student.step(distillation(wanted, said, self.settings.temperature))
