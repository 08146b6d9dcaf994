"""`fedisca`: one-shot distillation along synthesis trajectories, with teachers adapted to noise.

Kang et al., One-Shot Federated Learning on Medical Data Using Knowledge Distillation with Image Synthesis and Client
Model Adaptation, MICCAI 2023; Algorithm 1 of Kang et al., Medical Image Analysis 2025.

Each epoch: (2) images are synthesised from noise for S steps (Eq. 5, 6) and every iterate is kept in memory; (3)
noise-adapted copies of the teachers follow the memory backwards, from real to noise (Eq. 7); (4) the student goes
through it forwards and learns λ·KD(adapted) + (1 − λ)·KD(original) with λ = 1 − s/S (Eq. 8, Eq. 2 to 4 at temperature
20). Table 2's ablations: `learn_from` noise, the last images or the trajectory; `adaptation = "none"`.

What the paper leaves open, and what its public code really does: the adapted teachers answer in training mode there,
so with the statistics of the batch at hand, and what was adapted is never read; `adaptation = "batch"` is that
reading, `"ema"` (the default) the paper's. Adapted statistics persist over epochs. The cross-entropy asks the mean
logits (code; the text has the mean over sites: `classify = "each"`); the batch-norm term is averaged over sites (Eq.
6; the code sums: `bn_over = "sum"`). The student's schedule, momentum and weight decay are the code's. Convergence is
a fixed number of epochs.

What costs less here for the same result: of the S steps back to noise, those so far from the end that they are not felt
there (in float32 0.9¹⁵⁸ < 2⁻²⁴, in bf16 0.9¹⁰⁶ < 2⁻¹⁶) are not taken. In (4), where the whole memory is there,
teachers are asked about two batches of it at once. And what they say to an iterate is known from the next step of (2),
which begins with it, where the synthesis shows it to them as it is: Algorithm 1 has no jitter, its public code has
(`jitter`). `reuse` does the same in spite of the jitter: then the student learns from the images as the teachers saw
them, shifted by a few pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from wardround.errors import BadInput
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay, each
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled, DistilledSettings, Epochs, Groups, Midway
from wardround.methods.parts import Parts
from wardround.methods.state import State
from wardround.settings import Share
from wardround.study import Study
from wardround.synthesis.gallery import Trail
from wardround.synthesis.inversion import Synthesis, balanced_labels
from wardround.synthesis.memory import Memory
from wardround.synthesis.student import Student, mixed_distillation
from wardround.synthesis.teachers import Adaptation, AdaptedTeachers, Teachers, felt

ADAPTED, SYNTHESIS = "adapted", "synthesis"
AT_ONCE = 2  # batches that the teachers are asked about together: a GPU gets through larger ones faster


class FedISCA(Distilled):
    """Distil along the trajectory from noise to image, with teachers adapted to noise."""

    name = "fedisca"
    paper = "Kang et al., MICCAI 2023"
    summary = "one student distilled along synthesis trajectories, with teachers adapted to noise"

    class Settings(DistilledSettings):
        """`adaptation`: the paper's running statistics or the code's batch statistics; `follow`: Eq. 7's momentum.

        `reuse`: what the teachers said to an image, shifted by the jitter, is not asked again.
        """

        adaptation: Adaptation | Literal["none"] = "ema"
        follow: Share = 0.9
        learn_from: Literal["trajectory", "images", "noise"] = "trajectory"
        reuse: bool = False

    def check(self, study: Study) -> None:
        """What any synthesis needs; and noise, if there is to be adaptation to it."""
        super().check(study)
        if self.settings.learn_from == "images" and self.settings.adaptation != "none":
            raise BadInput(
                f"{self.name} adapts to noise, and its last images have none; set {self.name}.adaptation to none, too"
            )

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """Algorithm 1, lines 3 to 21."""
        work = _AtWork(self, ctx, members, student)
        self.trail = work.trail
        self.trail.load(state)
        if state.groups.get(ADAPTED):
            work.adapted.restore(state.groups[ADAPTED])
        yield from self.through(ctx, state, work, student, begun)


class _AtWork:
    """One epoch at a time: synthesis, adaptation, distillation, each able to stop after any step."""

    def __init__(self, method: FedISCA, ctx: Context, members: list[Member], student: Student) -> None:
        study, device, precision = ctx.study, ctx.device.torch, ctx.study.settings.train.precision
        self.ctx, self.student, self.precision = ctx, student, precision
        self.settings = s = method.settings.at(study.size)
        self.teachers = Teachers(members, device, precision)
        reading: Adaptation = "ema" if s.adaptation == "none" else s.adaptation
        self.adapted = AdaptedTeachers(members, device, reading, s.follow, precision)
        shape = study.image_shape
        self.labels = balanced_labels(s.batch, len(study.classes)).to(device)
        self.synthesis = Synthesis(self.teachers, self.labels, shape, s.inversion())
        self.memory = Memory(device, s.steps, (s.batch, *shape), precision)
        self.follow = Replay(self.adapted.follow, device)
        self.reused = (s.reuse or s.jitter == 0) and s.learn_from != "noise"  # noise was shown to nobody
        self.ask = Replay(self._ask, device)
        self.asked: int | None = None  # the first of the batches that `answers` are to
        self.answers: list[Tensor] = []
        self.learn = Replay(self._learn, device)
        self.parts = Parts(ctx, method.watch)
        self.trail = Trail(self.labels, study.classes, s.steps)

    def begin(self, epoch: int, generator: torch.Generator) -> None:
        """A new epoch."""
        self.epoch = epoch
        self.asked = None
        self.memory.clear()
        self.synthesis.begin(generator)
        self.parts.done = {}

    def restore(self, epoch: int, state: State, done: dict[str, int], generator: torch.Generator) -> None:
        """An epoch that was stopped."""
        self.epoch = epoch
        self.asked = None
        self.memory.restore(state.groups)
        self.synthesis.restore(state.groups[SYNTHESIS], done["synthesis"], generator)
        self.parts.done = dict(done)

    def rest(self) -> Iterator[Midway]:
        """What is left of the epoch; whenever a checkpoint is due, what it needs."""
        for part, step, total in (
            ("synthesis", self._synthesise, self.settings.steps),
            ("adaptation", self._follow, self._steps_back()),
            ("distillation", self._distil, self.settings.steps),
        ):
            for _ in self.parts.run(part, step, total):
                midway = {**self.groups(), SYNTHESIS: self.synthesis.state(), **self.memory.groups()}
                yield Midway(midway, dict(self.parts.done))

    def groups(self) -> Groups:
        """The adapted statistics persist over epochs."""
        return {ADAPTED: self.adapted.statistics()}

    # Steps ------------------------------------------------------------------------------------------------------------

    def _synthesise(self, number: int) -> None:
        """One step of Eq. 5; the iterate is remembered, or where answers are reused when the next step has shown it."""
        s = self.settings
        if s.learn_from == "noise":
            draw = self.ctx.streams.torch("noise", round=self.ctx.round, index=self.epoch * s.steps + number)
            self.memory.add(torch.randn(self.synthesis.images.shape, generator=draw).to(self.labels.device))
            return
        iterate = self.synthesis.step()
        self.trail.see(number, iterate.images)
        if not self.reused:
            self.memory.add(iterate.images)
            return
        if number > 0:
            self.memory.add(iterate.seen, iterate.logits)
        if number == s.steps - 1:
            self.memory.add(iterate.images, self.teachers.logits(iterate.images))

    def _steps_back(self) -> int:
        """How many steps of adaptation are felt at the end of it."""
        s = self.settings
        return min(int(s.steps), felt(s.follow, self.precision)) if s.adaptation == "ema" else 0

    def _follow(self, number: int) -> None:
        """Eq. 7, backwards; the first of the steps that are felt is that many from the noise."""
        self.follow(self.memory.images(self._steps_back() - 1 - number))

    def _distil(self, number: int) -> None:
        """Eq. 8, forwards."""
        s = self.settings
        place = s.steps - 1 if s.learn_from == "images" else number
        left = 0.0 if s.adaptation == "none" else 1 - (number + 1) / s.steps
        noise = torch.full((), left, device=self.labels.device)
        self.learn(self.memory.images(place), noise, *self._answers(place))

    def _answers(self, place: int) -> tuple[Tensor, Tensor]:
        """What the teachers, and the adapted ones, say to a batch of the memory."""
        s, first = self.settings, place - place % AT_ONCE
        if self.asked != first:
            shown = [self.memory.images(min(p, s.steps - 1)) for p in range(first, first + AT_ONCE)]
            self.asked, self.answers = first, [said.clone() for said in self.ask(torch.cat(shown))]
        *original, adapted = (torch.split(said, s.batch)[place - first] for said in self.answers)
        return (original[0] if original else self.memory.logits(place)), adapted

    def _ask(self, images: Tensor) -> list[Tensor]:
        teachers = [self.adapted] if self.reused else [self.teachers, self.adapted]
        return each([partial(self._asked, of, images) for of in teachers])

    def _asked(self, teachers: Teachers, images: Tensor) -> Tensor:
        """All batches at once, but one by one those whose own statistics are used."""
        if teachers is self.adapted and self.adapted.adaptation == "batch":
            return torch.cat([teachers.logits(batch) for batch in torch.split(images, self.settings.batch)])
        return teachers.logits(images)

    def _learn(self, images: Tensor, noise: Tensor, original: Tensor, adapted: Tensor) -> None:
        said = self.student.logits(images)
        self.student.step(mixed_distillation(original, adapted, said, noise, self.settings.temperature))
