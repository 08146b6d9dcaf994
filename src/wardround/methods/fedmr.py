"""`fedmr`: Fan et al., Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping, TMLR 2023.

A site with few classes lets their features collapse into few directions, and spread into the room of the classes that
it does not have. Two terms beside cross-entropy reshape them: F_k + μ₁·intra + μ₂·inter.

Intra: the features of a class should not be correlated. Per class c in the batch, R_c is the correlation matrix of the
d features over its n_c images; the term is the mean over the classes with n_c ≥ 2 of the mean squared entry of R_c off
the diagonal. As XᵀX and XXᵀ have the same norm, it is computed from n × n products of images, and no d × d matrix is
made. A class with one image in the batch contributes nothing; where all have one, the term is 0 (a step at which the
public code crashes).

Inter: the feature z of an image of class y should be nearer to the global prototype g_y than to those of the other
classes: the mean over images and classes c ≠ y of max(0, m + ‖z − g_y‖ − ‖z − g_c‖). After training a site sends the
mean feature of each class it has, and its counts; prototypes are their means weighted by counts over the round's
participants. A class that none of them has keeps its prototype; one that nobody ever had has none, and is left out of
the term. In the first round there are no prototypes, and no such term.

What the paper leaves open, and what is here:
- The public code holds the intra term only, so the form of the inter term is ours, made after the paper's description
  of it (a proper margin between the classes); with m = 0, the default, it acts on features that lie nearer to another
  class's prototype than to their own.
- The public code does not divide XᵀX by n_c − 1, so that its weight (0.01 in the code, 1e-5 in its README) counts for
  about n_c times as much: 0.3 and 3e-4 for a batch of 64 out of two classes. μ₁ = μ₂ = 0.1 is our choice.
- Variances have batch norm's 1e-5 added to them, since a dead feature has none.
- Class means are taken in evaluation mode, over all training images. A site too small to train sends none.
- Batch norm: as in FedAvg.

At μ₂ = 0 nothing more than FedAvg's travels; at μ₁ = μ₂ = 0 this is FedAvg bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.exchange.bundle import LABEL_COUNTS, Bundle
from wardround.exchange.payload import Group
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Fitted, Objective, Step
from wardround.learn.prototypes import Prototypes, class_means, weighted_mean
from wardround.methods.base import Context
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.models import spec_layout
from wardround.settings import Frozen, NotNegative
from wardround.study import Study

PROTOTYPES = "prototypes"
EPSILON = 1e-5


class FedMR(Averaging):
    """FedAvg with features that are decorrelated within a class and kept near the class's global prototype."""

    name = "fedmr"
    paper = "Fan et al., TMLR 2023"
    summary = "FedAvg with decorrelated features within a class and a margin to other classes' prototypes"

    class Settings(Frozen):
        """`mu1` and `mu2` weigh the intra and the inter term; `margin` is m."""

        mu1: NotNegative = 0.1
        mu2: NotNegative = 0.1
        margin: NotNegative = 0.0

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """The number of images, and mean features and counts by class."""
        size = super().more_up_groups(study)
        if self.settings.mu2 == 0:
            return size
        what = "this site's mean feature vector of each class it has: an image's own where it has one of that class"
        means = _by_class(study, what)
        words, counts = "how many images of each class the site trained on", ((len(study.classes),), "int64")
        return (*size, means, Group(LABEL_COUNTS, words, 8 * len(study.classes), {"counts": counts}, occasional=True))

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """Of the trained network, the mean feature of each class that the site has; nothing without training."""
        found = super().more_up(visit, fit, fitted)
        if self.settings.mu2 == 0 or fitted.trained_on == 0:
            return found
        device, data = visit.ctx.device.torch, visit.site.train
        features = network_outputs(fit.spec, fitted.weights, data.images, device, fit.recipe.precision).features
        means = class_means(features, data.labels.to(device), len(data.classes)).to("cpu")
        return {**found, PROTOTYPES: means.tensors(), LABEL_COUNTS: {"counts": data.counts().cpu()}}

    def more_down_groups(self, study: Study) -> tuple[Group, ...]:
        """The global prototypes, once there are some."""
        what = "the mean feature vector of each class over all sites"
        return (_by_class(study, what),) if self.settings.mu2 > 0 else ()

    def more_down(self, ctx: Context, site: str, state: State) -> dict[str, dict[str, Tensor]]:
        """The same prototypes to every site."""
        return {PROTOTYPES: dict(state.groups.get(PROTOTYPES, {}))}

    def objective(self, visit: Visit) -> Objective:
        """Cross-entropy and both terms, or plain cross-entropy where neither has weight."""
        if self.settings.mu1 == self.settings.mu2 == 0:
            return Objective()
        prototypes = _prototypes(visit.ctx.study, visit.request.group(PROTOTYPES))
        return Reshaped(self.settings.mu1, self.settings.mu2, self.settings.margin, prototypes)

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """FedAvg's mean, and the prototypes of the classes that this round's sites have anew."""
        for averaged in super().absorb(ctx, state, answers):
            if self.settings.mu2 == 0:
                yield averaged
                continue
            before = _prototypes(ctx.study, state.groups.get(PROTOTYPES, {}))
            new = mean_prototypes(answers)
            after = before if new is None else before.moved(new, 1.0)
            yield State({**averaged.groups, PROTOTYPES: after.tensors()}, averaged.facts)


class Reshaped(Objective):
    """Cross-entropy + μ₁·intra + μ₂·inter."""

    def __init__(self, mu1: float, mu2: float, margin: float, prototypes: Prototypes) -> None:
        self.mu1, self.mu2, self.margin, self.prototypes = mu1, mu2, margin, prototypes

    def to(self, device: str) -> None:
        """The prototypes move with the fit."""
        self.prototypes = self.prototypes.to(device)

    def loss(self, step: Step) -> Tensor:
        """The three terms; a term without weight is not computed."""
        features, labels = step.outputs.features, step.labels
        loss = super().loss(step)
        if self.mu1 > 0:
            loss = loss + self.mu1 * intra(features, labels, len(self.prototypes.known))
        if self.mu2 > 0:
            loss = loss + self.mu2 * inter(features, labels, self.prototypes, self.margin)
        return loss


def intra(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean over classes with two images or more of the mean squared correlation between two features.

    With X the standardised features of a class, divided by √(n_c − 1): Σ_{i≠j} R_ij² = ‖XᵀX‖² − Σ_i R_ii², and
    ‖XᵀX‖ = ‖XXᵀ‖.
    """
    size = features.shape[1]
    member = members(labels, classes).to(features.dtype)
    counts = member.sum(dim=0)
    freedom = (counts - 1).clamp_min(1)
    centred = features - member @ (member.T @ features / counts.clamp_min(1).unsqueeze(1))
    variances = member.T @ centred.square() / freedom.unsqueeze(1)
    standard = centred / (member @ ((variances + EPSILON) * freedom.unsqueeze(1))).sqrt()
    products = (standard @ standard.T).square() * (member @ member.T)
    whole = member.T @ products.sum(dim=1)
    diagonal = (member.T @ standard.square()).square().sum(dim=1)
    several = counts > 1
    return ((whole - diagonal) * several).sum() / (max(1, size * (size - 1)) * several.sum().clamp_min(1))


def inter(features: Tensor, labels: Tensor, prototypes: Prototypes, margin: float) -> Tensor:
    """The mean of max(0, m + ‖z − g_y‖ − ‖z − g_c‖) over images and other classes, where both have a prototype."""
    known = prototypes.known
    gaps = features.unsqueeze(1) - prototypes.means
    distances = gaps.square().sum(dim=2).clamp_min(1e-12).sqrt()  # at distance 0 the root has no gradient
    hinge = F.relu(margin + distances.gather(1, labels.unsqueeze(1)) - distances)
    own = members(labels, len(known))
    counted = (own & known).any(dim=1, keepdim=True) & known & ~own
    return (hinge * counted).sum() / counted.sum().clamp_min(1)


def members(labels: Tensor, classes: int) -> Tensor:
    """Which image belongs to which class, `(n, classes)`; by comparison, as a captured step cannot look at labels."""
    return labels.unsqueeze(1) == torch.arange(classes, device=labels.device)


def mean_prototypes(answers: Mapping[str, Bundle]) -> Prototypes | None:
    """Σ_k n_kc·z̄_kc / Σ_k n_kc for every class that a site has, in the order of site names.

    Means without counts, or counts without means, say nothing; None where no site says anything.
    """
    told = [
        (Prototypes.of(answer.group(PROTOTYPES)), answer.group(LABEL_COUNTS)["counts"])
        for answer in (answers[site] for site in sorted(answers))
        if {PROTOTYPES, LABEL_COUNTS} <= answer.groups.keys()
    ]
    return weighted_mean(told) if told else None


def _by_class(study: Study, what: str) -> Group:
    """A feature vector for every class, and for which classes it means something."""
    classes, width = len(study.classes), spec_layout(study.common_spec).feature_size
    tensors = {"means": ((classes, width), "float32"), "known": ((classes,), "bool")}
    return Group(PROTOTYPES, what, classes * (4 * width + 1), tensors, occasional=True)


def _prototypes(study: Study, tensors: Mapping[str, Tensor]) -> Prototypes:
    """What was sent or kept; none before anything was."""
    if tensors:
        return Prototypes.of(tensors)
    return Prototypes.none(len(study.classes), spec_layout(study.common_spec).feature_size)
