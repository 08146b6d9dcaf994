"""`dense`, `coboosting` and `dafl`: every term of their generators' losses, the weight search and ODS, by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wardround.methods.coboosting import (
    CoBoosting,
    better_weights,
    diversified,
    hard_cross_entropy,
    weighted,
)
from wardround.methods.dafl import DAFL, answers, imbalance
from wardround.methods.dense import DENSE, disagreement
from wardround.models import StagedNet
from wardround.synthesis.teachers import View

LN3 = math.log(3)
SURE = [LN3, 0.0]  # probabilities 3/4 and 1/4
OTHER = [0.0, LN3]  # 1/4 and 3/4


def test_disagreement_counts_only_where_the_classes_differ() -> None:
    """KL((3/4, 1/4) ‖ (1/4, 3/4)) = 1/2 ln 3; the second image has another student, but the same class."""
    teacher = torch.tensor([SURE, SURE])
    assert disagreement(teacher, torch.tensor([OTHER, [math.log(2), 0.0]])).item() == pytest.approx(LN3 / 4)
    assert disagreement(teacher, torch.tensor([SURE, [9.0, 0.0]])).item() == 0.0


def test_disagreement_is_seen_from_the_teacher() -> None:
    """Teacher (3/4, 1/4), student (1/10, 9/10)."""
    expected = 0.75 * math.log(0.75 / 0.1) + 0.25 * math.log(0.25 / 0.9)
    found = disagreement(torch.tensor([SURE]), torch.tensor([[0.0, math.log(9)]]))
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("bn_weight", "gaps", "bn"), [(0.5, (1.0, 3.0), 1.0), (0.0, (), 0.0)])
def test_the_loss_of_denses_generator(bn_weight: float, gaps: tuple[float, ...], bn: float) -> None:
    """Two teachers whose mean is (ln 3, 0); label 0 costs −ln 3/4; the mean of gaps 1 and 3 is 2."""
    logits = (torch.tensor([[2 * LN3, 0.0]]), torch.tensor([[0.0, 0.0]]))
    seen = View(logits, tuple(torch.tensor(gap) for gap in gaps))
    of = DENSE(DENSE.Settings(label_weight=2.0, adversarial_weight=3.0, bn_weight=bn_weight))
    found = of.loss(seen, torch.tensor([OTHER]), torch.tensor([0]))
    assert found.item() == pytest.approx(-2 * math.log(0.75) - 3 * LN3 / 2 + bn, rel=1e-5)


def test_hard_images_count_more_and_their_weight_has_no_gradient() -> None:
    """Sure of label 0 (3/4): weight 1/4. Unsure of label 1 (1/4): weight 3/4."""
    logits = torch.tensor([SURE, SURE], requires_grad=True)
    labels = torch.tensor([0, 1])
    loss = hard_cross_entropy(logits, labels, 1.0)
    assert loss.item() == pytest.approx((0.25 * -math.log(0.75) + 0.75 * math.log(4)) / 2, rel=1e-5)
    (slope,) = torch.autograd.grad(loss, logits)
    assert slope.flatten().tolist() == pytest.approx([-0.25 * 0.25 / 2, 0.25 * 0.25 / 2, 0.75**2 / 2, -(0.75**2) / 2])


@pytest.mark.parametrize("hardness", [0.0, 2.0])
def test_hardness_is_the_power(hardness: float) -> None:
    found = hard_cross_entropy(torch.tensor([SURE]), torch.tensor([0]), hardness)
    assert found.item() == pytest.approx(0.25**hardness * -math.log(0.75), rel=1e-5)


def test_the_ensemble_divides_by_the_sum_of_its_weights() -> None:
    logits = (torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 8.0]]))
    assert weighted(logits, torch.tensor([0.3, 0.1])).flatten().tolist() == pytest.approx([3.0, 2.0])


@pytest.mark.parametrize(("bn_weight", "gaps", "bn"), [(0.5, (1.0, 3.0), 1.0), (0.0, (), 0.0)])
def test_the_loss_of_coboostings_generator(bn_weight: float, gaps: tuple[float, ...], bn: float) -> None:
    """Weights (1, 0): the first teacher alone. At T = 3, 3·SURE is (3/4, 1/4) and 3·OTHER the reverse: 9 · 1/2 ln 3.

    At T = 1 the teacher is (27/28, 1/28), so its label 0 costs 1/28 · −ln 27/28. Nothing is masked.
    """
    logits = (torch.tensor([[3 * LN3, 0.0]]), torch.tensor([[7.0, 7.0]]))
    seen = View(logits, tuple(torch.tensor(gap) for gap in gaps))
    of = CoBoosting(CoBoosting.Settings(label_weight=2.0, adversarial_weight=3.0, bn_weight=bn_weight))
    found = of.loss(seen, torch.tensor([1.0, 0.0]), 3 * torch.tensor([OTHER]), torch.tensor([0]))
    assert found.item() == pytest.approx(2 / 28 * -math.log(27 / 28) - 3 * 9 * LN3 / 2 + bn, rel=1e-5)
    same = of.loss(seen, torch.tensor([1.0, 0.0]), torch.tensor([[6.0, 0.0]]), torch.tensor([0]))
    assert same.item() < 2 / 28 * -math.log(27 / 28) + bn - 0.1  # the same class, and still apart


RIGHT_AND_WRONG = (torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 2.0], [2.0, 0.0]]))


@pytest.mark.parametrize(
    ("before", "after"),
    [((0.5, 0.5), (0.6, 0.4)), ((0.95, 0.05), (1.0, 0.0)), ((0.2, 1.0), (0.3, 0.9)), ((1.0, 0.0), (1.0, 0.0))],
)
def test_one_step_of_the_weight_search(before: tuple[float, ...], after: tuple[float, ...]) -> None:
    """The first teacher is right about both images: its weight rises by the step, the other's falls, within 0..1."""
    found = better_weights(torch.tensor(before), RIGHT_AND_WRONG, torch.tensor([0, 1]), torch.tensor(0.1))
    assert found.tolist() == pytest.approx(after)


def test_a_step_of_zero_changes_nothing() -> None:
    before = torch.tensor([0.3, 0.6])
    found = better_weights(before, RIGHT_AND_WRONG, torch.tensor([0, 1]), torch.tensor(0.0))
    assert torch.equal(found, before)


def test_weights_never_all_vanish() -> None:
    """Where two teachers say the same, their gradients are rounding alone, and a step could take all of the weight."""
    for seed in range(40):
        logits = (torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)),) * 2
        before = torch.tensor([0.03, 0.07])
        found = better_weights(before, logits, torch.tensor([0, 1, 2, 3, 0]), torch.tensor(0.1))
        assert found.sum() > 0


def test_images_move_along_the_sign_of_the_diversity_gradient() -> None:
    """Where two pixels are the logits themselves, direction (1, −1) lifts the first and lowers the second."""
    pixels = torch.tensor([[0.5, 0.1], [0.0, 0.0]]).view(2, 1, 1, 2).requires_grad_(True)
    direction = torch.tensor([[1.0, -1.0], [-0.2, 0.3]])
    found = diversified(pixels, pixels.flatten(1), direction, 0.1)
    assert found.flatten().tolist() == pytest.approx([0.6, 0.0, -0.1, 0.1])
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([SURE, OTHER], -math.log(2)),
        ([SURE], 0.75 * math.log(0.75) + 0.25 * math.log(0.25)),
        ([[90.0, 0.0]], 0.0),
    ],
)
def test_imbalance_is_the_negative_entropy_of_the_mean(logits: list[list[float]], expected: float) -> None:
    assert imbalance(torch.tensor(logits)).item() == pytest.approx(expected, abs=1e-6)


def test_a_class_that_never_appears_has_a_finite_gradient() -> None:
    logits = torch.tensor([[500.0, 0.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(imbalance(logits), logits)
    assert slope.tolist() == [[0.0, 0.0]]


def test_the_loss_of_dafls_generator() -> None:
    """Each answer is sure of its own class: −ln 3/4. Both classes alike: −ln 2. Activity 7."""
    of = DAFL(DAFL.Settings(label_weight=2.0, balance_weight=5.0, activation_weight=0.1))
    found = of.loss(torch.tensor([SURE, OTHER]), torch.tensor(7.0))
    assert found.item() == pytest.approx(-2 * math.log(0.75) - 5 * math.log(2) - 0.7, rel=1e-5)


class Flat(nn.Module):
    """The first `count` values of each image are its features."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, : self.count]


def test_activity_is_the_mean_over_sites_whatever_their_feature_sizes() -> None:
    """Features (1, −3) have mean 2 of absolute values, (1) has 1: 3/2, not the 5/3 of all three together."""
    nets = []
    for count, head in ((2, [[1.0, 0.0], [0.0, 1.0]]), (1, [[4.0], [0.0]])):
        net = StagedNet({"flat": Flat(count)}, count, 2)
        net.head.weight.data.copy_(torch.tensor(head))
        net.head.bias.data.zero_()
        nets.append(net)
    teachers: Any = SimpleNamespace(bf16=False, teachers=nets)
    logits, activity = answers(teachers, torch.tensor([1.0, -3.0]).view(1, 1, 1, 2))
    assert activity.item() == pytest.approx(1.5)
    assert logits.flatten().tolist() == pytest.approx([2.5, -1.5])


def test_schedules() -> None:
    assert [DENSE(DENSE.Settings(epochs=4, lr=0.3)).rate(e) for e in range(4)] == [0.3] * 4
    cosine = [CoBoosting(CoBoosting.Settings(epochs=4, lr=0.4)).rate(e) for e in (0, 1, 2, 3)]
    assert cosine == pytest.approx([0.4, 0.2 + 0.2 * math.sqrt(0.5), 0.2, 0.2 - 0.2 * math.sqrt(0.5)])
    steps = [DAFL(DAFL.Settings(epochs=200, lr=1.0)).rate(e) for e in (0, 119, 120, 149, 150, 179, 180, 199)]
    assert steps == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])
    own = DAFL(DAFL.Settings(epochs=10, lr=1.0, milestones=(0.4, 0.8)))  # as its code has them for other sets
    assert [own.rate(e) for e in (3, 4, 7, 8)] == pytest.approx([1, 0.1, 0.1, 0.01])
