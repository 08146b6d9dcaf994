"""More steps on what was already made: FedBiCross's Eq. 4 on kept images.

The inner problem of Eq. 4 is over all images of a trajectory; the paper takes one step on each of a few (Eq. 7) and
throws them away, which trains a network only after very many trajectories. Synthesis is what costs time, so it pays to
go over the same images again: the batches at sampled steps of a trajectory's second half (before it they are mostly
noise) are kept, and after each trajectory every cluster's model takes steps on batches drawn from them, cropped and
flipped, with as many images of each cluster as its weights say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn.device import Device
from wardround.learn.pixels import augment
from wardround.learn.replay import Replay, together
from wardround.synthesis.deal import rounded
from wardround.synthesis.pool import draw_crops
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Teachers


class Kept:
    """A cluster's batches with what its adapted teachers said, and the noise left (λ) in each; the oldest go first."""

    def __init__(self, teachers: Teachers, like: Tensor, classes: int, batches: int, temperature: float) -> None:
        self.teachers, self.temperature, self.batch = teachers, temperature, len(like)
        rows, device = batches * self.batch, like.device
        self.images = torch.zeros((rows, *like.shape[1:]), dtype=torch.bfloat16 if teachers.bf16 else None).to(device)
        self.adapted = torch.zeros((rows, classes), device=device)
        self.noise = torch.zeros((rows, 1), device=device)
        self.added = 0
        self.recall = Replay(self._recall, device)

    def __len__(self) -> int:
        return min(self.added * self.batch, len(self.images))

    def add(self, images: Tensor, adapted: Tensor, noise: Tensor) -> None:
        """One more batch."""
        first = self.added * self.batch % len(self.images)
        rows = slice(first, first + self.batch)
        self.images[rows], self.adapted[rows], self.noise[rows] = images, adapted, noise
        self.added += 1

    def _recall(self, rows: Tensor, crops: Tensor) -> tuple[Tensor, Tensor]:
        """Images, cropped and flipped, and λ·softmax(F̃) + (1 − λ)·softmax(F): Eq. 5's slope is that of this target."""
        pixels = augment(self.images[rows], crops).float().contiguous(memory_format=torch.channels_last)
        original, adapted = self.teachers.logits(pixels), self.adapted[rows]
        near, far = (logits.div(self.temperature).softmax(dim=1) for logits in (original, adapted))
        return pixels, torch.lerp(near, far, self.noise[rows])

    def state(self) -> dict[str, Tensor]:
        """What is in it, for a state."""
        named = {"images": self.images, "adapted": self.adapted, "noise": self.noise}
        return {name: t[: len(self)].clone() for name, t in named.items()} | {"added": torch.tensor(self.added)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        self.added = int(state["added"])
        for name, tensor in (("images", self.images), ("adapted", self.adapted), ("noise", self.noise)):
            tensor[: len(self)] = state[name].to(tensor.device)


class Rehearsal:
    """Every cluster's kept batches, and the steps of every cluster's model on them."""

    def __init__(self, kept: Sequence[Kept], students: Sequence[Student], device: Device) -> None:
        self.kept, self.students, self.device = kept, students, device
        self.learn = [Replay(partial(self._learn, student), device.torch) for student in students]
        self.mixture: list[Tensor] = []

    def begin(self, cross: Tensor, rate: float, steps: int, generators: Sequence[torch.Generator]) -> None:
        """Draw all batches of one rehearsal; `cross[k]` are the shares of clusters in the batches of model k."""
        size = self.kept[0].batch
        self.mixture = [_places(shares, size).to(self.device.torch) for shares in cross]
        self.rows, self.crops = [], []
        for kept, draw in zip(self.kept, generators, strict=True):
            self.rows.append(torch.randint(len(kept), (steps, size), generator=draw).to(self.device.torch))
            self.crops.append(draw_crops(steps * size, "crop", draw).view(steps, size, 3).to(self.device.torch))
        for student in self.students:
            student.set_rate(rate)

    def step(self, number: int) -> None:
        """One step of every model."""
        recalls = [
            partial(kept.recall.start, rows[number], crops[number])
            for kept, rows, crops in zip(self.kept, self.rows, self.crops, strict=True)
        ]
        together(recalls, self.device)
        found = [tensor for kept in self.kept for tensor in kept.recall.wait()]
        pairs = zip(self.learn, self.mixture, strict=True)
        together([partial(learn.start, places, *found) for learn, places in pairs], self.device)
        for learn in self.learn:
            learn.wait()

    def _learn(self, student: Student, places: Tensor, *found: Tensor) -> None:
        pixels, targets = torch.cat(found[::2])[places], torch.cat(found[1::2])[places]
        temperature = self.kept[0].temperature
        said = student.logits(pixels.contiguous(memory_format=torch.channels_last)) / temperature
        student.step(F.cross_entropy(said, targets) * temperature**2)


def _places(shares: Tensor, size: int) -> Tensor:
    """Where in the clusters' batches, one after the other, the images of a mixed batch are: shares·size of each.

    What rounding leaves goes to the largest remainders, of equals to the first.
    """
    counts = rounded(shares.double().cpu(), size)
    return torch.cat([k * size + torch.arange(int(count)) for k, count in enumerate(counts)])


def mixed_batch(batches: Sequence[Tensor], shares: Tensor) -> Tensor:
    """One batch out of one of each cluster, by shares."""
    places = _places(shares, len(batches[0])).to(batches[0].device)
    return torch.cat(list(batches))[places].contiguous(memory_format=torch.channels_last)
