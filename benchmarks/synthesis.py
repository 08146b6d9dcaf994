"""The coordinator's work on a GPU, part by part, against plain eager fp32 code that does the same.

Five ResNet-18 teachers with random weights and plausible statistics (speed does not depend on what they know), batch
256, images of 28 pixels. The baseline is written here: statistics in forward hooks, one kernel at a time. Beside it the
same as FedISCA's public code does it: the teachers are not frozen, so that every step of synthesis also works out the
gradients of their weights, and the trajectory lies in the host's memory. Ours is what the methods call.

    python benchmarks/synthesis.py [--out synthesis.json] [--precision bf16]

An epoch of FedISCA (500 steps of each part) is also timed in the method itself, in bf16, on phantoms: there the steps
back to noise that are not felt are not taken, and with `reuse`, or without the jitter, which Algorithm 1 does not have
and the public code has, what teachers said in the synthesis is not asked again. It is the mean of five epochs (the
published setting has a hundred) after a short run as a warm-up, in which cuDNN tries out its algorithms. The first of
the five still includes the capture of every step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import report
from wardround.learn.distillation import distillation
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay, each
from wardround.methods.fedisca import AT_ONCE
from wardround.models import NetSpec, build, fresh
from wardround.progress import Silent
from wardround.run import begin_run
from wardround.settings import validate
from wardround.synthesis.inversion import Inversion, Synthesis, balanced_labels, total_variation
from wardround.synthesis.student import Student, mixed_distillation
from wardround.synthesis.teachers import AdaptedTeachers, Precision, Teachers

SITES, BATCH, CLASSES = 5, 256, 8
SPEC = NetSpec("resnet18", 3, CLASSES, 28)
SHAPE = (3, 28, 28)
WARM_UP = 10
READINGS: dict[str, dict[str, Any]] = {
    "with jitter": {},
    "with reuse": {"reuse": True},
    "without jitter": {"jitter": 0},
}
FROZEN, PUBLIC = "eager fp32", "eager fp32, as the public code"


def members() -> list[Member]:
    """Networks whose running statistics are those of noise, so that nothing overflows."""
    found = []
    for site in range(SITES):
        draw = torch.Generator().manual_seed(site)
        net = build(SPEC)
        net.load_state_dict(fresh(SPEC, draw))
        net.train()
        with torch.no_grad():
            for _ in range(5):
                net(torch.randn((32, *SHAPE), generator=draw))
        found.append(Member(SPEC, dict(net.state_dict())))
    return found


def milliseconds(step: Callable[[], object], steps: int) -> float:
    """Per step, after a warm-up."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1000


class Plain:
    """FedISCA's three loops, in eager fp32; `public`: as its public code has them."""

    def __init__(self, of: list[Member], device: torch.device, public: bool = False) -> None:
        self.public, self.device = public, device
        self.teachers = [self._net(m, device).eval().requires_grad_(public) for m in of]
        self.adapted = [self._net(m, device).train().requires_grad_(False) for m in of]
        self.student = self._net(of[0], device).train()
        self.sgd = torch.optim.SGD(self.student.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
        self.images = torch.randn((BATCH, *SHAPE), device=device, requires_grad=True)
        self.remembered = self.images.detach()
        self.labels = balanced_labels(BATCH, CLASSES).to(device)
        self.adam = torch.optim.Adam([self.images], lr=0.05)
        self.gaps: list[Tensor] = []
        self.hooks = [
            layer.register_forward_pre_hook(self._measure)
            for net in self.teachers
            for layer in net.modules()
            if isinstance(layer, nn.BatchNorm2d)
        ]

    @staticmethod
    def _net(of: Member, device: torch.device) -> nn.Module:
        net = build(of.spec)
        net.load_state_dict(of.weights)
        return net.to(device)

    def _measure(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        variance, mean = torch.var_mean(inputs[0], dim=(0, 2, 3), unbiased=False)
        self.gaps.append((mean - layer.running_mean).norm() + (variance - layer.running_var).norm())  # type: ignore[operator]

    def synthesise(self) -> None:
        """One step of Eq. 5."""
        self.gaps.clear()
        seen = torch.roll(self.images, (1, -1), dims=(2, 3))
        logits = torch.stack([net(seen) for net in self.teachers]).mean(dim=0)
        gap = torch.stack(self.gaps).sum() / SITES
        loss = F.cross_entropy(logits, self.labels) + 10 * gap + 2.5e-5 * total_variation(seen)
        self.adam.zero_grad()
        for net in self.teachers:
            net.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.remembered = self.images.detach().cpu() if self.public else self.images.detach()

    @torch.no_grad()
    def adapt(self) -> None:
        """One step of Eq. 7."""
        x = self.remembered.to(self.device)
        for net in self.adapted:
            net(x)

    def distil(self) -> None:
        """One step of Eq. 8."""
        x = self.remembered.to(self.device)
        with torch.no_grad():
            near = torch.stack([net(x) for net in self.teachers]).mean(dim=0)
            far = torch.stack([net(x) for net in self.adapted]).mean(dim=0)
        self.gaps.clear()
        said = self.student(x)
        loss = 0.5 * distillation(near, said, 20.0) + 0.5 * distillation(far, said, 20.0)
        self.sgd.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.sgd.step()


class Ours:
    """The same with the project's own parts."""

    def __init__(self, of: list[Member], device: torch.device, precision: Precision) -> None:
        self.teachers = Teachers(of, device, precision)
        self.adapted = AdaptedTeachers(of, device, "ema", 0.9, precision)
        self.student = Student(SPEC, of[0].weights, device, 0.9, 5e-4, precision)
        self.student.set_rate(1e-3)
        labels = balanced_labels(BATCH, CLASSES).to(device)
        self.synthesis = Synthesis(self.teachers, labels, SHAPE, Inversion(steps=10**6, batch=BATCH))
        self.synthesis.begin(torch.Generator().manual_seed(0))
        self.images = torch.randn((BATCH, *SHAPE), device=device).to(memory_format=torch.channels_last)
        self.noise = torch.full((), 0.5, device=device)
        self.follow = Replay(self.adapted.follow, device)
        self.ask, self.learn = Replay(self._ask, device), Replay(self._learn, device)
        self.shown, self.asked = torch.cat([self.images] * AT_ONCE), 0

    def synthesise(self) -> None:
        """One step of Eq. 5."""
        self.synthesis.step()

    def adapt(self) -> None:
        """One step of Eq. 7."""
        self.follow(self.images)

    def distil(self) -> None:
        """One step of Eq. 8; teachers are asked about several batches at once, as the method does."""
        if self.asked % AT_ONCE == 0:
            self.answers = [said[:BATCH] for said in self.ask(self.shown)]
        self.asked += 1
        self.learn(self.images, self.noise, *self.answers)

    def _ask(self, images: Tensor) -> list[Tensor]:
        return each([partial(of.logits, images) for of in (self.teachers, self.adapted)])

    def _learn(self, images: Tensor, noise: Tensor, near: Tensor, far: Tensor) -> None:
        self.student.step(mixed_distillation(near, far, self.student.logits(images), noise, 20.0))


def fedisca_epoch(changes: dict[str, Any], epochs: int = 5, steps: int = 500) -> dict[str, float]:
    """Seconds of one epoch of the method by part, on phantoms and sites that have hardly learned."""
    tree: dict[str, Any] = {
        "device": "cuda",
        "method": "fedisca",
        "data": {"source": "phantoms:1000", "sites": SITES, "alpha": 10.0},
        "model": {"name": SPEC.name},
        "train": {"epochs": 1, "precision": "bf16"},
        "set": {"epochs": epochs, "steps": steps, "batch": BATCH, **changes},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = begin_run(validate(tree), Path(folder) / "run", Silent()).finish()
    return {row["part"]: row["seconds"] / epochs for row in result["work"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    device, of = torch.device("cuda"), members()
    parts = ("synthesise", "adapt", "distil")
    found, rows = {}, []
    for name, public in ((FROZEN, False), (PUBLIC, True)):
        plain = Plain(of, device, public)
        found[name] = times = {part: milliseconds(getattr(plain, part), options.steps) for part in parts}
        del plain
        rows.append((f"{name}, ms a step", ", ".join(f"{part} {times[part]:.1f}" for part in parts)))
    base = found[FROZEN]
    for precision in options.precision:
        ours = Ours(of, device, precision)
        times = {part: milliseconds(getattr(ours, part), options.steps) for part in parts}
        found[precision] = times
        words = ", ".join(f"{part} {times[part]:.1f} ({base[part] / times[part]:.1f}x)" for part in parts)
        epoch = sum(base.values()) / sum(times.values())
        rows.append((f"ours {precision}, ms a step", f"{words}; an epoch of FedISCA {epoch:.1f}x"))
        rows.append((f"peak memory, {precision}", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"))
    whole = {name: sum(found[name].values()) * 500 / 1000 for name in (FROZEN, PUBLIC)}
    epochs = {}
    for name, changes in READINGS.items():
        fedisca_epoch(changes, epochs=1, steps=20)  # a warm-up, as the baseline has one
        epochs[name] = fedisca_epoch(changes)
        seconds = sum(epochs[name].values())
        words = f"{seconds:.1f} s against " + ", ".join(f"{s:.1f} ({s / seconds:.1f}x, {n})" for n, s in whole.items())
        rows.append((f"an epoch of the method fedisca, {name}", words))
    measured = {"milliseconds": found, "fedisca_epoch_seconds": epochs}
    report("synthesis", rows, options.out, n=options.steps, **measured)


if __name__ == "__main__":
    main()
