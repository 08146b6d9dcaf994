"""Who has seen what: label counts as sites declare them, held to what is plausible, or guessed from the models.

Counts are what a panel's votes are weighed by, so they are worth lying about. No site is believed to have trained on
more than `MOST` times what the others have on average, nor on many images of a class that its model does not show. For
a model tells. The head's weights are drawn between ±1/√d, with d features, and features are rectified: an image of
another class can only lower the weights of a class, an image of its own raises them. So no weight of a class that a
site never had is above 1/√d, however long it trained with cross-entropy and SGD or Adam (a network that starts from
others' weights, or has noise added as it trains, is another matter), and what the weights of a class are above it,
summed (`risen`), is roughly proportional to how many images of it there were (`benchmarks/counts_from_models.py` says
how roughly). What is not seen so is a class that the network never learned, or knows by nothing but faint features, as
a network with a dozen of them may. Whoever makes a model for the purpose can still lie.

Where a site may not or will not tell, its model alone is asked (`guessed`). That this works so well is also a leak: a
model gives away which classes its site has, and about how many of each.

And a model that was never trained has seen nothing, whatever its site tells: it says nearly the same of every image
(`still`), at least with batch norm; networks without it differ more in their answers from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wardround.learn.predictor import Member

MOST = 3.0
SHOWN, DOUBTED = 10.0, 50.0  # times what a model shows of a class, and images that it may fail to learn from
STILL = 0.02  # of the median of how far networks' answers differ; untrained ones reach a few thousandths of it


def plausible(counts: Tensor) -> Tensor:
    """Counts (sites, classes) with no site's total above `MOST` times the others' median or mean, whichever is larger.

    The median alone would take two large hospitals among three small ones, with 2000, 3000, 10, 12 and 15 images, for
    45 each; the mean alone the largest of 33, 10, 4476, 1632 and 1060 for 2051. Of an even number of others the median
    is the upper one of the two: the lower would there make 99 of each of the three that know most. What a site tells is
    not among the others', so one that lies gains nothing by it; of two that lie one may vouch for the other. A site
    that tells of no image at all, as coarse bins make of a small one, says nothing about the others.
    """
    totals = counts.sum(dim=1)
    some = torch.nonzero(totals > 0).flatten().tolist()
    if len(some) < 3:  # of two, nobody can say which one is out of line
        return counts
    limits = totals.clone()
    for k in some:
        others = totals[[j for j in some if j != k]].sort().values
        limits[k] = MOST * torch.maximum(others[len(others) // 2], others.mean())
    return counts * (limits / totals.clamp_min(1)).clamp(max=1).unsqueeze(1)


def held_to_model(counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """A site's counts (classes,), none above `SHOWN` times what its model shows of the class, and `DOUBTED` more.

    The tenfold is for a measure that is rough; what it tells well is a class that was not there, or never learned. A
    network of which no weight has risen shows nothing, and is not asked.
    """
    shown = risen(weights)
    if not bool(shown.any()):
        return counts
    return torch.minimum(counts, SHOWN * counts.sum() * shown / shown.sum() + DOUBTED)


def spread(logits: Tensor) -> Tensor:
    """How far a network's answers to different images (images, classes) differ, averaged over classes."""
    centred = logits.double() - logits.double().mean(dim=1, keepdim=True)
    return centred.std(dim=0).mean()


def still(spreads: Tensor) -> Tensor:
    """Which networks say nearly the same of every image: less than `STILL` of the (upper) median of all.

    Untrained networks with batch norm reach a few thousandths of what trained ones do. An untrained network
    would do harm with its votes: a site's label shares are divided out of them, and it never had them in, so it votes
    for what is rare at its site. Of two networks nobody can say which one is out of line.
    """
    if len(spreads) < 3:
        return torch.zeros(len(spreads), dtype=torch.bool)
    return spreads < STILL * spreads.sort().values[len(spreads) // 2]


def guessed(weights: Mapping[str, Tensor], images: int) -> Tensor:
    """How many of a site's images each class may have had, from the head of its network alone: float64 (classes,)."""
    shown = risen(weights)
    shown = shown if bool(shown.any()) else torch.ones_like(shown)
    return shown * (images / float(shown.sum()))


def guessed_shares(members: Sequence[Member]) -> Tensor:
    """The mix of classes that some networks together seem to have seen, each counted alike: float64 (classes,)."""
    return torch.stack([guessed(member.weights, 1) for member in members]).mean(dim=0)


def known_classes(members: Sequence[Member]) -> Tensor:
    """Which classes they seem to have seen: 1 for those with half of an equal share or more, else 0."""
    shares = guessed_shares(members)
    return (shares >= 0.5 / len(shares)).double()


def risen(weights: Mapping[str, Tensor]) -> Tensor:
    """Of each class, what the weights of its row of the head are above where any may have begun, Σ_j (w_cj − 1/√d)₊."""
    head = weights["head.weight"].double().cpu()
    above = head - 1 / math.sqrt(head.shape[1])
    return above.clamp_min(0).sum(dim=1)


def log_shares(counts: Tensor) -> Tensor:
    """The log of each row's shares of counts + 1/2, so that no class is impossible."""
    smoothed = counts.double() + 0.5
    return torch.log(smoothed / smoothed.sum(dim=-1, keepdim=True))
