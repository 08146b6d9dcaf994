"""Subspaces of images and the angles between them: exact small cases, invariances, sites with few images or none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.errors import BadInput
from wardround.synthesis import subspaces
from wardround.synthesis.subspaces import principal_angles, proximity, signature


def span(*vectors: list[float]) -> Tensor:
    return torch.tensor(vectors, dtype=torch.float64).T


def drawn(n: int, seed: int = 0, size: int = 4) -> Tensor:
    return torch.randint(0, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def turned(degrees: float) -> list[float]:
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), 0.0, 0.0]


# Angles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [0.0, 1e-6, 30.0, 45.0, 89.999999, 90.0])
def test_two_lines(degrees: float) -> None:
    found = principal_angles(span(turned(0)), span(turned(degrees)))
    assert found.tolist() == pytest.approx([degrees], abs=1e-9)


def test_two_planes_that_share_a_line_and_meet_at_thirty_degrees() -> None:
    one = span([0, 0, 1, 0], turned(0))
    other = span(turned(30), [0, 0, 1, 0])
    assert principal_angles(one, other).tolist() == pytest.approx([0, 30], abs=1e-9)
    assert proximity([one, other]).tolist() == [[0, pytest.approx(0, abs=1e-9)], [pytest.approx(0, abs=1e-9), 0]]


def test_planes_at_thirty_and_ninety_degrees() -> None:
    """Span of e₁, e₂ against e₁ turned by 30° towards e₃ and e₄: angles 30° and 90°."""
    one = span([1, 0, 0, 0], [0, 1, 0, 0])
    other = span([math.cos(math.pi / 6), 0, 0.5, 0], [0, 0, 0, 1])
    assert principal_angles(one, other).tolist() == pytest.approx([30, 90])
    assert proximity([one, other])[1, 0] == pytest.approx(30)


def test_three_sites() -> None:
    lines = [span(turned(0)), span(turned(20)), span(turned(65))]
    expected = [[0, 20, 65], [20, 0, 45], [65, 45, 0]]
    np.testing.assert_allclose(proximity([line.float() for line in lines]), expected, atol=1e-4)


def test_what_is_compared_is_the_subspace_and_not_its_vectors() -> None:
    one = span([1, 0, 0, 0], [0, 1, 0, 0])
    half = math.sqrt(0.5)
    same = span([half, half, 0, 0], [-half, half, 0, 0])
    crossed = span([3, 0, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0])  # neither of length 1, nor apart, nor independent
    np.testing.assert_allclose(proximity([one, same, -one, crossed]), np.zeros((4, 4)), atol=1e-6)


def test_sites_of_different_numbers_of_directions() -> None:
    line, plane = span([*turned(30)], [0, 0, 0, 0]), span(turned(0), [0, 0, 0, 1])
    assert proximity([line, plane])[0, 1] == pytest.approx(30)
    assert proximity([plane, line])[0, 1] == pytest.approx(30)


def test_an_empty_site_is_at_right_angles_to_all_others() -> None:
    empty, plane = torch.zeros(4, 2), span(turned(0), [0, 0, 0, 1])
    assert proximity([empty, plane, empty]).tolist() == [[0, 90, 90], [90, 0, 90], [90, 90, 0]]
    assert proximity([]).shape == (0, 0)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), p=st.integers(1, 4), q=st.integers(1, 4))
def test_angles_are_symmetric_and_no_rotation_of_the_space_changes_them(seed: int, p: int, q: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    one, other = (torch.linalg.qr(torch.randn(7, k, generator=draw, dtype=torch.float64)).Q for k in (p, q))
    rotation = torch.linalg.qr(torch.randn(7, 7, generator=draw, dtype=torch.float64)).Q
    found = principal_angles(one, other)
    assert len(found) == min(p, q)
    assert (np.diff(found) >= -1e-9).all()
    assert found.min() >= 0
    assert found.max() <= 90 + 1e-9
    np.testing.assert_allclose(principal_angles(other, one), found, atol=1e-6)
    np.testing.assert_allclose(principal_angles(rotation @ one, rotation @ other), found, atol=1e-6)
    cosines = torch.linalg.svdvals(one.T @ other).clamp(max=1)
    np.testing.assert_allclose(found, torch.rad2deg(torch.acos(cosines)).numpy(), atol=1e-4)


# Signatures -----------------------------------------------------------------------------------------------------------


def test_images_in_two_directions_worked_out_by_hand() -> None:
    """Three images of one pixel pattern, one of another: singular values √3·a and b."""
    images = torch.tensor([[[[200, 0], [0, 0]]]] * 3 + [[[[0, 0], [0, 100]]]], dtype=torch.uint8)
    expected = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1.0, 0]])
    torch.testing.assert_close(signature(images, 3), expected)


@pytest.mark.parametrize("count", [5, 48, 200])  # fewer than features, as many, more
@pytest.mark.parametrize("at_once", [64, 2**22])
def test_directions_are_the_left_singular_vectors(count: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subspaces, "AT_ONCE", at_once)
    images = drawn(count)
    found = signature(images, 3)
    expected = torch.linalg.svd(images.reshape(count, -1).double().T, full_matrices=False)[0][:, :3]
    assert (found.shape, found.dtype) == ((48, 3), torch.float32)
    torch.testing.assert_close((found.double() * expected).sum(dim=0).abs(), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(found.T @ found, torch.eye(3), rtol=0, atol=1e-5)


def test_the_largest_entry_is_positive_and_the_order_of_images_does_not_matter() -> None:
    images = drawn(30)
    found = signature(images, 4)
    assert (found.gather(0, found.abs().argmax(dim=0, keepdim=True)) > 0).all()
    assert torch.equal(signature(images, 4), found)
    torch.testing.assert_close(signature(images.flip(0), 4), found, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 1), (2, 2)])
def test_fewer_images_than_directions_leave_columns_of_zeros(count: int, kept: int) -> None:
    found = signature(drawn(count), 3)
    assert found.shape == (48, 3)
    assert found.norm(dim=0).tolist() == pytest.approx([1.0] * kept + [0.0] * (3 - kept))


def test_copies_and_black_images_add_no_direction() -> None:
    copies = drawn(1).repeat(60, 1, 1, 1)
    assert signature(copies, 3).norm(dim=0).tolist() == pytest.approx([1, 0, 0])
    assert signature(torch.zeros_like(copies), 3).abs().max() == 0


def test_sites_of_the_same_kind_are_nearer_than_others() -> None:
    """Two sites with bright upper halves, one with a bright left half."""
    up, left = torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)
    up[:, :4], left[:, :, :4] = 150, 150

    def site(pattern: Tensor, seed: int) -> Tensor:
        noise = torch.randint(0, 60, (40, 3, 8, 8), generator=torch.Generator().manual_seed(seed))
        return signature((pattern + noise).to(torch.uint8), 3)

    found = proximity([site(up, 1), site(left, 2), site(up, 3)])
    assert found[0, 2] < min(found[0, 1], found[1, 2])


# Refusals -------------------------------------------------------------------------------------------------------------


def test_what_is_no_image_and_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(BadInput, match="one direction or more, not 0"):
        signature(drawn(3), 0)
    with pytest.raises(BadInput, match="uint8"):
        signature(drawn(3).float(), 2)
    with pytest.raises(BadInput, match="uint8 and several"):
        signature(torch.zeros(3, dtype=torch.uint8), 2)
    with pytest.raises(BadInput, match="different sizes"):
        proximity([signature(drawn(3), 2), signature(drawn(3, size=5), 2)])
