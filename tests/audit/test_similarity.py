"""SSIM, L2 and nearest images on numbers worked by hand, and SSIM against a loop over windows."""

import math

import pytest
import torch
from torch import Tensor

from wardround.audit.similarity import best_ssim, l2, nearest, ssim, unit


def grey(*values: float, side: int = 11) -> Tensor:
    return torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 1, side, side)


def noise(n: int, channels: int = 3, side: int = 14, seed: int = 0) -> Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


def test_bytes_become_shares() -> None:
    assert unit(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx([0, 0.2, 1])


def test_l2_is_a_root_mean_square() -> None:
    """Differences 0.3 and 0.4 in two of eight values: √(0.25 / 8)."""
    a, b = torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 2)
    b[0, 0, 0, 0], b[0, 1, 1, 1] = 0.3, 0.4
    assert l2(a, b).item() == pytest.approx(math.sqrt(0.25 / 8))
    assert l2(grey(0.0), grey(1.0)).item() == 1.0


def test_nearest_and_nearest_other() -> None:
    rows = grey(0.0, 0.5, 0.6, 1.0)
    distance, index = nearest(grey(0.52, 0.9), rows)
    assert index.tolist() == [1, 3]
    assert distance.tolist() == pytest.approx([0.02, 0.1])
    distance, index = nearest(rows, rows, apart_from=torch.arange(4))
    assert index.tolist() == [1, 2, 1, 2]
    assert distance.tolist() == pytest.approx([0.5, 0.1, 0.1, 0.4])


def test_equal_images_are_nothing_apart_however_many() -> None:
    images = noise(600)
    distance, index = nearest(images, images)
    assert index.tolist() == list(range(600))
    assert distance.max() == 0
    distance, index = nearest(images, images, apart_from=torch.arange(600))
    assert (index != torch.arange(600)).all()
    assert distance.tolist() == pytest.approx(((images - images[index]) ** 2).flatten(1).mean(dim=1).sqrt().tolist())


def test_nearest_is_the_least_of_all_distances() -> None:
    images, others = noise(9, side=4), noise(700, side=4, seed=1)
    table = torch.cdist(images.flatten(1).double(), others.flatten(1).double()) / math.sqrt(48)
    distance, index = nearest(images, others)
    assert index.tolist() == table.argmin(dim=1).tolist()
    torch.testing.assert_close(distance, table.amin(dim=1))


def test_ssim_of_even_images() -> None:
    """Without variance only luminance is left: (2ab + C₁)/(a² + b² + C₁) with a = 0.25, b = 0.75, C₁ = 0.0001."""
    assert ssim(grey(0.25), grey(0.75)).item() == pytest.approx(0.3751 / 0.6251)


def test_ssim_of_equal_and_of_inverted_images() -> None:
    images = noise(3)
    assert ssim(images, images).tolist() == pytest.approx([1.0] * 3)
    assert ssim(images, 1 - images).max() < -0.8


def test_ssim_of_a_three_pixel_image_by_hand() -> None:
    """One window of 3×3 with axis weights (w, 1−2w, w); x is the middle column, y the middle row, both 0 and 1.

    Both means are m = 1 − 2w; x² = x, so both variances are m − m²; x·y is the middle pixel, so the covariance is
    m² − m² = 0.
    """
    w = math.exp(-1 / 4.5) / (1 + 2 * math.exp(-1 / 4.5))
    m = 1 - 2 * w
    x, y = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3)
    x[..., 1], y[..., 1, :] = 1, 1
    assert ssim(x, y).item() == pytest.approx(0.0009 / (2 * (m - m * m) + 0.0009))


def test_ssim_against_a_loop_over_windows() -> None:
    """Wang et al.'s Eq. 13 to 16, window by window, for an image that is not square."""
    x, y = noise(1, 2, 14)[..., :12], noise(1, 2, 14, seed=1)[..., :12]
    axis = torch.exp(-((torch.arange(11.0, dtype=torch.float64) - 5) ** 2) / 4.5)
    window = torch.outer(axis, axis) / axis.sum() ** 2
    values = []
    for channel in range(2):
        for row in range(4):
            for column in range(2):
                a, b = (t[0, channel, row : row + 11, column : column + 11].double() for t in (x, y))
                ma, mb = (window * a).sum(), (window * b).sum()
                va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
                cov = (window * (a - ma) * (b - mb)).sum()
                top = (2 * ma * mb + 1e-4) * (2 * cov + 9e-4)
                values.append(float(top / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))))
    assert ssim(x, y).item() == pytest.approx(sum(values) / len(values))


def test_best_ssim_is_over_every_pair() -> None:
    images, others = noise(2), torch.cat([noise(3, seed=5), noise(2)])
    assert best_ssim(images, others).tolist() == pytest.approx([1.0, 1.0])
    table = [[ssim(a[None], b[None]).item() for b in others] for a in others]
    wanted = [max(v for j, v in enumerate(row) if j != i) for i, row in enumerate(table)]
    assert best_ssim(others, others, apart_from=torch.arange(5)).tolist() == pytest.approx(wanted)
