"""Accuracy, balanced accuracy and macro-AUC: small cases worked by hand, and what must hold for any predictions."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, recall_score, roc_auc_score
from torch import Tensor

from wardround.errors import RunFailed
from wardround.measure import macro_auc, tally


def answers(predicted: list[int], classes: int) -> Tensor:
    """Scores whose highest entry is the wanted answer."""
    return torch.nn.functional.one_hot(torch.tensor(predicted, dtype=torch.int64), classes).float()


# Class 0: 3 of 4 right; class 1: 1 of 2 right; class 2: no images; class 3: 0 of 2 right. In all 4 of 8.
HAND = tally(answers([0, 0, 0, 1, 1, 3, 2, 0], 4), torch.tensor([0, 0, 0, 0, 1, 1, 3, 3]), 4)


@st.composite
def predictions(draw: st.DrawFn, min_images: int = 1) -> tuple[Tensor, Tensor]:
    """Scores with many ties, on a grid of quarters, and labels."""
    classes = draw(st.integers(2, 5))
    n = draw(st.integers(min_images, 40))
    grid = st.integers(-4, 4).map(lambda quarters: quarters / 4)
    scores = draw(st.lists(st.lists(grid, min_size=classes, max_size=classes), min_size=n, max_size=n))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n))
    return torch.tensor(scores).reshape(n, classes), torch.tensor(labels, dtype=torch.int64)


def test_a_tally_counts_by_class() -> None:
    assert HAND.correct.tolist() == [3, 1, 0, 0]
    assert HAND.totals.tolist() == [4, 2, 0, 2]
    assert HAND.predicted.tolist() == [4, 2, 1, 1]
    assert HAND.n == 8
    assert all(t.dtype == torch.int64 for t in (HAND.correct, HAND.totals, HAND.predicted))


def test_accuracy_by_hand() -> None:
    assert HAND.accuracy() == 0.5
    # 0.2 · 3/4 + 0.4 · 1/2 over the 0.6 of weight on classes with images: class 2's 0.4 cannot be judged.
    assert HAND.accuracy(torch.tensor([0.2, 0.4, 0.4, 0.0])) == pytest.approx(0.35 / 0.6, rel=1e-6)
    assert HAND.accuracy(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.75


def test_balanced_accuracy_by_hand() -> None:
    assert HAND.balanced_accuracy() == pytest.approx((3 / 4 + 1 / 2 + 0) / 3, rel=1e-15)
    # The weights choose the classes 0 and 1 and no more: their sizes do not matter.
    assert HAND.balanced_accuracy(torch.tensor([0.9, 0.1, 0.0, 0.0])) == 0.625


def test_equal_scores_give_the_first_class() -> None:
    tied = tally(torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([1]), 3)
    assert tied.predicted.tolist() == [0, 1, 0]


def test_a_constant_predictor_is_flagged() -> None:
    assert tally(answers([1, 1, 1], 3), torch.tensor([0, 1, 2]), 3).is_constant
    assert not tally(answers([1, 1, 0], 3), torch.tensor([0, 1, 2]), 3).is_constant
    # Nothing can be said from a test of one class.
    assert not tally(answers([1, 1, 1], 3), torch.tensor([1, 1, 1]), 3).is_constant


def test_log_probabilities_of_minus_infinity_are_scores() -> None:
    scores = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    assert tally(scores, torch.tensor([0, 1]), 2).accuracy() == 1.0
    assert macro_auc(scores, torch.tensor([0, 1])) == 1.0


@pytest.mark.parametrize("row", [[0.0, math.nan, 9.0], [0.0, math.inf, 0.0], [-math.inf] * 3])
def test_broken_scores_fail_in_one_line(row: list[float]) -> None:
    scores, labels = torch.tensor([[1.0, 0.0, 0.0], row]), torch.tensor([0, 2])
    for measure in (lambda: tally(scores, labels, 3), lambda: macro_auc(scores, labels)):
        with pytest.raises(RunFailed, match="not numbers for 1 of 2 images") as caught:
            measure()
        assert "\n" not in str(caught.value)


def test_nothing_to_judge_fails() -> None:
    empty = tally(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 3)
    assert empty.n == 0
    assert not empty.is_constant
    only_class_2 = torch.tensor([0.0, 0.0, 1.0, 0.0])
    for found, weights in ((empty, None), (HAND, only_class_2)):
        for measure in (found.accuracy, found.balanced_accuracy):
            with pytest.raises(RunFailed, match="no test image belongs to a class that counts"):
                measure(weights)


@pytest.mark.parametrize(
    "weights", [torch.ones(3), torch.tensor([0.5, 0.7, -0.2, 0.0]), torch.tensor([1.0, math.nan, 0.0, 0.0])]
)
def test_weights_that_are_no_label_mix_are_refused(weights: Tensor) -> None:
    for measure in (HAND.accuracy, HAND.balanced_accuracy):
        with pytest.raises(ValueError, match="class weights must be"):
            measure(weights)


def test_scores_and_labels_must_fit() -> None:
    with pytest.raises(ValueError, match="scores must be"):
        tally(torch.zeros(2, 3), torch.tensor([0]), 3)
    with pytest.raises(ValueError, match="scores must be"):
        tally(torch.zeros(1, 3), torch.tensor([0]), 4)
    for label in (3, -1):
        with pytest.raises(ValueError, match="outside 0 to 2"):
            tally(torch.zeros(1, 3), torch.tensor([label]), 3)


@given(predictions())
@settings(deadline=None, max_examples=25)
def test_agrees_with_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    scores, labels = case
    found, predicted = tally(scores, labels, scores.shape[1]), scores.argmax(dim=1)
    present = sorted(set(labels.tolist()))
    assert found.accuracy() == pytest.approx(accuracy_score(labels, predicted))
    assert found.balanced_accuracy() == pytest.approx(recall_score(labels, predicted, labels=present, average="macro"))


@given(predictions(), st.data())
@settings(deadline=None, max_examples=25)
def test_accuracies_are_shares(case: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    scores, labels = case
    classes = scores.shape[1]
    weights = torch.tensor(data.draw(st.lists(st.floats(0.01, 1), min_size=classes, max_size=classes)))
    found = tally(scores, labels, classes)
    for value in (
        found.accuracy(),
        found.accuracy(weights),
        found.balanced_accuracy(),
        found.balanced_accuracy(weights),
    ):
        assert 0 <= value <= 1
    # The test set's own label mix gives back the plain share.
    assert found.accuracy(found.totals / found.n) == pytest.approx(found.accuracy())


@given(predictions())
@settings(deadline=None, max_examples=25)
def test_equal_weights_give_the_balanced_accuracy(case: tuple[Tensor, Tensor]) -> None:
    classes = case[0].shape[1]
    scores = torch.cat([case[0], torch.zeros(classes, classes)])
    labels = torch.cat([case[1], torch.arange(classes)])  # so that every class is there
    found = tally(scores, labels, classes)
    assert found.accuracy(torch.full((classes,), 1 / classes)) == pytest.approx(found.balanced_accuracy())


@given(predictions(), st.integers(0, 40))
@settings(deadline=None, max_examples=25)
def test_tallies_of_parts_add_up(case: tuple[Tensor, Tensor], cut: int) -> None:
    scores, labels = case
    classes = scores.shape[1]
    whole = tally(scores, labels, classes)
    parts = [tally(scores[:cut], labels[:cut], classes), tally(scores[cut:], labels[cut:], classes)]
    for field in ("correct", "totals", "predicted"):
        assert torch.equal(getattr(whole, field), getattr(parts[0], field) + getattr(parts[1], field))


@given(predictions(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_the_order_of_images_does_not_matter(case: tuple[Tensor, Tensor], random: Random) -> None:
    scores, labels = case
    order = list(range(len(labels)))
    random.shuffle(order)
    before, after = tally(scores, labels, scores.shape[1]), tally(scores[order], labels[order], scores.shape[1])
    assert before.accuracy() == after.accuracy()
    assert torch.equal(before.predicted, after.predicted)
    assert macro_auc(scores, labels) == macro_auc(scores[order], labels[order])


def test_binary_auc_by_hand() -> None:
    # Class 1 has the scores 2, 1, 0 and class 0 has 1, -1: of 6 pairs 4 are in order, 1 is tied, 1 is not: 4.5 / 6.
    scores = torch.tensor([[0.0, 2.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert macro_auc(scores, torch.tensor([1, 1, 1, 0, 0])) == 0.75


def test_binary_auc_is_that_of_class_1_alone() -> None:
    # Both probabilities of class 1 round to 1 and tie; those of class 0, e^-50 and e^-60, would still rank.
    assert macro_auc(torch.tensor([[0.0, 50.0], [0.0, 60.0]]), torch.tensor([0, 1])) == 0.5


def test_multi_class_auc_by_hand() -> None:
    scores = torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, -1.0, 2.0], [0.0, 2.0, 0.0]])
    # Class 0: the first row ties with the second and passes the others, 2.5 / 3. Class 1: the second row ties with the
    # first and passes the third, the fourth passes both, 3.5 / 4. Class 2: the third row passes all three.
    assert macro_auc(scores, torch.tensor([0, 1, 2, 1])) == pytest.approx((5 / 6 + 7 / 8 + 1) / 3, rel=1e-15)


def test_auc_ranks_probabilities_and_not_logits() -> None:
    # Class 0's logits are the higher in the second row, its probabilities in the first: e/(e+2) against 1/3.
    scores = torch.tensor([[1.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    # Class 1's probability is higher in the second row, as it should be; class 2 has no image.
    assert macro_auc(scores, torch.tensor([0, 1])) == 1.0


def test_undefined_classes_are_left_out() -> None:
    # Class 2 has no image. Classes 0 and 1: the two rows are in the right order for both.
    scores = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    assert macro_auc(scores, torch.tensor([0, 1])) == 1.0
    assert macro_auc(scores, torch.tensor([1, 0])) == 0.0
    assert macro_auc(scores, torch.tensor([1, 1])) is None
    assert macro_auc(scores[:, :2], torch.tensor([0, 0])) is None
    assert macro_auc(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) is None


@given(predictions(min_images=2))
@settings(deadline=None, max_examples=100)
def test_auc_agrees_with_scikit_learn(case: tuple[Tensor, Tensor]) -> None:
    scores, labels = case
    probabilities = scores.double().softmax(dim=1)
    judged = [1] if scores.shape[1] == 2 else range(scores.shape[1])
    areas = [
        roc_auc_score(labels == c, probabilities[:, c]) for c in judged if 0 < int((labels == c).sum()) < len(labels)
    ]
    expected = sum(areas) / len(areas) if areas else None
    assert macro_auc(scores, labels) == (None if expected is None else pytest.approx(expected, abs=1e-12))
