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
from typing import Literal

import torch
from torch import Tensor

from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled, DistilledSettings
from wardround.methods.state import State
from wardround.settings import Count
from wardround.synthesis.inversion import balanced_labels, invert
from wardround.synthesis.student import Student, distillation
from wardround.synthesis.teachers import Teachers

POOL = "pool"


class DeepInversion(Distilled):
    """Invert, pool, distil."""

    name = "deepinversion"
    paper = "Yin et al., CVPR 2020"
    summary = "images inverted from the mean of the sites' models, one student distilled on them"

    class Settings(DistilledSettings):
        """`keep` says which iterate of a synthesis joins the pool; `kd_steps` how many steps follow each synthesis."""

        keep: Literal["lowest", "last"] = "lowest"
        kd_steps: Count = 500

    def epochs(
        self, ctx: Context, state: State, members: list[Member], student: Student, begun: int
    ) -> Iterator[tuple[int, dict[str, dict[str, Tensor]]]]:
        """A synthesis, then distillation over all images so far."""
        study, s = ctx.study, self.settings
        teachers = Teachers(members, ctx.device.torch)
        labels = balanced_labels(s.batch, len(study.classes)).to(ctx.device.torch)
        pool = dict(state.groups.get(POOL, {}))
        for epoch in range(begun, s.epochs):
            generator = ctx.streams.torch("synthesis", round=ctx.round, index=epoch)
            shape = (study.channels, study.size, study.size)
            pool[f"{epoch:06d}"] = self._kept(teachers, labels, shape, generator)
            images = torch.cat([_placed(batch, ctx.device.torch) for _, batch in sorted(pool.items())])
            for _ in range(s.kd_steps):
                chosen = torch.randint(len(images), (s.batch,), generator=generator).to(images.device)
                pixels = images[chosen]
                loss = distillation(teachers.logits(pixels), student.logits(pixels), s.temperature)
                student.learn(loss, self.rate(epoch))
            yield epoch, {POOL: dict(pool)}

    def _kept(
        self, teachers: Teachers, labels: Tensor, shape: tuple[int, int, int], generator: torch.Generator
    ) -> Tensor:
        """The images of lowest loss, or the last ones.

        An iterate's loss was measured before its last update, so it belongs to the images of the step before.
        """
        trajectory = invert(teachers, labels, shape, self.settings.inversion(), generator)
        last = best = next(trajectory).images
        lowest = torch.full((), torch.inf, device=labels.device)
        for iterate in trajectory:
            best = torch.where(iterate.loss < lowest, last, best)
            lowest = torch.minimum(lowest, iterate.loss)
            last = iterate.images
        return best if self.settings.keep == "lowest" else last


def _placed(batch: Tensor, device: torch.device) -> Tensor:
    """On the device, and in memory as a synthesis leaves it: a batch that comes out of a file has another layout."""
    return batch.to(device, memory_format=torch.channels_last)
