"""What class means and label counts give away by themselves, without any attack.

The mean of one embedding is that embedding: a site with one image of a rare diagnosis that sends its prototype sends
the description of one patient. With two images, whoever has one of them can work out the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wardround.audit.report import Attack, Figure
from wardround.errors import BadInput
from wardround.learn.embeddings import Embeddings
from wardround.learn.prototypes import Prototypes

SAME = 1e-4  # of the embedding's length: what float32 sums and a second pass through a network leave
FEW = 5  # images of a class: small counts are commonly suppressed in published statistics, often below five


@dataclass(frozen=True)
class PrototypeCase:
    """One class whose prototype is, or nearly is, one image's embedding.

    `image` is that image's row among the site's embeddings; `gap` the distance over the embedding's length.
    """

    label: int
    images: int
    image: int
    gap: float


def exposed_prototypes(prototypes: Prototypes, own: Embeddings) -> list[PrototypeCase]:
    """Classes whose prototype equals an embedding of a single image of that class, found by comparison.

    By comparison and not by count: prototypes that were averaged over rounds, clipped or noised are no longer equal
    even where a class has one image, and equal images make a mean of many be an embedding of one.
    """
    width = own.features.shape[1:]
    if prototypes.means.shape[1:] != width:
        raise BadInput(
            f"prototypes of {tuple(prototypes.means.shape[1:])} numbers are not of embeddings of {tuple(width)}; "
            "use the stage that the study names"
        )
    found = []
    for label in torch.nonzero(prototypes.known).flatten().tolist():
        rows = torch.nonzero(own.labels == label).flatten()
        if not len(rows):
            continue
        embeddings = own.features[rows].double()
        gaps = (embeddings - prototypes.means[label].double()).norm(dim=1)
        gaps = gaps / embeddings.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        best = int(gaps.argmin())
        if float(gaps[best]) <= SAME:
            found.append(PrototypeCase(label, len(rows), int(rows[best]), float(gaps[best])))
    return found


def prototype_audit(prototypes: Prototypes, own: Embeddings, classes: Sequence[str], seed: int) -> Attack:
    """What the prototypes of a site say about single images of it, for the record."""
    cases = exposed_prototypes(prototypes, own)
    sent = int(prototypes.known.sum())
    counts = torch.bincount(own.labels, minlength=len(classes))
    pairs = [c for c in range(len(classes)) if counts[c] == 2 and bool(prototypes.known[c])]
    figures = (
        Figure("prototypes_sent", sent, "how many classes have a prototype: which classes the site has", sent),
        Figure(
            "prototypes_of_one_image",
            len(cases),
            "how many prototypes are, up to rounding, the embedding of a single image; whatever can be done with that "
            "image's embedding can be done with them",
            sent,
        ),
        Figure(
            "prototypes_of_two_images", len(pairs), "how many prototypes are the mean of two images' embeddings", sent
        ),
    )
    findings = [
        f"the prototype of {classes[case.label]} is the embedding of one image ({case.images} in this class)"
        for case in cases
    ]
    findings += [f"whoever has one of the two images of {classes[c]} can work out the other's embedding" for c in pairs]
    return Attack(
        "prototypes", "each prototype is compared with the embeddings it was made of", seed, figures, tuple(findings)
    )


def label_count_audit(counts: Tensor, classes: Sequence[str], seed: int, few: int = FEW) -> Attack:
    """What label counts, as they were sent, say directly: small and absent classes, the site's size."""
    if counts.shape != (len(classes),):
        raise BadInput(
            f"label counts of shape {tuple(counts.shape)} do not fit {len(classes)} classes; give one for each"
        )
    small = [c for c in range(len(classes)) if 0 < float(counts[c]) < few]
    absent = [c for c in range(len(classes)) if float(counts[c]) <= 0]
    figures = (
        Figure("images", float(counts.sum()), "how many images the site has, by its counts", len(classes)),
        Figure(
            "few",
            len(small),
            f"how many classes have 1 to {few - 1} images: counts that may point at patients",
            len(classes),
        ),
        Figure("absent", len(absent), "how many classes the site has no image of", len(classes)),
    )
    findings = [f"{classes[c]} has {float(counts[c]):g} image{'s' * (counts[c] != 1)}: single patients" for c in small]
    return Attack("label-counts", "the counts are read as they were sent", seed, figures, tuple(findings))
