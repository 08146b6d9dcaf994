"""A frozen network's first layers in one pass: the 3×3 convolution of an image, batch norm and ReLU.

An image has one or three channels, so this convolution is hardly any arithmetic, but it makes the widest feature maps
of the whole network, and these are written, read for the norm, and read again on the way back. Here they never leave
the registers: whoever needs them works them out again from the image. In bf16 on a GPU, with stored statistics;
elsewhere the layers run as they are, which is also what the kernels are tested against.
"""

# Triton reads a kernel's source: its parameters are pointers and numbers, and have no annotations to check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,unused-ignore"

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

import torch
from torch import Tensor, nn

from wardround.synthesis import kernels
from wardround.synthesis.fused_norm import FusedNorm
from wardround.synthesis.kernels import BLOCKS, CHANNELS, ROWS, Affine, Slopes

try:  # comes with PyTorch's CUDA builds
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MOST_COLOURS = 3  # of an image


class FusedStem(nn.Sequential):
    """Stands in for a convolution, a norm and its ReLU in sequence, and has the same layers by the same names."""

    def forward(self, images: Tensor) -> Tensor:
        """relu(norm(conv(images))); what a measuring norm would leave with itself is left with it."""
        conv, norm = cast("tuple[nn.Conv2d, FusedNorm]", (self[0], self[1]))
        if norm.training or not _can_run(images, conv.weight):
            return cast(Tensor, norm(conv(images)))
        by = norm.by_channel(norm.statistics())
        normed, beside, gap, spread = _Stem.apply(images, conv.weight, by, norm.measuring)
        normed.twin = beside
        if norm.measuring:
            norm.moments = (gap, spread)
        return cast(Tensor, normed)


def replace_stems(net: nn.Module) -> None:
    """Put a stand-in in the place of every sequence it can stand in for; after `replace_norms`."""
    for name, child in list(net.named_children()):
        if _suits(child):
            setattr(net, name, FusedStem(OrderedDict(child.named_children())))
        else:
            replace_stems(child)


def _suits(layers: nn.Module) -> bool:
    if not isinstance(layers, nn.Sequential) or len(layers) < 2:
        return False
    conv, norm, *rest = layers
    return (
        isinstance(conv, nn.Conv2d)
        and (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (1, 1), (1, 1))
        and conv.bias is None
        and conv.in_channels <= MOST_COLOURS
        and isinstance(norm, FusedNorm)
        and norm.rectified
        and all(isinstance(layer, nn.Identity) for layer in rest)
    )


def _can_run(images: Tensor, weight: Tensor) -> bool:
    return kernels.can_run(images, weight) and images.dtype == torch.bfloat16


class _Stem(torch.autograd.Function):
    """The kernels as one differentiable function of the images."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, by: Affine, measure: bool) -> tuple[Tensor, ...]:
        normed, (gap, spread) = forward(images, weight, by, measure)
        ctx.save_for_backward(images, weight, gap)
        ctx.by = by
        ctx.set_materialize_grads(False)  # what has no twin in use has no slope by it
        return normed, normed.detach(), gap, spread

    @staticmethod
    def backward(
        ctx: Any, slope: Tensor | None, beside: Tensor | None, *by_moments: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        images, weight, gap = ctx.saved_tensors
        slopes = kernels.given(_empty_maps(images, weight), slope, beside)
        measured = kernels.given_moments(gap, by_moments)
        return backward(slopes, images, weight, ctx.by, gap, measured), None, None, None


def forward(images: Tensor, weight: Tensor, by: Affine, measure: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """relu(norm(conv(images))), and where measured, the moments of what the norm is given, as `kernels.norm`."""
    normed = _empty_maps(images, weight)
    (number, colours, height, width), channels = images.shape, len(weight)
    rows = number * height * width
    blocks = min(BLOCKS, triton.cdiv(rows, ROWS))
    sums = torch.empty((2, blocks, channels) if measure else (0,), device=images.device)
    _forward_kernel[(blocks, triton.cdiv(channels, CHANNELS))](
        images, weight, by.weight, by.bias, by.mean, by.variance, normed, sums,
        rows, height, width, channels, blocks, by.eps, measure, colours, _depth(colours), ROWS, CHANNELS,
    )  # fmt: skip
    return normed, kernels.finish(sums, rows) if measure else (sums, sums)


def backward(
    slopes: Slopes, images: Tensor, weight: Tensor, by: Affine, gap: Tensor, by_moments: tuple[Tensor, ...] | None
) -> Tensor:
    """The slope by the images: first by each pixel as each of nine neighbours sees it, then their sum."""
    (number, colours, height, width), channels = images.shape, len(weight)
    rows = number * height * width
    seen = torch.empty((rows, 9 * colours), device=images.device)
    by_gap, by_spread = (by.mean, by.mean) if by_moments is None else by_moments
    grid = (triton.cdiv(rows, ROWS),)
    _backward_kernel[grid](
        slopes[0], slopes[-1], images, weight, by.weight, by.bias, by.mean, by.variance, gap, by_gap, by_spread, seen,
        rows, height, width, channels, by.eps, len(slopes) == 2, by_moments is not None,
        colours, _depth(colours), ROWS, CHANNELS,
    )  # fmt: skip
    found = torch.empty_like(images)
    _gather_kernel[grid](seen, found, rows, height, width, colours, triton.next_power_of_2(colours), ROWS)
    return found


def _empty_maps(images: Tensor, weight: Tensor) -> Tensor:
    """Room for what the convolution makes of the images, channels last."""
    number, _, height, width = images.shape
    return images.new_empty((number, height, width, len(weight))).permute(0, 3, 1, 2)


def _depth(colours: int) -> int:
    """Of a matrix product over the nine neighbours: a power of two, 16 at least."""
    return max(16, 1 << (9 * colours - 1).bit_length())


if triton is not None:

    @triton.jit
    def _surroundings(images, row, rows, height, width, COLOURS: tl.constexpr, DEPTH: tl.constexpr):
        """The values around pixels: rows by neighbour and colour; zeros beyond the edge."""
        k = tl.arange(0, DEPTH)
        down, right = k // COLOURS // 3 - 1, k // COLOURS % 3 - 1
        y, x = (row // width % height)[:, None] + down[None, :], (row % width)[:, None] + right[None, :]
        valid = (row < rows)[:, None] & (k < 9 * COLOURS)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        place = (row[:, None] + (down * width + right)[None, :]) * COLOURS + (k % COLOURS)[None, :]
        return tl.load(images + place, mask=valid, other=0.0)

    @triton.jit
    def _forward_kernel(
        images, filters, weight, bias, mean, variance, normed, sums, rows, height, width, channels, blocks, eps,
        MEASURE: tl.constexpr, COLOURS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0)
        column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        k = tl.arange(0, DEPTH)
        known = (k < 9 * COLOURS)[:, None] & inside[None, :]
        filter = tl.load(filters + column[None, :] * (9 * COLOURS) + k[:, None], mask=known, other=0.0)
        centre = tl.load(mean + column, mask=inside, other=0.0)
        spread = tl.load(variance + column, mask=inside, other=1.0)
        scale = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
        shift = tl.load(bias + column, mask=inside, other=0.0)
        if MEASURE:
            first = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
            second = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
        for start in range(block * ROWS, rows, blocks * ROWS):
            row = start + tl.arange(0, ROWS)
            around = _surroundings(images, row, rows, height, width, COLOURS, DEPTH)
            away = tl.dot(around, filter) - centre[None, :]
            value = tl.maximum(away * scale[None, :] + shift[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)
            valid = (row < rows)[:, None] & inside[None, :]
            place = row[:, None] * channels + column[None, :]
            tl.store(normed + place, value.to(normed.dtype.element_ty), mask=valid)
            if MEASURE:
                away = tl.where(valid, away, 0.0)
                first += away
                second += away * away
        if MEASURE:
            kernels.put_sums(sums, first, second, block, blocks, column, channels)

    @triton.jit
    def _backward_kernel(
        slope, beside, images, filters, weight, bias, mean, variance, gap, by_gap, by_spread, seen,
        rows, height, width, channels, eps, TWO: tl.constexpr, MEASURE: tl.constexpr,
        COLOURS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        k = tl.arange(0, DEPTH)
        around = _surroundings(images, row, rows, height, width, COLOURS, DEPTH)
        total = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
        for start in range(0, channels, CHANNELS):
            column = start + tl.arange(0, CHANNELS)
            inside = column < channels
            known = (k < 9 * COLOURS)[:, None] & inside[None, :]
            filter = tl.load(filters + column[None, :] * (9 * COLOURS) + k[:, None], mask=known, other=0.0)
            spread = tl.load(variance + column, mask=inside, other=1.0)
            scale = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
            shift = tl.load(bias + column, mask=inside, other=0.0)
            away = tl.dot(around, filter) - tl.load(mean + column, mask=inside, other=0.0)[None, :]
            valid = (row < rows)[:, None] & inside[None, :]
            place = row[:, None] * channels + column[None, :]
            value = tl.load(slope + place, mask=valid, other=0.0).to(tl.float32)
            if TWO:
                value += tl.load(beside + place, mask=valid, other=0.0).to(tl.float32)
            value = tl.where(away * scale[None, :] + shift[None, :] > 0, value, 0.0) * scale[None, :]
            if MEASURE:
                away -= tl.load(gap + column, mask=inside, other=0.0)[None, :]
                constant = tl.load(by_gap + column, mask=inside, other=0.0) / rows
                steepness = tl.load(by_spread + column, mask=inside, other=0.0) * 2 / rows
                value += constant[None, :] + away * steepness[None, :]
            total += tl.dot(value.to(filter.dtype), tl.trans(filter))
        kept = (row < rows)[:, None] & (k < 9 * COLOURS)[None, :]
        tl.store(seen + row[:, None] * (9 * COLOURS) + k[None, :], total, mask=kept)

    @triton.jit
    def _gather_kernel(
        seen, found, rows, height, width, COLOURS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr
    ):  # fmt: skip
        """A pixel is its neighbour's neighbour the other way round."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        colour = tl.arange(0, WIDE)
        y, x = row // width % height, row % width
        total = tl.zeros((ROWS, WIDE), dtype=tl.float32)
        for k in tl.static_range(9):
            down, right = k // 3 - 1, k % 3 - 1
            there = (y >= down) & (y - down < height) & (x >= right) & (x - right < width) & (row < rows)
            place = (row - down * width - right)[:, None] * (9 * COLOURS) + k * COLOURS + colour[None, :]
            total += tl.load(seen + place, mask=there[:, None] & (colour < COLOURS)[None, :], other=0.0)
        valid = (row < rows)[:, None] & (colour < COLOURS)[None, :]
        tl.store(found + row[:, None] * COLOURS + colour[None, :], total.to(found.dtype.element_ty), mask=valid)
