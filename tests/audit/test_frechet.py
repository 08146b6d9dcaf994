"""Fréchet's distance on hand-worked numbers, and the networks that look at images for it."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

import tiny
from wardround.audit.frechet import frechet, random_network
from wardround.errors import BadInput


def cross(a: float, b: float, at: tuple[float, float] = (0, 0)) -> Tensor:
    """Four points at ±a and ±b on the axes around a middle: unbiased covariance diag(2a²/3, 2b²/3)."""
    return torch.tensor([[a, 0], [-a, 0], [0, b], [0, -b]]) + torch.tensor(at)


def test_by_hand() -> None:
    """Means 5 apart; standard deviations √(2/3)·(1, 2) and √(2/3)·(3, 5): 25 + 2/3·(4 + 9)."""
    assert frechet(cross(1, 2), cross(3, 5, at=(3, 4))) == pytest.approx(25 + 2 / 3 * 13, rel=1e-6)


def test_covariances_that_do_not_commute() -> None:
    """diag(4, 0) against the all-ones matrix: their product has eigenvalues 4 and 0, so tr = 4 + 2 − 2·2."""
    r = math.sqrt(6)
    first = torch.tensor([[r, 0.0], [-r, 0], [0, 0], [0, 0]])
    s = math.sqrt(1.5)
    second = torch.tensor([[s, s], [-s, -s], [0.0, 0], [0, 0]])
    assert frechet(first, second) == pytest.approx(2.0, abs=1e-6)


def test_against_scipys_matrix_root() -> None:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(40, 5, generator=draw, dtype=torch.float64) @ torch.randn(5, 5, generator=draw).double()
    b = torch.randn(30, 5, generator=draw, dtype=torch.float64) + 1
    first, second = np.cov(a.numpy().T), np.cov(b.numpy().T)
    root = scipy.linalg.sqrtm(first @ second).real
    wanted = float((a.mean(0) - b.mean(0)).square().sum()) + np.trace(first + second - 2 * root)
    assert frechet(a, b) == pytest.approx(wanted, rel=1e-9)


def test_it_is_symmetric_and_nothing_for_equal_sets_of_low_rank() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 20, generator=draw), torch.randn(8, 20, generator=draw)
    assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-6)
    assert frechet(a, a) == pytest.approx(0, abs=1e-5)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(BadInput, match="needs two images or more on each side, not 1 and 4"):
        frechet(torch.ones(1, 2), cross(1, 1))
    with pytest.raises(ValueError, match="same two numbers or more"):
        frechet(torch.ones(3, 2), torch.ones(3, 4))


def test_the_random_network_is_the_same_everywhere_and_tells_images_apart() -> None:
    images = tiny.images(60, size=16).images
    eye, again, other = random_network(3), random_network(3), random_network(3, seed=1)
    assert eye.name == "random convolutions 16-32-64, seed 0 (112 features; not Inception)"
    features = eye.features(images)
    assert features.shape == (60, 112)
    assert torch.equal(features, again.features(images))
    assert not torch.equal(features, other.features(images))
    assert torch.equal(features, eye.features(images.float() / 255))
    half, rest = features[:30], features[30:]
    darker = eye.features(images[30:] // 3)
    assert frechet(half, darker) > 10 * frechet(half, rest)
