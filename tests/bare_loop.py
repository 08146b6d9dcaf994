"""A slow, plain training loop that the real one is held against: no fused kernels, one image at a time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm2d

from wardround.data.imageset import ImageSet
from wardround.learn.fit import Fit, Fitted, Objective, Outputs, Recipe, Step, Teacher
from wardround.models import NetSpec, StagedNet, Weights, build, fresh, spec_layout
from wardround.streams import Streams

CPU = torch.device("cpu")
SIZE = 16  # with smaller images the last batch norm sees a handful of numbers, and roundings grow
RATE = 0.01  # with a higher one, too
CLASSES = ("ash", "birch", "cedar", "durmast")
BN, PLAIN = NetSpec("small", 3, 4, SIZE, width=2), NetSpec("cnn4", 3, 4, SIZE, width=2)
both_nets = pytest.mark.parametrize("spec", [BN, PLAIN], ids=lambda spec: spec.name)


def images(n: int, seed: int = 0, label: int | None = None) -> ImageSet:
    """Noise, with labels drawn at random or all the same."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 4, (n,), generator=generator) if label is None else torch.full((n,), label)
    return ImageSet(pixels, labels, CLASSES)


def a_fit(spec: NetSpec = BN, n: int = 20, seed: int = 11, **recipe: Any) -> Fit:
    """Three epochs of 8 + 8 + 4 images: nine steps."""
    chosen: dict[str, Any] = {"epochs": 3, "batch": 8, "lr": RATE, "weight_decay": 0.01, **recipe}
    start = fresh(spec, torch.Generator().manual_seed(seed))
    return Fit(f"site-{seed}, round 1", spec, start, images(n, seed), Recipe(**chosen), seed)


class Distillation(Objective):
    """Cross-entropy, the divergence from the mean of two teachers, and the distance from one's features."""

    def __init__(self) -> None:
        self.shown: list[Step] = []

    def loss(self, step: Step) -> Tensor:
        """Three terms; remembers what it was shown."""
        self.shown.append(step._replace(outputs=Outputs(*(output.detach() for output in step.outputs))))
        wanted = torch.stack([teacher.logits for teacher in step.teachers]).mean(0).softmax(1)
        divergence = F.kl_div(step.outputs.logits.log_softmax(1), wanted, reduction="batchmean")
        distance = (step.outputs.features - step.teachers[0].features).square().mean()
        return F.cross_entropy(step.outputs.logits, step.labels) + divergence + 0.1 * distance


def taught_fit(augment: bool, seed: int = 11) -> Fit:
    """A fit with two teachers."""
    teachers = [Teacher(BN, fresh(BN, torch.Generator().manual_seed(100 * seed + i))) for i in (1, 2)]
    return replace(a_fit(BN, seed=seed, augment=augment), objective=Distillation(), teachers=tuple(teachers))


def plain_network(spec: NetSpec, weights: Weights) -> StagedNet:
    """A network of its own, with these weights."""
    net = build(spec)
    net.load_state_dict(weights)
    return net


def plain_pixels(image: Tensor, draw: list[int] | None = None) -> Tensor:
    """One image, cropped out of its padded self and mirrored, as numbers from -1 to 1."""
    floats = image.float()
    if draw is not None:
        padded = F.pad(floats[None], (4, 4, 4, 4), mode="replicate")[0]
        floats = padded[:, draw[0] : draw[0] + SIZE, draw[1] : draw[1] + SIZE]
        floats = floats.flip(2) if draw[2] else floats
    return (floats / 255 - 0.5) / 0.5


def plain_batches(fit: Fit, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions and pixels of an epoch's batches."""
    n, streams = len(fit.data), Streams(fit.seed)
    order = torch.randperm(n, generator=streams.torch("shuffle", index=epoch))
    drawing = streams.torch("augment", index=epoch)
    offsets = torch.randint(0, 9, (n, 2), generator=drawing).tolist()
    flips = torch.randint(0, 2, (n, 1), generator=drawing).tolist()
    for start in range(0, n, fit.recipe.batch):
        index = order[start : start + fit.recipe.batch]
        if len(index) == 1 and spec_layout(fit.spec).has_batch_norm:
            continue
        draws = [offset + flip if fit.recipe.augment else None for offset, flip in zip(offsets, flips, strict=True)]
        yield index, torch.stack([plain_pixels(fit.data.images[i], draws[start + k]) for k, i in enumerate(index)])


def bare_loop(fit: Fit, rates: list[float], same_kernels: bool = False) -> tuple[Weights, list[float]]:
    """Weights and mean loss per epoch of a loop that anybody would write; `rates` are those of its steps, in order."""
    net = plain_network(fit.spec, fit.start)
    teachers = [plain_network(teacher.spec, teacher.weights).eval() for teacher in fit.teachers]
    if same_kernels:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trained = {name: p for name, p in net.named_parameters() if name not in fit.frozen}
    optimiser = _optimiser(fit.recipe, trained, same_kernels)
    left, losses = list(rates), []
    for epoch in range(fit.recipe.epochs):
        net.train()
        for name, layer in net.named_modules():
            if isinstance(layer, BatchNorm2d) and f"{name}.running_mean" in fit.frozen:
                layer.eval()
        seen: list[tuple[float, int]] = []
        for index, pixels in plain_batches(fit, epoch):
            if same_kernels:
                pixels = fit.data.images[index].to(torch.float32, memory_format=torch.channels_last) * (1 / 127.5) - 1
            with torch.no_grad():
                taught = tuple(Outputs(*teacher.outputs(pixels)) for teacher in teachers)
            step = Step(index, pixels, fit.data.labels[index], Outputs(*net.outputs(pixels)), taught)
            loss = fit.objective.loss(step)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            fit.objective.correct(trained)
            _clip([p.grad for p in trained.values() if p.grad is not None], fit.recipe.clip_norm)
            optimiser.param_groups[0]["lr"] = left.pop(0)
            optimiser.step()
            seen.append((float(loss.detach()), len(index)))
        losses.append(sum(loss * count for loss, count in seen) / sum(count for _, count in seen))
    assert not left, "the fit has fewer steps than rates"
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}, losses


def _optimiser(recipe: Recipe, trained: Mapping[str, Tensor], fused: bool) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"weight_decay": recipe.weight_decay, "foreach": False, "fused": fused}
    if recipe.optimiser == "adam":
        return torch.optim.Adam(trained.values(), recipe.lr, **how)
    return torch.optim.SGD(trained.values(), recipe.lr, recipe.momentum, **how)


def _clip(gradients: list[Tensor], most: float | None) -> None:
    if most is not None:
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        for gradient in gradients:
            gradient *= min(1.0, most / norm)


def same(one: Weights, other: Weights) -> bool:
    """Bit for bit."""
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def assert_follows(fit: Fit, rates: list[float], fitted: Fitted) -> None:
    """The fit moved as the bare loop does, but for the order in which numbers were added up.

    What is compared is the way gone from the start. Over these few steps rounding alone parts two loops by some 1e-6 of
    it (Adam, which divides by small gradients, by up to 5e-5), a rate that is 5 % off in one step by at least 1e-4
    (Adam: 1e-3).
    """
    weights, losses = bare_loop(fit, rates)
    assert list(fitted.weights) == list(weights)
    apart = gone = 0.0
    for name, expected in weights.items():
        if expected.is_floating_point():
            apart += float((fitted.weights[name] - expected).double().square().sum())
            gone += float((fit.start[name] - expected).double().square().sum())
        else:
            assert torch.equal(fitted.weights[name], expected)
    assert math.sqrt(apart / gone) < (2e-4 if fit.recipe.optimiser == "adam" else 2e-5)
    assert list(fitted.losses) == pytest.approx(losses, rel=1e-5)
