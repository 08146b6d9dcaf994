"""A request to train, and what comes back.

A method never trains by itself: it yields a `Fit` and is sent a `Fitted`. So the runner may train many sites side by
side, reuse a result that another method already asked for, or run one alone at a hospital, and no method knows which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from wardround.data.imageset import ImageSet
from wardround.models import NetSpec, StagedNet, Weights
from wardround.tensorfile import canonical


@dataclass(frozen=True)
class Recipe:
    """How to train: optimiser, learning rate and its course, batch size, epochs, precision.

    `step` multiplies the rate by `gamma` when each of the `milestones` (shares of the epochs) has passed; `cosine`
    takes it to zero, step by step. `augmentation` is what `augment` does (see `pixels`). `checkpointing` keeps the
    stages' inputs only and computes the rest again for the gradient: the same numbers from less memory. `keep` says
    which epoch's weights come back: the last, or the best on validation images (of equals the last, or the first).
    """

    epochs: int
    batch: int = 64
    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1
    clip_norm: float | None = None
    augment: bool = False
    augmentation: Literal["shift", "zoom"] = "shift"
    checkpointing: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    keep: Literal["last", "best", "first-best"] = "last"


class Outputs(NamedTuple):
    """What a network gives for a batch."""

    features: Tensor
    logits: Tensor


class Step(NamedTuple):
    """One mini-batch as an objective sees it: `positions` in the site's images, and what the networks gave for them.

    `teachers` are in the order of `Fit.teachers`.
    """

    positions: Tensor
    images: Tensor
    labels: Tensor
    outputs: Outputs
    teachers: tuple[Outputs, ...]


class Objective:
    """What a site minimises: cross-entropy, unless a method says otherwise by overriding one of the hooks.

    Hooks work on tensors alone, so that a step can be captured in a CUDA graph; one that cannot sets
    `capturable = False`. `key` names an objective whose fits may be reused by other methods; None means never, and is
    what a subclass has unless it names itself: another loss must never be taken for cross-entropy.
    """

    capturable = True
    key: str | None = "cross-entropy"

    def __init_subclass__(cls) -> None:
        cls.key = cls.__dict__.get("key")

    def to(self, device: str) -> None:
        """Move the objective's own tensors to the device; called once before training."""

    def follow(self, rate: Tensor) -> None:
        """For an objective with an optimiser of its own: the rate, set before every step. Called once, before `to`."""

    def outputs(self, net: StagedNet, pixels: Tensor) -> Outputs:
        """Run the live network, in training mode; one that reads a stage or the head itself looks in here."""
        return Outputs(*net.outputs(pixels))

    def loss(self, step: Step) -> Tensor:
        """The scalar to minimise."""
        return F.cross_entropy(step.outputs.logits, step.labels)

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        """Change `.grad` of the trained parameters in place, after the backward pass."""

    def state(self) -> dict[str, Tensor]:
        """What it has learned or counted so far, asked for between two epochs, so that a stopped fit can go on.

        An objective that changes while it trains overrides this and `restore`; without them its fit starts over.
        """
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave, after `to`."""


@dataclass(frozen=True)
class Teacher:
    """A frozen network whose outputs an objective reads; computed once per image where nothing is augmented."""

    spec: NetSpec
    weights: Weights


@dataclass(frozen=True)
class Fit:
    """Train `spec` from `start` on `data`. `frozen` names tensors (parameters or statistics) that must not change.

    `seed` is a number from the study's streams; shuffling and augmentation derive from it alone.
    """

    label: str
    spec: NetSpec
    start: Weights
    data: ImageSet
    recipe: Recipe
    seed: int
    objective: Objective = field(default_factory=Objective)
    teachers: tuple[Teacher, ...] = ()
    frozen: frozenset[str] = frozenset()
    validation: ImageSet | None = None
    reusable: bool = False

    def key(self) -> str | None:
        """A hash of everything the result depends on, or None where the fit must not be reused."""
        if not self.reusable or self.objective.key is None or self.teachers:
            return None
        record = {**self.ingredients(), "objective": self.objective.key}
        return hashlib.sha256(canonical(record).encode()).hexdigest()

    def ingredients(self) -> dict[str, Any]:
        """Everything the result depends on but the objective and the teachers, as plain values and hashes."""
        return {
            "spec": asdict(self.spec),
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "frozen": sorted(self.frozen),
            "data": self.data.sha256(),
            "validation": self.validation.sha256() if self.validation is not None else None,
            "start": weights_hash(self.start),
        }


@dataclass(frozen=True)
class Fitted:
    """The trained weights and how it went. `trained_on` is 0 where the fit was skipped by rule (see `skipped`)."""

    weights: Weights
    trained_on: int
    losses: tuple[float, ...]
    best_epoch: int
    seconds: float
    skipped: str = ""


def weights_hash(weights: Weights) -> str:
    """SHA-256 over names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).numpy().data)
    return digest.hexdigest()
