"""Class prototypes: the mean embedding of each class, how it is carried from round to round, and the pull towards it.

FedMP's Eq. 6 to 8. A class that nobody has shown yet has no prototype: it is not `known`, its row is zero, and nothing
is pulled towards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Prototypes:
    """`means` is float32 `(classes, width)`, `known` bool `(classes,)`."""

    means: Tensor
    known: Tensor

    @staticmethod
    def none(classes: int, width: int) -> Prototypes:
        """No class seen yet."""
        return Prototypes(torch.zeros(classes, width), torch.zeros(classes, dtype=torch.bool))

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Prototypes:
        """The inverse of `tensors`."""
        return Prototypes(tensors["means"], tensors["known"])

    def tensors(self) -> dict[str, Tensor]:
        """As they are kept and sent."""
        return {"means": self.means, "known": self.known}

    def moved(self, new: Prototypes, weight: float) -> Prototypes:
        """Eq. 6 and 7: (1 − μ)·old + μ·new, where μ is the weight of the new value.

        The first observation of a class is taken as it is (a start at zero would count as one), and a class that is
        absent from the new ones keeps its old value.
        """
        mixed = torch.where(self.known.unsqueeze(1), (1 - weight) * self.means + weight * new.means, new.means)
        return Prototypes(torch.where(new.known.unsqueeze(1), mixed, self.means), self.known | new.known)

    def to(self, device: str) -> Prototypes:
        """The same on a device."""
        return Prototypes(self.means.to(device), self.known.to(device))


def class_means(features: Tensor, labels: Tensor, classes: int) -> Prototypes:
    """The mean feature vector of each class that is there."""
    members = F.one_hot(labels, classes).to(features.dtype)
    counts = members.sum(dim=0)
    return Prototypes((members.T @ features) / counts.clamp_min(1).unsqueeze(1), counts > 0)


def weighted_mean(parts: Iterable[tuple[Prototypes, Tensor]]) -> Prototypes:
    """The sum in Eq. 7: Σ_i M_i·z_i / Σ_i M_i over those that know the class; weights are `(classes,)` of each part.

    Eq. 7 as printed divides by all sites' images; a site without the class would then pull its prototype to zero.
    """
    sums, total = torch.zeros(()), torch.zeros(())
    for part, weights in parts:
        counted = torch.where(part.known, weights, 0).float()
        sums = sums + counted.unsqueeze(1) * part.means
        total = total + counted
    return Prototypes(sums / torch.where(total > 0, total, 1).unsqueeze(1), total > 0)


def alignment(features: Tensor, labels: Tensor, prototypes: Prototypes) -> Tensor:
    """Eq. 8: less the cosine to the own class's prototype, averaged over each class of the batch, summed over classes.

    Images of classes without a prototype do not count. On tensors alone, whatever classes a batch has.
    """
    cosines = F.cosine_similarity(features, prototypes.means[labels], dim=1)
    members = F.one_hot(labels, len(prototypes.known)).to(features.dtype) * prototypes.known
    return -((members.T @ cosines) / members.sum(dim=0).clamp_min(1)).sum()
