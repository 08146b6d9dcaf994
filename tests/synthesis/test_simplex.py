"""The nearest shares to any numbers, and steps that stay among shares."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.synthesis.simplex import descend, project

numbers = st.lists(st.floats(-5, 5, allow_nan=False), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        ([7.0], [1.0]),
        ([-3.0], [1.0]),
        ([1.0, 1.0], [0.5, 0.5]),
        ([2.0, 0.0], [1.0, 0.0]),
        ([0.6, 0.6, -1.0], [0.5, 0.5, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([0.5, 1.25, 0.75], [0.0, 0.75, 0.25]),  # all three less 1/2 would be (0, 3/4, 1/4): one is just at zero
    ],
)
def test_by_hand(point: list[float], nearest: list[float]) -> None:
    torch.testing.assert_close(project(torch.tensor(point)), torch.tensor(nearest))


@given(numbers)
@settings(deadline=None, max_examples=25)
def test_it_is_a_point_of_the_simplex_and_stays_there(point: list[float]) -> None:
    once = project(torch.tensor(point, dtype=torch.float64))
    assert bool((once >= 0).all())
    assert float(once.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(project(once), once, rtol=0, atol=1e-12)


@given(st.lists(st.floats(-3, 3, allow_nan=False), min_size=3, max_size=3))
@settings(deadline=None, max_examples=25)
def test_nothing_on_a_fine_grid_is_nearer(point: list[float]) -> None:
    there = torch.tensor(point, dtype=torch.float64)
    n = 40
    whole = [(a, b, n - a - b) for a, b in itertools.product(range(n + 1), repeat=2) if a + b <= n]
    grid = torch.tensor(whole, dtype=torch.float64) / n
    best = (grid - there).norm(dim=1).min()
    assert float((project(there) - there).norm()) <= float(best) + 1e-9


def test_a_normalised_step_moves_by_the_rate() -> None:
    """h = (−200, 100): divided by 200, times 0.1: (0.6, 0.45); 0.025 less each."""
    found = descend(torch.tensor([0.5, 0.5]), torch.tensor([-200.0, 100.0]), 0.1, normalise=True)
    torch.testing.assert_close(found, torch.tensor([0.575, 0.425]))


def test_a_raw_step_is_equation_8() -> None:
    """0.5 + 0.1·2 and 0.5 − 0.1·1: (0.7, 0.4), 0.05 less each."""
    found = descend(torch.tensor([0.5, 0.5]), torch.tensor([-2.0, 1.0]), 0.1, normalise=False)
    torch.testing.assert_close(found, torch.tensor([0.65, 0.35]))


def test_no_gradient_no_step() -> None:
    start = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert descend(start, torch.zeros(2, dtype=torch.float64), 0.1, normalise=True).tolist() == [0.25, 0.75]
