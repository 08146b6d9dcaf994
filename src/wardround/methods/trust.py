"""Who has seen what: label counts as sites declare them, held to what is plausible, or guessed from the models.

Counts are what a panel's votes are weighed by, so they are worth lying about. No site is believed to have trained on
more than `MOST` times the median of the others' images, nor on many images of a class that its model does not show. For
a model tells: a network with rectified features pushes the output of a class it never meets down, so the row of the
head that belongs to such a class has a low sum r of weights and bias. At most sites r rises along a line with the share
of the class among the site's images, and as steeply from site to site; so the line that fits most sites says of each
model what shares it shows (`held_to_models`). A class that is easily told, or whose images are faint, needs no high
sum; but no class is learned without weights that speak for it, and one that was never there has hardly any. So both
must say that a class is missing. Whoever makes a model for the purpose can still lie.

And a model that was never trained has seen nothing, whatever its site tells: it says nearly the same of every image
(`still`).

Where a site may not or will not tell, its model alone is asked (`guessed`). That this works (a class's row tells seen
from unseen at an area under the curve of 0.98 on blood cells at α 0.1) is also a leak: a model gives away which classes
its site has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wardround.learn.predictor import Member

MOST = 3.0
SHOWN, DOUBTED = 10.0, 20.0  # times what a model shows of a class, and images that it need not show
STRONG = 1 / 3  # of the site's strongest class (`head_strengths`) from which on a class has been learned
UNEVEN = 0.05  # the squared distance of a site's shares from equal ones from which on they say how steep the line is
STILL = 0.02  # of the median of how far networks' answers differ: hundreds of times what untrained ones reach
SLOPE = 4.0  # how steeply a class's share rises with the standardised sum of its row


def plausible(counts: Tensor) -> Tensor:
    """Counts (sites, classes) with no site's total above `MOST` times the median of the others'.

    Of an even number of others it is the upper one of the two: with sites of 33, 10, 4476, 1632 and 1060 images the
    lower would make 99 of each of the three that know most. A site that tells of no image at all, as coarse bins make
    of a small one, says nothing about the others.
    """
    totals = counts.sum(dim=1)
    some = torch.nonzero(totals > 0).flatten().tolist()
    if len(some) < 3:  # of two, nobody can say which one is out of line
        return counts
    limits = totals.clone()
    for k in some:
        others = totals[[j for j in some if j != k]].sort().values
        limits[k] = MOST * others[len(others) // 2]
    return counts * (limits / totals.clamp_min(1)).clamp(max=1).unsqueeze(1)


def held_to_models(counts: Tensor, rows: Tensor, strengths: Tensor) -> Tensor:
    """Counts (sites, classes), none above `SHOWN` times what the site's model shows of it, and `DOUBTED` more.

    `rows` are the sums r of the rows of the sites' heads, `strengths` what speaks for each class in them: a class with
    `STRONG` of the largest at its site was there. With shares q of C classes the line of a site is
    r_c − r̄ = b·(q_c − 1/C), fitted by least squares, and its model shows q_c = 1/C + (r_c − r̄) / b, no less than 0,
    with the steepness b of the site itself or the (upper) median of all, whichever is more: of a site that tells of
    shares that its model does not have b is too small, and one that is too large only shows shares more alike. The line
    is rough, hence the tenfold: what it tells well is a class that was not there. It needs three sites, of which two
    have shares uneven enough for a b; otherwise nothing is held.
    """
    totals = counts.sum(dim=1, keepdim=True)
    told = counts / totals.clamp_min(1) - 1 / counts.shape[1]
    above = rows - rows.mean(dim=1, keepdim=True)
    uneven = (told**2).sum(dim=1) * (totals[:, 0] > 0)
    steep = (told * above).sum(dim=1) / uneven.clamp_min(1e-12)
    fitted = steep[uneven >= UNEVEN].sort().values
    if len(counts) < 3 or len(fitted) < 2 or fitted[len(fitted) // 2] <= 0:
        return counts
    common = fitted[len(fitted) // 2]
    b = torch.where(uneven >= UNEVEN, steep.clamp_min(float(common)), common).unsqueeze(1)
    shown = (1 / counts.shape[1] + above / b).clamp_min(0)
    most = SHOWN * totals * shown / shown.sum(dim=1, keepdim=True) + DOUBTED
    learned = strengths >= STRONG * strengths.amax(dim=1, keepdim=True)
    return torch.where(learned, counts, torch.minimum(counts, most))


def spread(logits: Tensor) -> Tensor:
    """How far a network's answers to different images (images, classes) differ, averaged over classes."""
    centred = logits.double() - logits.double().mean(dim=1, keepdim=True)
    return centred.std(dim=0).mean()


def still(spreads: Tensor) -> Tensor:
    """Which networks say nearly the same of every image: less than `STILL` of the (upper) median of all.

    Untrained networks reach a few thousandths of what trained ones do, on noise as on images. An untrained network
    would do harm with its votes: a site's label shares are divided out of them, and it never had them in, so it votes
    for what is rare at its site. Of two networks nobody can say which one is out of line.
    """
    if len(spreads) < 3:
        return torch.zeros(len(spreads), dtype=torch.bool)
    return spreads < STILL * spreads.sort().values[len(spreads) // 2]


def guessed(weights: Mapping[str, Tensor], images: int) -> Tensor:
    """How many of a site's images each class may have had, from the head of its network alone: float64 (classes,)."""
    rows = head_rows(weights)
    standardised = (rows - rows.mean()) / rows.std().clamp_min(1e-12)
    return images * torch.softmax(SLOPE * standardised, dim=0)


def guessed_shares(members: Sequence[Member]) -> Tensor:
    """The mix of classes that some networks together seem to have seen, each counted alike: float64 (classes,)."""
    return torch.stack([guessed(member.weights, 1) for member in members]).mean(dim=0)


def known_classes(members: Sequence[Member]) -> Tensor:
    """Which classes they seem to have seen: 1 for those with half of an equal share or more, else 0."""
    shares = guessed_shares(members)
    return (shares >= 0.5 / len(shares)).double()


def head_rows(weights: Mapping[str, Tensor]) -> Tensor:
    """Of each class, the sum of its row of the head and its bias."""
    rows = weights["head.weight"].double().cpu().sum(dim=1)
    return rows + weights["head.bias"].double().cpu() if "head.bias" in weights else rows


def head_strengths(weights: Mapping[str, Tensor]) -> Tensor:
    """Of each class, the norm of the positive weights in its row of the head: what speaks for it."""
    return weights["head.weight"].double().cpu().clamp_min(0).square().sum(dim=1).sqrt()


def log_shares(counts: Tensor) -> Tensor:
    """The log of each row's shares of counts + 1/2, so that no class is impossible."""
    smoothed = counts.double() + 0.5
    return torch.log(smoothed / smoothed.sum(dim=-1, keepdim=True))
