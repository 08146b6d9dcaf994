"""Acquisition shifts on values worked out by hand."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Generator, Tensor

from wardround.data import shifts as subject
from wardround.data.shifts import STAIN, Shift, drawn_shifts, fixed_shifts
from wardround.errors import BadInput


def noise(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def one_pixel(*channels: int) -> Tensor:
    return torch.tensor(channels, dtype=torch.uint8).reshape(1, -1, 1, 1)


def shifted(shift: Shift, *channels: int) -> list[int]:
    return [int(x) for x in shift.apply(one_pixel(*channels), noise()).flatten()]


def photos(n: int = 6, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randint(0, 256, (n, channels, size, size), generator=noise(5), dtype=torch.uint8)


def test_the_identity_returns_the_very_images() -> None:
    images = photos()
    assert Shift().apply(images, noise()) is images
    assert Shift().describe() == "none"


@pytest.mark.parametrize(
    ("shift", "before", "after"),
    [
        (Shift(gamma=0.6), 64, 111),  # 255·(64/255)^0.6 = 111.27
        (Shift(gamma=0.6), 0, 0),
        (Shift(gamma=0.6), 255, 255),
        (Shift(gamma=2.0), 128, 64),  # 128²/255 = 64.25
        (Shift(brightness=1.3), 100, 130),
        (Shift(brightness=1.3), 250, 255),
        (Shift(contrast=0.7), 0, 38),  # 0.15·255 = 38.25
        (Shift(contrast=0.7), 255, 217),  # 0.85·255 = 216.75
        (Shift(brightness=1.3, contrast=0.7), 100, 129),  # 0.7·130 + 0.15·255 = 129.25
    ],
)
def test_point_shifts(shift: Shift, before: int, after: int) -> None:
    assert shifted(shift, before) == [after]


def test_the_colour_mix_is_a_matrix_product_and_leaves_grey_alone() -> None:
    assert shifted(Shift(colour_mix=STAIN), 200, 100, 0) == [170, 70, 60]
    assert shifted(Shift(colour_mix=STAIN), 90, 90, 90) == [90, 90, 90]
    assert shifted(Shift(colour_mix=STAIN), 77) == [77]


def test_a_negative_mix_does_not_reach_gamma_as_nan() -> None:
    mix = ((-1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    assert shifted(Shift(colour_mix=mix, gamma=0.5, contrast=0.5), 255, 255, 0) == [64, 191, 64]


def test_light_rises_along_its_angle() -> None:
    flat = torch.full((1, 1, 3, 3), 100, dtype=torch.uint8)
    assert Shift(light=0.3).apply(flat, noise())[0, 0].tolist() == [[70, 100, 130]] * 3
    down = Shift(light=0.3, light_angle=math.pi / 2).apply(flat, noise())[0, 0]
    assert down.tolist() == [[70] * 3, [100] * 3, [130] * 3]


@pytest.mark.parametrize("value", [0, 1, 100, 254, 255])
@pytest.mark.parametrize("sigma", [1e-300, 0.3, 0.8, 5.0])
def test_blur_keeps_constant_images(value: int, sigma: float) -> None:
    flat = torch.full((2, 3, 7, 7), value, dtype=torch.uint8)
    assert torch.equal(Shift(blur=sigma).apply(flat, noise()), flat)


def test_blur_spreads_a_point_by_the_gaussian() -> None:
    point = torch.zeros(1, 2, 9, 9, dtype=torch.uint8)
    point[0, 0, 4, 4] = 255
    blurred = Shift(blur=0.8).apply(point, noise())
    weights = [math.exp(-(k**2) / (2 * 0.64)) for k in range(-3, 4)]
    middle, beside = weights[3] / sum(weights), weights[4] / sum(weights)
    assert int(blurred[0, 0, 4, 4]) == round(255 * middle**2) == 63
    assert int(blurred[0, 0, 4, 5]) == int(blurred[0, 0, 3, 4]) == round(255 * middle * beside) == 29
    assert int(blurred[0, 1].max()) == 0  # channels stay apart


def test_noise_has_its_standard_deviation_and_speckle_grows_with_intensity() -> None:
    flat = torch.full((4, 1, 64, 64), 100, dtype=torch.uint8)
    added = Shift(noise=0.05).apply(flat, noise()).float()
    assert abs(float(added.std()) - 0.05 * 255) < 0.3
    speckled = Shift(speckle=0.2).apply(flat, noise()).float()
    assert abs(float(speckled.std()) - 20) < 0.5
    assert int(Shift(speckle=0.2).apply(flat * 0, noise()).max()) == 0


def test_noise_comes_from_the_generator_alone() -> None:
    shift = Shift(noise=0.1)
    state = torch.get_rng_state()
    first = shift.apply(photos(), noise(1))
    assert torch.equal(first, shift.apply(photos(), noise(1)))
    assert not torch.equal(first, shift.apply(photos(), noise(2)))
    assert torch.equal(state, torch.get_rng_state())


def test_chunks_change_nothing_and_the_input_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = Shift(colour_mix=STAIN, light=0.2, gamma=0.9, brightness=1.1, contrast=0.9, blur=0.7)
    images = photos()
    before = images.clone()
    whole = shift.apply(images, noise())
    monkeypatch.setattr(subject, "VALUES_AT_ONCE", 2 * 3 * 8 * 8 + 1)
    assert torch.equal(shift.apply(images, noise()), whole)
    monkeypatch.setattr(subject, "VALUES_AT_ONCE", 1)
    assert torch.equal(shift.apply(images, noise()), whole)
    assert torch.equal(images, before)
    assert whole.dtype == torch.uint8
    assert not torch.equal(whole, before)


def test_no_images_are_no_problem() -> None:
    assert Shift(noise=0.1, blur=1).apply(photos(0), noise()).shape == (0, 3, 8, 8)


def test_the_five_fixed_shifts_come_in_turn() -> None:
    seven = fixed_shifts(7)
    assert [shift.describe() for shift in seven[:5]] == [
        "none",
        "gamma 0.6",
        "brightness ×1.3, contrast ×0.7",
        "blur σ 0.8",
        "colour mix 0.70 0.30 0.00 / 0.00 0.70 0.30 / 0.30 0.00 0.70",
    ]
    assert seven[5:] == seven[:2]
    assert fixed_shifts(5, channels=1)[4].describe() == "speckle 0.2"


def test_drawn_shifts_belong_to_a_seed_and_a_site() -> None:
    five = drawn_shifts(5, seed=3)
    assert drawn_shifts(8, seed=3)[:5] == five
    assert len({*five, *drawn_shifts(5, seed=4)}) == 10
    assert drawn_shifts(3, seed=3, strength=0) == (Shift(),) * 3
    assert "noise" in five[0].describe()


def test_drawn_shifts_stay_in_their_ranges_and_grow_with_strength() -> None:
    for weak, strong in zip(drawn_shifts(50, 0, 1.0), drawn_shifts(50, 0, 4.0), strict=True):
        assert 0 <= weak.light <= 0.3
        assert 0 <= weak.blur <= 0.8
        assert 0 <= weak.noise <= 0.05
        assert strong.blur == pytest.approx(4 * weak.blur)
        assert weak.colour_mix is not None
        assert strong.colour_mix is not None
        for mix in (weak.colour_mix, strong.colour_mix):
            assert [sum(row) for row in mix] == pytest.approx([1, 1, 1])
            assert min(map(min, mix)) >= 0
        assert min(weak.colour_mix[c][c] for c in range(3)) >= 0.6
    assert all(shift.colour_mix is None for shift in drawn_shifts(3, 0, channels=1))


def test_a_stronger_shift_moves_images_further() -> None:
    images = photos(20)
    moved = []
    for strength in (0.0, 0.5, 1.0, 2.0):
        shift = drawn_shifts(1, 1, strength)[0]
        moved.append(float((shift.apply(images, noise()).float() - images.float()).abs().mean()))
    assert moved[0] == 0
    assert all(weak < strong for weak, strong in pairwise(moved))


@pytest.mark.parametrize("strength", [-0.1, 4.1, float("nan"), float("inf")])
def test_a_strength_out_of_range_is_refused(strength: float) -> None:
    with pytest.raises(BadInput, match="shift strength must be from 0 to 4"):
        drawn_shifts(2, 0, strength)
