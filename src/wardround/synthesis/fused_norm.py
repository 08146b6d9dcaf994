"""Batch norm at the coordinator: norm, shortcut and ReLU in one pass, and what came in measured in the same.

Inversion needs two things of every batch-norm layer: its output under stored statistics, and how far the mean and
variance of its input are from them. Done apart, with the ReLU and the sum of a residual block, they read and write the
feature maps many times over; on a GPU that, not the convolutions, is what a step would wait for. Here Triton kernels
read them once each way. A student in training has the same done with the statistics of each batch (`TrainedNorm`).
Elsewhere it is all done by PyTorch's own functions, which is also what the kernels are tested against
(`tests/synthesis/test_on_gpu.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.synthesis import kernels

Moments = tuple[Tensor, Tensor]  # by channel: mean and biased variance


class FusedNorm(nn.BatchNorm2d):
    """Stands in for a batch-norm layer whose parameters no longer learn, and shares its tensors.

    `measuring`: the moments of what comes in are left in `moments`, differentiable; the mean less the stored one.
    """

    def __init__(self, layer: _BatchNorm, rectified: bool) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum)
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.rectified, self.measuring = rectified, False
        self.moments: Moments
        self.train(layer.training)

    def forward(self, maps: Tensor) -> Tensor:
        """The norm alone, or with the ReLU that followed it."""
        return self._norm(maps, None, self.rectified)

    def activate(self, maps: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """relu(norm(maps) + shortcut)."""
        return self._norm(maps, shortcut, rectify=True)

    def _norm(self, maps: Tensor, shortcut: Tensor | None, rectify: bool) -> Tensor:
        mean, variance = self._statistics()
        if kernels.can_run(maps, shortcut):
            if self.training:
                mean, variance = self._batch_moments(maps)
            normed, *moments = _Fused.apply(  # type: ignore[no-untyped-call]
                maps, shortcut, self.weight, self.bias, mean, variance, self.eps, rectify, self.measuring
            )
        else:
            normed = self._plain(maps, shortcut, rectify)
            moments = plain_moments(maps, mean) if self.measuring else ()
        if self.measuring:
            self.moments = (moments[0], moments[1])
        return normed  # type: ignore[no-any-return]

    def _plain(self, maps: Tensor, shortcut: Tensor | None, rectify: bool) -> Tensor:
        """By PyTorch's own functions."""
        normed = super().forward(maps)
        normed = normed if shortcut is None else normed + shortcut
        return F.relu(normed) if rectify else normed

    def _batch_moments(self, maps: Tensor) -> Moments:
        """Of this batch; the running ones follow where they are tracked, as `nn.BatchNorm2d` has it."""
        share = (self.momentum or 0.0) if self.track_running_stats else 0.0
        return kernels.batch_moments(maps, *self._statistics(), share)

    def _statistics(self) -> Moments:
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None:
            raise ValueError("a batch-norm layer without running statistics cannot be a teacher's")
        return mean, variance


class TrainedNorm(FusedNorm):
    """Stands in for a batch-norm layer of a network in training; its parameters learn.

    In evaluation mode, which is rare there, all is left to PyTorch.
    """

    def _norm(self, maps: Tensor, shortcut: Tensor | None, rectify: bool) -> Tensor:
        if not (self.training and kernels.can_run(maps, shortcut)):
            return self._plain(maps, shortcut, rectify)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean, variance = self._batch_moments(maps)
        return _Trained.apply(  # type: ignore[no-any-return, no-untyped-call]
            maps, shortcut, self.weight, self.bias, mean, variance, self.eps, rectify
        )


def plain_moments(maps: Tensor, centre: Tensor) -> Moments:
    """The mean less `centre`, and the variance, by channel, in float32 or better."""
    variance, mean = torch.var_mean(widened(maps), dim=(0, 2, 3), unbiased=False)
    return mean - centre, variance


def widened(values: Tensor) -> Tensor:
    """At least float32: what is summed or compared must not be in bf16."""
    return values.float() if values.dtype == torch.bfloat16 else values


def replace_norms(net: nn.Module, kind: type[FusedNorm] = FusedNorm) -> list[FusedNorm]:
    """Put a stand-in in the place of every batch-norm layer; these, in the order of the network.

    A ReLU that follows in a sequence becomes part of it.
    """
    found: list[FusedNorm] = []
    children = list(net.named_children())
    for place, (name, child) in enumerate(children):
        if not isinstance(child, nn.BatchNorm2d):
            found += replace_norms(child, kind)
            continue
        after = children[place + 1] if isinstance(net, nn.Sequential) and place + 1 < len(children) else ("", None)
        rectified = isinstance(after[1], nn.ReLU)
        stand_in = kind(child, rectified)
        setattr(net, name, stand_in)
        if rectified:
            setattr(net, after[0], nn.Identity())
        found.append(stand_in)
    return found


class _Fused(torch.autograd.Function):
    """The kernels as one differentiable function of the maps and the shortcut."""

    @staticmethod
    def forward(
        ctx: Any,
        maps: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        rectify: bool,
        measure: bool,
    ) -> tuple[Tensor, ...]:
        normed, sums = kernels.norm(maps, shortcut, weight, bias, mean, variance, eps, rectify, measure)
        gap, spread = kernels.finish(sums, maps) if measure else (maps.new_empty(0), maps.new_empty(0))
        ctx.save_for_backward(maps, normed if rectify else None, weight, mean, variance, gap)
        ctx.eps, ctx.measure, ctx.has_shortcut = eps, measure, shortcut is not None
        return normed, gap, spread

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        maps, normed, weight, mean, variance, gap = ctx.saved_tensors
        by_moments = slopes[1:] if ctx.measure else None
        found, passed = kernels.backward(
            slopes[0], maps, normed, weight, mean, variance, ctx.eps, gap, by_moments, ctx.has_shortcut
        )
        return found, passed, None, None, None, None, None, None, None


class _Trained(torch.autograd.Function):
    """relu(norm(maps) + shortcut) under the batch's own statistics, which are functions of the maps themselves.

    With g the slope behind the ReLU, x̂ = (x − μ)/√(σ² + ε) and n rows: ∂β = Σg, ∂γ = Σg·x̂, and
    ∂x = γ/√(σ² + ε) · (g − ∂β/n − x̂·∂γ/n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        maps: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        rectify: bool,
    ) -> Tensor:
        normed, _ = kernels.norm(maps, shortcut, weight, bias, mean, variance, eps, rectify, measure=False)
        ctx.save_for_backward(maps, normed if rectify else None, weight, mean, variance)
        ctx.eps, ctx.has_shortcut = eps, shortcut is not None
        return normed

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        maps, normed, weight, mean, variance = ctx.saved_tensors
        slope = slope.contiguous(memory_format=torch.channels_last)
        by_weight, by_bias, by_moments = kernels.parameter_slopes(slope, maps, normed, weight, mean, variance, ctx.eps)
        found, passed = kernels.backward(
            slope, maps, normed, weight, mean, variance, ctx.eps, None, by_moments, ctx.has_shortcut
        )
        return found, passed, by_weight, by_bias, None, None, None, None
