"""How much of what all sites show one site shows itself: FedMP's Hausdorff distance (Eq. 4), as a diagnostic.

A site whose images cover only a corner of what the others have is far from their union. Lemma 1 and 2 of FedMP speak of
this distance, class by class, so this is how to see whether completion and alignment do what they are for. It needs
every site's features in one place and under one network: for simulations, not for hospitals.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ROWS = 1024  # of the table of distances held at once


def directed(of: Tensor, to: Tensor) -> float:
    """The largest distance from a row of `of` to the nearest row of `to`; both are float `(n, width)`, not empty."""
    exact = "donot_use_mm_for_euclid_dist"  # else equal rows are a little apart
    nearest = [torch.cdist(rows, to, compute_mode=exact).amin(dim=1) for rows in torch.split(of, ROWS)]
    return float(torch.cat(nearest).max())


def hausdorff(p: Tensor, q: Tensor) -> float:
    """Eq. 4, the larger of both directions; as printed, its second supremum runs over the wrong set."""
    return max(directed(p, q), directed(q, p))


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
