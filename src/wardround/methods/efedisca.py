"""`efedisca`: FedISCA with one synthesis for all epochs; mixtures with structured noise stand in for the others.

Kang et al., Efficient One-Shot Federated Learning on Medical Data Using Knowledge Distillation with Image Synthesis
and Client Model Adaptation, Medical Image Analysis 2025; Algorithm 2.

Once: images are synthesised from noise (Eq. 5, 6), and n snapshots of the batch are kept in memory. Then each epoch:
(3) noise-adapted copies of the teachers follow mixtures of a snapshot x̂ and structured noise x̂', λ·x̂' + (1 − λ)·x̂
(Eq. 9), with λ = s/S, from real to noise (Eq. 7); (4) the student learns λ·KD(adapted) + (1 − λ)·KD(original) on such
mixtures with λ = 1 − s/S, from noise to real (Eq. 8). Snapshot and noise are drawn anew for every step. The coordinator
makes the noise itself (`synthesis/noise.py`); the paper took StyleGAN-oriented images that others had made.

What the paper leaves open (its code could not be read), and what is done here:
- L_th = 50 means something only together with the sites and layers that L_s sums over, and the paper finds that it
  matters little, since the memory is completed with the latest snapshots. So `threshold` is None by default: the last
  n. With one, the latest n below it, completed with the latest others. A snapshot is judged by the loss of the step
  that made it.
- The S of Algorithm 2's lines 12 and 21 is, read literally, the 1000 of the synthesis; the whole would then cost more
  than FedISCA. `kd_steps` is the number for both: 500, as many as an epoch of FedISCA has.
- Everything else that FedISCA leaves open is as in `fedisca`. As there, steps of the adaptation so far from its end
  that float32 no longer feels them are not taken.

Snapshots are kept as float16: half of the memory, and finer by far than the 256 levels of a picture (2⁻¹¹ of a value
near 1, against 2⁻⁷ from level to level). Eight bits would clip, as synthesised values leave -1..1.

Table 2's ablations: `synthesis = false`, `noise = "none"`, `adaptation = "none"`. Without synthesis the images are
noise alone, without noise snapshots alone, without adaptation every λ in Eq. 8 is 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from wardround.errors import BadInput
from wardround.learn.distillation import distillation
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay, each
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled, DistilledSettings, Epochs, Groups, Midway
from wardround.methods.parts import Parts
from wardround.methods.state import State
from wardround.settings import Count, Positive, Share
from wardround.study import Study
from wardround.synthesis.gallery import Trail
from wardround.synthesis.inversion import Iterate, Synthesis, balanced_labels
from wardround.synthesis.noise import bank
from wardround.synthesis.student import Student, mixed_distillation
from wardround.synthesis.teachers import AdaptedTeachers, Teachers, felt

MEMORY, OTHERS, ADAPTED, SYNTHESIS = "memory", "memory_others", "adapted", "synthesis"  # groups of a state
Draw = Callable[[Generator], Tensor]  # a batch of pixels


class EFedISCA(Distilled):
    """One synthesis, then distillation on mixtures of its images and structured noise."""

    name = "efedisca"
    paper = "Kang et al., Medical Image Analysis 2025"
    summary = "fedisca with a single synthesis, whose images are mixed with structured noise"

    class Settings(DistilledSettings):
        """The memory, the noise, and how teachers adapt to it. One synthesis may be longer than each of FedISCA's."""

        SIZED: ClassVar[dict[str, tuple[int, int]]] = {"steps": (1000, 2000), "batch": (256, 96), "jitter": (2, 30)}

        kd_steps: Count = 500  # of an epoch: of the adaptation, and of the distillation
        memory: Count = 500  # n, snapshots of the whole batch
        threshold: Positive | None = None  # L_th; None: the last n
        synthesis: bool = True
        noise: Literal["stylegan", "deadleaves", "spectrum", "gaussian", "none"] = "stylegan"
        noise_images: Count = 2048  # structured ones, made once; Gaussian noise is always fresh
        adaptation: Literal["ema", "batch", "none"] = "ema"
        follow: Share = 0.9  # α

    def check(self, study: Study) -> None:
        """What any synthesis needs; something to learn from, and noise if there is to be adaptation to it."""
        super().check(study)
        s = self.settings
        if s.noise == "none" and not s.synthesis:
            raise BadInput(f"{self.name} has no images with noise = none and synthesis = false; leave out one of them")
        if s.noise == "none" and s.adaptation != "none":
            raise BadInput(f"{self.name} adapts to noise, and there is none; set {self.name}.adaptation to none, too")
        if s.noise not in ("none", "gaussian") and study.channels not in (1, 3):
            raise BadInput(
                f"{self.name}: structured noise has 1 or 3 channels, the images have {study.channels}; "
                f"set {self.name}.noise to gaussian"
            )

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """Algorithm 2; the memory is part of every state, so a resumed run does not synthesise again."""
        work = _AtWork(self, ctx, state, members, student)
        yield from work.synthesise()
        for epoch in range(begun, self.settings.epochs):
            student.set_rate(self.rate(epoch))
            yield from work.rest(epoch)
            yield epoch, work.groups()


class _AtWork:
    """The synthesis, then one epoch at a time: adaptation and distillation; all able to stop after any step."""

    def __init__(self, method: EFedISCA, ctx: Context, state: State, members: list[Member], student: Student) -> None:
        device, precision = ctx.device.torch, ctx.study.settings.train.precision
        self.ctx, self.student = ctx, student
        self.settings = s = method.settings.at(ctx.study.size)
        self.teachers = Teachers(members, device, precision)
        self.parts = Parts(ctx, method.watch, state.facts.get("midway"))
        self.snapshots = Snapshots(s.memory, s.threshold)
        self.snapshots.restore(state.groups, device)
        self.synthesis = self._begun(method, state) if s.synthesis else None
        self.noise = self._noise()
        self.adapted: AdaptedTeachers | None = None
        if s.adaptation != "none":
            self.adapted = AdaptedTeachers(members, device, s.adaptation, s.follow, precision)
            if ADAPTED in state.groups:
                self.adapted.restore(state.groups[ADAPTED])
            self.follow = Replay(self.adapted.follow, device)
        self.learn = Replay(self._learn, device)
        # The statistics of the batch at hand, of "batch", need no adaptation.
        self.rising = rising(s.kd_steps)[-felt(s.follow, precision) :] if s.adaptation == "ema" else []
        self.falling = falling(s.kd_steps)

    def synthesise(self) -> Iterator[Midway]:
        """Lines 3 to 10, or what is left of them; whenever a checkpoint is due, what it needs."""
        if (synthesis := self.synthesis) is not None:
            for _ in self.parts.run(SYNTHESIS, partial(self._synthesise, synthesis), self.settings.steps):
                yield self._midway({SYNTHESIS: synthesis.state(), **self.snapshots.groups()})
        self.memory = self.snapshots.kept()
        self.images = _snapshots(self.memory)

    def rest(self, epoch: int) -> Iterator[Midway]:
        """What is left of an epoch; whenever a checkpoint is due, what it needs."""
        self.epoch = epoch
        for part, step, levels in (
            ("adaptation", self._follow, self.rising),
            ("distillation", self._distil, self.falling),
        ):
            for _ in self.parts.run(part, step, len(levels)):
                yield self._midway({MEMORY: self.memory})
        self.parts.done = {}

    def groups(self) -> Groups:
        """For a state, beside the student."""
        return {MEMORY: self.memory, **self._adapted()}

    def _midway(self, kept: Groups) -> Midway:
        return Midway({**kept, **self._adapted()}, dict(self.parts.done))

    def _adapted(self) -> Groups:
        return {ADAPTED: self.adapted.statistics()} if self.adapted else {}

    def _synthesise(self, synthesis: Synthesis, number: int) -> None:
        """One step of Eq. 5."""
        iterate = synthesis.step()
        self.trail.see(number, iterate.images)
        self.snapshots.add(iterate)

    def _follow(self, number: int) -> None:
        """Lines 13 to 19."""
        self.follow(self._mixture("adaptation", number, self.rising[number]))

    def _distil(self, number: int) -> None:
        """Lines 22 to 27."""
        level = self.falling[number]
        pixels = self._mixture("distillation", number, level)
        self.learn(pixels, torch.full((), level, device=pixels.device))

    def _mixture(self, part: str, number: int, level: float) -> Tensor:
        step = self.epoch * self.settings.kd_steps + number
        return mixture(self.images, self.noise, level, self.ctx.streams.torch(part, round=self.ctx.round, index=step))

    def _learn(self, pixels: Tensor, level: Tensor) -> None:
        asked = [of for of in (self.student, self.teachers, self.adapted) if of is not None]
        said, original, *far = each([partial(of.logits, pixels) for of in asked])
        temperature = self.settings.temperature
        if far:
            self.student.step(mixed_distillation(original, far[0], said, level, temperature))
        else:
            self.student.step(distillation(original, said, temperature))

    def _begun(self, method: EFedISCA, state: State) -> Synthesis | None:
        """The synthesis as it begins, or as an earlier run left it; None where that one had finished."""
        s, study, device = self.settings, self.ctx.study, self.ctx.device.torch
        labels = balanced_labels(s.batch, len(study.classes)).to(device)
        self.trail = method.trail = Trail(labels, study.classes, s.steps)
        self.trail.load(state)
        if MEMORY in state.groups and SYNTHESIS not in state.groups:
            return None
        synthesis = Synthesis(self.teachers, labels, study.image_shape, s.inversion())
        generator = self.ctx.streams.torch("synthesis", round=self.ctx.round)
        if SYNTHESIS in state.groups:
            synthesis.restore(state.groups[SYNTHESIS], self.parts.done[SYNTHESIS], generator)
        else:
            synthesis.begin(generator)
        return synthesis

    def _noise(self) -> Draw | None:
        s, study, device = self.settings, self.ctx.study, self.ctx.device.torch
        if s.noise == "none":
            return None
        if s.noise == "gaussian":
            return _gaussian((s.batch, *study.image_shape), device)
        generator = self.ctx.streams.torch("structured noise")
        made = bank(s.noise, s.noise_images, study.channels, study.size, generator, self.ctx.progress)
        return _out_of(made.to(device), s.batch)


class Snapshots:
    """The latest `room` snapshots below the threshold, completed with the latest others, by their step's number."""

    def __init__(self, room: int, threshold: float | None) -> None:
        self.room, self.threshold = room, threshold
        self.below: deque[tuple[str, Tensor]] = deque(maxlen=room)
        self.others: deque[tuple[str, Tensor]] = deque(maxlen=room)

    def add(self, iterate: Iterate) -> None:
        """One more iterate; what is kept is a copy, since a captured step overwrites what it returned."""
        good = self.threshold is None or bool(iterate.loss < self.threshold)
        snapshot = iterate.images.to(torch.float16)
        (self.below if good else self.others).append((f"{iterate.step:06d}", snapshot))

    def kept(self) -> dict[str, Tensor]:
        """Those that are remembered, in the order of their steps."""
        room_left = self.room - len(self.below)
        others = list(self.others)[-room_left:] if room_left else []
        return dict(sorted([*self.below, *others], key=lambda named: named[0]))

    def groups(self) -> Groups:
        """For a state in the middle of the synthesis."""
        return {MEMORY: dict(self.below), OTHERS: dict(self.others)}

    def restore(self, groups: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        """The inverse of `groups`, and of `kept` once the synthesis is done."""
        for name, snapshots in ((MEMORY, self.below), (OTHERS, self.others)):
            snapshots.extend((step, tensor.to(device)) for step, tensor in sorted(groups.get(name, {}).items()))


def rising(steps: int) -> list[float]:
    """λ = s/S for s = 1..S: from real to noise."""
    return [s / steps for s in range(1, steps + 1)]


def falling(steps: int) -> list[float]:
    """λ = 1 − s/S for s = 1..S: from noise to real."""
    return [1 - s / steps for s in range(1, steps + 1)]


def mixture(images: Draw | None, noise: Draw | None, level: float, generator: Generator) -> Tensor:
    """Eq. 9: λ·x̂' + (1 − λ)·x̂; of one kind alone where there is no other."""
    drawn = [draw(generator) for draw in (images, noise) if draw is not None]
    return torch.lerp(drawn[0], drawn[1], level) if len(drawn) == 2 else drawn[0]


def _snapshots(memory: Mapping[str, Tensor]) -> Draw | None:
    """One snapshot of the whole batch; in memory as a synthesis leaves it, wherever it comes from."""
    kept = [memory[name] for name in sorted(memory)]

    def draw(generator: Generator) -> Tensor:
        chosen = int(torch.randint(len(kept), (), generator=generator))
        return kept[chosen].to(torch.float32, memory_format=torch.channels_last)

    return draw if kept else None


def _out_of(images: Tensor, batch: int) -> Draw:
    """Any images of a bank."""

    def draw(generator: Generator) -> Tensor:
        chosen = torch.randint(len(images), (batch,), generator=generator)
        return normalise(images[chosen.to(images.device)])

    return draw


def _gaussian(shape: tuple[int, ...], device: torch.device) -> Draw:
    """N(0, 1), FedISCA's noise."""

    def draw(generator: Generator) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, memory_format=torch.channels_last)

    return draw
