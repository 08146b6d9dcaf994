"""How much of what all sites show one site shows itself: FedMP's Hausdorff distance (Eq. 4), as a diagnostic.

A site whose images cover only a corner of what the others have is far from their union. Lemma 1 and 2 of FedMP speak of
this distance, class by class, so this is how to see whether completion and alignment do what they are for. It needs
every site's features in one place and under one network: for simulations, not for hospitals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 1024  # of the table of distances held at once


@dataclass(frozen=True)
class Reach:
    """How far one site's features are from all sites', class by class; None for classes that it has no features of."""

    features: int
    by_class: tuple[float | None, ...]
    spreads: tuple[float | None, ...]  # of all sites' features of the class

    @property
    def distance(self) -> float | None:
        """The mean over the site's classes."""
        return _mean([d for d in self.by_class if d is not None])

    @property
    def relative(self) -> float | None:
        """The mean over the site's classes of the distance over the spread; without spread there is no distance.

        One network may make features twice as long as another's, and every distance between them with it. This does
        not change then, so that methods can be compared.
        """
        pairs = [(d, s) for d, s in zip(self.by_class, self.spreads, strict=True) if d is not None and s is not None]
        return _mean([d / s if s else 0.0 for d, s in pairs])


def directed(of: Tensor, to: Tensor) -> float:
    """The largest distance from a row of `of` to the nearest row of `to`; both are float `(n, width)`, not empty.

    Eq. 4 is the larger of both directions; as printed, its second supremum runs over the wrong set.
    """
    exact = "donot_use_mm_for_euclid_dist"  # else equal rows are a little apart
    nearest = [torch.cdist(rows, to, compute_mode=exact).amin(dim=1) for rows in torch.split(of, ROWS)]
    return float(torch.cat(nearest).max())


def distances_to_union(
    features: Mapping[str, Tensor], labels: Mapping[str, Tensor], classes: int
) -> dict[str, list[float | None]]:
    """For each site and class the distance of the site's features to all sites' of that class; None where it has none.

    A site's features are part of the union, so only one direction can be above zero.
    """
    found: dict[str, list[float | None]] = {site: [] for site in features}
    for c in range(classes):
        own = {site: features[site][labels[site] == c] for site in features}
        union = torch.cat(list(own.values()))
        for site, part in own.items():
            found[site].append(directed(union, part) if len(part) else None)
    return found


def spreads(features: Mapping[str, Tensor], labels: Mapping[str, Tensor], classes: int) -> tuple[float | None, ...]:
    """For each class the root mean square distance of all sites' features to their mean; None where there are none."""
    everything, all_labels = torch.cat(list(features.values())), torch.cat(list(labels.values()))
    found: list[float | None] = []
    for c in range(classes):
        union = everything[all_labels == c].double()
        found.append(float((union - union.mean(dim=0)).square().sum(dim=1).mean().sqrt()) if len(union) else None)
    return tuple(found)


def reaches(features: Mapping[str, Tensor], labels: Mapping[str, Tensor], classes: int) -> dict[str, Reach]:
    """Every site's features, float `(n, width)`, against all sites' together."""
    if not features:
        return {}
    distances, spread = distances_to_union(features, labels, classes), spreads(features, labels, classes)
    return {site: Reach(len(features[site]), tuple(distances[site]), spread) for site in features}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
