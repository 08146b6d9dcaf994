"""What is evaluated, exported and deployed: networks, how they combine, and an optional prior.

One network, an ensemble, a panel with weights per class or per image and a constant majority vote are the same small,
saved thing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wardround.learn import pairs
from wardround.learn.device import Device
from wardround.learn.evaluate import batch_size, network_outputs
from wardround.models import NetSpec, Weights
from wardround.progress import NO_PROGRESS, Silent
from wardround.tensorfile import Groups

Measure = Literal["entropy", "margin", "maximum"]
Combine = Literal["logits", "softmax", "pairs", "chain", Measure]
# What members are combined with, and from where on an image is familiar.
EXTRAS = ("trust", "log_prior", "member_log_prior", "votes", "voices", "sharpness", "least_familiar")
ROWS = 4096  # images whose votes are combined at once: pairs of classes take memory
UNSURE = 1e-6  # the vote of a member that is not sure at all, so that members of whom none is sure vote alike


@dataclass(frozen=True)
class Member:
    """One network of a predictor."""

    spec: NetSpec
    weights: Weights

    def identity(self) -> tuple[object, ...]:
        """Equal for members that share their tensors, so that they are evaluated once."""
        return (self.spec, *((name, tensor.data_ptr()) for name, tensor in sorted(self.weights.items())))


@dataclass(frozen=True)
class Predictor:
    """Scores `(n, classes)`: the weighted mean of the members' logits, or the log of that of their softmax.

    They are multiplied by `sharpness`, then `log_prior` is added. `trust` is `(members,)` or `(members, classes)` and
    is normalised over members; None means equal. Where `combine` is a measure of confidence, softmax is weighed by
    trust times confidence, image by image. `member_log_prior` `(members, classes)` is subtracted from the members'
    logits first. `pairs` is the rule of `learn/pairs.py`: trust is how many images of each class a member has seen,
    `votes` the rule's temperature and doubt, `voices` how loud each member is. `chain` is of two members: the first
    tells whether it is a class that the second is trusted with, the second which of these. With no members the scores
    are the prior alone: a constant predictor. An image whose familiarity is below `least_familiar` is unlike what the
    networks were trained on; None: it cannot tell.
    """

    classes: int
    members: tuple[Member, ...] = ()
    combine: Combine = "logits"
    trust: Tensor | None = None
    log_prior: Tensor | None = None
    member_log_prior: Tensor | None = None
    votes: Tensor | None = None
    voices: Tensor | None = None
    sharpness: Tensor | None = None
    least_familiar: Tensor | None = None

    def scores(self, images: Tensor, device: Device, precision: str = "fp32", progress: Silent = NO_PROGRESS) -> Tensor:
        """Scores of uint8 images: float32 on the CPU; the largest is the predicted class."""
        return self.scores_of(member_logits(self.members, images, device, precision, progress), len(images))

    def scores_of(self, logits: list[Tensor], n: int) -> Tensor:
        """Scores from the members' logits over any number n of images, so many at a time."""
        parts = [slice(start, min(start + ROWS, n)) for start in range(0, n, ROWS)]
        scores = [self.combined([each[part] for each in logits], part.stop - part.start) for part in parts]
        return torch.cat(scores) if scores else torch.zeros(0, self.classes)

    def combined(self, logits: list[Tensor], n: int) -> Tensor:
        """Scores from the members' logits over n images."""
        scores = torch.zeros(n, self.classes)
        if logits:
            stacked = torch.stack(logits)
            ways = {"pairs": self._by_pairs, "chain": self._chained}
            scores = ways.get(self.combine, self._mean)(stacked)
        if self.sharpness is not None:
            scores = scores * self.sharpness.float().cpu()
        return scores if self.log_prior is None else scores + self.log_prior.float().cpu()

    def familiarity(self, logits: list[Tensor]) -> Tensor:
        """Of images, from the members' logits: the highest score before sharpness and prior, `(n,)`.

        A network that has seen nothing like an image has a high logit for no class; probabilities, which sum to 1, hide
        it. Networks that vote on pairs have a measure of their own (`pairs.familiarity`): some class always wins. Of a
        chain the first member tells.
        """
        if self.combine == "chain":
            return logits[0].amax(dim=1)
        stacked = torch.stack(logits)
        if self.combine != "pairs":
            return self._mean(stacked).amax(dim=1)
        trust, prior, (_, doubt) = self._voting()
        return pairs.familiarity(stacked, trust, prior, doubt, self.voices)

    def unfamiliar(self, logits: list[Tensor]) -> Tensor | None:
        """Which images are unlike what the networks were trained on, bool `(n,)`; None where it cannot tell."""
        if self.least_familiar is None or not logits:
            return None
        return self.familiarity(logits) < self.least_familiar.to(logits[0])

    def _mean(self, logits: Tensor) -> Tensor:
        """Over the first axis of `(members, n, classes)`."""
        count = len(self.members)
        if self.member_log_prior is not None:
            logits = logits - self.member_log_prior.float().cpu().unsqueeze(1)
        trust = torch.ones(count) if self.trust is None else self.trust.float().cpu()
        trust = trust.reshape(count, 1, -1)
        if self.combine == "logits":
            return (logits * _shares(trust)).sum(dim=0)
        probabilities = logits.softmax(dim=2)
        if self.combine in ("entropy", "margin", "maximum"):
            trust = trust * confidence(probabilities, self.combine).unsqueeze(2)
        return (probabilities * _shares(trust)).sum(dim=0).clamp_min(1e-12).log()

    def _by_pairs(self, logits: Tensor) -> Tensor:
        trust, prior, (temperature, doubt) = self._voting()
        return pairs.pair_scores(logits, trust, prior, temperature, doubt, self.voices)

    def _chained(self, logits: Tensor) -> Tensor:
        """With C the classes of the second: log P₁(C) + log P₂(c | C) for c in C, log P₁(c) for all others."""
        if self.trust is None or self.member_log_prior is None or len(logits) != 2:
            raise ValueError("a chain is of two members, and needs trust and member_log_prior")
        known = self.trust[1].cpu() > 0
        first, second = logits - self.member_log_prior.float().cpu().unsqueeze(1)
        first, nothing = first.log_softmax(dim=1), torch.tensor(-torch.inf)
        among = torch.where(known, first, nothing).logsumexp(dim=1, keepdim=True)
        return torch.where(known, among + torch.where(known, second, nothing).log_softmax(dim=1), first)

    def _voting(self) -> tuple[Tensor, Tensor, list[float]]:
        """Trust, the members' priors, and the rule's temperature and doubt."""
        if self.trust is None or self.member_log_prior is None or self.votes is None:
            raise ValueError("votes on pairs need trust, member_log_prior and votes")
        return self.trust.float().cpu(), self.member_log_prior.float().cpu(), self.votes.tolist()

    def identity(self) -> tuple[object, ...]:
        """Equal for predictors whose members are the same tensors, combined the same way.

        What they are combined with is small and compared by value: a site that works it out anew from what it was
        sent has the coordinator's predictor.
        """
        extras = tuple((name, t.shape, tuple(t.flatten().tolist())) for name, t in self._extras().items())
        return (self.combine, extras, *(member.identity() for member in self.members))

    def parts(self) -> tuple[Groups, dict[str, Any]]:
        """Tensor groups and a JSON record: what a file of this predictor holds."""
        groups = {member_group(i): member.weights for i, member in enumerate(self.members)}
        groups["combine"] = self._extras()
        record = {
            "classes": self.classes,
            "combine": self.combine,
            "members": [asdict(member.spec) for member in self.members],
        }
        return groups, record

    @staticmethod
    def from_parts(groups: Groups, record: dict[str, Any]) -> Predictor:
        """The inverse of `parts`."""
        members = tuple(
            Member(NetSpec(**spec), dict(groups[member_group(i)])) for i, spec in enumerate(record["members"])
        )
        extras = {name: groups.get("combine", {}).get(name) for name in EXTRAS}
        return Predictor(record["classes"], members, record["combine"], **extras)

    def _extras(self) -> dict[str, Tensor]:
        extras = {name: getattr(self, name) for name in EXTRAS}
        return {name: tensor for name, tensor in extras.items() if tensor is not None}


def member_logits(
    members: Sequence[Member], images: Tensor, device: Device, precision: str = "fp32", progress: Silent = NO_PROGRESS
) -> list[Tensor]:
    """Logits of uint8 images by each network, float32 on the CPU."""
    batches = len(members) * -(-len(images) // batch_size(device.torch))
    with progress.task(f"measuring on {len(images):,} images", batches) as advance:
        return [
            network_outputs(m.spec, m.weights, images, device.torch, precision, device.workers, advance).logits.cpu()
            for m in members
        ]


def confidence(probabilities: Tensor, measure: Measure) -> Tensor:
    """How sure a member is of an image, from `UNSURE` to 1: `(members, n)` from `(members, n, classes)`.

    `entropy`: 1 less the entropy over that of equal probabilities; `margin`: the largest probability less the second;
    `maximum`: the largest.
    """
    if measure == "entropy":
        entropy = torch.special.entr(probabilities).sum(dim=2)
        sure: Tensor = 1 - entropy / math.log(probabilities.shape[2])
    elif measure == "margin":
        first, second = probabilities.topk(2, dim=2).values.unbind(dim=2)
        sure = first - second
    else:
        sure = probabilities.amax(dim=2)
    return sure.clamp_min(UNSURE)


def _shares(trust: Tensor) -> Tensor:
    """Normalised over members."""
    return trust / trust.sum(dim=0, keepdim=True).clamp_min(1e-12)


def member_group(place: int) -> str:
    """The group of a file of this predictor that holds its network at a place."""
    return f"member-{place:03d}"


def single(spec: NetSpec, weights: Weights) -> Predictor:
    """One network as a predictor."""
    return Predictor(spec.classes, (Member(spec, weights),))
