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
        if kernels.can_run(maps, shortcut):
            by = self.by_channel(self._batch_moments(maps) if self.training else self.statistics())
            normed, beside, *moments = _Fused.apply(  # type: ignore[no-untyped-call]
                maps, shortcut, by, rectify, self.measuring
            )
            normed.twin = beside
        else:
            mean, _ = self.statistics()
            normed = self._plain(maps, shortcut, rectify)
            moments = plain_moments(maps, mean) if self.measuring else ()
        if self.measuring:
            self.moments = (moments[0], moments[1])
        return normed  # type: ignore[no-any-return]

    def by_channel(self, moments: Moments) -> kernels.Affine:
        """What it does to a channel of these moments."""
        return kernels.Affine(self.weight, self.bias, *moments, self.eps)

    def _plain(self, maps: Tensor, shortcut: Tensor | None, rectify: bool) -> Tensor:
        """By PyTorch's own functions."""
        normed = super().forward(maps)
        normed = normed if shortcut is None else normed + shortcut
        return F.relu(normed) if rectify else normed

    def _batch_moments(self, maps: Tensor) -> Moments:
        """Of this batch; the running ones follow where they are tracked, as `nn.BatchNorm2d` has it."""
        share = (self.momentum or 0.0) if self.track_running_stats else 0.0
        return kernels.batch_moments(maps, *self.statistics(), share)

    def statistics(self) -> Moments:
        """The stored moments."""
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
        normed, beside = _Trained.apply(  # type: ignore[no-untyped-call]
            maps, shortcut, self.weight, self.bias, mean, variance, self.eps, rectify
        )
        normed.twin = beside
        return normed  # type: ignore[no-any-return]


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
        ctx: Any, maps: Tensor, shortcut: Tensor | None, by: kernels.Affine, rectify: bool, measure: bool
    ) -> tuple[Tensor, ...]:
        normed, (gap, spread) = kernels.norm(maps, shortcut, by, rectify, measure)
        ctx.save_for_backward(maps, _kept(normed, shortcut, rectify), gap)
        ctx.by, ctx.rectify, ctx.has_shortcut = by, rectify, shortcut is not None
        ctx.set_materialize_grads(False)  # what has no twin in use has no slope by it
        return normed, normed.detach(), gap, spread

    @staticmethod
    def backward(
        ctx: Any, slope: Tensor | None, beside: Tensor | None, *by_moments: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        maps, normed, gap = ctx.saved_tensors
        slopes, measured = kernels.given(maps, slope, beside), kernels.given_moments(gap, by_moments)
        found, passed = kernels.backward(slopes, maps, normed, ctx.by, ctx.rectify, gap, measured, ctx.has_shortcut)
        return found, passed, None, None, None


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
    ) -> tuple[Tensor, Tensor]:
        by = kernels.Affine(weight, bias, mean, variance, eps)
        normed, _ = kernels.norm(maps, shortcut, by, rectify, measure=False)
        ctx.save_for_backward(maps, _kept(normed, shortcut, rectify), weight, bias, mean, variance)
        ctx.eps, ctx.rectify, ctx.has_shortcut = eps, rectify, shortcut is not None
        ctx.set_materialize_grads(False)
        return normed, normed.detach()

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, ...]:
        maps, normed, weight, bias, mean, variance = ctx.saved_tensors
        by = kernels.Affine(weight, bias, mean, variance, ctx.eps)
        slopes = kernels.given(maps, slope, beside)
        by_weight, by_bias, by_moments = kernels.parameter_slopes(slopes, maps, normed, by, ctx.rectify)
        found, passed = kernels.backward(slopes, maps, normed, by, ctx.rectify, None, by_moments, ctx.has_shortcut)
        return found, passed, by_weight, by_bias, None, None, None, None


def _kept(normed: Tensor, shortcut: Tensor | None, rectify: bool) -> Tensor | None:
    """What the way back must know of what came out: without a shortcut, the maps tell what the ReLU let through."""
    return normed if rectify and shortcut is not None else None
