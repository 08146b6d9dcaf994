"""The coordinator's epochs of `consult-distilled`: a generator, and a student that learns from a panel on its images.

`consult_distilled.py` says why; this knows no site, only the panel and what its members have seen. `settings` are those
of `ConsultDistilled`, with the values that depend on the images' size filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn import nets
from wardround.learn.distillation import distillation
from wardround.learn.predictor import Predictor
from wardround.learn.replay import Replay, each
from wardround.methods.base import Context
from wardround.methods.distilled import Groups, Midway
from wardround.methods.parts import Parts
from wardround.methods.state import State
from wardround.synthesis.deal import deal
from wardround.synthesis.features import FeatureMaps
from wardround.synthesis.gallery import one_of_each, to_pixels, trail_of_epochs
from wardround.synthesis.generator import ImageGenerator, require_finite
from wardround.synthesis.panel import PanelTeachers
from wardround.synthesis.pool import cropped, draw_crops
from wardround.synthesis.stopwatch import Stopwatch
from wardround.synthesis.student import Student
from wardround.synthesis.tally import TallyLayer

GENERATOR, FEATURES, TALLY, SUM, SYNTHETIC = "generator", "features", "tally", "sum", "synthetic"
LAYER = f"{TALLY}."  # before the names of the layer's tensors, where they are among the student's
LESSONS = 16  # batches of made images from whose features the head learns at the end
NAMED = 3.0  # how loud a code says its class: of normal numbers beside it, few are as large


class PanelEpochs:
    """One epoch at a time: the generator, then the student, each able to stop after any step."""

    def __init__(
        self,
        ctx: Context,
        settings: Any,
        state: State,
        panel: Predictor,
        counts: Tensor,
        student: Student,
        watch: Stopwatch,
    ) -> None:
        study, device, precision = ctx.study, ctx.device.torch, ctx.study.settings.train.precision
        self.student, self.device, self.settings = student, device, settings
        self.batch, self.classes = self.settings.batch, len(study.classes)
        self.teachers = PanelTeachers(panel, device, precision)
        self.dealt = deal(counts, self.teachers.shares, self.batch, device)
        self.named = NAMED * F.one_hot(self.dealt.labels, self.classes).float()
        shape = study.image_shape
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
        self.parts = Parts(ctx, watch)
        self.trail = trail_of_epochs(study.classes, self.settings.epochs, state)

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
