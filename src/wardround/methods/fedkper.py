"""`fedkper`: Fowler and AlRegib, FedKPer: Tackling Generalization and Personalization in Medical FL, ICIP 2026.

(arXiv 2605.00698.) At the site, knowledge personalisation (Eq. 3): ℓ = CE(q_k, y) + λ·KD(q_g, q_k), with q_g what the
received model says of an image. It is a teacher trusted as far as it is right here: λ = 1 / CE(q_g, y), at most 10. At
the coordinator, models are not weighed by images but by a score (Eq. 6), p̄_k = A_k·(ε + d_k): A_k is the accuracy of
the trained model on the site's own training images, d_k the entropy of their labels over that of equal shares (Eq. 4
and 5). Only the product travels: no count, no accuracy.

Paper and public code (olivesgatech/FedKPer) differ; `profile` chooses:

              `paper`                                      `code`
    ε         1e-12 everywhere                             1e-12 in the entropy, 1e-6 in the score
    clipping  the gradient's norm at most 5                none

Both read the same here, after the code where the paper is silent: KD is T²·KL(q_g ‖ q_k) averaged over the batch at
temperature T = 1; λ is of each mini-batch; A_k is taken after training in evaluation mode (the code rounds it to four
digits, we do not). d_k is kept in 0 to 1 as in the code: as printed, a site with one of two classes would get a
negative weight. `train.clip_norm`, where it is set, wins over the profile.

What we add: `lambda_over`, the images over which the teacher's cross-entropy is averaged: each `batch`, the `epoch` so
far, or once all the images of the `site` (a whole epoch would be that again, the teacher being frozen; it costs one
more pass). Where every score of a round is 0 or not a number all sites count alike, and a note says so: the code would
turn to the sizes, which do not travel here, and divides 0 by 0 where all are 0.

The paper's Figure 4: `knowledge = false` trains by plain cross-entropy and does not clip ("Agg Only"); `score = false`
weighs by images ("KD Only"), and then the number of images travels in place of the score. Both off is FedAvg bit for
bit. Batch norm (the paper's network has none): parameters and running statistics are averaged with the score's
weights, counters take the largest; the teacher answers with its running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.data.imageset import ImageSet
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group
from wardround.learn.distillation import distillation
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Fitted, Objective, Step, Teacher
from wardround.learn.trainer import batch_bounds
from wardround.methods.base import Context
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit, average, told_weight
from wardround.models import Weights, spec_layout
from wardround.settings import Frozen, Positive
from wardround.study import Study

SCORE = "score"
SCORE_GROUP = Group(
    SCORE,
    "one number from 0 to 1: the share of its own training images that the site's model gets right, times how evenly "
    "their labels are spread over the classes; near 0 it says that the site holds almost one class alone, or that its "
    "model fits almost none of its images; once the model fits them all, it is the evenness of the labels itself",
    8,
    {"score": ((), "float64")},
)
EPSILON = 1e-12
CODE_EPSILON = 1e-6
PAPER_CLIP = 5.0


class FedKPer(Averaging):
    """A teacher trusted as far as it is right, and an average weighed by a score."""

    name = "fedkper"
    paper = "Fowler and AlRegib, ICIP 2026"
    summary = "distil from the received model as far as it is right here, weigh sites by fit and label diversity"

    class Settings(Frozen):
        """`cap` is the largest λ; `knowledge` and `score` are the two components."""

        profile: Literal["paper", "code"] = "paper"
        knowledge: bool = True
        score: bool = True
        cap: Positive = 10.0
        lambda_over: Literal["batch", "epoch", "site"] = "batch"
        temperature: Positive = 1.0

    # At the site ------------------------------------------------------------------------------------------------------

    def teachers(self, visit: Visit) -> tuple[Teacher, ...]:
        """The received model; what it says of each image is computed once."""
        return (Teacher(visit.ctx.study.spec(visit.site.name), visit.received),) if self.settings.knowledge else ()

    def objective(self, visit: Visit) -> Objective:
        """Eq. 3, or plain cross-entropy."""
        if not self.settings.knowledge:
            return Objective()
        epoch = _images_of_an_epoch(visit) if self.settings.lambda_over == "epoch" else None
        known = None
        if self.settings.lambda_over == "site":
            known = F.cross_entropy(*_answers(visit, visit.received, visit.site.train))
        return KnowledgePersonalisation(self.settings.cap, self.settings.temperature, epoch, known)

    def fit(self, visit: Visit, start: Weights) -> Fit:
        """The template's, with the paper's clipping."""
        fit = super().fit(visit, start)
        clips = self.settings.knowledge and self.settings.profile == "paper" and fit.recipe.clip_norm is None
        return replace(fit, recipe=replace(fit.recipe, clip_norm=PAPER_CLIP)) if clips else fit

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """One score; without it, what FedAvg sends."""
        return (SCORE_GROUP,) if self.settings.score else super().more_up_groups(study)

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """Eq. 6; 0 where the site was too small to train."""
        if not self.settings.score:
            return super().more_up(visit, fit, fitted)
        value = 0.0
        if fitted.trained_on:
            epsilon = EPSILON if self.settings.profile == "paper" else CODE_EPSILON
            value = own_accuracy(visit, fit, fitted.weights) * (epsilon + diversity(visit.site.train.counts()))
        return {SCORE: {"score": torch.tensor(value, dtype=torch.float64)}}

    # At the coordinator -----------------------------------------------------------------------------------------------

    def weigh(self, answer: Bundle) -> float:
        """The score; one that is not a positive number counts as 0."""
        if not self.settings.score:
            return super().weigh(answer)
        return told_weight(answer.group(SCORE)["score"])

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """The mean weighed by scores, or the plain one where no score says anything."""
        if not self.settings.score or any(self.weigh(answer) > 0 for answer in answers.values()):
            yield from super().absorb(ctx, state, answers)
            return
        ctx.note(f"no site has a score above 0 in round {ctx.round + 1}: all that answered count alike in its average")
        averaged = average(answers, lambda answer: 1.0, ctx.note)
        yield State({**state.groups, "model": {**state.groups["model"], **averaged}}, state.facts)


# Knowledge personalisation --------------------------------------------------------------------------------------------


class KnowledgePersonalisation(Objective):
    """Eq. 3: CE(q_k, y) + λ·KD(q_g, q_k) with λ = min(1 / CE(q_g, y), cap), which is no part of what is minimised.

    The teacher's CE is the batch's; with `epoch` (its number of images) the mean over the epoch so far; with `known`,
    that number. All in place on tensors, so that a step may be captured in a graph.
    """

    def __init__(self, cap: float, temperature: float, epoch: int | None = None, known: Tensor | None = None) -> None:
        self.cap, self.temperature, self.epoch, self.known = cap, temperature, epoch, known
        self.total, self.seen = torch.zeros(()), torch.zeros(())

    def to(self, device: str) -> None:
        """What λ is made of moves with the fit."""
        self.total, self.seen = self.total.to(device), self.seen.to(device)
        self.known = self.known if self.known is None else self.known.to(device)

    def state(self) -> dict[str, Tensor]:
        """The running mean."""
        return {"total": self.total, "seen": self.seen}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """In place: a captured step adds to these very tensors."""
        self.total.copy_(state["total"])
        self.seen.copy_(state["seen"])

    def loss(self, step: Step) -> Tensor:
        """One mini-batch."""
        ((_, teacher),) = step.teachers
        trust = self._teacher_loss(teacher, step.labels).reciprocal().clamp(max=self.cap)  # 1/0 is infinite, and capped
        own = F.cross_entropy(step.outputs.logits, step.labels)
        return own + trust * distillation(teacher, step.outputs.logits, self.temperature)

    def _teacher_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.known is not None:
            return self.known
        loss = F.cross_entropy(logits, labels)
        if self.epoch is None:
            return loss
        going_on = self.seen < self.epoch
        self.total.mul_(going_on).add_(loss, alpha=len(labels))
        self.seen.mul_(going_on).add_(len(labels))
        return self.total / self.seen


def _images_of_an_epoch(visit: Visit) -> int:
    batch_norm = spec_layout(visit.ctx.study.spec(visit.site.name)).has_batch_norm
    bounds = batch_bounds(len(visit.site.train), visit.ctx.study.settings.train.batch, batch_norm)
    return sum(end - start for start, end in bounds)


def _answers(visit: Visit, weights: Weights, images: ImageSet) -> tuple[Tensor, Tensor]:
    """What a network of the site says of some images, and their labels, both on the device."""
    device, precision = visit.ctx.device, visit.ctx.study.settings.train.precision
    spec = visit.ctx.study.spec(visit.site.name)
    logits = network_outputs(spec, weights, images.images, device.torch, precision, device.workers).logits
    return logits, images.labels.to(logits.device)


# The score ------------------------------------------------------------------------------------------------------------


def own_accuracy(visit: Visit, fit: Fit, weights: Weights) -> float:
    """A_k: the share of the site's own training images that its trained model gets right."""
    logits, labels = _answers(visit, weights, fit.data)
    return int((logits.argmax(dim=1) == labels).sum()) / len(labels)


def diversity(counts: Tensor) -> float:
    """d_k: the entropy of the labels over log C, C being all classes of the study (Eq. 4 and 5), kept in 0 to 1."""
    shares = counts.double() / (counts.sum().double() + EPSILON)
    entropy = -float((shares * (shares + EPSILON).log()).sum())
    return min(max(entropy / (math.log(len(counts)) + EPSILON), 0.0), 1.0)
