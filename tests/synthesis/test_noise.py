"""Structured noise: what the recipes fix, the shapes and kinds that are asked for, and draws that can be repeated."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.errors import BadInput
from wardround.progress import Silent
from wardround.synthesis import noise
from wardround.synthesis.noise import Kind, bank

KINDS: list[Kind] = ["stylegan", "deadleaves", "spectrum"]


def rows(of: Tensor) -> int:
    """How many different ones there are."""
    return len(torch.unique(of.flatten(1), dim=0))


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_generator_gives_the_same_images_and_no_other_is_touched(kind: Kind) -> None:
    before = torch.get_rng_state()
    first = bank(kind, 3, 3, 12, draw(5))
    assert torch.equal(first, bank(kind, 3, 3, 12, draw(5)))
    assert not torch.equal(first, bank(kind, 3, 3, 12, draw(6)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 3), channels=st.sampled_from([1, 3]), size=st.integers(4, 40))
def test_images_have_the_shape_that_is_asked_for(kind: Kind, count: int, channels: int, size: int) -> None:
    found = bank(kind, count, channels, size, draw())
    assert (found.shape, found.dtype) == ((count, channels, size, size), torch.uint8)
    assert found.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_large_images(kind: Kind) -> None:
    found = bank(kind, 1, 3, 224, draw())
    assert found.shape == (1, 3, 224, 224)
    assert found.float().std() > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_no_image_is_constant_and_no_two_are_alike(kind: Kind, channels: int) -> None:
    """Over more than one batch of images that are made together. A leaf can hide all others, but hardly ever does."""
    count = noise.AT_ONCE // 16**2 + 7
    found = bank(kind, count, channels, 16, draw())
    assert rows(found) == count
    constant = int((found.float().std(dim=(2, 3)).amax(dim=1) < 2).sum())
    assert constant <= (2 if kind == "deadleaves" else 0)
    found = found[found.float().std(dim=(1, 2, 3)) > 2]
    count = len(found)
    flat = found.double().flatten(1) - found.double().flatten(1).mean(dim=1, keepdim=True)
    alike = torch.corrcoef(flat) - torch.eye(count)
    assert alike.abs().mean() < 0.35


def test_progress_counts_the_batches() -> None:
    seen: list[tuple[str, int]] = []

    class Watching(Silent):
        def track(self, items, label):  # type: ignore[no-untyped-def]
            seen.append((label, len(items)))
            return iter(items)

    bank("spectrum", 2 * noise.AT_ONCE // 16**2 + 1, 1, 16, draw(), Watching())
    assert seen == [("structured noise: spectrum", 3)]


# StyleGAN-oriented ----------------------------------------------------------------------------------------------------


def test_the_dictionary_has_oriented_edges_and_lines_and_sparse_kernels() -> None:
    found = noise._dictionary()
    assert found.shape == (40, 3, 3)
    edge = torch.tensor([[1.0, 0.0, -1.0]] * 3)
    line = torch.tensor([[2.0, -4.0, 2.0]] * 3) / 3
    torch.testing.assert_close(found[0], edge)
    torch.testing.assert_close(found[8], line)
    torch.testing.assert_close(found[4], edge.T, rtol=0, atol=1e-6)  # a quarter turn is four of eight steps
    torch.testing.assert_close(found[12], line.T, rtol=0, atol=1e-6)
    assert found[:16].mean(dim=(1, 2)).abs().max() < 1e-6
    sparse = [
        [[0, 0, 0], [0, 1, 0], [0, 0, 0]],
        [[-1, -1, -1], [-1, 1, -1], [-1, -1, -1]],
        [[0, 1, 0], [1, 1, 1], [0, 1, 0]],
        [[-1, 1, -1], [1, 1, 1], [-1, 1, -1]],
    ]
    assert found[16:20].tolist() == sparse
    assert torch.equal(found[20:], -found[:20])
    assert rows(found.round(decimals=4)) == 40


def test_an_edge_at_an_angle_is_the_rotated_step() -> None:
    """At 45°, the corners lie √2 from the edge, further than where the step is full."""
    half = math.sqrt(0.5)
    expected = torch.tensor([[1.0, half, 0.0], [half, 0.0, -half], [0.0, -half, -1.0]])
    torch.testing.assert_close(noise._dictionary()[2], expected, rtol=0, atol=1e-6)


def test_every_image_uses_at_least_a_few_kernels_and_all_are_used() -> None:
    found = noise._drawn_kernels(300, 200, draw())
    used = [rows(image) for image in found]
    assert min(used) >= noise.FEWEST_KERNELS - 1  # of 200 features, hardly any leaves a drawn kernel out
    assert max(used) > 35
    assert rows(found.flatten(0, 1)) == 40


def test_a_layer_is_the_modulated_convolution_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """W[o, i] = g[o]·s[i]·K[i], divided by its norm over i and the kernel, for every image and output."""
    count, inputs, side = 2, 5, 8
    monkeypatch.setattr(noise, "MOST_FEATURES", 4)
    maps, pink = torch.randn(count, inputs, side, side, generator=draw(1)), torch.randn(2, 1, 16, 16, generator=draw(2))
    found = noise._layer(maps, pink, draw(3))

    again = draw(3)
    styles = 1 + math.sqrt(0.52) * torch.randn((count, inputs, 1, 1), generator=again)
    kernels = noise._drawn_kernels(count, inputs, again)
    sign = torch.randint(0, 2, (count, 4, 1, 1), generator=again) * 2 - 1
    gain = sign * torch.tensor([0.3, 1.0, 2.0, 5.0]).reshape(1, 4, 1, 1)  # their sizes must not matter
    bias = torch.rand((count, 4, 1, 1), generator=again) * 0.4 - 0.2
    strength = torch.rand((count, 1, 1, 1), generator=again) * 0.3
    for n in range(count):
        weight = gain[n].reshape(4, 1, 1, 1) * (styles[n] * kernels[n]).unsqueeze(0)
        weight = weight / weight.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()
        out = F.conv2d(maps[n : n + 1], weight, padding=1)[0] + strength[n] * F.avg_pool2d(pink[n], 2) + bias[n]
        torch.testing.assert_close(found[n], math.sqrt(2) * out.clamp_min(0), rtol=1e-4, atol=1e-5)


def test_a_deep_layer_has_fewer_maps() -> None:
    maps = [noise._layer(torch.randn(1, 2, side, side), torch.ones(1, 1, 256, 256), draw()) for side in (4, 64, 128)]
    assert [m.shape[1] for m in maps] == [64, 64, 32]


def test_colours_are_those_of_natural_images() -> None:
    """A mean over 1600 images is known to 0.004 of the range, a grey level; clipping moves it by another one or two."""
    found = bank("stylegan", 1600, 3, 8, draw()).double()
    expected = 255 * torch.tensor(noise.COLOUR_MEAN, dtype=torch.float64)
    torch.testing.assert_close(found.mean(dim=(0, 2, 3)), expected, rtol=0, atol=5)
    between = 255 * torch.tensor(noise.COLOUR_MEAN_SPREAD, dtype=torch.float64)
    torch.testing.assert_close(found.mean(dim=(2, 3)).std(dim=0), between, rtol=0.15, atol=0)
    grey = bank("stylegan", 400, 1, 8, draw()).double()
    assert grey.mean().item() == pytest.approx(255 * sum(noise.COLOUR_MEAN) / 3, abs=5)


def test_every_channel_gets_the_mean_and_deviation_that_were_drawn() -> None:
    pictures = 7 + 3 * torch.rand(2, 3, 16, 16, generator=draw(1))  # flat, so that few are clipped
    found = noise._in_natural_colours(pictures, draw(2))
    assert (found.amin() >= 0) & (found.amax() <= 1)
    again = draw(2)
    mean = torch.tensor(noise.COLOUR_MEAN) + torch.tensor(noise.COLOUR_MEAN_SPREAD) * torch.randn(2, 3, generator=again)
    deviation = torch.tensor(noise.COLOUR_DEVIATION) + torch.tensor(noise.COLOUR_DEVIATION_SPREAD) * torch.randn(
        2, 3, generator=again
    )
    whole = (found.amin(dim=(2, 3)) > 0) & (found.amax(dim=(2, 3)) < 1)  # not clipped
    assert whole.any()
    torch.testing.assert_close(found.mean(dim=(2, 3))[whole], mean[whole], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.std(dim=(2, 3))[whole], deviation.abs()[whole], rtol=1e-4, atol=1e-4)


# Dead leaves ----------------------------------------------------------------------------------------------------------


def test_dead_leaves_are_flat_with_edges_between_them() -> None:
    found = bank("deadleaves", 20, 3, 28, draw()).int()
    same = (found[..., 1:] == found[..., :-1]).all(dim=1).double().mean().item()
    assert 0.5 < same < 0.97
    colours = [rows(image.flatten(1).T) for image in found]
    assert max(colours) < 28 * 28 / 3
    assert min(colours) > 3


def test_leaves_are_discs_and_polygons_with_their_corners_on_the_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "LEAVES_AT_ONCE", 6000)
    radius, normals, reach = noise._leaf_shapes(200, draw())
    assert 6.0 <= float(radius.min()) < 6.5  # three in a hundred of the side
    assert float(radius.max()) <= 200
    torch.testing.assert_close(normals.square().sum(dim=1), torch.ones(4, 6000))
    discs = reach.isinf().all(dim=0)
    assert int(discs.sum()) == pytest.approx(1000, abs=100)
    share = reach / radius
    assert (share[:, ~discs] <= 1).all()
    squares = ((share - math.sqrt(0.5)).abs() < 1e-4).all(dim=0)
    assert int(squares.sum()) == pytest.approx(2000, abs=150)  # upright and turned
    upright = squares & (normals.abs().amax(dim=1) > 1 - 1e-6).all(dim=0)
    assert int(upright.sum()) == pytest.approx(1000, abs=100)
    triangles = ((share - 1).abs() < 1e-6).any(dim=0) & ~discs  # an edge between a corner and itself cuts nothing
    assert int(triangles.sum()) == pytest.approx(1000, abs=100)


def test_small_leaves_are_more_likely_as_the_cube_of_their_radius(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "LEAVES_AT_ONCE", 20_000)
    radius, _, _ = noise._leaf_shapes(100, draw())
    r = torch.linspace(3, 100, 200)
    weight = r**-3 - 100.0**-3
    for low, high in pairwise((3.0, 4.0, 6.0, 12.0, 101.0)):
        expected = weight[(r >= low) & (r < high)].sum() / weight.sum()
        found = ((radius >= low) & (radius < high)).double().mean()
        assert float(found) == pytest.approx(float(expected), abs=0.015)


def test_a_disc_covers_what_lies_within_its_radius(monkeypatch: pytest.MonkeyPatch) -> None:
    """One great disc on top in the corner, then leaves that cover everything."""
    passes: list[int] = []

    def shapes(size: int, _: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        passes.append(size)
        radius = torch.full((noise.LEAVES_AT_ONCE,), 4.0 if len(passes) == 1 else 99.0)
        return radius, torch.ones(4, 2, noise.LEAVES_AT_ONCE), torch.full((4, noise.LEAVES_AT_ONCE), torch.inf)

    monkeypatch.setattr(noise, "LEAVES_AT_ONCE", 1)
    monkeypatch.setattr(noise, "_leaf_shapes", shapes)
    monkeypatch.setattr(noise, "_uniform", lambda *_: torch.zeros(2, 1))
    found = noise._leaves(1, 8, draw())[0]
    assert len(passes) == 2
    y, x = torch.meshgrid(torch.arange(8) + 0.5, torch.arange(8) + 0.5, indexing="ij")
    inside = x**2 + y**2 <= 16
    assert (found[inside] == found[0, 0]).all()
    assert (found[~inside] == found[7, 7]).all()
    assert found[0, 0] != found[7, 7]


# Spectrum -------------------------------------------------------------------------------------------------------------


def slope(images: Tensor) -> Tensor:
    """Of log amplitude against log frequency, for every image, by least squares."""
    side = images.shape[-1]
    rows, columns = torch.fft.fftfreq(side), torch.fft.rfftfreq(side)
    frequency = (rows[:, None] ** 2 + columns**2).sqrt()
    kept = (frequency > 0) & (frequency < 0.5)
    log_f = frequency[kept].log().double()
    log_a = torch.fft.rfft2(images.double())[..., kept].abs().clamp_min(1e-9).log()
    centred = log_f - log_f.mean()
    found: Tensor = (log_a * centred).sum(dim=-1) / centred.square().sum()
    return found


def test_the_amplitude_falls_with_the_exponent() -> None:
    exponents = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    found = noise._power_law(exponents, 128, draw())
    torch.testing.assert_close(-slope(found), exponents.double(), rtol=0, atol=0.05)
    assert (found.mean(dim=(2, 3)).abs() < 1e-5 * found.std(dim=(2, 3))).all()


def test_spectra_of_a_bank_spread_over_the_papers_range() -> None:
    """Clipping and eight bits add noise of their own to the smoothest, so the upper end is not reached."""
    found = -slope(bank("spectrum", 60, 1, 64, draw()))
    assert 0.35 < float(found.min()) < 0.8
    assert 2.2 < float(found.max()) < 3.7


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "perlin"}, "there is no structured noise 'perlin'; use stylegan, deadleaves, spectrum"),
        ({"count": 0}, "an image or more of 4 pixels or more, not 0 of 8"),
        ({"size": 3}, "not 2 of 3"),
        ({"channels": 2}, "1 or 3 channels, not 2"),
    ],
)
def test_what_cannot_be_made_is_refused(changes: dict[str, object], words: str) -> None:
    asked = {"kind": "stylegan", "count": 2, "channels": 3, "size": 8, **changes}
    with pytest.raises(BadInput, match=words) as caught:
        bank(**asked, generator=draw())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
