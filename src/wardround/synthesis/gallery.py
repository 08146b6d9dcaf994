"""A few images on their way from noise, kept for the report.

A method that makes images shows every iterate to a `Trail` and puts what the trail kept into the state it yields: the
group `gallery` and the fact `gallery`. The report shows them; nothing is learned from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wardround.methods.state import State

GALLERY = "gallery"  # the group's name, and the fact's
ONE = "images"  # the title where a method makes one set of images
MOST_CLASSES = 12  # a row of more is too wide to look at

Groups = dict[str, dict[str, Tensor]]
Facts = dict[str, Any]


class Trail:
    """The first image of each class at `frames` steps, the first and the last among them.

    `labels` are those of the batch that will be shown, as places in `classes`. A method that synthesises many times may
    show every trajectory to the same trail: the last one shown remains. A class that is not in the batch is left out
    or, where trails of several batches shall stand side by side (`whole`), grey.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        classes: Sequence[str],
        steps: int,
        frames: int = 6,
        whole: bool = False,
    ) -> None:
        given = [int(label) for label in (labels.tolist() if isinstance(labels, Tensor) else labels)]
        present = [c for c in range(len(classes)) if whole or c in given]
        self.labels, self.left_out = present[:MOST_CLASSES], present[MOST_CLASSES:]
        self.chosen = [given.index(c) if c in given else None for c in self.labels]
        self.frames = spread(steps, frames)
        self._seen: dict[int, Tensor] = {}

    def see(self, step: int, images: Tensor) -> None:
        """The whole batch after `step` + 1 updates, in the networks' own value range, on any device.

        A step that is no frame costs a look-up. A frame is a copy on the device, and nothing waits for it: images are
        taken one by one, since a list of indices would have to travel to the device first.
        """
        if step in self.frames:
            grey = torch.zeros_like(images[0])
            self._seen[step] = to_pixels(torch.stack([grey if i is None else images.detach()[i] for i in self.chosen]))

    def groups(self, title: str = ONE) -> Groups:
        """For a state: uint8 `(frames, images, channels, height, width)`; nothing where nothing was seen."""
        return merged({title: self})[0]

    def facts(self) -> Facts:
        """For a state: the class of each image, how many updates each frame has behind it, and classes left out."""
        if not self._seen:
            return {}
        steps = [step + 1 for step in sorted(self._seen)]
        return {GALLERY: {"labels": self.labels, "steps": steps, "left_out": self.left_out}}

    def load(self, state: State, title: str = ONE) -> None:
        """Go on from what a state has, so that a resumed run keeps the gallery of the one that was stopped."""
        kept, facts = state.groups.get(GALLERY, {}).get(title), state.facts.get(GALLERY)
        if kept is not None and facts is not None:
            self._seen = {step - 1: frame for step, frame in zip(facts["steps"], kept, strict=True)}

    def _pictures(self) -> Tensor:
        return torch.stack([self._seen[step].cpu() for step in sorted(self._seen)])


def merged(trails: Mapping[str, Trail]) -> tuple[Groups, Facts]:
    """Groups and facts of several trails under their titles, such as `cluster 1`; all of the same batch and steps."""
    seen = {title: trail for title, trail in trails.items() if trail.facts()}
    if not seen:
        return {}, {}
    facts, *others = [trail.facts() for trail in seen.values()]
    if any(other != facts for other in others):
        raise ValueError("the trails of one gallery must show the same classes at the same steps")
    return {GALLERY: {title: trail._pictures() for title, trail in seen.items()}}, facts


def trail_of_epochs(classes: Sequence[str], epochs: int, state: State) -> Trail:
    """Of a method that makes other images in every epoch: one of each class at some of the epochs."""
    trail = Trail(range(len(classes)), classes, epochs)
    trail.load(state)
    return trail


def one_of_each(images: Tensor, labels: Sequence[int], classes: int) -> Tensor:
    """The first image of each class, in the order of classes, for a trail of one image a class; grey where none is."""
    first = {label: place for place, label in reversed(list(enumerate(labels)))}
    return torch.stack([images[first[c]] if c in first else torch.zeros_like(images[0]) for c in range(classes)])


def to_pixels(images: Tensor) -> Tensor:
    """The inverse of `normalise`: -1..1 as 0..255; what lies beyond is clipped, what is no number is grey."""
    return images.float().nan_to_num(nan=0.0).add(1.0).mul(127.5).round().clamp(0, 255).to(torch.uint8)


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` of 0..count−1, two or more, evenly, the first and the last among them."""
    if wanted >= count:
        return list(range(count))
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]
