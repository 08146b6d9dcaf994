"""Was this image among those a model was trained on? Two attacks, from crude to sharp.

The loss threshold (Yeom et al., "Privacy Risk in Machine Learning", CSF 2018) calls an image a member where the model's
loss on it is low. LiRA in its offline form (Carlini et al., S&P 2022, §V) asks how unusual the model's confidence in an
image is among shadow models that never saw it: easy images no longer pass for members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.audit.fitting import require_fit
from wardround.audit.report import Attack, Figure
from wardround.audit.roc import LOW_RATE, Roc, roc
from wardround.audit.target import image_hashes
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, SiteFailed
from wardround.learn.device import Device
from wardround.learn.fit import Fit, Recipe
from wardround.learn.predictor import Member, Predictor
from wardround.learn.side_by_side import count_steps, train_many
from wardround.models import NetSpec, fresh
from wardround.progress import NO_PROGRESS, Silent
from wardround.streams import Streams

Spread = Literal["shared", "each"]
SMALLEST_SPREAD = 1e-6  # of shadow confidences, so that shadows that agree entirely do not divide by zero


@dataclass(frozen=True)
class Membership:
    """How one attack went; `advantage` is Yeom et al.'s, where the attack has their threshold."""

    name: str
    what: str
    curve: Roc
    advantage: float | None = None

    def attack(self, seed: int) -> Attack:
        """For the record."""
        curve, n = self.curve, self.curve.members + self.curve.others
        figures = [
            Figure(
                "auc",
                curve.auc,
                "the chance that an image that was trained on gets a higher score than one that was not, a tie "
                "counting half: 0.5 is guessing, 1 is certainty",
                n,
            ),
            Figure(
                "tpr_at_fpr_0.001",
                curve.tpr_at(LOW_RATE),
                "the share of the images trained on that are recognised at a threshold that wrongly accuses at most "
                "0.1 % of the others; nothing is interpolated",
                n,
            ),
            Figure(
                "smallest_fpr",
                curve.smallest_rate,
                "the smallest false positive rate above 0 that so many other images can show: 1 over their number",
                curve.others,
            ),
        ]
        if self.advantage is not None:
            figures.append(
                Figure(
                    "advantage",
                    self.advantage,
                    "true less false positive rate where an image counts as trained on if its loss is at most the mean "
                    "loss of those that were (Yeom et al. 2018): 0 is guessing",
                    n,
                )
            )
        return Attack(self.name, self.what, seed, tuple(figures), self._limits(), curve.points())

    def _limits(self) -> tuple[str, ...]:
        if self.curve.smallest_rate <= LOW_RATE:
            return ()
        return (
            f"with {self.curve.others} images that were not trained on, the smallest false positive rate above 0 is "
            f"{self.curve.smallest_rate:.2%}: the figure at 0.1 % is the rate without any false alarm, and is rough",
        )


def confidence(scores: Tensor, labels: Tensor) -> Tensor:
    """The logit log p/(1−p) of the true class's probability p, float64 `(n,)`, from scores before softmax.

    As the true class's score less the log-sum-exp of the others, which never divides by a rounded 1 − p.
    """
    scores = scores.double()
    true = F.one_hot(labels, scores.shape[1]).bool()
    return scores[true] - scores.masked_fill(true, -torch.inf).logsumexp(dim=1)


def losses(target: Predictor, images: ImageSet, device: Device) -> Tensor:
    """Cross-entropy of every image, float64 `(n,)`."""
    scores = target.scores(images.images, device).double()
    return F.cross_entropy(scores, images.labels, reduction="none")


def loss_threshold(target: Predictor, members: ImageSet, others: ImageSet, device: Device) -> Membership:
    """Yeom et al.'s attack at every threshold; `others` are images that the target was not trained on."""
    _require_usable(target, members, others)
    inside, outside = (losses(target, images, device) for images in (members, others))
    threshold = inside.mean()
    advantage = float((inside <= threshold).double().mean() - (outside <= threshold).double().mean())
    return Membership(
        "loss-threshold",
        "an image with a small loss is called one that was trained on",
        roc(-inside, -outside),
        advantage,
    )


def offline_scores(target: Tensor, shadows: Tensor, spread: Spread = "shared") -> Tensor:
    """How many deviations the target's confidence `(n,)` lies above that of shadows `(count, n)` that are all out.

    Carlini et al.'s Λ is the normal distribution's cumulative value of this; the order is the same, and far out, where
    Λ rounds to 1, this still tells images apart. `each` takes a variance per image, which needs many shadows; `shared`
    the mean of those variances, as they advise for few.
    """
    variances = shadows.var(dim=0, unbiased=True) if len(shadows) > 1 else torch.ones_like(target)
    if spread == "shared":
        variances = variances.mean().expand_as(target)
    return (target - shadows.mean(dim=0)) / variances.sqrt().clamp_min(SMALLEST_SPREAD)


def lira_offline(
    target: Predictor,
    members: ImageSet,
    others: ImageSet,
    shadows: Sequence[Predictor],
    device: Device,
    spread: Spread = "shared",
) -> Membership:
    """LiRA with out-models only; no shadow may have seen any of these images."""
    _require_usable(target, members, others)
    if len(shadows) < (2 if spread == "each" else 1):
        raise BadInput(f"{len(shadows)} shadow models are too few for LiRA; train more of them")
    scores = []
    for images in (members, others):
        confidences = [confidence(p.scores(images.images, device), images.labels) for p in (target, *shadows)]
        scores.append(offline_scores(confidences[0], torch.stack(confidences[1:]), spread))
    return Membership(
        "lira-offline",
        f"an image in which the model is surer than {len(shadows)} shadow models that never saw it is called one that "
        "was trained on",
        roc(*scores),
    )


@dataclass(frozen=True)
class Shadows:
    """How many shadow models, and on how many auxiliary images each; as many as the target had is best."""

    count: int = 8
    images: int = 500


def train_shadows(
    spec: NetSpec,
    recipe: Recipe,
    auxiliary: ImageSet,
    audited: ImageSet,
    how: Shadows,
    streams: Streams,
    device: Device,
    progress: Silent = NO_PROGRESS,
) -> list[Predictor]:
    """Networks trained as the target was, each from its own start on its own draw of the auxiliary images.

    `audited` are the images that will be asked about; an auxiliary image that is equal to one of them is refused.
    """
    _refuse_shared(auxiliary, audited)
    require_fit(spec, auxiliary)
    fits = shadow_fits(spec, recipe, auxiliary, how, streams)
    with progress.task(f"training {len(fits)} shadow models", sum(map(count_steps, fits))) as advance:
        outcomes = train_many(fits, device, advance)
    found = []
    for outcome in outcomes:
        if isinstance(outcome, SiteFailed):
            raise outcome
        found.append(Predictor(spec.classes, (Member(spec, outcome.weights),)))
    return found


def shadow_fits(spec: NetSpec, recipe: Recipe, auxiliary: ImageSet, how: Shadows, streams: Streams) -> list[Fit]:
    """What is trained for shadows; the draws are without repetition within a shadow and overlap between them."""
    if how.count < 1 or how.images < 2:
        raise BadInput(f"{how.count} shadow models of {how.images} images cannot be trained; ask for more")
    if len(auxiliary) < how.images:
        raise BadInput(
            f"shadow models want {how.images} auxiliary images each, and there are {len(auxiliary)}; "
            "give more auxiliary images or smaller shadows"
        )
    fits = []
    for number in range(how.count):
        order = torch.randperm(len(auxiliary), generator=streams.torch("audit shadow images", index=number))
        fits.append(
            Fit(
                f"shadow {number + 1}",
                spec,
                fresh(spec, streams.torch("audit shadow start", index=number)),
                auxiliary.take(order[: how.images].sort().values),
                recipe,
                streams.number("audit shadow fit", index=number),
            )
        )
    return fits


def _require_usable(target: Predictor, members: ImageSet, others: ImageSet) -> None:
    if not len(members) or not len(others):
        raise BadInput(
            f"a membership attack needs images that were trained on and others, not {len(members)} and {len(others)}; "
            "hold some images out"
        )
    for network in target.members:
        require_fit(network.spec, members)
        require_fit(network.spec, others)


def _refuse_shared(auxiliary: ImageSet, audited: ImageSet) -> None:
    known = set(image_hashes(audited))
    shared = sum(value in known for value in image_hashes(auxiliary))
    if shared:
        raise BadInput(
            f"{shared} auxiliary images are among the audited ones, so shadow models would have seen them; "
            "remove duplicates or split the images anew"
        )
