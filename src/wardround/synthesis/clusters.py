"""Which models belong together: clusters of sites from what they uploaded, and nothing else.

FedBiCross §2.1: models are alike where they answer the same noise alike. K-means on these answers, with the number of
clusters chosen by silhouette (Eq. 1). Its Figure 2 compares two clusterings that models alone allow: K-means on
parameters (Ghosh et al. 2019) and hierarchical clustering (Briggs et al., IJCNN 2020; agglomerative with average
linkage here, on the same answers). PACFL, the third, needs subspaces of the sites' images, a payload of its own
(`subspaces.py`), and clusters the angles between them hierarchically; its threshold of angles is replaced by the
silhouette, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wardround.exchange.bundle import PARAMETERS
from wardround.learn.predictor import Member
from wardround.models import spec_layout
from wardround.synthesis.teachers import Teachers

Clustering = Literal["predictions", "parameters", "hierarchical", "subspaces"]
Points = npt.NDArray[np.float64]
SAME = 1e-6  # points nearer than this share of the largest norm are one point
STARTS = 10  # of K-means; the best one counts


@dataclass(frozen=True)
class Grouping:
    """The cluster of each point, numbered in the order of first appearance, and the silhouette of each K tried."""

    labels: tuple[int, ...]
    silhouettes: dict[int, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """K."""
        return max(self.labels) + 1


def answers_to_noise(
    members: Sequence[Member], noise: Tensor, device: torch.device, say: Literal["softmax", "logits"] = "softmax"
) -> Points:
    """One row per model: its answers to all probes, one after the other.

    The paper leaves open whether an answer is a softmax or logits. Softmax, since logits cluster by their scale: models
    trained longer would belong together.
    """
    rows = []
    for member in members:
        logits = Teachers([member], device).logits(noise.to(device))
        rows.append((logits.softmax(dim=1) if say == "softmax" else logits).flatten().double().cpu())
    return torch.stack(rows).numpy()


def parameters(members: Sequence[Member]) -> Points:
    """One row per model: its parameters, in at most as many coordinates as there are models.

    A QR decomposition turns millions of coordinates into these few and keeps every distance. All models must be of one
    architecture.
    """
    names = spec_layout(members[0].spec).in_group(PARAMETERS)
    columns = torch.stack([torch.cat([m.weights[n].flatten().double().cpu() for n in names]) for m in members], dim=1)
    coordinates: Tensor = torch.linalg.qr(columns, mode="r").R.T
    return coordinates.contiguous().numpy()


def group(points: Points, clustering: Clustering, clusters: int, seed: int) -> Grouping:
    """`clusters` clusters, or with 0 as many of 2..N−1 as have the highest silhouette; of equals, the fewest.

    A point alone in its cluster has silhouette 0 (Rousseeuw, and scikit-learn). There are never more clusters than
    distinct points. For `subspaces` a point is a row of the matrix of angles. Where there is nothing to choose from
    (fewer than three sites, identical models) all are one cluster.
    """
    distinct = _distinct(points)
    if clusters:
        return Grouping(_labels(points, clustering, min(clusters, distinct), seed))
    candidates = {k: _labels(points, clustering, k, seed) for k in range(2, min(len(points) - 1, distinct) + 1)}
    if not candidates:
        return Grouping((0,) * len(points))
    from sklearn.metrics import silhouette_score  # takes a second to import, which no other command should wait for

    metric = "precomputed" if clustering == "subspaces" else "euclidean"
    silhouettes = {k: float(silhouette_score(points, labels, metric=metric)) for k, labels in candidates.items()}
    best = max(candidates, key=lambda k: (round(silhouettes[k], 6), -k))  # rounding must not decide between equals
    return Grouping(candidates[best], silhouettes)


def similarity(points: Points, labels: Sequence[int]) -> Tensor:
    """Cross-cluster weights by nearness, `(K, K)`, rows summing to 1: exp(−‖c_k − c_j‖² / median) of the centres.

    Table 2's "similarity-weighted" names no formula; this one is ours. The median is over pairs of different clusters.
    """
    of = np.asarray(labels)
    centres = torch.tensor(np.stack([points[of == k].mean(axis=0) for k in range(max(labels) + 1)]))
    squares = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
    apart = squares[~torch.eye(len(squares), dtype=torch.bool)]
    scale = apart.median() if len(apart) else torch.ones(())
    near = torch.exp(-squares / scale.clamp_min(torch.finfo(squares.dtype).tiny))
    return near / near.sum(dim=1, keepdim=True)


def central(points: Points, labels: Sequence[int], among: Sequence[bool]) -> list[int | None]:
    """Of each cluster the point nearest to its centre, of equals the first; only points `among` can be it."""
    of, allowed = np.asarray(labels), np.asarray(among)
    found: list[int | None] = []
    for k in range(max(labels) + 1):
        candidates = np.flatnonzero((of == k) & allowed)
        apart = np.linalg.norm(points[candidates] - points[of == k].mean(axis=0), axis=1)
        found.append(int(candidates[apart.round(9).argmin()]) if len(candidates) else None)
    return found


def _labels(points: Points, clustering: Clustering, k: int, seed: int) -> tuple[int, ...]:
    if k == 1:
        return (0,) * len(points)
    from sklearn.cluster import AgglomerativeClustering, KMeans

    if clustering in ("hierarchical", "subspaces"):
        metric = "precomputed" if clustering == "subspaces" else "euclidean"
        found = AgglomerativeClustering(k, linkage="average", metric=metric).fit_predict(points)
    else:
        found = KMeans(k, init="k-means++", n_init=STARTS, random_state=seed % 2**32).fit_predict(points)
    order = {label: place for place, label in enumerate(dict.fromkeys(found.tolist()))}
    return tuple(order[label] for label in found.tolist())


def _distinct(points: Points) -> int:
    """How many points are there once those that rounding alone tells apart count as one."""
    tolerance = SAME * float(np.linalg.norm(points, axis=1).max())
    kept: list[Points] = []
    for point in points:
        if all(float(np.linalg.norm(point - other)) > tolerance for other in kept):
            kept.append(point)
    return len(kept)
