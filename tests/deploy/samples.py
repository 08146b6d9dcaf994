"""Predictors, records and pictures that the tests of deployment share: four-pixel images, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from wardround.deploy.about import Measured, ModelAbout, Origin, Task
from wardround.learn.predictor import Member, Predictor, single
from wardround.models import NetSpec, Weights, fresh, spec_layout

MADE = "2031-02-03T04:05:06Z"
TASK = Task(classes=("benign", "malignant"), channels=1, size=4)
ORIGIN = Origin(study="lungs", study_id="0123456789abcdef", method="fedavg", site="north", seed=3)
ABOUT = ModelAbout(
    task=TASK,
    origin=ORIGIN,
    images=1234,
    accuracies=(Measured(label="Local accuracy", value=0.912, definition="Of north's predictor on 100 images."),),
)


def bright() -> Predictor:
    """A network that finds bright images malignant: probabilities (1/4, 3/4) of white and (1/2, 1/2) of black.

    Each layer hands on the brightness h = pixels / 127.5 - 1, or 0 where that is negative; the head's scores are
    0 and h·log 3.
    """
    spec = NetSpec("cnn4", 1, 2, 4, width=1)
    layout = spec_layout(spec)
    weights = {name: torch.zeros(layout.shapes[name]) for name in layout.names}
    weights["stages.conv1.0.weight"][0, 0, 2, 2] = 1
    weights["stages.conv2.0.weight"][0, 0, 2, 2] = 1
    weights["stages.fc.1.weight"][0, 0] = 1
    weights["head.weight"][1, 0] = math.log(3)
    return single(spec, weights)


def malignant(grey: int) -> float:
    """What `bright` gives an even image of this grey, by hand."""
    odds = 3 ** max(grey / 127.5 - 1, 0.0)
    return odds / (1 + odds)


def weights(spec: NetSpec, seed: int) -> Weights:
    """Of a network that has opinions: fresh ones, scaled as He does so that signals reach the end of deep networks,
    and statistics that are not those of a fresh network.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = fresh(spec, generator)
    for name, tensor in drawn.items():
        drawn_anew = torch.rand(tensor.shape, generator=generator)
        if name.endswith("running_mean"):
            tensor.copy_(drawn_anew / 2 - 0.25)
        elif name.endswith("running_var"):
            tensor.copy_(drawn_anew + 0.5)
        elif tensor.ndim > 1:
            tensor.mul_(6**0.5)
    return drawn


def panel(**how: Any) -> Predictor:
    """Two small networks of different width on 8-pixel colour images, three classes."""
    specs = NetSpec("cnn4", 3, 3, 8, width=2), NetSpec("cnn4", 3, 3, 8, width=1)
    return Predictor(3, tuple(Member(spec, weights(spec, i)) for i, spec in enumerate(specs)), **how)


def panel_about(**changes: Any) -> ModelAbout:
    """What belongs to `panel`."""
    task = Task(classes=("ash", "birch", "cedar"), channels=3, size=8)
    return ABOUT.model_copy(update={"task": task, **changes})


# Every way in which a predictor may combine its members, and those without members.
WAYS: dict[str, dict[str, Any]] = {
    "logits": {},
    "softmax": {"combine": "softmax", "trust": torch.tensor([1.0, 3.0])},
    "entropy": {"combine": "entropy"},
    "margin": {"combine": "margin", "log_prior": torch.tensor([0.1, 0.2, 0.7]).log()},
    "maximum": {
        "combine": "maximum",
        "trust": torch.tensor([[1.0, 0.0, 2.0], [2.0, 3.0, 1.0]], dtype=torch.float64),
        "member_log_prior": torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64).log(),
    },
    "chain": {
        "combine": "chain",
        "trust": torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]], dtype=torch.float64),
        "member_log_prior": torch.tensor([[1.0, 1.0, 1.0], [0.3, 0.1, 0.6]], dtype=torch.float64).log(),
        "log_prior": torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log(),
        "least_familiar": torch.tensor(-0.5, dtype=torch.float64),
    },
    "pairs": {
        "combine": "pairs",
        "trust": torch.tensor([[40.0, 0.0, 90.0], [30.0, 300.0, 5.0]], dtype=torch.float64),
        "member_log_prior": torch.tensor([[0.3, 0.01, 0.69], [0.1, 0.8, 0.1]], dtype=torch.float64).log(),
        "votes": torch.tensor([3.0, 50.0], dtype=torch.float64),
        "voices": torch.tensor([4.0, 1.0], dtype=torch.float64),
        "sharpness": torch.tensor(4.0, dtype=torch.float64),
        "log_prior": torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log(),
        "least_familiar": torch.tensor(0.5, dtype=torch.float64),
    },
}
PREDICTORS: dict[str, Predictor] = {
    **{name: panel(**how) for name, how in WAYS.items()},
    "prior": Predictor(3, log_prior=torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()),
    "nothing": Predictor(3),
}


def noise(n: int, task: Task, seed: int = 0) -> Tensor:
    """Images of noise, each brighter than the one before, so that networks tell them apart."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, task.channels, task.size, task.size), generator=draw)
    return (pixels * torch.arange(1, n + 1).reshape(n, 1, 1, 1) // n).to(torch.uint8)


def picture(path: Path, grey: int | tuple[int, int, int], size: tuple[int, int] = (4, 4)) -> Path:
    """An even picture; colour where three values are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(grey, int) else "RGB", size, grey).save(path)
    return path


def grain(path: Path, shape: tuple[int, ...], seed: int = 0) -> Path:
    """A picture of noise: (height, width) for grey, (height, width, 3) for colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path
