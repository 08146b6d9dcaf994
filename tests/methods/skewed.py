"""A federation whose sites have seen different classes, with enough validation images to judge by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tiny import federation, images
from wardround.data.federation import Federation, Site
from wardround.data.imageset import ImageSet

SEEN = ((0, 1), (1, 2), (2, 3, 0))


def federate(seen: Sequence[Sequence[int]] = SEEN, n: int = 24, val: int = 24, **how: int) -> Federation:
    """Sites with n training and `val` validation images of these classes."""
    base = federation((0,) * len(seen), **how)
    sites = []
    for number, classes in enumerate(seen):
        train, own = (
            images(k, seed=seed + number, labels=[classes[i % len(classes)] for i in range(k)], **how)
            for k, seed in ((n, 10), (val, 70))
        )
        sites.append(replace(base.sites[number], train=train, val=own))
    return replace(base, sites=tuple(sites))


def with_site(data: Federation, place: int, **changes: ImageSet) -> Federation:
    """The same with something of one site changed."""
    sites: list[Site] = list(data.sites)
    sites[place] = replace(sites[place], **changes)
    return replace(data, sites=tuple(sites))


def none_of(data: ImageSet) -> ImageSet:
    """No image at all."""
    return data.take(torch.arange(0))
