"""What is evaluated, exported and deployed: networks, how they combine, and an optional prior.

One network, an ensemble, a panel with weights per class and a constant majority vote are the same small, saved thing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wardround.learn.device import Device
from wardround.learn.evaluate import batch_size, network_outputs
from wardround.models import NetSpec, Weights
from wardround.progress import NO_PROGRESS, Silent
from wardround.tensorfile import Groups


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
    """Scores `(n, classes)` are the weighted mean of the members' logits (or softmax) plus the log prior.

    `trust` is `(members,)` or `(members, classes)` and is normalised over members; None means equal. With no members
    the scores are the prior alone: a constant predictor.
    """

    classes: int
    members: tuple[Member, ...] = ()
    combine: Literal["logits", "softmax"] = "logits"
    trust: Tensor | None = None
    log_prior: Tensor | None = None

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
            if self.combine == "softmax":
                stacked = stacked.softmax(dim=2)
            scores = (stacked * self._shares()).sum(dim=0)
            if self.combine == "softmax":
                scores = scores.clamp_min(1e-12).log()
        return scores if self.log_prior is None else scores + self.log_prior.float().cpu()

    def _shares(self) -> Tensor:
        count = len(self.members)
        trust = torch.ones(count) if self.trust is None else self.trust.float().cpu()
        trust = trust.reshape(count, 1, -1)
        return trust / trust.sum(dim=0, keepdim=True).clamp_min(1e-12)

    def identity(self) -> tuple[object, ...]:
        """Equal for predictors that are the same tensors combined the same way."""
        extras = tuple(None if t is None else t.data_ptr() for t in (self.trust, self.log_prior))
        return (self.combine, extras, *(member.identity() for member in self.members))

    def parts(self) -> tuple[Groups, dict[str, Any]]:
        """Tensor groups and a JSON record: what a file of this predictor holds."""
        groups = {f"member-{i:03d}": member.weights for i, member in enumerate(self.members)}
        extras = {"trust": self.trust, "log_prior": self.log_prior}
        groups["combine"] = {name: tensor for name, tensor in extras.items() if tensor is not None}
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
        return Predictor(record["classes"], members, record["combine"], extras.get("trust"), extras.get("log_prior"))


def single(spec: NetSpec, weights: Weights) -> Predictor:
    """One network as a predictor."""
    return Predictor(spec.classes, (Member(spec, weights),))
