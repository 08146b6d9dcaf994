"""Truncated updates: ranks by hand, against PyTorch's decomposition, every rank within reach, and what is refused."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.errors import BadInput
from wardround.learn.lowrank import Packed, factors, pack, unpack


def shapes(of: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in of.items()}


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("energy", "rank"), [(0.01, 1), (0.639, 1), (0.641, 2), (0.979, 2), (0.981, 3), (0.9999, 3), (1.0, 4)]
)
def test_the_rank_by_hand(energy: float, rank: int) -> None:
    """Squares 64, 34, 1.999 and 0.001 of 100: 0.64, 0.98, 0.99999, 1."""
    values = torch.tensor([64.0, 34.0, 1.999, 0.001]).sqrt()
    left, right = factors(torch.diag(values), energy)
    assert left.shape == (4, rank)
    assert right.shape == (rank, 4)
    kept = torch.where(torch.arange(4) < rank, values, 0.0)
    torch.testing.assert_close(left @ right, torch.diag(kept), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.05, 1), st.integers(0, 99))
def test_it_is_the_truncated_decomposition(rows: int, columns: int, energy: float, seed: int) -> None:
    matrix = drawn(rows, columns, seed=seed)
    left, right = factors(matrix, energy)
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = left.shape[1]
    torch.testing.assert_close((left @ right).double(), (u[:, :rank] * s[:rank]) @ v[:rank], rtol=1e-4, atol=1e-4)
    lost = float((matrix - left @ right).square().sum() / matrix.square().sum())
    assert lost <= 1 - energy + 1e-5
    if rank > 1:  # and no smaller rank would do
        assert float(s[: rank - 1].square().sum() / s.square().sum()) < energy + 1e-9


def test_nothing_at_all_has_one_value_and_no_nan() -> None:
    left, right = factors(torch.zeros(3, 5), 0.95)
    assert left.shape[1] == 1
    assert torch.equal(left @ right, torch.zeros(3, 5))


@pytest.mark.parametrize("classes", range(2, 12))
@pytest.mark.parametrize("energy", [0.95, 0.98, 1.0])
def test_no_head_is_ever_zeroed(classes: int, energy: float) -> None:
    """A search that never gets to the full rank leaves 0 of the values of a head of two to eleven classes."""
    head = {"head.weight": drawn(classes, 64)}
    back = unpack(pack(head, energy), shapes(head), "x")["head.weight"]
    lost = float((back - head["head.weight"]).square().sum() / head["head.weight"].square().sum())
    assert lost <= 1 - energy + 1e-6


def test_all_energy_is_the_whole_update() -> None:
    """Also of a matrix of full rank, which is then sent as it is: its factors would be larger."""
    update = {"full": drawn(6, 8), "thin": drawn(6, 1) @ drawn(1, 8, seed=2)}
    packed = pack(update, 1.0)
    assert set(packed.whole) == {"full"}
    assert set(packed.left) == set(packed.right) == {"thin"}
    back = unpack(packed, shapes(update), "x")
    assert torch.equal(back["full"], update["full"])
    torch.testing.assert_close(back["thin"], update["thin"])


def test_a_bias_of_three_classes_is_no_triple_of_factors() -> None:
    """What has three entries is not therefore a decomposition."""
    update = {"head.bias": torch.tensor([1.0, 2.0, 3.0]), "head.weight": drawn(3, 50)}
    back = unpack(pack(update, 0.95), shapes(update), "x")
    assert back["head.bias"].tolist() == [1.0, 2.0, 3.0]
    assert back["head.weight"].shape == (3, 50)


def test_a_convolution_is_a_matrix_of_its_output_maps() -> None:
    update = {"conv": (drawn(8, 1) @ drawn(1, 4 * 9, seed=2)).reshape(8, 4, 3, 3)}
    packed = pack(update, 0.95)
    assert packed.left["conv"].shape == (8, 1)
    assert packed.right["conv"].shape == (1, 36)
    torch.testing.assert_close(unpack(packed, shapes(update), "x")["conv"], update["conv"])


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 8), st.integers(1, 8), st.floats(0.05, 1))
def test_a_packed_tensor_is_never_larger(rows: int, columns: int, energy: float) -> None:
    update = {"w": drawn(rows, columns)}
    packed = pack(update, energy)
    sent = sum(tensor.numel() for form in packed for tensor in form.values())
    assert sent <= rows * columns
    assert len(packed.whole) + len(packed.left) == 1


def good() -> Packed:
    return Packed({"b": torch.zeros(3)}, {"w": torch.zeros(4, 1)}, {"w": torch.zeros(1, 6)})


SHAPES = {"b": (3,), "w": (4, 2, 3)}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"left": {}}, "w must be there once, whole or as two factors"),
        ({"whole": {}}, "b must be there once"),
        ({"whole": {"b": torch.zeros(3), "w": torch.zeros(4, 2, 3)}}, "w must be there once"),
        ({"whole": {"b": torch.zeros(3), "other": torch.zeros(1)}}, "other must be there once"),
        ({"whole": {"b": torch.zeros(4)}}, r"sent for b does not make a float32 tensor of shape \(3,\)"),
        ({"whole": {"b": torch.zeros(())}}, "sent for b"),
        ({"whole": {"b": torch.zeros(3, dtype=torch.int64)}}, "sent for b"),
        ({"left": {"w": torch.zeros(4, 2)}}, "sent for w"),
        ({"left": {"w": torch.zeros(4)}}, "sent for w"),
        ({"right": {"w": torch.zeros(1, 7)}}, "sent for w"),
        ({"left": {"w": torch.zeros(6, 1)}, "right": {"w": torch.zeros(1, 4)}}, "sent for w"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    assert unpack(good(), SHAPES, "x").keys() == SHAPES.keys()
    with pytest.raises(BadInput, match=f"^the answer of a: .*{complaint}"):
        unpack(good()._replace(**change), SHAPES, "the answer of a")


def test_rounding_does_not_lose_the_last_value() -> None:
    """Sums of many squares rarely come to exactly one."""
    matrix = torch.diag(torch.full((50,), 1 / math.sqrt(50)))
    left, right = factors(matrix, 1.0)
    torch.testing.assert_close(left @ right, matrix)
