"""Triton kernels of `fused_norm.py`: feature maps in channels-last layout, as rows of channels.

Every kernel works on tiles of rows by channels, in float32 whatever the maps are stored in. Sums over rows stay in
registers for as long as a block has rows, are written per block and added up by a second small kernel, always in the
same order: no atomics.
"""

# Triton reads a kernel's source: its parameters are pointers and numbers, and have no annotations to check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,unused-ignore"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

try:  # comes with PyTorch's CUDA builds
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCKS = 264  # row blocks that add up side by side: two per multiprocessor of a large GPU
ROWS, CHANNELS = 64, 64  # of a tile
STAGES = {2: 3, 4: 2}  # tiles of a loop that are under way at once, by bytes of a value: in 64 KiB of shared memory
FEW = 8  # channels whose sums one program adds up
ALL_PASS, AS_CAME_OUT, AS_CAME_IN = 0, 1, 2  # how `backward` knows what a ReLU let through


Slopes = tuple[Tensor, ...]  # one, of what came out; or two, where its twin is in use, too


class Affine(NamedTuple):
    """What a batch-norm layer does to a channel: (x − mean)/√(variance + eps)·weight + bias."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    eps: float


def can_run(maps: Tensor, shortcut: Tensor | None = None) -> bool:
    """Whether the kernels take these maps: on a GPU, channels last, in one of two sizes of numbers."""
    given = [maps] if shortcut is None else [maps, shortcut]
    return (
        triton is not None
        and maps.is_cuda
        and maps.element_size() in STAGES
        and all(m.is_contiguous(memory_format=torch.channels_last) and m.dtype == maps.dtype for m in given)
    )


def norm(
    maps: Tensor, shortcut: Tensor | None, by: Affine, rectify: bool, measure: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """relu(norm(maps) + shortcut), and where measured the maps' mean less the stored one, and their variance."""
    rows, channels, blocks = _shape(maps)
    normed = torch.empty_like(maps)
    sums = torch.empty((2, blocks, channels) if measure else (0,), device=maps.device)
    _norm_kernel[(blocks, triton.cdiv(channels, CHANNELS))](
        maps, maps if shortcut is None else shortcut, by.weight, by.bias, by.mean, by.variance, normed, sums,
        rows, channels, blocks, by.eps, shortcut is not None, rectify, measure, True,
        ROWS, CHANNELS, STAGES[maps.element_size()],
    )  # fmt: skip
    return normed, finish(sums, rows) if measure else (sums, sums)


def batch_moments(maps: Tensor, mean: Tensor, variance: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Mean and variance by channel; the running ones given move towards them by `share`, the unbiased variance.

    Sums are of how far values are from the first row: centred on anything that the batch itself does not say, such as
    the running mean, a small variance would be lost in the square of the distance.
    """
    rows, channels, blocks = _shape(maps)
    sums = torch.empty((2, blocks, channels), device=maps.device)
    _norm_kernel[(blocks, triton.cdiv(channels, CHANNELS))](
        maps, maps, mean, mean, maps, mean, maps, sums, rows, channels, blocks,
        0.0, False, False, True, False, ROWS, CHANNELS, STAGES[maps.element_size()],
    )  # fmt: skip
    centre, spread = torch.empty((2, channels), device=maps.device)
    _finish_kernel[(triton.cdiv(channels, FEW),)](
        sums, maps, centre, spread, mean, variance, rows, channels, blocks, share,
        True, triton.next_power_of_2(blocks), FEW,
    )  # fmt: skip
    return centre, spread


def finish(sums: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sums by block to the mean less the centre, and the variance. Centred, they lose nothing to a large mean."""
    _, blocks, channels = sums.shape
    gap, spread = torch.empty((2, channels), device=sums.device)
    _finish_kernel[(triton.cdiv(channels, FEW),)](
        sums, gap, gap, spread, gap, gap, rows, channels, blocks, 0.0,
        False, triton.next_power_of_2(blocks), FEW,
    )  # fmt: skip
    return gap, spread


def parameter_slopes(
    slopes: Slopes, maps: Tensor, normed: Tensor | None, by: Affine, rectified: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The slopes by weight and bias under the batch's own statistics, and those by these statistics for `backward`."""
    rows, channels, blocks = _shape(maps)
    sums = torch.empty((2, blocks, channels), device=maps.device)
    _slope_kernel[(blocks, triton.cdiv(channels, CHANNELS))](
        slopes[0], slopes[-1], maps, maps if normed is None else normed, by.weight, by.bias, by.mean, by.variance, sums,
        rows, channels, blocks, by.eps, len(slopes) == 2, _gate(normed, rectified),
        ROWS, CHANNELS, STAGES[maps.element_size()],
    )  # fmt: skip
    by_weight, by_bias, by_gap, by_spread = torch.empty((4, channels), device=maps.device)
    _slope_finish_kernel[(triton.cdiv(channels, FEW),)](
        sums, by.weight, by.variance, by_weight, by_bias, by_gap, by_spread, channels, blocks, by.eps,
        triton.next_power_of_2(blocks), FEW,
    )  # fmt: skip
    return by_weight, by_bias, (by_gap, by_spread)


def backward(
    slopes: Slopes,
    maps: Tensor,
    normed: Tensor | None,
    by: Affine,
    rectified: bool,
    gap: Tensor | None,
    by_moments: tuple[Tensor, ...] | None,
    has_shortcut: bool,
) -> tuple[Tensor, Tensor | None]:
    """The slopes by the maps and by the shortcut, from one slope by what came out, or the sum of two.

    What a ReLU let through is read off `normed`, what came out of it; without a shortcut it can be told from the maps,
    and `normed` need not be kept nor read. `by_moments` are the slopes by the maps' own mean and variance; that mean is
    the stored one, and `gap` more where given.
    """
    rows, channels, _ = _shape(maps)
    found = torch.empty_like(maps)
    passed = torch.empty_like(maps) if has_shortcut and (rectified or len(slopes) == 2) else None
    by_gap, by_spread = (by.mean, by.mean) if by_moments is None else by_moments
    _backward_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS))](
        slopes[0], slopes[-1], maps, maps if normed is None else normed, by.weight, by.bias, by.mean, by.variance,
        by.mean if gap is None else gap, by_gap, by_spread, found, found if passed is None else passed, rows, channels,
        by.eps, len(slopes) == 2, _gate(normed, rectified), by_moments is not None, gap is not None, passed is not None,
        ROWS, CHANNELS,
    )  # fmt: skip
    return found, passed if passed is not None or not has_shortcut else slopes[0]


def given(like: Tensor, *slopes: Tensor | None) -> Slopes:
    """Those slopes that there are, one or two, laid out as the kernels read them; zeros where there is none."""
    found = [slope.contiguous(memory_format=torch.channels_last) for slope in slopes if slope is not None]
    first, *more = found or [torch.zeros_like(like)]
    return (first, *more[:1])


def given_moments(like: Tensor, by_moments: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
    """The slopes by mean and variance, zeros for one that is missing; nothing where both are."""
    if all(slope is None for slope in by_moments):
        return None
    return tuple(torch.zeros_like(like) if slope is None else slope for slope in by_moments)


def _gate(normed: Tensor | None, rectified: bool) -> int:
    if not rectified:
        return ALL_PASS
    return AS_CAME_IN if normed is None else AS_CAME_OUT


def _shape(maps: Tensor) -> tuple[int, int, int]:
    channels = maps.shape[1]
    rows = maps.numel() // channels
    return rows, channels, min(BLOCKS, triton.cdiv(rows, ROWS))


if triton is not None:

    @triton.jit
    def put_sums(sums, first, second, block, blocks, column, channels):
        """What a block has added up, tile by tile, for `_added`."""
        place = sums + block * channels + column
        tl.store(place, tl.sum(first, axis=0), mask=column < channels)
        tl.store(place + blocks * channels, tl.sum(second, axis=0), mask=column < channels)

    @triton.jit
    def _norm_kernel(
        maps, shortcut, weight, bias, centre, variance, normed, sums, rows, channels, blocks, eps,
        SHORTCUT: tl.constexpr, RECTIFY: tl.constexpr, MEASURE: tl.constexpr, WRITE: tl.constexpr,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0)
        column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        middle = tl.load(centre + column, mask=inside, other=0.0).to(tl.float32)
        if WRITE:
            spread = tl.load(variance + column, mask=inside, other=1.0)
            scale = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
            shift = tl.load(bias + column, mask=inside, other=0.0)
        if MEASURE:
            first = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
            second = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
        for start in tl.range(block * ROWS, rows, blocks * ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            place = row[:, None] * channels + column[None, :]
            valid = (row < rows)[:, None] & inside[None, :]
            away = tl.load(maps + place, mask=valid, other=0.0).to(tl.float32) - middle[None, :]
            if WRITE:
                value = away * scale[None, :] + shift[None, :]
                if SHORTCUT:
                    value += tl.load(shortcut + place, mask=valid, other=0.0).to(tl.float32)
                if RECTIFY:
                    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
                tl.store(normed + place, value.to(normed.dtype.element_ty), mask=valid)
            if MEASURE:
                away = tl.where(valid, away, 0.0)
                first += away
                second += away * away
        if MEASURE:
            put_sums(sums, first, second, block, blocks, column, channels)

    @triton.jit
    def _added(sums, column, channels, blocks, PARTS: tl.constexpr):
        """The two sums of some channels over all blocks."""
        part = tl.arange(0, PARTS)
        place = part[:, None] * channels + column[None, :]
        valid = (part < blocks)[:, None] & (column < channels)[None, :]
        first = tl.load(sums + place, mask=valid, other=0.0)
        second = tl.load(sums + blocks * channels + place, mask=valid, other=0.0)
        return tl.sum(first, axis=0), tl.sum(second, axis=0)

    @triton.jit
    def _finish_kernel(
        sums, maps, gap, spread, running_mean, running_variance, rows, channels, blocks, share,
        FOLLOW: tl.constexpr, PARTS: tl.constexpr, FEW: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(0) * FEW + tl.arange(0, FEW)
        inside = column < channels
        first, second = _added(sums, column, channels, blocks, PARTS)
        away = first / rows
        variance = tl.maximum(second / rows - away * away, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(spread + column, variance, mask=inside)
        if FOLLOW:
            mean = tl.load(maps + column, mask=inside, other=0.0).to(tl.float32) + away
            behind = tl.load(running_mean + column, mask=inside, other=0.0)
            follower = tl.load(running_variance + column, mask=inside, other=0.0)
            tl.store(gap + column, mean, mask=inside)
            tl.store(running_mean + column, behind + share * (mean - behind), mask=inside)
            unbiased = variance * (rows / (rows - 1))
            tl.store(running_variance + column, follower + share * (unbiased - follower), mask=inside)
        else:
            tl.store(gap + column, away, mask=inside)

    @triton.jit
    def _let_through(
        value, away, normed, place, valid, scale, bias, column, inside, GATE: tl.constexpr
    ):  # fmt: skip
        """A slope where the ReLU was open, and 0 elsewhere; GATE is what `_gate` says: 1 as came out, 2 as came in."""
        if GATE == 1:
            value = tl.where(tl.load(normed + place, mask=valid, other=0.0).to(tl.float32) > 0, value, 0.0)
        if GATE == 2:
            shift = tl.load(bias + column, mask=inside, other=0.0)
            value = tl.where(away * scale[None, :] + shift[None, :] > 0, value, 0.0)
        return value

    @triton.jit
    def _slope_kernel(
        slope, beside, maps, normed, weight, bias, mean, variance, sums, rows, channels, blocks, eps,
        TWO: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0)
        column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        centre = tl.load(mean + column, mask=inside, other=0.0)
        spread = tl.load(variance + column, mask=inside, other=1.0)
        scale = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
        first = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
        second = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
        for start in tl.range(block * ROWS, rows, blocks * ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            place = row[:, None] * channels + column[None, :]
            valid = (row < rows)[:, None] & inside[None, :]
            away = tl.load(maps + place, mask=valid, other=0.0).to(tl.float32) - centre[None, :]
            value = tl.load(slope + place, mask=valid, other=0.0).to(tl.float32)
            if TWO:
                value += tl.load(beside + place, mask=valid, other=0.0).to(tl.float32)
            value = _let_through(value, away, normed, place, valid, scale, bias, column, inside, GATE)
            first += value
            second += value * away
        put_sums(sums, first, second, block, blocks, column, channels)

    @triton.jit
    def _slope_finish_kernel(
        sums, weight, variance, by_weight, by_bias, by_gap, by_spread, channels, blocks, eps,
        PARTS: tl.constexpr, FEW: tl.constexpr,
    ):  # fmt: skip
        column = tl.program_id(0) * FEW + tl.arange(0, FEW)
        inside = column < channels
        first, second = _added(sums, column, channels, blocks, PARTS)
        inverse = 1.0 / tl.sqrt(tl.load(variance + column, mask=inside, other=1.0) + eps)
        scale = tl.load(weight + column, mask=inside, other=0.0) * inverse
        tl.store(by_weight + column, second * inverse, mask=inside)
        tl.store(by_bias + column, first, mask=inside)
        tl.store(by_gap + column, -scale * first, mask=inside)
        tl.store(by_spread + column, -0.5 * scale * inverse * inverse * second, mask=inside)

    @triton.jit
    def _backward_kernel(
        slope, beside, maps, normed, weight, bias, mean, variance, gap, by_gap, by_spread, found, passed,
        rows, channels, eps, TWO: tl.constexpr, GATE: tl.constexpr, MEASURE: tl.constexpr, GAP: tl.constexpr,
        PASS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = column < channels
        place = row[:, None] * channels + column[None, :]
        valid = (row < rows)[:, None] & inside[None, :]
        spread = tl.load(variance + column, mask=inside, other=1.0)
        scale = tl.load(weight + column, mask=inside, other=0.0) / tl.sqrt(spread + eps)
        value = tl.load(slope + place, mask=valid, other=0.0).to(tl.float32)
        if TWO:
            value += tl.load(beside + place, mask=valid, other=0.0).to(tl.float32)
        away = value
        if MEASURE or GATE == 2:
            centre = tl.load(mean + column, mask=inside, other=0.0)
            away = tl.load(maps + place, mask=valid, other=0.0).to(tl.float32) - centre[None, :]
        value = _let_through(value, away, normed, place, valid, scale, bias, column, inside, GATE)
        if PASS:
            tl.store(passed + place, value.to(passed.dtype.element_ty), mask=valid)
        value = value * scale[None, :]
        if MEASURE:
            if GAP:
                away -= tl.load(gap + column, mask=inside, other=0.0)[None, :]
            constant = tl.load(by_gap + column, mask=inside, other=0.0) / rows
            steepness = tl.load(by_spread + column, mask=inside, other=0.0) * 2 / rows
            value += constant[None, :] + away * steepness[None, :]
        tl.store(found + place, value.to(found.dtype.element_ty), mask=valid)
