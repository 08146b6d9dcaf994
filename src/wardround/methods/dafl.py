"""`dafl`: Chen et al., Data-Free Learning of Student Networks (DAFL), ICCV 2019.

One generator, trained all along, whose images the teacher should take for its training images; no label is drawn, the
teacher's own answer is the label. With the teacher's logits y_T, their argmax t, its features f_T and the mean
probabilities p̄ over a batch (the paper's L_Total = L_oh + α L_a + β L_ie):

    L_oh = CE(y_T, t)          the teacher is sure
    L_a  = −mean |f_T|         its features are active
    L_ie = Σ_c p̄_c ln p̄_c      all classes appear alike

In turn the generator takes a step on fresh codes, and the student some on images of fresh codes. As a one-shot
federated method (FedISCA's and FedBiCross's tables) the teacher is the mean of the sites' logits; since sites may
differ in architecture and so in the size of f, L_a is the mean over sites of their own mean |f|.

What the paper leaves open, and the defaults. The recipe of the data-free library of Fang et al. (CMI, Fast-Datafree) is
more stable than the original's and is the default: Adam at 1e-3 with β₁ = 0.5, five student steps per generator step,
weights 1, 1e-3 and 20, temperature 20, SGD at 0.1 with weight decay 1e-4, a tenth of the rate after 60, 75 and 90 % of
200 epochs, batches of 256, codes of 512, sigmoid output. The original on CIFAR-10: `epochs = 2000`, `turns = 120`,
`kd_steps = 1`, `batch = 1024`, `codes = 1000`, `output = "tanh"`, `generator_lr = 0.02`, `beta = 0.9`,
`label_weight = 0.05`, `activation_weight = 0.01`, `balance_weight = 2.17` (5, of a decimal logarithm),
`temperature = 1`, `weight_decay = 5e-4`, `milestones = [0.4, 0.8]`; there the student learns on the very batch of the
generator's step, here on a fresh one.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.learn.distillation import distillation
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled, Epochs, Midway
from wardround.methods.state import State
from wardround.settings import Count, Frozen, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis.gallery import one_of_each, trail_of_epochs
from wardround.synthesis.generator import ImageGenerator, Output, outputs, require_finite
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Teachers

GENERATOR = "generator"


class DAFL(Distilled):
    """A generator and a student in turn; the teachers are the discriminator."""

    name = "dafl"
    paper = "Chen et al., ICCV 2019"
    summary = "one student and one generator trained in turn, the mean of the sites' models as discriminator"

    class Settings(Frozen):
        """The generator's, then the student's."""

        epochs: Count = 200
        shots: Count | None = None  # exchanges with the sites; None: as many as `rounds` says where set, else one
        turns: Count = 80  # in one epoch, each of a generator step and `kd_steps` of the student
        batch: Annotated[int, Field(ge=2)] = 256
        codes: Count = 512
        output: Output = "sigmoid"
        generator_lr: Positive = 1e-3
        beta: Share = 0.5  # Adam's β₁ for the generator
        label_weight: NotNegative = 1.0
        activation_weight: NotNegative = 1e-3  # α
        balance_weight: NotNegative = 20.0  # β
        kd_steps: Count = 5
        temperature: Positive = 20.0
        lr: Positive = 0.1
        milestones: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.6, 0.75, 0.9)  # shares of the epochs
        momentum: Share = 0.9
        weight_decay: NotNegative = 1e-4

    def check(self, study: Study) -> None:
        """Any network will do: no statistics are matched, and no label is drawn."""
        self.check_shots(study)

    def rate(self, epoch: int) -> float:
        """A tenth from each milestone on."""
        passed = sum(epoch / self.settings.epochs >= share for share in self.settings.milestones)
        return float(self.settings.lr * 0.1**passed)

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """The generator and the student in turn."""
        study, s, device = ctx.study, self.settings, ctx.device.torch
        precision = study.settings.train.precision
        teachers = Teachers(members, device, precision)
        shape = study.image_shape
        generator = ImageGenerator(
            shape, s.codes, device, lr=s.generator_lr, beta=s.beta, output=s.output, precision=precision
        )
        generator.begin(ctx.streams.torch("generator", round=ctx.round), "uniform")
        if GENERATOR in state.groups:
            generator.restore(state.groups[GENERATOR])

        def make(codes: Tensor) -> Tensor:
            logits, activity = answers(teachers, generator.images(codes))
            loss = self.loss(logits, activity)
            generator.step(loss)
            return loss.detach()

        def distil(codes: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                pixels = generator.images(codes)
            taught = teachers.logits(pixels)
            student.step(distillation(taught, student.logits(pixels), s.temperature))
            return pixels, taught

        making, lesson = Replay(make, device), Replay(distil, device)
        self.trail = trail = trail_of_epochs(study.classes, s.epochs, state)
        taken = state.facts.get("midway", {}).get("turns", 0)  # of the epoch that was stopped
        for epoch in range(begun, s.epochs):
            draw = ctx.streams.torch("synthesis", round=ctx.round, index=epoch)
            student.set_rate(self.rate(epoch))
            with ctx.progress.task("turns", s.turns, taken) as advance:
                for turn in range(s.turns):
                    drawn = torch.randn((1 + s.kd_steps, s.batch, s.codes), generator=draw)
                    if turn < taken:
                        continue
                    codes = drawn.to(device)
                    with self.watch.time("synthesis", 1):
                        loss = making(codes[0])
                    with self.watch.time("distillation", s.kd_steps):
                        for batch in codes[1:]:
                            pixels, taught = lesson(batch)
                    advance()
                    if turn + 1 < s.turns and ctx.due():
                        yield Midway({GENERATOR: generator.state()}, {"turns": turn + 1})
            taken = 0
            require_finite(loss)
            trail.see(epoch, one_of_each(pixels, taught.argmax(dim=1).tolist(), len(study.classes)))
            yield epoch, {GENERATOR: generator.state()}

    def loss(self, logits: Tensor, activity: Tensor) -> Tensor:
        """L_Total of the teachers' mean logits and of how active their features are."""
        s = self.settings
        sure = F.cross_entropy(logits, logits.argmax(dim=1))
        loss: Tensor = sure * s.label_weight + imbalance(logits) * s.balance_weight - activity * s.activation_weight
        return loss


def imbalance(logits: Tensor) -> Tensor:
    """L_ie: Σ p̄ ln p̄ of the mean probabilities over the batch, from −ln C where all classes are alike up to 0.

    A class that never appears has gradient zero, not infinity.
    """
    shares = logits.softmax(dim=1).mean(dim=0).clamp_min(torch.finfo(logits.dtype).tiny)
    return (shares * shares.log()).sum()


def answers(teachers: Teachers, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean logits, and the mean over sites of mean |features|; differentiable in the pixels."""
    found = outputs(teachers, pixels)
    logits = torch.stack([logits for _, logits in found]).mean(dim=0)
    return logits, torch.stack([features.abs().mean() for features, _ in found]).mean()
