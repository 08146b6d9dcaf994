"""`fedisca`: one-shot distillation along synthesis trajectories, with teachers adapted to noise.

Kang et al., One-Shot Federated Learning on Medical Data Using Knowledge Distillation with Image Synthesis and Client
Model Adaptation, MICCAI 2023; Algorithm 1 of Kang et al., Medical Image Analysis 2025.

Each epoch: (2) images are synthesised from noise for S steps (Eq. 5, 6) and every iterate is kept in memory; (3)
noise-adapted copies of the teachers follow the memory backwards, from real to noise (Eq. 7); (4) the student goes
through it forwards and learns λ·KD(adapted) + (1 − λ)·KD(original) with λ = 1 − s/S (Eq. 8, Eq. 2 to 4 at temperature
20).

What the paper leaves open, and what its public code really does: the adapted teachers answer in training mode there,
so with the statistics of the batch at hand, and what was adapted is never read; `adaptation = "batch"` is that
reading, `"ema"` (the default) the paper's. Adapted statistics persist over epochs. The cross-entropy asks the mean
logits (code; the text has the mean over sites: `classify = "each"`); the batch-norm term is averaged over sites (Eq.
6; the code sums: `bn_over = "sum"`). The student's schedule, momentum and weight decay are the code's. Convergence is
a fixed number of epochs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled, DistilledSettings
from wardround.methods.state import State
from wardround.settings import Share
from wardround.synthesis.inversion import balanced_labels, invert
from wardround.synthesis.student import Student, distillation
from wardround.synthesis.teachers import Adaptation, AdaptedTeachers, Teachers

ADAPTED = "adapted"


class FedISCA(Distilled):
    """Distil along the trajectory from noise to image, with teachers adapted to noise."""

    name = "fedisca"
    paper = "Kang et al., MICCAI 2023"
    summary = "one student distilled along synthesis trajectories, with teachers adapted to noise"

    class Settings(DistilledSettings):
        """`adaptation`: the paper's running statistics or the code's batch statistics; `follow`: Eq. 7's momentum."""

        adaptation: Adaptation = "ema"
        follow: Share = 0.9

    def epochs(
        self, ctx: Context, state: State, members: list[Member], student: Student, begun: int
    ) -> Iterator[tuple[int, dict[str, dict[str, Tensor]]]]:
        """Algorithm 1, lines 3 to 21."""
        study, s, device = ctx.study, self.settings, ctx.device.torch
        teachers = Teachers(members, device)
        adapted = AdaptedTeachers(members, device, s.adaptation, s.follow)
        if state.groups.get(ADAPTED):
            adapted.restore(state.groups[ADAPTED])
        labels = balanced_labels(s.batch, len(study.classes)).to(device)
        shape = (study.channels, study.size, study.size)
        for epoch in range(begun, s.epochs):
            generator = ctx.streams.torch("synthesis", round=ctx.round, index=epoch)
            memory = [i.images for i in invert(teachers, labels, shape, s.inversion(), generator)]
            for images in reversed(memory):
                adapted.follow(images)
            for step, images in enumerate(memory):
                noise = 1 - (step + 1) / len(memory)
                loss = self.loss(adapted.logits(images), teachers.logits(images), student.logits(images), noise)
                student.learn(loss, self.rate(epoch))
            yield epoch, {ADAPTED: adapted.statistics()}

    def loss(self, adapted: Tensor, original: Tensor, student: Tensor, noise: float) -> Tensor:
        """Eq. 8 at the noise level λ."""
        temperature = self.settings.temperature
        far, near = distillation(adapted, student, temperature), distillation(original, student, temperature)
        return torch.lerp(near, far, noise)
