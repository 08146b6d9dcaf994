"""Features of many images in the plane, to be looked at: FedMP's Figures 5 and 6.

Principal components keep large distances and say how much of the variance they show; t-SNE shows neighbourhoods and
nothing else. Both are the same every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from wardround.streams import Streams

LEAST = 10  # points below which neighbourhoods mean nothing
PERPLEXITY = 30.0  # neighbours that a point has, about; fewer where there are few points


def principal_components(features: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """Float64 `(n, 2)` and the share of the variance along each; a component's largest loading is positive."""
    centred = features.double() - features.double().mean(dim=0)
    if min(centred.shape) < 2:
        centred = torch.nn.functional.pad(centred, (0, max(2 - centred.shape[1], 0), 0, max(2 - centred.shape[0], 0)))
    _, lengths, directions = torch.linalg.svd(centred, full_matrices=False)
    largest = directions[:2].abs().argmax(dim=1, keepdim=True)
    signs = directions[:2].gather(1, largest).sign()
    signs[signs == 0] = 1.0
    variances = lengths.square()
    shares = (variances[:2] / variances.sum().clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    return (centred @ (directions[:2] * signs).T)[: len(features)], (shares[0], shares[1])


def neighbourhoods(features: Tensor) -> Tensor:
    """t-SNE (van der Maaten and Hinton, JMLR 2008), float64 `(n, 2)`; the exact form, which knows no threads."""
    from sklearn.manifold import TSNE  # takes a second to import, which no other command should wait for

    start, _ = principal_components(features)
    spread = float(start[:, 0].std(correction=0)) or 1.0
    settings: dict[str, Any] = {"method": "exact", "random_state": 0, "learning_rate": "auto"}
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    found = TSNE(perplexity=perplexity, init=(start / spread * 1e-4).numpy(), **settings)
    return torch.from_numpy(found.fit_transform(features.double().numpy())).double()


def project(
    features: Mapping[str, Tensor], labels: Mapping[str, Tensor], streams: Streams, most: int
) -> Iterator[dict[str, Any]]:
    """Both pictures of some of the sites' features, at most so many points in all, each `[x, y, site, class]`.

    Which images they are of cannot be told from them: they are drawn at random and listed in the order of the draw.
    """
    if not features:
        return
    each = max(most // len(features), 1)
    drawn = {
        site: torch.randperm(len(rows), generator=streams.torch("projection", site))[:each]
        for site, rows in features.items()
    }
    points = torch.cat([features[site][rows] for site, rows in drawn.items()]).float()
    of = [[i, c] for i, (site, rows) in enumerate(drawn.items()) for c in labels[site][rows].tolist()]
    found, shares = principal_components(points)
    yield {"way": "pca", "shares": [round(share, 4) for share in shares], "sites": [*drawn], "points": _rows(found, of)}
    if LEAST <= len(points) <= most:
        yield {"way": "tsne", "shares": [], "sites": [*drawn], "points": _rows(neighbourhoods(points), of)}


def _rows(places: Tensor, of: list[list[int]]) -> list[list[float]]:
    """In tenths of a per cent of the picture, which is what an eye can tell."""
    scale = float(places.abs().max()) or 1.0
    return [
        [round(x / scale, 3), round(y / scale, 3), *which] for (x, y), which in zip(places.tolist(), of, strict=True)
    ]
