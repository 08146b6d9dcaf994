"""Which images of a batch each teacher is shown: as many of every class as its own site had.

Batch-norm statistics are those of a site's own mix of classes. A teacher that has seen little but one class, shown a
batch of all classes alike, finds its statistics far off whatever the images look like, and pulls every class towards
the one it knows. Shown its own mix, it asks only for images like those it was trained on.

A batch is therefore made with as many images of each class as the teacher that needs most of them is shown; whoever
needs fewer is shown the first ones. The student is shown equally many of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 4  # times as many images are made as one teacher is shown, at most; beyond it, images are shown twice


@dataclass(frozen=True)
class Deal:
    """The labels of the images that are made, and by teacher which of them it is shown.

    `weights` make a sum over a teacher's images one over classes: W_kc over the number of images of class c. `even` are
    equally many of each class, in turn.
    """

    labels: Tensor
    rows: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    even: Tensor
    classes: int  # that images are made of


def deal(counts: Tensor, shares: Tensor, batch: int, device: torch.device) -> Deal:
    """Of teachers that have seen `counts` (teachers, classes) and know W `shares` of each class, each is shown `batch`.

    A class that a teacher has seen at all is shown to it once or more, so that of many rare ones it is shown a few more
    images than `batch`. Where no counts are known, all are shown alike.
    """
    counts, shares = counts.double().cpu(), shares.double().cpu()
    known = (counts > 0).any(dim=0)
    known = known if bool(known.any()) else ~known
    wanted = torch.stack([parts(row if bool(row.any()) else known.double(), batch) for row in counts])
    evenly = parts(known.double(), batch)
    made = limited(wanted.amax(dim=0), evenly, MOST * batch)
    first = made.cumsum(0) - made
    rows = tuple(_places(first, made, each) for each in wanted)
    labels = torch.repeat_interleave(torch.arange(len(made)), made)
    by_image = shares / wanted.clamp_min(1)
    weights = tuple(of[labels[places]].float().to(device) for of, places in zip(by_image, rows, strict=True))
    even = _places(first, made, evenly)
    even = even[torch.argsort(even - first[labels[even]], stable=True)]
    return Deal(labels.to(device), tuple(p.to(device) for p in rows), weights, even.to(device), int(known.sum()))


def parts(amounts: Tensor, total: int) -> Tensor:
    """`total` in proportion to amounts, and nothing that is there gets less than one, if there are more in all."""
    found = rounded(amounts, total)
    return torch.where(amounts > 0, found.clamp_min(1), found)


def rounded(amounts: Tensor, total: int) -> Tensor:
    """`total` in proportion to amounts, by largest remainders."""
    wanted = amounts / amounts.sum() * total
    found = wanted.floor().long()
    order = torch.argsort(wanted - found, descending=True, stable=True)
    found[order[: total - int(found.sum())]] += 1
    return found


def limited(wanted: Tensor, least: Tensor, most: int) -> Tensor:
    """As many images of each class as wanted and `least`; what is over `least` is cut to keep to `most` in all."""
    over = (wanted - least).clamp_min(0)
    room = max(0, most - int(least.sum()))
    total = int(over.sum())
    return least + (over if total <= room else over * room // total)


def _places(first: Tensor, made: Tensor, wanted: Tensor) -> Tensor:
    """The first `wanted` images of each class, from the beginning again where there are fewer."""
    chosen = zip(first.tolist(), made.tolist(), wanted.tolist(), strict=True)
    return torch.cat([start + torch.arange(n) % max(there, 1) for start, there, n in chosen])
