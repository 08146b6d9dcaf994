"""Images by inversion: noise is moved until the teachers take it for what they were trained on.

DeepInversion (Yin et al., CVPR 2020) as FedISCA uses it (its Eq. 5): cross-entropy to a drawn label, batch-norm
statistics (Eq. 6), and total variation. The images live in the networks' own value range and are never clipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.errors import Diverged
from wardround.learn.replay import Replay, each
from wardround.synthesis.deal import rounded
from wardround.synthesis.teachers import Teachers, View

CHECK_EVERY = 50  # steps between two looks at the loss, each of which waits for the device
EXPLODED = 100.0  # times the first loss


@dataclass(frozen=True)
class Inversion:
    """How to invert; the defaults are FedISCA's.

    `bn_over` says whether the batch-norm distances of several teachers are averaged (Eq. 6) or summed (FedISCA's
    code, which makes the term as many times heavier as there are sites). `classify` says whether the label is asked
    of the mean logits (the code, and FedBiCross) or of each teacher (FedISCA §3.1.3).
    """

    steps: int = 500
    batch: int = 256
    lr: float = 0.05
    bn_weight: float = 10.0
    tv_weight: float = 2.5e-5
    jitter: int = 2
    bn_over: Literal["mean", "sum"] = "mean"
    classify: Literal["together", "each"] = "together"


class Iterate(NamedTuple):
    """One point of a trajectory: images after `step` + 1 updates, and of the last of them the loss.

    `seen` are the images before that update, shifted by the jitter, as the teachers saw them; `logits` is what they
    said: a lesson that costs nothing.
    """

    step: int
    images: Tensor
    loss: Tensor
    seen: Tensor
    logits: Tensor


def balanced_labels(batch: int, classes: int) -> Tensor:
    """0..C−1 repeated: as many of each class as the batch allows."""
    return torch.arange(batch) % classes


def shared_labels(batch: int, shares: Tensor) -> Tensor:
    """As many of each class as its share, and any part of the batch holds about the same mix."""
    counts = rounded(shares.double(), batch)
    labels = torch.repeat_interleave(torch.arange(len(counts)), counts)
    number = torch.cat([torch.arange(int(n)) for n in counts])
    return labels[torch.argsort((number + 0.5) / counts[labels], stable=True)]


def total_variation(images: Tensor) -> Tensor:
    """The sum of four L2 norms: differences to the right, down, and along both diagonals, over the whole batch."""
    right = images[..., :, 1:] - images[..., :, :-1]
    down = images[..., 1:, :] - images[..., :-1, :]
    falling = images[..., 1:, 1:] - images[..., :-1, :-1]
    rising = images[..., 1:, :-1] - images[..., :-1, 1:]
    return torch.stack([d.norm() for d in (right, down, falling, rising)]).sum()


def label_loss(view: View, labels: Tensor, how: Inversion) -> Tensor:
    """Eq. 5's first term: how far the images are from being taken for what they should be."""
    if how.classify == "together":
        return F.cross_entropy(view.mean, labels)
    return torch.stack([F.cross_entropy(logits, labels) for logits in view.logits]).mean()


def inversion_loss(view: View, variation: Tensor, labels: Tensor, how: Inversion) -> Tensor:
    """Eq. 5 of images that the teachers have just viewed, and their total variation."""
    label = label_loss(view, labels, how)
    gaps = torch.stack(view.gaps)
    distance = gaps.mean() if how.bn_over == "mean" else gaps.sum()
    return label + how.bn_weight * distance + how.tv_weight * variation


def rolled(images: Tensor, shift: Tensor) -> Tensor:
    """`torch.roll` down and to the right by a shift on the device, so that a captured step sees it change."""
    rows = (torch.arange(images.shape[2], device=images.device) - shift[0]) % images.shape[2]
    columns = (torch.arange(images.shape[3], device=images.device) - shift[1]) % images.shape[3]
    moved = images.index_select(2, rows).index_select(3, columns)
    return moved.contiguous(memory_format=torch.channels_last)


class Synthesis:
    """A batch of images and its Adam, made once and used for many trajectories.

    Every step sees the images shifted by a few pixels, the same for the whole batch.
    """

    def __init__(self, teachers: Teachers, labels: Tensor, shape: tuple[int, int, int], how: Inversion) -> None:
        self.teachers, self.labels, self.how = teachers, labels, how
        self.device = labels.device
        blank = torch.zeros((how.batch, *shape), device=self.device)
        self.images = blank.to(memory_format=torch.channels_last).requires_grad_(True)
        cuda = self.device.type == "cuda"
        self.optimiser = torch.optim.Adam([self.images], lr=how.lr, capturable=cuda, fused=cuda or None)
        self.memory = {  # Adam's own, made here so that it can be emptied and filled where a captured step looks for it
            "step": torch.zeros((), device=self.device if cuda else None),
            "exp_avg": torch.zeros_like(self.images, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(self.images, requires_grad=False),
        }
        self.optimiser.state[self.images] = self.memory
        self.replay = Replay(self._step, self.device)
        self.shifts = torch.zeros((0, 2), dtype=torch.int64)
        self.done = 0
        self.first_loss: float | None = None

    def begin(self, generator: torch.Generator) -> None:
        """Fresh noise from N(0, 1) and fresh shifts; Adam forgets."""
        with torch.no_grad():
            self.images.copy_(torch.randn(self.images.shape, generator=generator))
        bound, steps = self.how.jitter, self.how.steps
        self.shifts = torch.randint(-bound, bound + 1, (steps, 2), generator=generator).to(self.device)
        for tensor in self.memory.values():
            tensor.zero_()
        self.done, self.first_loss = 0, None

    def trajectory(self, generator: torch.Generator) -> Iterator[Iterate]:
        """From noise to images, one Adam step at a time; each iterate is a copy of its own.

        A loss that is no longer finite, or a hundred times the first, ends it with a clear error.
        """
        self.begin(generator)
        while self.done < self.how.steps:
            yield self.step()

    def step(self) -> Iterate:
        """The next step of the trajectory that was begun or restored."""
        self.start()
        return self.wait()

    def start(self) -> None:
        """Begin the next step; others may begin theirs before `wait`."""
        self.replay.start(self.shifts[self.done])

    def wait(self) -> Iterate:
        """The step's outcome."""
        loss, seen, logits = self.replay.wait()
        step, self.done = self.done, self.done + 1
        if step % CHECK_EVERY == 0 or self.done == self.how.steps:
            self._require_sane(loss)
        return Iterate(step, self.images.detach().clone(), loss.clone(), seen.clone(), logits.clone())

    def state(self) -> dict[str, Tensor]:
        """The images and Adam's memory, to be kept in a state; the shifts derive from the generator."""
        first = torch.tensor(math.nan if self.first_loss is None else self.first_loss)
        return {
            "images": self.images.detach().clone(),
            "first_loss": first,
            **{name: tensor.clone() for name, tensor in self.memory.items()},
        }

    def restore(self, state: Mapping[str, Tensor], done: int, generator: torch.Generator) -> None:
        """Stand where `state` was taken, after `done` steps of the trajectory that this generator draws."""
        self.begin(generator)
        with torch.no_grad():
            self.images.copy_(state["images"])
        for name, tensor in self.memory.items():
            tensor.copy_(state[name])
        first = float(state["first_loss"])
        self.done, self.first_loss = done, None if math.isnan(first) else first

    def _step(self, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self._moved(self.images.detach(), shift).requires_grad_(True)
        view, variation = self._viewed(seen)
        loss = inversion_loss(view, variation, self.labels, self.how)
        (gradient,) = torch.autograd.grad(loss, seen)
        self.images.grad = self._moved(gradient, -shift)
        self.optimiser.step()
        return loss.detach(), seen.detach(), view.mean.detach()

    def _moved(self, images: Tensor, shift: Tensor) -> Tensor:
        """A copy, shifted where there is a jitter."""
        return rolled(images, shift) if self.how.jitter else images.clone(memory_format=torch.channels_last)

    def _viewed(self, seen: Tensor) -> tuple[View, Tensor]:
        """What the teachers make of the images, and worked out beside them, how much the images vary."""
        found: list[Any] = each([partial(self.teachers.view, seen), partial(total_variation, seen)])
        return found[0], found[1]

    def _require_sane(self, loss: Tensor) -> None:
        value = float(loss)
        if self.first_loss is None:
            self.first_loss = abs(value)
        if not value < EXPLODED * max(self.first_loss, 1.0):  # also where it is not a number
            raise Diverged(
                f"the synthesis diverged at step {self.done}: its loss is {value:.3g}; use a smaller synthesis_lr"
            )
