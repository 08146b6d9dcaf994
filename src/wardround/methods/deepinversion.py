"""`deepinversion`: Yin et al., Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion, CVPR 2020.

As a one-shot federated baseline (FedISCA's tables): images are inverted from the mean of the sites' models (FedISCA
Eq. 5, 6), and the student learns the teachers' mean logits on them (Eq. 3, 4). Each epoch inverts one fresh batch,
adds it to a pool in memory and takes `kd_steps` steps on batches drawn from the pool.

What the paper leaves open: it released no distillation code; pool and steps are ours. Which iterate is kept: the one
of lowest loss, as the text says, by default; `keep = "last"` is what the public code does, since its "best" aliases
the tensor that is still being optimised.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from wardround.learn.distillation import distillation
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay, each
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled, DistilledSettings, Epochs, Groups, Midway
from wardround.methods.parts import Parts
from wardround.methods.state import State
from wardround.settings import Count
from wardround.synthesis.gallery import Trail
from wardround.synthesis.inversion import Synthesis, balanced_labels
from wardround.synthesis.memory import placed
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Teachers

POOL, SYNTHESIS = "pool", "synthesis"


class DeepInversion(Distilled):
    """Invert, pool, distil."""

    name = "deepinversion"
    paper = "Yin et al., CVPR 2020"
    summary = "images inverted from the mean of the sites' models, one student distilled on them"

    class Settings(DistilledSettings):
        """`keep` says which iterate of a synthesis joins the pool; `kd_steps` how many steps follow each synthesis."""

        keep: Literal["lowest", "last"] = "lowest"
        kd_steps: Count = 500

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """A synthesis, then distillation over all images so far."""
        work = _AtWork(self, ctx, members, student, state)
        yield from self.through(ctx, state, work, student, begun)


class _AtWork:
    """One epoch at a time: synthesis, distillation, each able to stop after any step."""

    def __init__(
        self, method: DeepInversion, ctx: Context, members: list[Member], student: Student, state: State
    ) -> None:
        study, device, precision = ctx.study, ctx.device.torch, ctx.study.settings.train.precision
        self.student, self.device = student, device
        self.settings = s = method.settings.at(study.size)
        self.teachers = Teachers(members, device, precision)
        labels = balanced_labels(s.batch, len(study.classes)).to(device)
        self.synthesis = Synthesis(self.teachers, labels, study.image_shape, s.inversion())
        self.learn = Replay(self._learn, device)
        self.parts = Parts(ctx, method.watch)
        self.trail = method.trail = Trail(labels, study.classes, s.steps)
        self.trail.load(state)
        self.pool = dict(state.groups.get(POOL, {}))

    def begin(self, epoch: int, generator: torch.Generator) -> None:
        """A new epoch."""
        self.epoch, self.generator = epoch, generator
        self.synthesis.begin(generator)
        self.last = self.best = self.synthesis.images.detach().clone()
        self.lowest = torch.full((), torch.inf, device=self.device)
        self.parts.done = {}

    def restore(self, epoch: int, state: State, done: dict[str, int], generator: torch.Generator) -> None:
        """An epoch that was stopped."""
        self.epoch, self.generator = epoch, generator
        kept = {name: t.to(self.device) for name, t in state.groups[SYNTHESIS].items()}
        self.synthesis.restore(kept, done["synthesis"], generator)
        self.last, self.best, self.lowest = self.synthesis.images.detach().clone(), kept["best"], kept["lowest"]
        self.parts.done = dict(done)

    def rest(self) -> Iterator[Midway]:
        """What is left of the epoch; whenever a checkpoint is due, what it needs."""
        s = self.settings
        for _ in self.parts.run("synthesis", self._synthesise, s.steps):
            yield self._midway()
        self.pool[f"{self.epoch:06d}"] = self.best if s.keep == "lowest" else self.last
        images = torch.cat([placed(batch, self.device) for _, batch in sorted(self.pool.items())])
        chosen = torch.randint(len(images), (s.kd_steps, s.batch), generator=self.generator).to(self.device)
        for _ in self.parts.run("distillation", lambda number: self.learn(images[chosen[number]]), s.kd_steps):
            yield self._midway()

    def groups(self) -> Groups:
        """The pool."""
        return {POOL: dict(self.pool)}

    def _midway(self) -> Midway:
        kept = {**self.synthesis.state(), "best": self.best, "lowest": self.lowest}
        return Midway({SYNTHESIS: kept, **self.groups()}, dict(self.parts.done))

    def _synthesise(self, number: int) -> None:
        """An iterate's loss was measured before its last update, so it belongs to the images of the step before."""
        iterate = self.synthesis.step()
        if number > 0:
            self.best = torch.where(iterate.loss < self.lowest, self.last, self.best)
            self.lowest = torch.minimum(self.lowest, iterate.loss)
        self.last = iterate.images
        if number == 0:
            self.best = self.last
        self.trail.see(number, self.last)

    def _learn(self, pixels: Tensor) -> None:
        said, wanted = each([partial(of.logits, pixels) for of in (self.student, self.teachers)])
        self.student.step(distillation(wanted, said, self.settings.temperature))
