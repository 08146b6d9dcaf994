"""From a shared predictor to a site's own: the site's label prior, tempered, with its validation images as the judge.

Multiplying by the whole prior (t = 1) is right for a site whose next patients are like its last, and forgets what only
others have seen; t = 0 is the shared predictor. The smallest t at which the site loses nothing against its own model
keeps the most of the others. As it comes, what the shared predictor itself expects goes: (1 − t) of it stays, none from
t = 1 on. Where the shared predictor comes in several forms, that with the smallest t is taken. A handful of images
would find almost anything as good, so with fewer than `ENOUGH` of them t = 1 is tried first, and less only after more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.data.federation import Site
from wardround.learn.predictor import Member, Predictor
from wardround.methods.trust import log_shares

TEMPERS = torch.linspace(0, 3, 61, dtype=torch.float64)
OF_FEW = torch.cat([TEMPERS[TEMPERS >= 1], TEMPERS[TEMPERS < 1].flip(0)])  # in this order
SHARPER = torch.logspace(-1, 1, 41, base=4.0, dtype=torch.float64)  # 1/4 to 4, with 1 in the middle
BINS = 15
FAMILIAR, ENOUGH = 0.05, 20  # the share of right answers that may be called unfamiliar; images to fit anything to


class Offer(NamedTuple):
    """A form of the shared predictor, its scores on the site's validation images, and what is added to its name."""

    predictor: Predictor
    scores: Tensor
    how: str = ""

    def expects(self, t: float, log_prior: Tensor) -> Tensor:
        """The prior of this predictor with t of the site's: t·log π, and (1 − t)₊ of what it expected before."""
        before = self.predictor.log_prior
        return t * log_prior + (0.0 if before is None else max(0.0, 1 - t) * before.double())

    def tempered(self, t: float, log_prior: Tensor) -> Tensor:
        """The scores that it then has."""
        return self.scores + self.expects(t, log_prior) - self.expects(0.0, log_prior)


class Choice(NamedTuple):
    """A site's predictor, in words what was chosen and why, and the share of validation images it is right about."""

    predictor: Predictor
    words: str
    accuracy: float


@dataclass(frozen=True)
class Judge:
    """A site, a fixed temper or None, and whether probabilities are fitted to what is right.

    Of forms that need equally little of the prior `of_equals` takes the first, or the one that is most often right.
    """

    site: Site
    prior: float | None
    calibrate: bool
    of_equals: Literal["first", "right"] = "first"

    def choose(self, offers: Sequence[Offer], own: tuple[Member, Tensor] | None) -> Choice:
        """The best of the shared predictor with some of the site's prior, and the site's own model.

        `offers` are the forms that the shared predictor comes in, `own` the site's model and its logits.
        """
        labels, prior = self.site.val.labels.cpu(), log_shares(self.site.train.counts().cpu())
        bar = 0.0 if own is None else accuracy(own[1], labels)
        tempers = TEMPERS if len(labels) >= ENOUGH or len(self.site.train) == 0 else OF_FEW
        if self.prior is not None:
            tempers, enough = torch.tensor([self.prior], dtype=torch.float64), [(0, offers[0])]
        else:
            found = [(first_enough(offer, prior, labels, bar, tempers), offer) for offer in offers]
            enough = [(place, offer) for place, offer in found if place is not None]
        if not enough and own is not None:
            most = max(accuracy(o.tempered(t, prior), labels) for o in offers for t in tempers.tolist())
            words = "keeps its own model: the shared predictor, with whatever share of its prior, is right on "
            words += f"{most:.1%} at most, its own on more"
            return self.finished(Predictor(offers[0].predictor.classes, (own[0],)), own[1].double(), None, words)
        least = min(place for place, _ in enough)
        t = float(tempers[least])
        equals = [offer for place, offer in enough if place == least]
        offer = equals[0]
        if self.of_equals == "right":
            offer = max(equals, key=lambda each: accuracy(each.tempered(t, prior), labels))  # of equals the first
        why = "the least that is as good as its own model"
        if tempers is OF_FEW:
            why = "with so few validation images" if t == 1 else why if t > 1 else why.replace("least", "most")
        chosen, words = self._tempered(offer, t, why)
        return self.finished(chosen, offer.tempered(t, prior), own, f"takes {words}")

    def finished(self, chosen: Predictor, found: Tensor, own: tuple[Member, Tensor] | None, words: str) -> Choice:
        """What was chosen, calibrated and with a floor; `found` are its scores on the validation images."""
        labels = self.site.val.labels.cpu()
        right = accuracy(found, labels)
        words += f" ({right:.1%} of {len(labels)} validation image{'' if len(labels) == 1 else 's'}"
        words += f", its own model {accuracy(own[1], labels):.1%})" if own is not None else ")"
        if self.calibrate and len(labels) < ENOUGH:
            words += "; too few of them to calibrate on"
        elif self.calibrate:
            factor = best_factor(found, labels)
            before, after = (calibration_error(f * found, labels) for f in (1.0, factor))
            words += f"; calibration error {before:.1%} before, {after:.1%} after"
            chosen, found = sharpened(chosen, factor), factor * found
        familiar = chosen.familiarity(found)[found.argmax(dim=1) == labels]
        return Choice(replace(chosen, floor=lowest_familiar(familiar)), words, right)

    def unjudged(self, offer: Offer) -> tuple[Predictor, str]:
        """Of a site without validation images: the whole prior, or as much of it as was fixed."""
        t = float(len(self.site.train) > 0) if self.prior is None else self.prior
        found, words = self._tempered(offer, t, "as nothing can be measured")
        return found, f"has no validation images: it takes {words}"

    def _tempered(self, offer: Offer, t: float, why: str) -> tuple[Predictor, str]:
        """The shared predictor with t of the site's prior, in words; `why` is told where t was not set."""
        end = "" if self.prior is None else ", as set"
        if t == 0:
            return offer.predictor, f"the shared predictor{offer.how.rstrip(',') or ' as it is'}{end}"
        prior = offer.expects(t, log_shares(self.site.train.counts().cpu()))
        words = f"the shared predictor{offer.how} with its own prior, tempered by {t:.2f}{end or f', {why}'}"
        return replace(offer.predictor, log_prior=prior), words


def first_enough(offer: Offer, log_prior: Tensor, labels: Tensor, bar: float, tempers: Tensor) -> int | None:
    """The place of the first temper with which accuracy is not below the bar; None where there is none."""
    for place, t in enumerate(tempers.tolist()):
        if accuracy(offer.tempered(t, log_prior), labels) >= bar:
            return place
    return None


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """The share of right answers."""
    return float((scores.argmax(dim=1) == labels).double().mean())


def best_factor(scores: Tensor, labels: Tensor) -> float:
    """What to multiply scores with for the lowest mean negative log-likelihood; it never changes an answer."""
    losses = torch.stack([F.cross_entropy(factor * scores, labels) for factor in SHARPER])
    return float(SHARPER[int(losses.argmin())])


def sharpened(predictor: Predictor, factor: float) -> Predictor:
    """The same answers, with scores multiplied."""
    before = torch.tensor(1.0, dtype=torch.float64) if predictor.sharpness is None else predictor.sharpness
    prior = None if predictor.log_prior is None else predictor.log_prior * factor
    return replace(predictor, sharpness=before * factor, log_prior=prior)


def lowest_familiar(familiarity: Tensor) -> Tensor | None:
    """From where on an image is familiar, given how familiar those are that were answered right; None: too few of them.

    It is their `FAMILIAR` quantile: so many of them are called unfamiliar.
    """
    return torch.quantile(familiarity.double(), FAMILIAR) if len(familiarity) >= ENOUGH else None


def calibration_error(scores: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: over equal bins of confidence, the mean gap between it and the share of right."""
    sure, answers = scores.softmax(dim=1).max(dim=1)
    right = (answers == labels).double()
    place = (sure * bins).ceil().long().clamp(1, bins) - 1
    sums = torch.zeros(2, bins, dtype=torch.float64).index_add_(1, place, torch.stack([sure.double(), right]))
    return float((sums[0] - sums[1]).abs().sum() / len(labels))
