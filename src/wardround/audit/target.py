"""What an audit attacks: all that left one site, and the images it is to be held against.

It comes from a run or from a parcel; no attack knows which. The site's test images are split once, by the audit's own
stream: one half plays the images that were not trained on, the other half those that an attacker has of his own.

A site may hold other classes than its test does (in a simulation nearly all do), and a model favours the classes it was
trained on. So membership is asked of as many images of each class on either side: else an attack that tells classes
apart would pass for one that tells members.
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
from wardround.data.splits import hold_out
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
    """At most `most` of each, drawn at random; members and others have as many images of every class.

    No image is in two pools, and no patient in both others and auxiliary.
    """
    if not len(site.train):
        raise BadInput(f"{site.name} has no training images here; name its images with --data")
    held = _fresh(_drawn(site.test.images, streams, "audit others", site.name, 2 * most), site.train)
    patients = None if held.patients is None else held.patients.numpy()
    known, out = hold_out(len(held), 0.5, streams.numpy("audit auxiliary", site.name), patients)
    if len(known) < 2 or len(out) < 2:
        raise BadInput(
            f"{site.name} has {len(held)} test images that are not among its training images, too few for an audit; "
            "hold more images out, of two patients or more"
        )
    members = _drawn(site.train, streams, "audit members", site.name, most)
    members, others = _same_classes(members, held.take(torch.from_numpy(out)))
    if len(others) < 2:
        raise BadInput(
            f"{site.name} has hardly a test image of the classes that it trained on, so membership cannot be judged; "
            "hold some of its own images out (data.test = own)"
        )
    return Pools(members, others, held.take(torch.from_numpy(known)))


def _fresh(held: ImageSet, trained: ImageSet) -> ImageSet:
    """Those that are not among the training images, each once."""
    trained_on = set(image_hashes(trained))
    first = {value: place for place, value in reversed(list(enumerate(image_hashes(held))))}
    return held.take(torch.tensor(sorted(place for value, place in first.items() if value not in trained_on)).long())


def _same_classes(members: ImageSet, others: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Of each class as many on either side as the smaller one has; both come in random order."""
    each = torch.minimum(members.counts(), others.counts()).cpu()
    return _at_most(members, each), _at_most(others, each)


def _at_most(images: ImageSet, each: Tensor) -> ImageSet:
    labels = images.labels.cpu()
    places = [torch.nonzero(labels == c).flatten()[:n] for c, n in enumerate(each.tolist())]
    return images.take(torch.cat(places).sort().values)


def image_hashes(images: ImageSet) -> list[bytes]:
    """A hash of each image's pixels."""
    return [hashlib.sha256(image.contiguous().numpy().data).digest() for image in images.images.cpu()]


def _drawn(images: ImageSet, streams: Streams, purpose: str, site: str, most: int) -> ImageSet:
    order = torch.randperm(len(images), generator=streams.torch(purpose, site))[:most]
    return images.take(order)
