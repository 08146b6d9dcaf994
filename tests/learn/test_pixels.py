import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.learn.pixels import CROP_PADDING, augment, draw_augmentation, normalise


def test_pixels_run_from_minus_one_to_one() -> None:
    images = torch.tensor([0, 51, 255, 204], dtype=torch.uint8).reshape(1, 1, 2, 2)
    assert torch.allclose(normalise(images), torch.tensor([-1.0, -0.6, 1.0, 0.6]).reshape(1, 1, 2, 2), atol=1e-6)


def test_normalising_copies_and_puts_channels_last() -> None:
    images = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    pixels = normalise(images)
    assert bool((images == 255).all())
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous(memory_format=torch.channels_last)


def test_draws_are_offsets_and_flips_of_one_stream() -> None:
    draws = draw_augmentation(2000, torch.Generator().manual_seed(1))
    assert draws.shape == (2000, 3)
    assert draws.dtype == torch.int64
    assert sorted(set(draws[:, :2].flatten().tolist())) == list(range(2 * CROP_PADDING + 1))
    assert 900 < int(draws[:, 2].sum()) < 1100
    assert torch.equal(draws, draw_augmentation(2000, torch.Generator().manual_seed(1)))


def row_image() -> torch.Tensor:
    """One 6×6 image whose pixel is 10·row + column."""
    return (10 * torch.arange(6)[:, None] + torch.arange(6)).to(torch.uint8)[None, None]


def test_the_middle_crop_without_a_flip_is_the_image() -> None:
    assert torch.equal(augment(row_image(), torch.tensor([[CROP_PADDING, CROP_PADDING, 0]])), row_image())


def test_a_flip_mirrors_left_and_right_only() -> None:
    assert torch.equal(augment(row_image(), torch.tensor([[CROP_PADDING, CROP_PADDING, 1]])), row_image().flip(3))


def test_a_crop_by_hand() -> None:
    """Two rows down and one column left: the last rows and the first column come twice, as the padding's do."""
    shifted = augment(row_image(), torch.tensor([[CROP_PADDING + 2, CROP_PADDING - 1, 0]]))
    assert shifted[0, 0, :, 0].tolist() == [20, 30, 40, 50, 50, 50]
    assert shifted[0, 0, 0].tolist() == [20, 20, 21, 22, 23, 24]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 5), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(0, 1000))
def test_augmentation_is_pad_crop_flip_image_by_image(n: int, channels: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, channels, size, size), generator=generator, dtype=torch.uint8)
    draws = draw_augmentation(n, generator)
    before = images.clone()
    found = augment(images, draws)
    assert found.dtype == torch.uint8
    assert found.shape == images.shape
    assert torch.equal(images, before)
    for image, draw, one in zip(images, draws.tolist(), found, strict=True):
        padded = torch.nn.functional.pad(image[None].float(), (CROP_PADDING,) * 4, mode="replicate")[0]
        crop = padded[:, draw[0] : draw[0] + size, draw[1] : draw[1] + size].to(torch.uint8)
        assert torch.equal(one, crop.flip(2) if draw[2] else crop)
