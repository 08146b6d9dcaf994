"""From a shared predictor to a site's own: the site's label prior, tempered, with its validation images as the judge.

Multiplying by the whole prior (t = 1) is right for a site whose next patients are like its last, and forgets what only
others have seen; t = 0 is the shared predictor. A site begins with a little of its prior. Where the predictor is then
less often right than the site's own model, it is usually for a class or two that it names too readily: the scores of
these are lowered, no further than it must be (`lowering`) nor than three times the prior would, and all others stay as
they are. Only where that is not enough, t rises, for all classes. As the prior comes, what the shared predictor itself
expects goes: (1 − t) of it stays, none from t = 1 on. Where the shared predictor comes in several forms, the one that
needs the least is taken; where that is much, other forms are tried (`otherwise`), as they are before a site keeps its
own model. A handful of images would find almost anything as good, so with fewer than `ENOUGH` of them a site begins
with t = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.data.federation import Site
from wardround.learn.predictor import Member, Predictor
from wardround.measure import calibration_gap
from wardround.methods.trust import log_shares

TEMPER_STEP, MOST_TEMPER = 0.25, 3.0
NUDGE = 1e-3  # by which a score that is lowered ends below the next one
SURE = NUDGE / 4  # the lead of a right answer that single precision cannot lose
SHARPER = torch.logspace(-1, 1, 41, base=4.0, dtype=torch.float64)  # 1/4 to 4, with 1 in the middle
LITTLE = 0.3  # of how far the first class is above the mean: what a form may need before others are tried
ROUNDING = 1e-6  # of a familiarity, which is worked out in single precision
FAMILIAR, ENOUGH = 0.05, 20  # the share of right answers that may be called unfamiliar; images to fit anything to


class Offer(NamedTuple):
    """A form of the shared predictor, its scores on the site's validation images, and what is added to its name.

    `familiar` is how familiar these images are to it; None: it cannot tell.
    """

    predictor: Predictor
    scores: Tensor
    how: str = ""
    familiar: Tensor | None = None

    def expects(self, t: float, log_prior: Tensor) -> Tensor:
        """The prior of this predictor with t of the site's: t·log π, and (1 − t)₊ of what it expected before."""
        before = self.predictor.log_prior
        return t * log_prior + (0.0 if before is None else max(0.0, 1 - t) * before.double())

    def tempered(self, t: float, log_prior: Tensor) -> Tensor:
        """The scores that it then has."""
        return self.scores + self.expects(t, log_prior) - self.expects(0.0, log_prior)


class Trial(NamedTuple):
    """A form with t of the site's prior and what is taken off each class's score, and how many answers are right."""

    offer: Offer
    t: float
    taken: Tensor
    right: int

    @property
    def needs(self) -> tuple[float, int]:
        """Of forms with one t the smallest is the best: the less is taken off, and of equals the more are right."""
        return float(self.taken.sum()), -self.right


class Choice(NamedTuple):
    """A site's predictor, in words what was chosen and why, and the share of validation images it is right about."""

    predictor: Predictor
    words: str
    accuracy: float


@dataclass(frozen=True)
class Judge:
    """A site, a fixed temper or None, whether probabilities are fitted to what is right, and the least temper."""

    site: Site
    prior: float | None
    calibrate: bool
    least: float = 0.0

    def choose(
        self, offers: Sequence[Offer], own: tuple[Member, Tensor] | None, otherwise: Sequence[Offer] = ()
    ) -> Choice:
        """The best of the shared predictor with some of the site's prior, and the site's own model.

        `offers` are the forms that the shared predictor comes in; `otherwise` are tried where none of these is as good
        as the site's own model, or only where much is taken off. `own` is that model and its logits.
        """
        labels = self.site.val.labels.cpu()
        if self.prior is not None:
            trial = self._tried(offers[0], self.prior, 0)
        else:
            needed = 0 if own is None else right_answers(own[1], labels)
            trial = self._least(offers, needed)
            if otherwise and self._lacks(trial, needed) > (0, LITTLE):
                others = self._least(otherwise, needed)
                trial = min(trial, others, key=lambda each: self._lacks(each, needed))
            if trial.right < needed and own is not None:
                words = "keeps its own model: the shared predictor, whatever the site expects, is right on "
                words += f"{trial.right / len(labels):.1%} at most, its own on more"
                alone = Predictor(offers[0].predictor.classes, (own[0],))
                return self._finished(alone, own[1].double(), alone.familiarity([own[1]]), words)
        chosen, words = self._tempered(trial.offer, trial.t, self._why(trial), trial.taken)
        found = trial.offer.tempered(trial.t, self._log_prior()) - trial.taken
        words += "; it has no model of its own to be held against" if own is None and self.prior is None else ""
        return self._finished(chosen, found, trial.offer.familiar, f"takes {words}", own)

    def _least(self, offers: Sequence[Offer], needed: int) -> Trial:
        """With the smallest temper that is enough, the form that needs the least; where none is, what comes nearest."""
        tried: list[Trial] = []
        t = self._begins_with()
        while t <= MOST_TEMPER:
            found = [self._tried(offer, t, needed) for offer in offers]
            enough = [each for each in found if each.right >= needed]
            if enough:
                return min(enough, key=lambda each: each.needs)
            tried += found
            t += TEMPER_STEP
        return max(tried, key=lambda each: each.right)

    def _lacks(self, trial: Trial, needed: int) -> tuple[int, float]:
        """Of any two the smaller is the better: right answers that are missing, and how far scores were moved.

        That is what was taken off all classes, by the prior, too, in units of how far the first class is above the
        mean of all, so that networks and panels, whose scores differ in size, may be compared.
        """
        log_prior, scores = self._log_prior(), trial.offer.scores
        moved = trial.taken + (trial.t - self._begins_with()) * (log_prior.max() - log_prior)
        above = (scores.amax(dim=1) - scores.mean(dim=1)).mean().clamp_min(NUDGE)
        return max(0, needed - trial.right), float(moved.sum() / above)

    def _begins_with(self) -> float:
        """Without training images there is no prior; a handful of validation images could not tell it from less."""
        if len(self.site.train) == 0:
            return 0.0
        return self.least if len(self.site.val) >= ENOUGH else 1.0

    def _tried(self, offer: Offer, t: float, needed: int) -> Trial:
        labels, log_prior = self.site.val.labels.cpu(), self._log_prior()
        scores, most = offer.tempered(t, log_prior), (MOST_TEMPER - t) * (log_prior.max() - log_prior)
        taken = lowering(scores, labels, needed, most) if needed else torch.zeros_like(log_prior)
        return Trial(offer, t, taken, surely_right(scores - taken, labels))

    def _log_prior(self) -> Tensor:
        return log_shares(self.site.train.counts().cpu())

    def _why(self, trial: Trial) -> str:
        begun = trial.t == self._begins_with()
        if begun and len(self.site.val) < ENOUGH:
            return "with so few validation images"
        if begun:
            return "with which every site begins"
        return "the least that is enough" if trial.taken.any() else "the least that is as good as its own model"

    def _finished(
        self,
        chosen: Predictor,
        found: Tensor,
        familiar: Tensor | None,
        words: str,
        own: tuple[Member, Tensor] | None = None,
    ) -> Choice:
        """What was chosen, calibrated, and from where on images are familiar to it.

        `found` are its scores on the validation images, `familiar` how familiar they are.
        """
        labels = self.site.val.labels.cpu()
        right = accuracy(found, labels)
        words += f" ({right:.1%} of {len(labels)} validation image{'' if len(labels) == 1 else 's'}"
        words += f", its own model {accuracy(own[1], labels):.1%})" if own is not None else ")"
        if self.calibrate and len(labels) < ENOUGH:
            words += "; too few of them to calibrate on"
        elif self.calibrate:
            chosen, more = calibrated(chosen, found, labels)
            words += more
        least = None if familiar is None else lowest_familiar(familiar[found.argmax(dim=1) == labels])
        return Choice(replace(chosen, least_familiar=least), words, right)

    def unjudged(self, offer: Offer) -> tuple[Predictor, str]:
        """Of a site without validation images: the whole prior, or as much of it as was fixed."""
        t = float(len(self.site.train) > 0) if self.prior is None else self.prior
        found, words = self._tempered(offer, t, "as nothing can be measured")
        return found, f"has no validation images: it takes {words}"

    def _tempered(self, offer: Offer, t: float, why: str, taken: Tensor | None = None) -> tuple[Predictor, str]:
        """The shared predictor with t of the site's prior, in words; `why` is told where t was not set."""
        lowered = [] if taken is None else [self.site.val.classes[c] for c in torch.nonzero(taken).flatten().tolist()]
        end = ", as set" if self.prior is not None else f", {why}" if t else ""
        end += f"; it expects less of {', '.join(lowered)}, to be as good as its own model" if lowered else ""
        if t == 0 and not lowered:
            return offer.predictor, f"the shared predictor{offer.how.rstrip(',') or ' as it is'}{end}"
        prior = offer.expects(t, self._log_prior()) - (0 if taken is None else taken)
        some = f"{offer.how} with its own prior, tempered by {t:.2f}" if t else offer.how.rstrip(",") or " as it is"
        return replace(offer.predictor, log_prior=prior), f"the shared predictor{some}{end}"


def lowering(scores: Tensor, labels: Tensor, needed: int, most: Tensor) -> Tensor:
    """What to take off each class's score so that `needed` answers are right, or as many as this reaches: `(classes,)`.

    One class at a time and no class more than `most`: an image that is called d wrongly becomes right where its own
    class comes next and d falls below it, and one that is called d rightly is lost. The step is taken that gains the
    most answers, of those that are still missing, for what it takes off.
    """
    taken = torch.zeros(scores.shape[1], dtype=torch.float64)
    while True:
        values, answers = (scores - taken).topk(min(2, scores.shape[1]), dim=1)
        margins, named, then = values[:, 0] - values[:, -1], answers[:, 0], answers[:, -1]
        missing = needed - int(((named == labels) & (margins >= SURE)).sum())
        winnable = (named != labels) & (then == labels)
        best, most_gained = None, 0.0
        for d in torch.unique(named[winnable]).tolist() if missing > 0 else ():
            won, lost = (margins[(named == d) & which].sort().values for which in (winnable, labels == d))
            gained, step = _best_step(won, lost, missing, float(most[d] - taken[d]))
            if gained > most_gained:
                best, most_gained = (d, step), gained
        if best is None:
            return taken
        taken[best[0]] += best[1]


def _best_step(won: Tensor, lost: Tensor, missing: int, most: float) -> tuple[float, float]:
    """What to take off a class, given the margins of answers that are then won and lost, and the gain for it; or 0."""
    steps = won + NUDGE
    steps = steps[steps <= most]
    if len(steps) == 0:
        return 0.0, 0.0
    gains = torch.searchsorted(won, steps) - torch.searchsorted(lost, steps)
    rates = gains.clamp(max=missing) / steps
    place = int(rates.argmax())
    return float(rates[place]), float(steps[place])


def surely_right(scores: Tensor, labels: Tensor) -> int:
    """How many answers are right with a lead that rounding cannot take."""
    others = scores.scatter(1, labels.unsqueeze(1), -torch.inf).amax(dim=1)
    return int((scores.gather(1, labels.unsqueeze(1)).squeeze(1) - others >= SURE).sum())


def right_answers(scores: Tensor, labels: Tensor) -> int:
    """How many there are."""
    return int((scores.argmax(dim=1) == labels).sum())


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """The share of right answers."""
    return float((scores.argmax(dim=1) == labels).double().mean())


def best_factor(scores: Tensor, labels: Tensor) -> float:
    """What to multiply scores with for the lowest mean negative log-likelihood; it never changes an answer."""
    losses = torch.stack([F.cross_entropy(factor * scores, labels) for factor in SHARPER])
    return float(SHARPER[int(losses.argmin())])


def calibrated(predictor: Predictor, scores: Tensor, labels: Tensor) -> tuple[Predictor, str]:
    """Sharpened or flattened as the likelihood of these answers asks for, unless that makes the calibration worse.

    A few images whose own class is thought impossible outweigh all others in a likelihood, and would flatten what is
    well calibrated on the rest.
    """
    factor = best_factor(scores, labels)
    before, after = (calibration_gap(f * scores, labels) for f in (1.0, factor))
    words = f"; calibration error {before:.1%}"
    if after > before:
        return predictor, f"{words}, left as it is: what is likeliest would make it {after:.1%}"
    return sharpened(predictor, factor), f"{words} before, {after:.1%} after"


def sharpened(predictor: Predictor, factor: float) -> Predictor:
    """The same answers, with scores multiplied."""
    before = torch.tensor(1.0, dtype=torch.float64) if predictor.sharpness is None else predictor.sharpness
    prior = None if predictor.log_prior is None else predictor.log_prior * factor
    return replace(predictor, sharpness=before * factor, log_prior=prior)


def lowest_familiar(familiarity: Tensor) -> Tensor | None:
    """From where on an image is familiar, given how familiar those are that were answered right; None: too few of them.

    It is their `FAMILIAR` quantile: so many of them are called unfamiliar. A hair below it: where all are as familiar
    as can be, the last bits of a sum must not decide.
    """
    if len(familiarity) < ENOUGH:
        return None
    least = torch.quantile(familiarity.double(), FAMILIAR)
    return least - ROUNDING * least.abs().clamp_min(1)
