"""Forgetting by hand: consistency, backward transfer and when a run settles."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.measure import backward_transfer, consistency, settled_after

shares = st.lists(st.floats(0, 1), min_size=1, max_size=30)


# Consistency ----------------------------------------------------------------------------------------------------------


def test_consistency_of_the_vector_worked_out_by_hand() -> None:
    """Peak .50, passed by .60 three rounds later: (0 + .10 + .05 + .10) / .50 / 3 = 1/6.

    Without the end of the interval it would be .90, with the unclosed tail at .55 averaged in it would be .875.
    """
    found = consistency([0.30, 0.50, 0.40, 0.45, 0.60, 0.55])
    assert found == pytest.approx(0.83333, abs=5e-6)
    assert found != pytest.approx(0.90, abs=0.01)
    assert found != pytest.approx(0.875, abs=0.01)


def test_two_intervals_count_alike() -> None:
    """[.5, .4, .5] gives (.1 / .5) / 2 = .1; [.5, .25, .25, .5] gives (.5 + .5) / 3 = 1/3; the mean is 13/60."""
    assert consistency([0.5, 0.4, 0.5, 0.25, 0.25, 0.5]) == pytest.approx(1 - 13 / 60)


@pytest.mark.parametrize("accuracies", [[], [0.5], [0.1, 0.2, 0.3], [0.5, 0.5, 0.5], [0.5, 0.4, 0.3], [0, 0, 0.5]])
def test_without_an_interval_it_is_1(accuracies: list[float]) -> None:
    """Rising, level, or falling and never back: nothing was lost and regained."""
    assert consistency(accuracies) == 1.0


@given(shares)
@settings(deadline=None, max_examples=25)
def test_consistency_does_not_see_the_scale_nor_the_tail(accuracies: list[float]) -> None:
    found = consistency(accuracies)
    assert found <= 1
    assert consistency([a / 2 for a in accuracies]) == pytest.approx(found, abs=1e-9)
    below = max(accuracies) / 2
    if below > 0:
        assert consistency([*accuracies, below, below]) == found


# Backward transfer ----------------------------------------------------------------------------------------------------


def test_backward_transfer_by_hand() -> None:
    """a takes part in rounds 0 and 2, b in round 1.

    Round 0: nobody before. Round 1: a .6 − .8 = −.2. Round 2: a, last in round 0, .7 − .8 = −.1 and b .3 − .5 = −.2.
    Round 3: a, now last in round 2, .9 − .7 = .2 and b .5 − .5 = 0. c never took part.
    """
    accuracies = {
        0: {"a": 0.8, "b": 0.1, "c": 0.0},
        1: {"a": 0.6, "b": 0.5, "c": 0.9},
        2: {"a": 0.7, "b": 0.3, "c": 0.0},
        3: {"a": 0.9, "b": 0.5, "c": 0.5},
    }
    found = backward_transfer(accuracies, {0: ["a"], 1: ["b"], 2: ["a"], 3: []})
    assert found == pytest.approx({0: 0.0, 1: -0.2, 2: -0.15, 3: 0.1})


def test_a_site_of_this_round_is_compared_with_its_round_before() -> None:
    """Asked in every round, a site's transfer is the change from the round before, not 0."""
    found = backward_transfer({0: {"a": 0.25}, 1: {"a": 0.5}, 2: {"a": 0.25}}, {0: "a", 1: "a", 2: "a"})
    assert found == {0: 0.0, 1: 0.25, 2: -0.25}


# Convergence ----------------------------------------------------------------------------------------------------------


def test_settled_after_by_hand() -> None:
    """Running means .0, .25, .333, .375, .4, .5 and then .5: within a point of .5 from the sixth value on."""
    values = [0.0, *[0.5] * 9]
    assert settled_after(dict(enumerate(values))) == 5
    assert settled_after({10 * round: value for round, value in enumerate(values)}) == 50


def test_level_from_the_start() -> None:
    assert settled_after(dict.fromkeys(range(5), 0.5)) == 0


@pytest.mark.parametrize("values", [[], [0.5], [0.5] * 4, [0.1 * i for i in range(10)]])
def test_the_end_of_a_course_is_not_convergence(values: list[float]) -> None:
    assert settled_after(dict(enumerate(values))) is None


def test_what_leaves_again_had_not_settled() -> None:
    values = [0.5] * 10 + [0.9] + [0.5] * 9
    assert settled_after(dict(enumerate(values))) == 15  # the 0.9 is in the running means up to that of round 14
