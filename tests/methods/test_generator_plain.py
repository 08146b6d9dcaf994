"""`dense`, `coboosting`, `dafl`: whole epochs against plain loops."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.generators import begin, method
from methods.plain import kl, mean_logits, members, network, snapshot, statistics_distance
from wardround.learn.pixels import augment, draw_augmentation
from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.methods.state import State
from wardround.models import StagedNet, Weights


def plain_generator() -> nn.Sequential:
    """For eight colour pixels out of five numbers; its weights are drawn below."""
    return nn.Sequential(
        nn.Linear(5, 128 * 2 * 2),
        nn.Unflatten(1, (128, 2, 2)),
        nn.BatchNorm2d(128),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 128, 3, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 3, 3, padding=1),
        nn.Sigmoid(),
    )


def drawn(draw: torch.Generator) -> tuple[nn.Sequential, Tensor]:
    """A generator with weights from N(0, 0.02) and batch norm from N(1, 0.02), then six codes."""
    net = plain_generator()
    for name, p in net.named_parameters():
        is_norm = p.dim() == 1 and name.endswith("weight")
        p.data = torch.zeros_like(p) if name.endswith("bias") else torch.empty_like(p)
        if name.endswith("weight"):
            p.data.normal_(float(is_norm), 0.02, generator=draw)
    return net, torch.randn(6, 5, generator=draw).requires_grad_(True)


def learner(ctx: Context, decay: float) -> tuple[StagedNet, torch.optim.SGD]:
    spec = ctx.study.student_spec
    net = network(Member(spec, ctx.study.fresh_weights(spec, "student"))).train()
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=decay)


def descend(optimiser: torch.optim.Optimizer, loss: Tensor, clip: Any = None) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(clip.parameters(), 10)
    optimiser.step()


def unpooled(pool: list[Tensor], index: Tensor, crops: Tensor) -> Tensor:
    return augment(torch.cat(pool)[index], crops).float() / 127.5 - 1


def pass_over(pool: list[Tensor], draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    count = 6 * len(pool)
    order = torch.randperm(count, generator=draw)
    crops = draw_augmentation(count, draw)
    yield from zip(order.view(-1, 6), crops.view(-1, 6, 3), strict=True)


def plain_dense(ctx: Context, of: list[Member], bn_weight: float) -> Iterator[tuple[Weights, Tensor]]:
    teachers = [network(m) for m in of]
    student, sgd = learner(ctx, 0.0)
    pool: list[Tensor] = []
    for epoch in range(3):
        draw = ctx.streams.torch("synthesis", index=epoch)
        labels = torch.randint(4, (6,), generator=draw)
        crops = draw_augmentation(18, draw).view(3, 6, 3)
        generator, z = drawn(draw)
        adam = torch.optim.Adam([*generator.parameters(), z], lr=1e-3, betas=(0.5, 0.999))
        best, lowest = torch.empty(0), math.inf
        for crop in crops:
            images = generator(z) * 2 - 1
            seen = augment(images, crop)
            student.eval()
            t, s = mean_logits(teachers, seen), student(seen)
            student.train()
            differ = (t.argmax(dim=1) != s.argmax(dim=1)).float()
            loss = F.cross_entropy(t, labels) - (kl(t, s, 1.0) * differ).mean()
            loss = loss + bn_weight * sum(statistics_distance(net, seen) for net in teachers) / 2
            if loss.item() < lowest:
                best, lowest = images.detach().clone(), loss.item()
            descend(adam, loss)
        pool.append(((best + 1) / 2 * 255).round().to(torch.uint8))
        for index, crop in pass_over(pool, ctx.streams.torch("distillation", index=epoch)):
            x = unpooled(pool, index, crop)
            with torch.no_grad():
                target = mean_logits(teachers, x)
            descend(sgd, kl(target, student(x), 20.0).mean())
        yield snapshot(student), torch.cat(pool)


def plain_coboosting(ctx: Context, of: list[Member]) -> Iterator[tuple[Weights, Tensor, Tensor]]:
    teachers = [network(m) for m in of]
    student, sgd = learner(ctx, 1e-4)
    pool: list[Tensor] = []
    known_labels = torch.empty(0, dtype=torch.int64)
    w = torch.full((2,), 0.5)

    def ensemble(x: Tensor, weights: Tensor) -> Tensor:
        both: Tensor = (weights[0] * teachers[0](x) + weights[1] * teachers[1](x)) / weights.sum()
        return both

    for epoch in range(3):
        draw = ctx.streams.torch("synthesis", index=epoch)
        labels = torch.randint(4, (6,), generator=draw)
        generator, z = drawn(draw)
        adam = torch.optim.Adam([*generator.parameters(), z], lr=1e-3, betas=(0.5, 0.999))
        best, lowest = torch.empty(0), math.inf
        for _ in range(3):
            images = generator(z) * 2 - 1
            student.eval()
            t, s = ensemble(images, w), student(images)
            student.train()
            p = t.softmax(dim=1)[torch.arange(6), labels].detach()
            loss = ((1 - p) * F.cross_entropy(t, labels, reduction="none")).mean() - kl(t, s, 3.0).mean()
            if loss.item() < lowest:
                best, lowest = images.detach().clone(), loss.item()
            descend(adam, loss, clip=generator)
        if epoch > 0:
            for index, crop in pass_over(pool, ctx.streams.torch("weights", index=epoch)):
                free = w.clone().requires_grad_(True)
                loss = F.cross_entropy(ensemble(unpooled(pool, index, crop), free), known_labels[index])
                loss.backward()  # type: ignore[no-untyped-call]
                assert free.grad is not None
                w = (w - 0.01 * 0.99**epoch * free.grad.sign()).clamp(0, 1)
        pool.append(((best + 1) / 2 * 255).round().to(torch.uint8))
        known_labels = torch.cat([known_labels, labels])
        order = ctx.streams.torch("distillation", index=epoch)
        batches = list(pass_over(pool, order))
        directions = torch.rand(len(batches), 6, 4, generator=order) * 2 - 1
        sgd.param_groups[0]["lr"] = 0.02 * (1 + math.cos(math.pi * epoch / 3)) / 2
        for (index, crop), u in zip(batches, directions, strict=True):
            x = unpooled(pool, index, crop).requires_grad_(True)
            (u * (ensemble(x, w) / 4).softmax(dim=1)).sum().backward()
            assert x.grad is not None
            moved = (x + 8 / 255 * x.grad.sign()).detach()
            with torch.no_grad():
                target = ensemble(moved, w)
            descend(sgd, kl(target, student(moved), 4.0).mean(), clip=student)
        yield snapshot(student), torch.cat(pool), w


def plain_dafl(ctx: Context, of: list[Member]) -> Iterator[tuple[Weights, Tensor]]:
    teachers = [network(m) for m in of]
    student, sgd = learner(ctx, 1e-4)
    generator, first = plain_generator(), ctx.streams.torch("generator")
    for layer in generator:
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.fill_(1)
            layer.bias.data.zero_()
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            for parameter in layer.parameters():
                parameter.data.uniform_(-bound, bound, generator=first)
    adam = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for epoch in range(3):
        draw = ctx.streams.torch("synthesis", index=epoch)
        sgd.param_groups[0]["lr"] = (0.02, 0.02, 0.002)[epoch]  # 2/3 of the epochs are over 60 %
        for _ in range(2):
            z = torch.randn(3, 6, 5, generator=draw)
            x = generator(z[0]) * 2 - 1
            t = mean_logits(teachers, x)
            p = t.softmax(dim=1).mean(dim=0)
            active = sum(net.features(x).abs().mean() for net in teachers) / 2
            descend(adam, F.cross_entropy(t, t.argmax(dim=1)) + 20 * (p * p.log()).sum() - 1e-3 * active)
            for codes in z[1:]:
                with torch.no_grad():
                    x = generator(codes) * 2 - 1
                    target = mean_logits(teachers, x)
                descend(sgd, kl(target, student(x), 20.0).mean())
        yield snapshot(student), snapshot(generator)["0.weight"]


def assert_close(found: Any, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=5e-3, atol=5e-4)


def assert_same_pictures(found: Tensor, expected: Tensor) -> None:
    """But for one level here and there, which rounding may shift."""
    assert found.shape == expected.shape
    assert found.dtype == torch.uint8
    away = (found.int() - expected.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 0.01


@pytest.mark.parametrize("bn_weight", [1.0, 0.0])
def test_dense_is_a_plain_loop(bn_weight: float) -> None:
    ctx, sent = begin("dense")
    states = method("dense", bn_weight=bn_weight).absorb(ctx, State(), sent)
    for state, (weights, pool) in zip(states, plain_dense(ctx, members(ctx, sent), bn_weight), strict=True):
        assert_same_pictures(state.groups["pool"]["images"], pool)
        assert_close(state.groups["student"], weights)


def test_coboosting_is_a_plain_loop() -> None:
    ctx, sent = begin("coboosting")
    states = method("coboosting").absorb(ctx, State(), sent)
    for state, (weights, pool, w) in zip(states, plain_coboosting(ctx, members(ctx, sent)), strict=True):
        assert_same_pictures(state.groups["pool"]["images"], pool)
        torch.testing.assert_close(state.groups["ensemble_weights"]["weights"], w)
        assert_close(state.groups["student"], weights)


def test_dafl_is_a_plain_loop() -> None:
    ctx, sent = begin("dafl")
    states = method("dafl").absorb(ctx, State(), sent)
    for state, (weights, start) in zip(states, plain_dafl(ctx, members(ctx, sent)), strict=True):
        torch.testing.assert_close(state.groups["generator"]["start.weight"], start, rtol=1e-3, atol=1e-4)
        assert_close(state.groups["student"], weights)
