"""The uploaded models as frozen teachers: their mean answer, and how far an image is from what they were trained on.

Batch-norm running statistics are the synthesis signal: each layer remembers the mean and variance of the real images'
feature maps, and an image is plausible when it reproduces them (FedISCA Eq. 6). Parameters are frozen, so a backward
pass goes to the image alone and costs a third less than one that also visits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.learn import nets
from wardround.learn.predictor import Member
from wardround.models import StagedNet, build

Adaptation = Literal["ema", "batch"]


class View(NamedTuple):
    """What the teachers make of images: each one's logits, and the summed distance of its batch-norm statistics."""

    logits: tuple[Tensor, ...]
    gaps: tuple[Tensor, ...]

    @property
    def mean(self) -> Tensor:
        """Eq. 3: the mean of the teachers' logits."""
        return torch.stack(self.logits).mean(dim=0)


class Teachers:
    """Frozen networks that answer together."""

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self.nets = [_frozen(member, device) for member in members]

    def logits(self, pixels: Tensor) -> Tensor:
        """Eq. 3, without a gradient."""
        with torch.no_grad():
            return torch.stack([net(pixels) for net in self.nets]).mean(dim=0)

    def view(self, pixels: Tensor) -> View:
        """Logits and statistics in one pass, differentiable in the pixels."""
        logits, gaps = [], []
        for net in self.nets:
            with _statistics_gap(net) as layers:
                logits.append(net(pixels))
            gaps.append(torch.stack(layers).sum())
        return View(tuple(logits), tuple(gaps))


class AdaptedTeachers(Teachers):
    """Copies whose batch-norm statistics follow the images they are shown (Eq. 7), for noise that real ones never met.

    `ema`, as the papers say: running statistics move by 1 − momentum with every batch, and answers use them. `batch`,
    as FedISCA's public code does: answers use the statistics of the very batch that is asked about, so `follow` has
    no effect.
    """

    def __init__(
        self, members: Sequence[Member], device: torch.device, adaptation: Adaptation = "ema", momentum: float = 0.9
    ) -> None:
        super().__init__(members, device)
        self.adaptation = adaptation
        for layer in self._layers():
            layer.momentum = 1 - momentum

    def follow(self, pixels: Tensor) -> None:
        """Eq. 7 on one batch."""
        if self.adaptation == "batch":
            return
        with self._batch_statistics(recorded=True), torch.no_grad():
            for net in self.nets:
                net(pixels)

    def logits(self, pixels: Tensor) -> Tensor:
        """Eq. 3 with adapted statistics, without a gradient."""
        if self.adaptation == "ema":
            return super().logits(pixels)
        with self._batch_statistics(recorded=False):
            return super().logits(pixels)

    def statistics(self) -> dict[str, Tensor]:
        """The adapted statistics of all teachers, to be kept in a state."""
        return {
            f"{i:03d}.{name}": buffer.detach().clone()
            for i, net in enumerate(self.nets)
            for name, buffer in net.named_buffers()
            if buffer.is_floating_point()
        }

    def restore(self, statistics: Mapping[str, Tensor]) -> None:
        """The inverse of `statistics`."""
        for i, net in enumerate(self.nets):
            for name, buffer in net.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(statistics[f"{i:03d}.{name}"])

    def _layers(self) -> list[_BatchNorm]:
        return [module for net in self.nets for module in net.modules() if isinstance(module, _BatchNorm)]

    @contextmanager
    def _batch_statistics(self, recorded: bool) -> Iterator[None]:
        """Within the block, batch norm uses each batch's own statistics; running ones and counters move if recorded."""
        for layer in self._layers():
            layer.train()
            layer.track_running_stats = recorded
        try:
            yield
        finally:
            for layer in self._layers():
                layer.eval()
                layer.track_running_stats = True


def _frozen(member: Member, device: torch.device) -> StagedNet:
    net = build(member.spec).to(device)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    nets.load(net, member.weights)
    return net.requires_grad_(False).eval()


@contextmanager
def _statistics_gap(net: StagedNet) -> Iterator[list[Tensor]]:
    """Within the block, every batch-norm layer adds ‖μ(x) − μ‖ + ‖σ²(x) − σ²‖ of its input to the list (Eq. 6)."""
    found: list[Tensor] = []

    def measure(layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        maps = inputs[0]
        variance, mean = torch.var_mean(maps, dim=[0, *range(2, maps.ndim)], unbiased=False)
        found.append((mean - layer.running_mean).norm() + (variance - layer.running_var).norm())  # type: ignore[operator]

    hooks = [m.register_forward_pre_hook(measure) for m in net.modules() if isinstance(m, _BatchNorm)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
