"""What a one-shot method does, written out slowly: the pieces that plain loops of several methods are made of.

Nothing here comes from `wardround.synthesis`, so that a mistake there cannot be made twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.exchange.bundle import Bundle
from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.models import StagedNet, Weights, build


def members(ctx: Context, sent: Mapping[str, Bundle]) -> list[Member]:
    """The networks that sites sent, in the order of their names."""
    return [
        Member(
            ctx.study.spec(site),
            {n: t for kind, group in sent[site].groups.items() if kind != "size" for n, t in group.items()},
        )
        for site in sorted(sent)
    ]


def network(of: Member) -> StagedNet:
    """A network of its own, in evaluation mode."""
    net = build(of.spec)
    net.load_state_dict(of.weights)
    return net.eval()


def followers(of: Sequence[Member], follow: float) -> list[StagedNet]:
    """Networks whose running statistics keep `follow` of what they were with every batch."""
    nets = [network(member) for member in of]
    for layer in (m for net in nets for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        layer.momentum = 1 - follow
    return nets


def snapshot(net: nn.Module) -> Weights:
    """A copy of what is in it."""
    return {name: t.clone() for name, t in net.state_dict().items()}


def mean_logits(teachers: Sequence[StagedNet], x: Tensor) -> Tensor:
    """Eq. 3 of FedISCA."""
    return sum((teacher(x) for teacher in teachers), torch.zeros(())) / len(teachers)


def statistics_distance(teacher: StagedNet, x: Tensor) -> Tensor:
    """Eq. 6 of FedISCA for one teacher, layer by layer through its stages."""
    total = torch.zeros(())
    for stage in teacher.stages.values():
        for layer in stage.children() if isinstance(stage, nn.Sequential) else [stage]:
            if isinstance(layer, nn.BatchNorm2d):
                mean = x.mean(dim=(0, 2, 3))
                variance = ((x - mean.reshape(1, -1, 1, 1)) ** 2).mean(dim=(0, 2, 3))
                assert layer.running_mean is not None
                assert layer.running_var is not None
                total = total + ((mean - layer.running_mean) ** 2).sum().sqrt()
                total = total + ((variance - layer.running_var) ** 2).sum().sqrt()
            x = layer(x.clone())
    return total


class Point(NamedTuple):
    """Images after a step of the synthesis; before it the loss, and the images as the teachers saw them."""

    images: Tensor
    loss: float
    seen: Tensor


def synthesis(
    teachers: Sequence[StagedNet], draw: torch.Generator, steps: int, batch: int = 6, lr: float = 0.05, jitter: int = 2
) -> list[Point]:
    """Eq. 5 of FedISCA, Eq. 2 of FedBiCross: steps of Adam on images of eight pixels and four classes."""
    x = torch.randn(batch, 3, 8, 8, generator=draw)
    shifts = torch.randint(-jitter, jitter + 1, (steps, 2), generator=draw)
    x.requires_grad_(True)
    adam = torch.optim.Adam([x], lr=lr)
    labels = torch.tensor([0, 1, 2, 3] * batch)[:batch]
    found = []
    for dy, dx in shifts.tolist():
        seen = x.roll((dy, dx), dims=(2, 3))
        variation = (
            (seen[:, :, :, 1:] - seen[:, :, :, :-1]).norm()
            + (seen[:, :, 1:] - seen[:, :, :-1]).norm()
            + (seen[:, :, 1:, 1:] - seen[:, :, :-1, :-1]).norm()
            + (seen[:, :, 1:, :-1] - seen[:, :, :-1, 1:]).norm()
        )
        distance = sum((statistics_distance(t, seen) for t in teachers), torch.zeros(())) / len(teachers)
        loss = F.cross_entropy(mean_logits(teachers, seen), labels) + 10 * distance + 2.5e-5 * variation
        adam.zero_grad()
        loss.backward()
        before = seen.detach().clone()
        adam.step()
        found.append(Point(x.detach().clone(), loss.item(), before))
    return found


def kd(teacher: Tensor, student: Tensor, t: float = 20.0) -> Tensor:
    """Eq. 4 of FedISCA with its code's factor: the mean over the batch."""
    return kl(teacher, student, t).mean()


def kl(teacher: Tensor, student: Tensor, t: float) -> Tensor:
    """T²·KL at temperature T, image by image."""
    p, q = (teacher / t).softmax(dim=1), (student / t).softmax(dim=1)
    return t * t * (p * (p.log() - q.log())).sum(dim=1)
