"""The ROC curve by hand, and against its definition on random scores."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wardround.audit.roc import roc
from wardround.errors import BadInput


def test_five_scores_by_hand() -> None:
    """Members 9, 7, 7 and others 8, 7: from 9 down one hit, then an alarm, then two hits and an alarm at once."""
    curve = roc(torch.tensor([7.0, 9.0, 7.0]), torch.tensor([7.0, 8.0]))
    assert curve.thresholds.tolist() == [float("inf"), 9, 8, 7]
    assert curve.hits.tolist() == [0, 1, 1, 3]
    assert curve.alarms.tolist() == [0, 0, 1, 2]
    assert (curve.members, curve.others, curve.smallest_rate) == (3, 2, 0.5)
    # 9 beats both; each 7 loses to 8 and ties with 7: (2 + 0.5 + 0.5) of 6
    assert curve.auc == 0.5
    assert curve.points() == ((0.0, 0.0), (0.0, pytest.approx(1 / 3)), (0.5, pytest.approx(1 / 3)), (1.0, 1.0))


def test_perfect_and_useless_scores() -> None:
    assert roc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])).auc == 1.0
    assert roc(torch.tensor([0.0]), torch.tensor([1.0])).auc == 0.0
    same = roc(torch.ones(4), torch.ones(7))
    assert same.auc == 0.5
    assert same.tpr_at() == 0.0
    assert same.points() == ((0.0, 0.0), (1.0, 1.0))


def test_rate_at_a_low_false_rate_allows_whole_alarms_only() -> None:
    """Of 2,000 others, 0.1 % are two: the third alarm, at 10, is one too many."""
    others = torch.cat([torch.tensor([30.0, 20.0, 10.0]), torch.zeros(1997)])
    curve = roc(torch.tensor([40.0, 25.0, 15.0, 10.0, 5.0]), others)
    assert curve.tpr_at(0.001) == 3 / 5
    assert curve.tpr_at(0.0005) == 2 / 5
    assert curve.tpr_at(0.0) == 1 / 5
    assert curve.tpr_at(1.0) == 1.0


def test_with_few_others_no_alarm_is_allowed() -> None:
    curve = roc(torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([1.5] * 100))
    assert curve.tpr_at(0.001) == 0.5
    assert curve.smallest_rate == 0.01


def test_a_rate_is_not_lost_to_rounding() -> None:
    """0.29 · 100 is a hair below 29 in floating point, and 29 alarms are allowed."""
    others = torch.arange(100.0)
    assert roc(torch.tensor([70.5]), others).tpr_at(0.29) == 1.0


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
)
def test_area_is_the_chance_of_outranking(members: list[int], others: list[int]) -> None:
    curve = roc(torch.tensor(members), torch.tensor(others))
    wins = sum((m > o) + 0.5 * (m == o) for m in members for o in others)
    assert curve.auc == pytest.approx(wins / (len(members) * len(others)))
    rates = curve.points()
    assert rates[0] == (0.0, 0.0)
    assert rates[-1] == (1.0, 1.0)
    assert list(rates) == sorted(rates)
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(rates))
    assert area == pytest.approx(curve.auc, abs=1e-6)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(BadInput, match=r"needs images that were trained on and others, not 0 and 2; hold some images"):
        roc(torch.empty(0), torch.ones(2))


def test_a_score_that_is_no_number_is_a_fault() -> None:
    with pytest.raises(ValueError, match="not a number"):
        roc(torch.tensor([float("nan")]), torch.ones(2))
