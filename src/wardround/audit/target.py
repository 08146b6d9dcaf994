"""What an audit attacks: all that left one site, and the images it is to be held against.

It comes from a run or from a parcel; no attack knows which. The site's test images are split once, by the audit's own
stream: one half plays the images that were not trained on, the other half those that an attacker has of his own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from wardround.data.federation import Site
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import Recipe
from wardround.learn.predictor import Member
from wardround.streams import Streams
from wardround.tensorfile import canonical

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Target:
    """Everything of one site that an attacker may have.

    `bundle` is what left (empty where nothing did), `model` the network that can be made of it, or the one that stays
    at the site where `kept` says so. `stage` is where embeddings and prototypes were cut. `synthetic` are images
    (8-bit) with labels that were computed from what left.
    """

    bundle: Bundle
    site: Site
    recipe: Recipe
    model: Member | None
    kept: bool = False
    stage: int | None = None
    synthetic: tuple[Tensor, Tensor] | None = None
    notes: tuple[str, ...] = ()
    privacy: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The site's."""
        return self.site.name

    @cached_property
    def sha256(self) -> str:
        """A hash of what is attacked and of the images, to tell whether stored parts of an audit are this one's."""
        digest = hashlib.sha256(self.bundle.sha256().encode())
        for images in (self.site.train, self.site.test.images):
            digest.update(images.sha256().encode())
        if self.model is not None:
            for name in sorted(self.model.weights):
                digest.update(self.model.weights[name].detach().cpu().contiguous().reshape(-1).numpy().data)
        digest.update(canonical({"kept": self.kept, "stage": self.stage, "notes": list(self.notes)}).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Pools:
    """Images by what they are to the attacks: trained on, not trained on, and the attacker's own."""

    members: ImageSet
    others: ImageSet
    auxiliary: ImageSet


def pools(site: Site, streams: Streams, most: int) -> Pools:
    """At most `most` of each, drawn at random; no image is in two of them."""
    if not len(site.train):
        raise BadInput(f"{site.name} has no training images here; name its images with --data")
    train = _drawn(site.train, streams, "audit members", site.name, most)
    held = _drawn(site.test.images, streams, "audit others", site.name, 2 * most)
    trained_on = set(image_hashes(train))
    first = {value: place for place, value in reversed(list(enumerate(image_hashes(held))))}
    fresh = sorted(place for value, place in first.items() if value not in trained_on)
    if len(fresh) < 4:
        raise BadInput(
            f"{site.name} has {len(fresh)} test images that are not among its training images, too few for an audit; "
            "hold more images out"
        )
    half = len(fresh) // 2
    return Pools(train, held.take(torch.tensor(fresh[:half])), held.take(torch.tensor(fresh[half:])))


def image_hashes(images: ImageSet) -> list[bytes]:
    """A hash of each image's pixels."""
    return [hashlib.sha256(image.contiguous().numpy().data).digest() for image in images.images.cpu()]


def _drawn(images: ImageSet, streams: Streams, purpose: str, site: str, most: int) -> ImageSet:
    order = torch.randperm(len(images), generator=streams.torch(purpose, site))[:most]
    return images.take(order)
