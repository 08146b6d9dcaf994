"""Class prototypes: means, moving averages, weights over sites, and the pull, each by hand."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.learn.prototypes import Prototypes, alignment, class_means, weighted_mean


def prototypes(rows: list[list[float]], known: list[bool]) -> Prototypes:
    return Prototypes(torch.tensor(rows), torch.tensor(known))


def content(of: Prototypes) -> tuple[list[list[float]], list[bool]]:
    return of.means.tolist(), of.known.tolist()


def test_class_means_by_hand() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 0.0]])
    found = class_means(features, torch.tensor([2, 2, 0]), 4)
    assert content(found) == ([[5, 0], [0, 0], [2, 4], [0, 0]], [True, False, True, False])


def test_no_images_no_means() -> None:
    assert content(class_means(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 2)) == content(
        Prototypes.none(2, 2)
    )


def test_the_moving_average_weighs_the_new_value() -> None:
    """Eq. 7 at μ = 0.7: 0.3·10 + 0.7·0 = 3. Class 1 comes for the first time, class 2 stays away, 3 was never seen."""
    old = prototypes([[10.0], [0.0], [4.0], [0.0]], [True, False, True, False])
    new = prototypes([[0.0], [8.0], [0.0], [0.0]], [True, True, False, False])
    found = old.moved(new, 0.7)
    torch.testing.assert_close(found.means, torch.tensor([[3.0], [8.0], [4.0], [0.0]]))
    assert found.known.tolist() == [True, True, True, False]


def test_the_first_observation_is_not_mixed_with_zero() -> None:
    """Zeros as Algorithm 1 starts would count: 0.5·0 + 0.5·6 = 3 after the first round."""
    assert content(Prototypes.none(1, 1).moved(prototypes([[6.0]], [True]), 0.5)) == ([[6.0]], [True])


def test_the_mean_over_sites_counts_those_that_have_the_class() -> None:
    """(1·2 + 3·6) / 4 = 5 for class 0; class 1 only at the second site; class 2 nowhere; weight 0 is nobody."""
    one = prototypes([[2.0], [0.0], [0.0]], [True, False, False])
    two = prototypes([[6.0], [9.0], [0.0]], [True, True, False])
    nobody = prototypes([[99.0], [99.0], [99.0]], [True, True, True])
    weights = [torch.full((3,), n) for n in (1, 3, 0)]
    found = weighted_mean(zip((one, two, nobody), weights, strict=True))
    assert content(found) == ([[5.0], [9.0], [0.0]], [True, True, False])


def test_weights_may_differ_by_class() -> None:
    one, two = prototypes([[0.0], [0.0]], [True, True]), prototypes([[4.0], [4.0]], [True, True])
    found = weighted_mean([(one, torch.tensor([1, 3])), (two, torch.tensor([3, 1]))])
    assert content(found) == ([[3.0], [1.0]], [True, True])


def test_alignment_by_hand() -> None:
    """Cosines 1 and 0.6 in class 0, −1 in class 1: −(0.8 + (−1)) = 0.2. Lengths do not matter."""
    features = torch.tensor([[2.0, 0.0], [3.0, 4.0], [0.0, 5.0]])
    anchors = prototypes([[7.0, 0.0], [0.0, -1.0]], [True, True])
    found = alignment(features, torch.tensor([0, 0, 1]), anchors)
    torch.testing.assert_close(found, torch.tensor(0.2))


def test_images_of_a_class_without_prototype_do_not_count() -> None:
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    found = alignment(features, torch.tensor([0, 1]), prototypes([[0.0, 1.0], [0.0, 0.0]], [True, False]))
    (gradient,) = torch.autograd.grad(found, features)
    assert found.item() == 0.0
    assert gradient[1].tolist() == [0.0, 0.0]
    assert gradient[0].tolist() != [0.0, 0.0]


def test_no_prototype_at_all_is_no_pull() -> None:
    features = torch.ones(3, 2, requires_grad=True)
    found = alignment(features, torch.tensor([0, 1, 1]), Prototypes.none(2, 2))
    (gradient,) = torch.autograd.grad(found, features)
    assert found.item() == 0.0
    assert gradient.abs().max() == 0.0


def plain_alignment(features: Tensor, labels: Tensor, anchors: Prototypes) -> float:
    """Eq. 8 in loops."""
    total = 0.0
    for c in range(len(anchors.known)):
        mine = features[labels == c]
        if anchors.known[c] and len(mine):
            total -= float(F.cosine_similarity(mine, anchors.means[c].unsqueeze(0)).mean())
    return total


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(2, 5))
def test_alignment_is_equation_8(seed: int, n: int, classes: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 4, generator=draw)
    labels = torch.randint(0, classes, (n,), generator=draw)
    known = torch.rand(classes, generator=draw) < 0.7
    anchors = Prototypes(torch.randn(classes, 4, generator=draw), known)  # what is not known does not count
    found = float(alignment(features, labels, anchors))
    assert abs(found - plain_alignment(features, labels, anchors)) < 1e-5
    assert -classes <= found <= classes


def test_they_come_back_from_their_tensors() -> None:
    kept = prototypes([[1.0], [0.0]], [True, False])
    assert content(Prototypes.of(kept.tensors())) == content(kept)
