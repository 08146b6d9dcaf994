"""Triton kernels of `fused_norm.py`: feature maps in channels-last layout, as rows of channels.

Every kernel works on tiles of rows by channels, in float32 whatever the maps are stored in. Sums over rows are written
per block and added up by a second small kernel, always in the same order: no atomics.
"""

# Triton reads a kernel's source: its parameters are pointers and numbers, and have no annotations to check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,unused-ignore"

from __future__ import annotations

import torch
from torch import Tensor

try:  # comes with PyTorch's CUDA builds
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCKS = 264  # row blocks that add up side by side: two per multiprocessor of a large GPU
ROWS, CHANNELS = 64, 64  # of a tile


def can_run(maps: Tensor, shortcut: Tensor | None = None) -> bool:
    """Whether the kernels take these maps: on a GPU, channels last."""
    given = [maps] if shortcut is None else [maps, shortcut]
    return (
        triton is not None
        and maps.is_cuda
        and all(m.is_contiguous(memory_format=torch.channels_last) and m.dtype == maps.dtype for m in given)
    )


def norm(
    maps: Tensor,
    shortcut: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    rectify: bool,
    measure: bool,
) -> tuple[Tensor, Tensor]:
    """relu((maps − mean)/√(variance + eps)·weight + bias + shortcut), and sums by block for `finish`."""
    rows, channels, blocks = _shape(maps)
    normed = torch.empty_like(maps)
    sums = torch.empty((2, blocks, channels) if measure else (0,), device=maps.device)
    _norm_kernel[(blocks, triton.cdiv(channels, CHANNELS))](
        maps, maps if shortcut is None else shortcut, weight, bias, mean, variance, normed, sums,
        rows, channels, blocks, eps, shortcut is not None, rectify, measure, True, ROWS, CHANNELS,
    )  # fmt: skip
    return normed, sums


def batch_moments(maps: Tensor, mean: Tensor, variance: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mean and variance by channel; the running ones given move towards them by `share`, the unbiased variance."""
    rows, channels, blocks = _shape(maps)
    sums = torch.empty((2, blocks, channels), device=maps.device)
    _norm_kernel[(blocks, triton.cdiv(channels, CHANNELS))](
        maps, maps, mean, mean, mean, mean, maps, sums, rows, channels, blocks,
        0.0, False, False, True, False, ROWS, CHANNELS,
    )  # fmt: skip
    centre, spread = torch.empty((2, channels), device=maps.device)
    _finish_kernel[(triton.cdiv(channels, CHANNELS),)](
        sums, centre, spread, mean, variance, rows, channels, blocks, share, True, ROWS, CHANNELS
    )
    return centre, spread


def finish(sums: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Sums by block to the mean less the centre, and the variance. Centred, they lose nothing to a large mean."""
    rows, channels, blocks = _shape(maps)
    gap, spread = torch.empty((2, channels), device=maps.device)
    _finish_kernel[(triton.cdiv(channels, CHANNELS),)](
        sums, gap, spread, gap, gap, rows, channels, blocks, 0.0, False, ROWS, CHANNELS
    )
    return gap, spread


def parameter_slopes(
    slope: Tensor, maps: Tensor, normed: Tensor | None, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The slopes by weight and bias under the batch's own statistics, and those by these statistics for `backward`."""
    rows, channels, blocks = _shape(maps)
    sums = torch.empty((2, blocks, channels), device=maps.device)
    _slope_kernel[(blocks, triton.cdiv(channels, CHANNELS))](
        slope, maps, maps if normed is None else normed, mean, sums, rows, channels, blocks, normed is not None,
        ROWS, CHANNELS,
    )  # fmt: skip
    by_weight, by_bias, by_gap, by_spread = torch.empty((4, channels), device=maps.device)
    _slope_finish_kernel[(triton.cdiv(channels, CHANNELS),)](
        sums, weight, variance, by_weight, by_bias, by_gap, by_spread, channels, blocks, eps, ROWS, CHANNELS
    )
    return by_weight, by_bias, (by_gap, by_spread)


def backward(
    slope: Tensor,
    maps: Tensor,
    normed: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    gap: Tensor | None,
    by_moments: tuple[Tensor, ...] | None,
    has_shortcut: bool,
) -> tuple[Tensor, Tensor | None]:
    """The slopes by the maps and by the shortcut; `normed` is what a ReLU let through.

    `by_moments` are the slopes by the maps' own mean and variance; that mean is `mean`, and `gap` more where given.
    """
    rows, channels, _ = _shape(maps)
    slope = slope.contiguous(memory_format=torch.channels_last)
    found = torch.empty_like(maps)
    passed = torch.empty_like(maps) if has_shortcut and normed is not None else None
    by_gap, by_spread = (mean, mean) if by_moments is None else by_moments
    _backward_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS))](
        slope, maps, maps if normed is None else normed, weight, mean, variance, mean if gap is None else gap,
        by_gap, by_spread, found, found if passed is None else passed, rows, channels,
        eps, normed is not None, by_moments is not None, gap is not None, passed is not None, ROWS, CHANNELS,
    )  # fmt: skip
    return found, passed if passed is not None or not has_shortcut else slope


def _shape(maps: Tensor) -> tuple[int, int, int]:
    channels = maps.shape[1]
    rows = maps.numel() // channels
    return rows, channels, min(BLOCKS, triton.cdiv(rows, ROWS))


if triton is not None:

    @triton.jit
    def _norm_kernel(
        maps, shortcut, weight, bias, mean, variance, normed, sums, rows, channels, blocks, eps,
        SHORTCUT: tl.constexpr, RECTIFY: tl.constexpr, MEASURE: tl.constexpr, WRITE: tl.constexpr,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0)
        column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        centre = tl.load(mean + column, mask=inside, other=0.0)
        if WRITE:
            spread = tl.load(variance + column, mask=inside, other=1.0)
            scale = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
            shift = tl.load(bias + column, mask=inside, other=0.0)
        first = tl.zeros((CHANNELS,), dtype=tl.float32)
        second = tl.zeros((CHANNELS,), dtype=tl.float32)
        for start in range(block * ROWS, rows, blocks * ROWS):
            row = start + tl.arange(0, ROWS)
            place = row[:, None] * channels + column[None, :]
            valid = (row < rows)[:, None] & inside[None, :]
            away = tl.load(maps + place, mask=valid, other=0.0).to(tl.float32) - centre[None, :]
            if WRITE:
                value = away * scale[None, :] + shift[None, :]
                if SHORTCUT:
                    value += tl.load(shortcut + place, mask=valid, other=0.0).to(tl.float32)
                if RECTIFY:
                    value = tl.maximum(value, 0.0)
                tl.store(normed + place, value.to(normed.dtype.element_ty), mask=valid)
            if MEASURE:
                away = tl.where(valid, away, 0.0)
                first += tl.sum(away, axis=0)
                second += tl.sum(away * away, axis=0)
        if MEASURE:
            tl.store(sums + block * channels + column, first, mask=inside)
            tl.store(sums + (blocks + block) * channels + column, second, mask=inside)

    @triton.jit
    def _finish_kernel(
        sums, gap, spread, running_mean, running_variance, rows, channels, blocks, share,
        FOLLOW: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        first = tl.zeros((CHANNELS,), dtype=tl.float32)
        second = tl.zeros((CHANNELS,), dtype=tl.float32)
        for start in range(0, blocks, ROWS):
            row = start + tl.arange(0, ROWS)
            valid = (row < blocks)[:, None] & inside[None, :]
            place = row[:, None] * channels + column[None, :]
            first += tl.sum(tl.load(sums + place, mask=valid, other=0.0), axis=0)
            second += tl.sum(tl.load(sums + blocks * channels + place, mask=valid, other=0.0), axis=0)
        away = first / rows
        variance = second / rows - away * away
        tl.store(spread + column, variance, mask=inside)
        if FOLLOW:
            mean = tl.load(running_mean + column, mask=inside, other=0.0)
            follower = tl.load(running_variance + column, mask=inside, other=0.0)
            tl.store(gap + column, mean + away, mask=inside)
            tl.store(running_mean + column, mean + share * away, mask=inside)
            unbiased = variance * (rows / (rows - 1))
            tl.store(running_variance + column, follower + share * (unbiased - follower), mask=inside)
        else:
            tl.store(gap + column, away, mask=inside)

    @triton.jit
    def _slope_kernel(
        slope, maps, normed, mean, sums, rows, channels, blocks,
        RECTIFY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0)
        column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        centre = tl.load(mean + column, mask=inside, other=0.0)
        first = tl.zeros((CHANNELS,), dtype=tl.float32)
        second = tl.zeros((CHANNELS,), dtype=tl.float32)
        for start in range(block * ROWS, rows, blocks * ROWS):
            row = start + tl.arange(0, ROWS)
            place = row[:, None] * channels + column[None, :]
            valid = (row < rows)[:, None] & inside[None, :]
            value = tl.load(slope + place, mask=valid, other=0.0).to(tl.float32)
            if RECTIFY:
                value = tl.where(tl.load(normed + place, mask=valid, other=0.0).to(tl.float32) > 0, value, 0.0)
            away = tl.load(maps + place, mask=valid, other=0.0).to(tl.float32) - centre[None, :]
            first += tl.sum(value, axis=0)
            second += tl.sum(value * away, axis=0)
        tl.store(sums + block * channels + column, first, mask=inside)
        tl.store(sums + (blocks + block) * channels + column, second, mask=inside)

    @triton.jit
    def _slope_finish_kernel(
        sums, weight, variance, by_weight, by_bias, by_gap, by_spread, channels, blocks, eps,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        first = tl.zeros((CHANNELS,), dtype=tl.float32)
        second = tl.zeros((CHANNELS,), dtype=tl.float32)
        for start in range(0, blocks, ROWS):
            row = start + tl.arange(0, ROWS)
            valid = (row < blocks)[:, None] & inside[None, :]
            place = row[:, None] * channels + column[None, :]
            first += tl.sum(tl.load(sums + place, mask=valid, other=0.0), axis=0)
            second += tl.sum(tl.load(sums + blocks * channels + place, mask=valid, other=0.0), axis=0)
        inverse = 1.0 / tl.sqrt(tl.load(variance + column, mask=inside, other=1.0) + eps)
        scale = tl.load(weight + column, mask=inside, other=0.0) * inverse
        tl.store(by_weight + column, second * inverse, mask=inside)
        tl.store(by_bias + column, first, mask=inside)
        tl.store(by_gap + column, -scale * first, mask=inside)
        tl.store(by_spread + column, -0.5 * scale * inverse * inverse * second, mask=inside)

    @triton.jit
    def _backward_kernel(
        slope, maps, normed, weight, mean, variance, gap, by_gap, by_spread, found, passed, rows, channels, eps,
        RECTIFY: tl.constexpr, MEASURE: tl.constexpr, GAP: tl.constexpr, PASS: tl.constexpr,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        place = row[:, None] * channels + column[None, :]
        valid = (row < rows)[:, None] & inside[None, :]
        spread = tl.load(variance + column, mask=inside, other=1.0)
        scale = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
        value = tl.load(slope + place, mask=valid, other=0.0).to(tl.float32)
        if RECTIFY:
            value = tl.where(tl.load(normed + place, mask=valid, other=0.0).to(tl.float32) > 0, value, 0.0)
        if PASS:
            tl.store(passed + place, value.to(passed.dtype.element_ty), mask=valid)
        value = value * scale[None, :]
        if MEASURE:
            centre = tl.load(mean + column, mask=inside, other=0.0)
            if GAP:
                centre += tl.load(gap + column, mask=inside, other=0.0)
            away = tl.load(maps + place, mask=valid, other=0.0).to(tl.float32) - centre[None, :]
            constant = tl.load(by_gap + column, mask=inside, other=0.0) / rows
            value += (
                constant[None, :] + away * (tl.load(by_spread + column, mask=inside, other=0.0) * 2 / rows)[None, :]
            )
        tl.store(found + place, value.to(found.dtype.element_ty), mask=valid)
