"""`coboosting`: Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting, ICLR 2024.

Images and the ensemble improve each other. The ensemble answers A(x) = Σ_k w_k f_k(x) / Σ_k w_k, at first with
w_k = 1/n. Each epoch:

1. A generator begins anew and seeks hard images: it goes down mean (1 − p_y)^h · CE(A(x), y), in which p_y, the
   probability of the label, is not differentiated, less the mean of T²·KL(A(x) ‖ f_S(x)) to the student at T = 3.
2. Better weights: on each batch of the pool so far, w ← clip(w − μ·d^epoch·sign(∂CE(A(x), y)/∂w), 0, 1). They are not
   kept on the simplex; A divides by their sum.
3. The images of lowest loss join the pool, and the student learns A on one pass over it, each image moved on the fly
   where the ensemble's answers change fastest in a random direction u ~ U(−1, 1): x + η·sign ∇⟨u, softmax(A(x)/4)⟩
   (output diversified sampling, Tashiro et al., NeurIPS 2020).

What the paper leaves open, and its public code answers: h = 1, 30 generator steps of Adam at 1e-3, gradients of both
networks clipped to a norm of 10, μ = 0.01 (the paper: 0.1/n, and its runs have n = 10), d = 0.99, η = 8/255 in the
range -1..1, distillation at temperature 4 by SGD at 0.01 with weight decay 1e-4 and a cosine schedule, 200 epochs,
batches of 128, no batch-norm term (`bn_weight = 0`; averaged over sites where it is set). In the first epoch the pool
is empty, so no weights are sought. Weights that would all be zero stay as they were. Crops are as in `dense`; the code
augments CIFAR's pools only (`augment = "none"` for others). `kd_steps` and `search_steps` cap the passes over the
growing pool.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.learn.distillation import distillation
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay
from wardround.methods.base import Context
from wardround.methods.dense import MAKER, POOL, check_statistics
from wardround.methods.distilled import Distilled, Epochs, Groups, Midway
from wardround.methods.parts import Parts
from wardround.methods.state import State
from wardround.settings import Count, Frozen, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis.gallery import one_of_each, trail_of_epochs
from wardround.synthesis.generator import BatchMaker, ImageGenerator, settled_logits, view
from wardround.synthesis.pool import Augmentation, Pool
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Teachers, View

WEIGHTS = "ensemble_weights"
MADE = "made"  # an epoch's images, until they join the pool
ADVERSARIAL_TEMPERATURE = 3.0
DIVERSITY_TEMPERATURE = 4.0
STEP = 1 / 255  # the unit of `ods`


class CoBoosting(Distilled):
    """Hard images from the ensemble, a better ensemble from hard images, one student from both."""

    name = "coboosting"
    paper = "Dai et al., ICLR 2024"
    summary = "one student distilled on hard images of a generator, from an ensemble whose weights learn from them"

    class Settings(Frozen):
        """The generator's, the ensemble's, then the student's."""

        epochs: Count = 200
        shots: Count | None = None  # exchanges with the sites; None: as many as `rounds` says where set, else one
        batch: Annotated[int, Field(ge=2)] = 128
        codes: Count = 256
        generator_steps: Count = 30
        generator_lr: Positive = 1e-3
        label_weight: NotNegative = 1.0
        hardness: NotNegative = 1.0  # h
        adversarial_weight: NotNegative = 1.0
        bn_weight: NotNegative = 0.0
        clip_norm: Positive = 10.0  # of the generator's gradient and of the student's
        weight_step: NotNegative = 0.01  # μ; 0: the weights stay equal
        weight_decline: Annotated[float, Field(gt=0, le=1)] = 0.99  # d
        search_steps: Annotated[int, Field(ge=0)] = 0  # of one epoch at most; 0: a whole pass
        ods: NotNegative = 8.0  # η, in 255ths
        augment: Augmentation = "crop"
        kd_steps: Annotated[int, Field(ge=0)] = 0
        temperature: Positive = 4.0
        lr: Positive = 0.01  # falls to zero along a cosine
        momentum: Share = 0.9
        weight_decay: NotNegative = 1e-4

    def check(self, study: Study) -> None:
        """Batch-norm statistics must be there if they are to be matched."""
        check_statistics(self.name, study, self.settings.bn_weight)
        self.check_shots(study)

    def rate(self, epoch: int) -> float:
        """Half a cosine over the epochs."""
        return float(self.settings.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.settings.epochs)))

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """Hard images, weights, distillation."""
        study, s, device = ctx.study, self.settings, ctx.device.torch
        precision, classes = study.settings.train.precision, len(study.classes)
        shape = study.image_shape
        work = _Work(self, Teachers(members, device, precision), student, Pool(s.epochs * s.batch, shape, device))
        work.restore(state)
        generator = ImageGenerator(
            shape, s.codes, device, lr=s.generator_lr, learned=s.batch, clip=s.clip_norm, precision=precision
        )
        maker = BatchMaker(generator, work.generator_loss)
        search, lesson = Replay(work.search, device), Replay(work.distil, device)
        self.trail = trail = trail_of_epochs(study.classes, s.epochs, state)
        parts = Parts(ctx, self.watch, state.facts.get("midway"))
        for epoch in range(begun, s.epochs):
            draw = ctx.streams.torch("synthesis", round=ctx.round, index=epoch)
            drawn = torch.randint(classes, (s.batch,), generator=draw)
            labels = drawn.to(device)
            if not parts.done.keys() - {"synthesis"}:
                maker.begin(draw)
                if parts.done:
                    maker.restore(state.groups[MAKER])
                for _ in parts.run_all("synthesis", maker.step, [(labels,)] * s.generator_steps):
                    yield Midway({**work.groups(), MAKER: maker.state()}, dict(parts.done))
                images = maker.made()
                trail.see(epoch, one_of_each(images, drawn.tolist(), classes))
            elif MADE in state.groups:
                images = state.groups[MADE]["images"].to(device)
            if "distillation" not in parts.done:  # else this epoch was stopped after its images had joined the pool
                work.reach.fill_(s.weight_step * s.weight_decline**epoch)
                pool_order = ctx.streams.torch("weights", round=ctx.round, index=epoch)
                searches = work.pool.one_pass(s.batch, s.search_steps, s.augment, pool_order)
                for _ in parts.run_all("weighting", search, searches):
                    yield Midway({**work.groups(), MADE: {"images": images}}, dict(parts.done))
                work.pool.add(images, labels)
            order = ctx.streams.torch("distillation", round=ctx.round, index=epoch)
            lessons = work.pool.one_pass(s.batch, s.kd_steps, s.augment, order)
            directions = torch.rand((len(lessons), s.batch, classes), generator=order).mul_(2).sub_(1).to(device)
            student.set_rate(self.rate(epoch))
            inputs = [(*taken, direction) for taken, direction in zip(lessons, directions, strict=True)]
            for _ in parts.run_all("distillation", lesson, inputs):
                yield Midway(work.groups(), dict(parts.done))
            parts.done = {}
            yield epoch, work.groups()

    def loss(self, seen: View, weights: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """Step 1 of images that the teachers have viewed and the student has answered."""
        s, logits = self.settings, weighted(seen.logits, weights)
        loss: Tensor = hard_cross_entropy(logits, labels, s.hardness) * s.label_weight
        loss = loss - distillation(logits, student, ADVERSARIAL_TEMPERATURE) * s.adversarial_weight
        return loss + torch.stack(seen.gaps).mean() * s.bn_weight if seen.gaps else loss


class _Work:
    """What an epoch's steps work on, all of it changed in place."""

    def __init__(self, method: CoBoosting, teachers: Teachers, student: Student, pool: Pool) -> None:
        self.method, self.settings = method, method.settings
        self.teachers, self.student, self.pool = teachers, student, pool
        count, device = len(teachers.nets), pool.labels.device
        self.weights = torch.full((count,), 1 / count, device=device)
        self.reach = torch.zeros((), device=device)  # how far one step of the search moves a weight

    def restore(self, state: State) -> None:
        """Go on from a state; from an empty one, begin."""
        self.pool.restore(state.groups.get(POOL, {}))
        if WEIGHTS in state.groups:
            self.weights.copy_(state.groups[WEIGHTS]["weights"])

    def groups(self) -> Groups:
        """For a state, beside the student."""
        return {POOL: self.pool.state(), WEIGHTS: {"weights": self.weights.clone()}}

    def generator_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Step 1."""
        seen = view(self.teachers, images, self.settings.bn_weight > 0)
        return self.method.loss(seen, self.weights, settled_logits(self.student, images), labels)

    def search(self, index: Tensor, crops: Tensor) -> None:
        """Step 2 on one batch."""
        with torch.no_grad():
            logits = view(self.teachers, self.pool.pixels(index, crops), statistics=False).logits
        self.weights.copy_(better_weights(self.weights, logits, self.pool.labels[index], self.reach))

    def distil(self, index: Tensor, crops: Tensor, direction: Tensor) -> None:
        """Step 3 on one batch."""
        pixels = self.pool.pixels(index, crops).requires_grad_(True)
        answer = weighted(view(self.teachers, pixels, statistics=False).logits, self.weights)
        moved = diversified(pixels, answer, direction, self.settings.ods * STEP)
        with torch.no_grad():
            target = weighted(view(self.teachers, moved, statistics=False).logits, self.weights)
        loss = distillation(target, self.student.logits(moved), self.settings.temperature)
        self.student.step(loss, self.settings.clip_norm)


def weighted(logits: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """A(x)."""
    return (torch.stack(logits) * (weights / weights.sum()).view(-1, 1, 1)).sum(dim=0)


def hard_cross_entropy(logits: Tensor, labels: Tensor, hardness: float) -> Tensor:
    """The mean over the batch of (1 − p_y)^h · CE: images of which the ensemble is already sure count less."""
    surprise = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-surprise.detach()).exp()).pow(hardness) * surprise).mean()


def better_weights(weights: Tensor, logits: tuple[Tensor, ...], labels: Tensor, reach: Tensor) -> Tensor:
    """One step against the sign of the cross-entropy's gradient, clipped to 0..1; none where no weight would be left.

    A does not change with the scale of w, so the exact gradient never pushes all weights down; a rounded one may.
    """
    free = weights.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(F.cross_entropy(weighted(logits, free), labels), free)
    found = (weights - reach * slope.sign()).clamp(0, 1)
    return torch.where(found.sum() > 0, found, weights)


def diversified(pixels: Tensor, answer: Tensor, direction: Tensor, distance: float) -> Tensor:
    """Images moved by ±`distance` in each value, so that the softened answer to them moves along `direction`."""
    along = (direction * (answer / DIVERSITY_TEMPERATURE).softmax(dim=1)).sum()
    (slope,) = torch.autograd.grad(along, pixels)
    return (pixels + distance * slope.sign()).detach()
