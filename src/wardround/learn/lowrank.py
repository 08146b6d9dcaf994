"""Updates as products of two thin matrices: what FedKD sends instead of whole tensors.

A tensor of two or more axes is seen as a matrix of as many rows as its first axis has. Of its singular value
decomposition the largest values that together hold a share of the energy (the sum of their squares) are kept, one at
least and all if need be. Where two factors would be no smaller than the tensor, and for vectors, it stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from wardround.errors import BadInput
from wardround.models import Weights


class Packed(NamedTuple):
    """Tensors by name: each is in `whole`, or has a factor in `left` and in `right`."""

    whole: dict[str, Tensor]
    left: dict[str, Tensor]
    right: dict[str, Tensor]


def factors(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """L `(rows, k)` and R `(k, columns)` with L·R the truncated decomposition; k is the least that keeps the energy.

    From the eigenvectors of the smaller of M·Mᵀ and Mᵀ·M, in float64: several times as fast as a decomposition of M.
    """
    wide = matrix.double()
    if wide.shape[0] > wide.shape[1]:
        left, right = factors(matrix.T, energy)
        return right.T.contiguous(), left.T.contiguous()
    squares, vectors = torch.linalg.eigh(wide @ wide.T)
    kept = squares.flip(0).clamp_min(0).cumsum(0)  # the energy of the k largest
    rank = min(int((kept < energy * kept[-1]).sum()) + 1, len(kept))
    basis = vectors.flip(1)[:, :rank]
    return basis.to(matrix.dtype).contiguous(), (basis.T @ wide).to(matrix.dtype)


def pack(update: Mapping[str, Tensor], energy: float) -> Packed:
    """Every tensor in the smaller of its two forms, on the CPU."""
    found = Packed({}, {}, {})
    for name, tensor in update.items():
        tensor = tensor.cpu()
        if tensor.ndim > 1:
            left, right = factors(tensor.reshape(len(tensor), -1), energy)
            if left.numel() + right.numel() < tensor.numel():
                found.left[name], found.right[name] = left, right
                continue
        found.whole[name] = tensor
    return found


def unpack(packed: Packed, shapes: Mapping[str, tuple[int, ...]], where: str) -> Weights:
    """The tensors of these shapes, whole again; whatever does not fit is refused by its name."""
    whole, left, right = packed
    for name in sorted(whole.keys() | left.keys() | right.keys() | shapes.keys()):
        forms = (name in shapes, name in whole, name in left, name in right)
        if forms not in ((True, True, False, False), (True, False, True, True)):
            raise BadInput(f"{where}: {name} must be there once, whole or as two factors")
    found = {}
    for name, shape in shapes.items():
        made = whole[name] if name in whole else _product(left[name], right[name], shape)
        if made is None or tuple(made.shape) != shape or made.dtype != torch.float32:
            raise BadInput(f"{where}: what was sent for {name} does not make a float32 tensor of shape {shape}")
        found[name] = made
    return found


def _product(left: Tensor, right: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    rows, columns = shape[0], math.prod(shape[1:])
    if left.ndim != 2 or tuple(right.shape) != (left.shape[1], columns) or len(left) != rows:
        return None
    return (left @ right).reshape(shape)
