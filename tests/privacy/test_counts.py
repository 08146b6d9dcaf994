"""Counts that may leave: bins by hand, noise against its own distribution."""

import math

import numpy as np
import pytest
import torch

from wardround.errors import BadInput
from wardround.privacy.counts import binned, noised
from wardround.privacy.secret import Secret

SECRET = Secret(bytes(range(32)))


def test_a_bin_is_named_by_its_lower_edge() -> None:
    counts = torch.tensor([0, 4, 5, 9, 10, 11, 499, 500, 250_000])
    assert binned(counts).tolist() == [0, 0, 5, 5, 10, 10, 200, 500, 100_000]
    assert binned(torch.tensor([3.0, 7.0])).tolist() == [0, 5]


@pytest.mark.parametrize("counts", [[-1], [1.5], [math.nan]])
def test_what_is_no_count_is_refused(counts: list[float]) -> None:
    with pytest.raises(BadInput, match="whole numbers from 0"):
        noised(torch.tensor(counts), 1.0, SECRET.numpy("test"))
    with pytest.raises(BadInput, match="whole numbers from 0"):
        binned(torch.tensor(counts))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_an_epsilon_that_is_none_is_refused(epsilon: float) -> None:
    with pytest.raises(BadInput, match="above 0"):
        noised(torch.tensor([1]), epsilon, SECRET.numpy("test"))


@pytest.mark.parametrize("epsilon", [0.25, 1.0])
def test_the_noise_has_the_distribution_that_gives_epsilon(epsilon: float) -> None:
    n = 200_000
    noise = noised(torch.full((n,), 1000), epsilon, SECRET.numpy("law")).numpy() - 1000
    a = math.exp(-epsilon)
    for k in range(-4, 5):
        expected = (1 - a) / (1 + a) * a ** abs(k)
        assert np.mean(noise == k) == pytest.approx(expected, abs=5 * math.sqrt(expected / n))
    assert np.var(noise) == pytest.approx(2 * a / (1 - a) ** 2, rel=0.03)


def test_noise_is_clipped_at_zero_and_depends_on_the_secret_alone() -> None:
    counts = torch.zeros(1000, dtype=torch.int64)
    first = noised(counts, 0.5, SECRET.numpy("counts", "north"))
    assert first.dtype == torch.int64
    assert int(first.min()) == 0
    assert int(first.max()) > 0
    assert torch.equal(first, noised(counts, 0.5, SECRET.numpy("counts", "north")))
    assert not torch.equal(first, noised(counts, 0.5, SECRET.numpy("counts", "south")))
    assert not torch.equal(first, noised(counts, 0.5, Secret(bytes(32)).numpy("counts", "north")))
