"""What is evaluated, exported and deployed: networks, how they combine, and an optional prior.

One network, an ensemble, a panel with weights per class or per image and a constant majority vote are the same small,
saved thing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wardround.learn.device import Device
from wardround.learn.evaluate import batch_size, network_outputs
from wardround.models import NetSpec, Weights
from wardround.progress import NO_PROGRESS, Silent
from wardround.tensorfile import Groups

Measure = Literal["entropy", "margin", "maximum"]
Combine = Literal["logits", "softmax", Measure]
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

    `log_prior` is added to them. `trust` is `(members,)` or `(members, classes)` and is normalised over members; None
    means equal. Where `combine` is a measure of confidence, softmax is weighed by trust times confidence, image by
    image. `member_log_prior` `(members, classes)` is subtracted from the members' logits first. With no members the
    scores are the prior alone: a constant predictor.
    """

    classes: int
    members: tuple[Member, ...] = ()
    combine: Combine = "logits"
    trust: Tensor | None = None
    log_prior: Tensor | None = None
    member_log_prior: Tensor | None = None

    def scores(self, images: Tensor, device: Device, precision: str = "fp32", progress: Silent = NO_PROGRESS) -> Tensor:
        """Scores of uint8 images: float32 on the CPU; the largest is the predicted class."""
        batches = len(self.members) * -(-len(images) // batch_size(device.torch))
        with progress.task(f"measuring on {len(images):,} images", batches) as advance:
            logits = [
                network_outputs(
                    m.spec, m.weights, images, device.torch, precision, device.workers, advance
                ).logits.cpu()
                for m in self.members
            ]
        return self.combined(logits, len(images))

    def combined(self, logits: list[Tensor], n: int) -> Tensor:
        """Scores from the members' logits over n images."""
        scores = torch.zeros(n, self.classes)
        if logits:
            stacked = torch.stack(logits)
            if self.member_log_prior is not None:
                stacked = stacked - self.member_log_prior.float().cpu().unsqueeze(1)
            scores = self._mean(stacked)
        return scores if self.log_prior is None else scores + self.log_prior.float().cpu()

    def _mean(self, logits: Tensor) -> Tensor:
        """Over the first axis of `(members, n, classes)`."""
        count = len(self.members)
        trust = torch.ones(count) if self.trust is None else self.trust.float().cpu()
        trust = trust.reshape(count, 1, -1)
        if self.combine == "logits":
            return (logits * _shares(trust)).sum(dim=0)
        probabilities = logits.softmax(dim=2)
        if self.combine != "softmax":
            trust = trust * confidence(probabilities, self.combine).unsqueeze(2)
        return (probabilities * _shares(trust)).sum(dim=0).clamp_min(1e-12).log()

    def identity(self) -> tuple[object, ...]:
        """Equal for predictors whose members are the same tensors, combined the same way.

        What they are combined with is small and compared by value: a site that works it out anew from what it was
        sent has the coordinator's predictor.
        """
        extras = tuple((name, t.shape, tuple(t.flatten().tolist())) for name, t in self._extras().items())
        return (self.combine, extras, *(member.identity() for member in self.members))

    def parts(self) -> tuple[Groups, dict[str, Any]]:
        """Tensor groups and a JSON record: what a file of this predictor holds."""
        groups = {f"member-{i:03d}": member.weights for i, member in enumerate(self.members)}
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
            Member(NetSpec(**spec), dict(groups[f"member-{i:03d}"])) for i, spec in enumerate(record["members"])
        )
        extras = groups.get("combine", {})
        return Predictor(
            record["classes"],
            members,
            record["combine"],
            extras.get("trust"),
            extras.get("log_prior"),
            extras.get("member_log_prior"),
        )

    def _extras(self) -> dict[str, Tensor]:
        extras = {"trust": self.trust, "log_prior": self.log_prior, "member_log_prior": self.member_log_prior}
        return {name: tensor for name, tensor in extras.items() if tensor is not None}


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


def single(spec: NetSpec, weights: Weights) -> Predictor:
    """One network as a predictor."""
    return Predictor(spec.classes, (Member(spec, weights),))
