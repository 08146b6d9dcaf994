"""The Hausdorff distance of FedMP's Eq. 4, by hand and by its definition, and of sites to their union."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.measure import manifold
from wardround.measure.manifold import Reach, directed, distances_to_union, reaches, spreads


def points(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def test_by_hand_and_both_directions() -> None:
    """(0, 0) and (3, 4) to (0, 0) alone: 5 one way, 0 the other."""
    two, one = points((0, 0), (3, 4)), points((0, 0))
    assert directed(two, one) == 5.0
    assert directed(one, two) == 0.0


def test_eq_4_as_printed_would_miss_a_far_point() -> None:
    """Its second supremum runs over M_p again; the point of M_q that nothing in M_p is near would not show."""
    near, with_outlier = points((0, 0)), points((0, 0), (0, 7))
    assert directed(near, with_outlier) == 0.0
    assert directed(with_outlier, near) == 7.0


clouds = st.lists(st.tuples(*[st.floats(-9, 9, width=32)] * 2), min_size=1, max_size=6)


@settings(deadline=None, max_examples=25)
@given(clouds, clouds)
def test_it_is_the_definition(p: list[tuple[float, float]], q: list[tuple[float, float]]) -> None:
    def slow(a: Tensor, b: Tensor) -> float:
        return max(min(float((x - y).norm()) for y in b) for x in a)

    a, b = points(*p), points(*q)
    torch.testing.assert_close(directed(a, b), slow(a, b), rtol=1e-5, atol=1e-5)
    assert directed(a, a) == 0.0


def test_many_rows_go_in_pieces() -> None:
    cloud = torch.rand(2 * manifold.ROWS + 3, 2, generator=torch.Generator().manual_seed(1))
    cloud[-1] = 9.0  # in the last piece
    expected = float((cloud[-1] - cloud[:5]).norm(dim=1).min())
    torch.testing.assert_close(directed(cloud, cloud[:5]), expected)


def test_sites_to_their_union_class_by_class() -> None:
    """a has class 0 at 0 and 3 and class 1 at 5; b has class 0 at 7 only. The union of class 0 is {0, 3, 7}."""
    features = {"a": points((0, 0), (3, 0), (5, 0)), "b": points((7, 0))}
    labels = {"a": torch.tensor([0, 0, 1]), "b": torch.tensor([0])}
    assert distances_to_union(features, labels, 3) == {"a": [4.0, 0.0, None], "b": [7.0, None, None]}


def test_who_has_all_of_it_is_at_no_distance() -> None:
    cloud, labels = torch.rand(8, 3, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 2
    found = distances_to_union({"all": cloud, "half": cloud[:4]}, {"all": labels, "half": labels[:4]}, 2)
    assert found["all"] == [0.0, 0.0]
    assert all(d is not None and d > 0 for d in found["half"])
    # FedMP's claim under Eq. 4: completing a site's features with some of the others' brings it no further away.
    more = distances_to_union({"all": cloud, "half": cloud[:6]}, {"all": labels, "half": labels[:6]}, 2)
    assert all(a is not None and b is not None and a <= b for a, b in zip(more["half"], found["half"], strict=True))


def test_spread_and_reach_by_hand() -> None:
    """Class 0 lies at 0, 3 and 7 (mean 10/3, mean square distance 74/9), class 1 at 5 alone."""
    features = {"a": points((0, 0), (3, 0), (5, 0)), "b": points((7, 0))}
    labels = {"a": torch.tensor([0, 0, 1]), "b": torch.tensor([0])}
    spread = math.sqrt(74 / 9)
    assert spreads(features, labels, 3) == pytest.approx((spread, 0.0, None))
    found = reaches(features, labels, 3)
    assert (found["a"].features, found["b"].features) == (3, 1)
    assert found["a"].by_class == (4.0, 0.0, None)
    assert found["a"].distance == 2.0
    assert found["a"].relative == pytest.approx((4 / spread + 0) / 2)
    assert found["b"].distance == 7.0
    assert found["b"].relative == pytest.approx(7 / spread)
    assert reaches({}, {}, 3) == {}
    assert Reach(0, (None,), (1.0,)).distance is None
    assert Reach(0, (None,), (1.0,)).relative is None


@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_the_relative_distance_does_not_depend_on_how_long_features_are(factor: float) -> None:
    draw = torch.Generator().manual_seed(3)
    features = {site: torch.rand(6, 3, generator=draw) for site in "ab"}
    labels = dict.fromkeys("ab", torch.arange(6) % 2)
    one, other = reaches(features, labels, 2), reaches({site: factor * f for site, f in features.items()}, labels, 2)
    assert one["a"].relative == pytest.approx(other["a"].relative)
    assert one["a"].distance != pytest.approx(other["a"].distance)
