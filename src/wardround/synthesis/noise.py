"""Structured noise: images that no camera took, with the statistics of images.

Baradad et al., Learning to See by Looking at Noise, NeurIPS 2021. E-FedISCA mixes such images into the ones it
synthesises. They are made here, by three of the paper's processes, so that nothing need be downloaded:

- `stylegan`, the paper's StyleGAN-oriented: an untrained StyleGAN2 whose 3×3 kernels are drawn from a dictionary of
  oriented edges and lines, given the colours of natural images. One network makes 400 images there; here each image has
  a network of its own. It works at the power of two at or above the size that is asked for and is scaled down, since a
  picture of 256 pixels loses its structure at 28 (E-FedISCA §5.1).
- `deadleaves`: opaque discs and polygons that hide one another; their radii follow r⁻³.
- `spectrum`: random phases under an amplitude of 1/fᵃ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent

Kind = Literal["stylegan", "deadleaves", "spectrum"]
AT_ONCE = 2**15  # pixels of the images that are made together; more would only need more memory
SMALLEST = 4  # pixels; the resolution that a StyleGAN begins with

MOST_FEATURES, FEATURES_BASE = 64, 4096  # maps in a layer: 64, and above 64 pixels 4096 divided by the resolution
ORIENTATIONS = 8
FEWEST_KERNELS = 5  # of the dictionary, in a layer
STYLE_DEVIATION = math.sqrt(0.52)  # a style is 1 + an affine map of LeakyReLU(N(0, 1)) at slope 0.2: E w² = (1 + .2²)/2
BIAS = 0.2
NOISE_STRENGTH = 0.3

# Of red, green and blue: the mean over natural images, and how it differs from image to image; the same of deviations.
COLOUR_MEAN, COLOUR_MEAN_SPREAD = (0.483, 0.455, 0.401), (0.145, 0.142, 0.161)
COLOUR_DEVIATION, COLOUR_DEVIATION_SPREAD = (0.219, 0.213, 0.213), (0.063, 0.062, 0.069)

SMALLEST_LEAF = 0.03  # its radius as a share of the image's side, which is the largest radius
SMALLEST_LEAF_PIXELS = 3.0  # smaller leaves would leave no structure in a small image
RADII, LEAVES_AT_ONCE = 200, 64


def bank(
    kind: Kind, count: int, channels: int, size: int, generator: Generator, progress: Silent = NO_PROGRESS
) -> Tensor:
    """`count` images of one kind: uint8 `(count, channels, size, size)`, on the CPU. Grey ones have one channel."""
    if kind not in get_args(Kind):
        raise BadInput(f"there is no structured noise {kind!r}; use {', '.join(get_args(Kind))}")
    if count < 1 or size < SMALLEST:
        raise BadInput(f"structured noise needs an image or more of {SMALLEST} pixels or more, not {count} of {size}")
    if channels not in (1, 3):
        raise BadInput(f"structured noise is grey or in colour, 1 or 3 channels, not {channels}; convert the images")
    make: Callable[[int, int, int, Generator], Tensor] = {
        "stylegan": _stylegan,
        "deadleaves": _dead_leaves,
        "spectrum": _spectrum,
    }[kind]
    together = max(1, AT_ONCE // size**2)
    found = torch.empty((count, channels, size, size), dtype=torch.uint8)
    for part in progress.track(torch.split(found, together), f"structured noise: {kind}"):
        part.copy_(make(len(part), channels, size, generator).mul(255).round())
    return found


# StyleGAN-oriented ----------------------------------------------------------------------------------------------------


def _stylegan(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Skip architecture: each resolution adds its own colours to the picture so far."""
    resolution = 1 << (size - 1).bit_length()
    exponents = _uniform((count, 1), 0.5, 1.5, generator)
    envelope = _laplace((count, 1, 4, 4), generator)
    noise = _power_law(exponents, resolution, generator) * _resized(envelope, resolution, "bicubic")
    noise = noise / noise.std(dim=(2, 3), keepdim=True)
    maps = torch.randn((count, MOST_FEATURES, SMALLEST, SMALLEST), generator=generator)
    maps = _layer(maps, noise, generator)
    picture = _colours(maps, channels, generator)
    while picture.shape[-1] < resolution:
        maps = _layer(_doubled(maps), noise, generator)
        maps = _layer(maps, noise, generator)
        picture = _doubled(picture) + _colours(maps, channels, generator)
    return _in_natural_colours(_resized(picture, size, "bilinear"), generator)


def _layer(maps: Tensor, noise: Tensor, generator: Generator) -> Tensor:
    """A modulated 3×3 convolution, its noise, bias and ReLU.

    Every input map has one kernel for all outputs, and every output one weight for all inputs. The demodulation divides
    by that weight's size, so all that tells outputs apart is its sign and their bias: one convolution does for all.
    """
    count, features, side, _ = maps.shape
    outputs = min(MOST_FEATURES, FEATURES_BASE // side)
    styles = 1 + STYLE_DEVIATION * torch.randn((count, features, 1, 1), generator=generator)
    kernels = _drawn_kernels(count, features, generator) * styles
    kernels = kernels / kernels.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()
    shared = F.conv2d(maps.reshape(1, count * features, side, side), kernels, padding=1, groups=count)
    sign = torch.randint(0, 2, (count, outputs, 1, 1), generator=generator) * 2 - 1
    bias = _uniform((count, outputs, 1, 1), -BIAS, BIAS, generator)
    added = F.adaptive_avg_pool2d(noise, side) * _uniform((count, 1, 1, 1), 0, NOISE_STRENGTH, generator)
    return F.relu(shared.reshape(count, 1, side, side) * sign + added + bias) * math.sqrt(2)


def _colours(maps: Tensor, channels: int, generator: Generator) -> Tensor:
    """A modulated 1×1 convolution to the picture's channels."""
    count, features, side, _ = maps.shape
    styles = 1 + STYLE_DEVIATION * torch.randn((count, 1, features), generator=generator)
    weights = torch.randn((count, channels, features), generator=generator) * styles / math.sqrt(features)
    return torch.bmm(weights, maps.flatten(2)).reshape(count, channels, side, side)


def _drawn_kernels(count: int, features: int, generator: Generator) -> Tensor:
    """For every image a few kernels of the dictionary, and for every feature one of them: `(count, features, 3, 3)`."""
    dictionary = _dictionary()
    shuffled = torch.rand((count, len(dictionary)), generator=generator).argsort(dim=1)
    few = torch.randint(FEWEST_KERNELS, len(dictionary) + 1, (count, 1), generator=generator)
    drawn = (torch.rand((count, features), generator=generator) * few).long()
    return dictionary[shuffled.gather(1, drawn)]


def _dictionary() -> Tensor:
    """Forty kernels: an edge and a line at eight orientations each, without their mean; four sparse ones; all negated.

    `across` is the distance from the edge or line that runs through the centre.
    """
    y, x = torch.meshgrid(torch.arange(-1.0, 2.0), torch.arange(-1.0, 2.0), indexing="ij")
    angles = torch.arange(ORIENTATIONS).reshape(-1, 1, 1) * math.pi / ORIENTATIONS
    across = x * torch.cos(angles) + y * torch.sin(angles)
    oriented = torch.cat([-across.clamp(-1, 1), (2 * across.abs() - 1).clamp(max=1)])
    oriented = oriented - oriented.mean(dim=(1, 2), keepdim=True)
    centre, cross = ((x == 0) & (y == 0)).float(), ((x == 0) | (y == 0)).float()
    kernels = torch.cat([oriented, torch.stack([centre, 2 * centre - 1, cross, 2 * cross - 1])])
    return torch.cat([kernels, -kernels])


# Dead leaves ----------------------------------------------------------------------------------------------------------


def _dead_leaves(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Leaves are laid from the topmost down, each visible where nothing covers it, until no pixel is bare."""
    return torch.stack([_leaves(channels, size, generator) for _ in range(count)])


def _leaves(channels: int, size: int, generator: Generator) -> Tensor:
    found = torch.zeros((channels, size * size))
    bare = torch.arange(size * size)
    while len(bare):
        radius, normals, reach = _leaf_shapes(size, generator)
        centre = _uniform((2, LEAVES_AT_ONCE), 0, size, generator)
        colour = torch.rand((channels, LEAVES_AT_ONCE), generator=generator)
        right = (bare % size + 0.5)[:, None] - centre[0]
        down = (bare // size + 0.5)[:, None] - centre[1]
        covered = right.square() + down.square() <= radius.square()
        for (across, along), farthest in zip(normals, reach, strict=True):
            covered &= right * across + down * along <= farthest
        hit, topmost = covered.max(dim=1)
        found[:, bare[hit]] = colour[:, topmost[hit]]
        bare = bare[~hit]
    return found.reshape(channels, size, size)


def _leaf_shapes(size: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Radii in pixels, and the four half-planes that cut each leaf out of its disc: outward normals, and their reach.

    All polygons have their corners on the circle, so the edge between two corners lies across the direction half-way
    between them, at the cosine of half their gap. A triangle has a corner twice; a disc is not cut at all.
    """
    smallest = max(SMALLEST_LEAF * size, min(SMALLEST_LEAF_PIXELS, size / 2))
    radii = torch.linspace(smallest, size, RADII)
    likely = radii**-3 - float(size) ** -3
    radius = radii[torch.multinomial(likely, LEAVES_AT_ONCE, replacement=True, generator=generator)]
    drawn = _uniform((4, LEAVES_AT_ONCE), 0, 2 * math.pi, generator).sort(dim=0).values
    turn = _uniform((LEAVES_AT_ONCE,), 0, math.pi / 2, generator)
    square = (torch.arange(4) * math.pi / 2 + math.pi / 4)[:, None].expand(4, LEAVES_AT_ONCE)
    shapes = {
        "square": square,
        "turned square": square + turn,
        "rectangle": torch.stack([turn, math.pi - turn, math.pi + turn, 2 * math.pi - turn]),
        "triangle": drawn[[0, 1, 2, 2]],
        "quadrilateral": drawn,
        "disc": drawn,
    }
    kind = torch.randint(0, len(shapes), (LEAVES_AT_ONCE,), generator=generator)
    corners = torch.stack(list(shapes.values()))[kind, :, torch.arange(LEAVES_AT_ONCE)].T
    gap = torch.diff(corners, dim=0, append=corners[:1] + 2 * math.pi)
    middle = corners + gap / 2
    reach = torch.where(kind == list(shapes).index("disc"), torch.inf, radius * torch.cos(gap / 2))
    return radius, torch.stack([torch.cos(middle), torch.sin(middle)], dim=1), reach


# Spectrum -------------------------------------------------------------------------------------------------------------


def _spectrum(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """One exponent per image, from nearly white to cloudy; channels are mixtures of one another."""
    exponents = _uniform((count, 1), 0.5, 3.5, generator).expand(count, channels)
    plain = _power_law(exponents, size, generator)
    mixing = torch.randn((count, channels, channels), generator=generator)
    mixed = torch.bmm(mixing, plain.flatten(2)).reshape(plain.shape)
    return _in_natural_colours(mixed, generator)


def _power_law(exponents: Tensor, side: int, generator: Generator) -> Tensor:
    """White noise under an amplitude of 1/fᵃ, without its mean: for exponents `(n, c)`, `(n, c, side, side)`."""
    rows, columns = torch.fft.fftfreq(side), torch.fft.rfftfreq(side)
    frequency = torch.sqrt(rows[:, None].square() + columns.square())
    frequency[0, 0] = torch.inf
    white = torch.randn((*exponents.shape, side, side), generator=generator)
    shaped = torch.fft.rfft2(white) * frequency.pow(-exponents[..., None, None])
    found: Tensor = torch.fft.irfft2(shaped, s=(side, side))
    return found


# Common ---------------------------------------------------------------------------------------------------------------


def _in_natural_colours(pictures: Tensor, generator: Generator) -> Tensor:
    """Every channel gets a mean and deviation as in natural images, within 0..1; a grey one gets those of all three."""
    count, channels = pictures.shape[:2]

    def drawn(middle: tuple[float, ...], spread: tuple[float, ...]) -> Tensor:
        of = torch.tensor([middle, spread])
        of = of.mean(dim=1, keepdim=True) if channels == 1 else of
        return (of[0] + of[1] * torch.randn((count, channels), generator=generator))[..., None, None]

    mean = drawn(COLOUR_MEAN, COLOUR_MEAN_SPREAD)
    deviation = drawn(COLOUR_DEVIATION, COLOUR_DEVIATION_SPREAD).abs()
    plain = pictures - pictures.mean(dim=(2, 3), keepdim=True)
    plain = plain / plain.std(dim=(2, 3), keepdim=True).clamp_min(torch.finfo(plain.dtype).tiny)
    return (plain * deviation + mean).clamp(0, 1)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * (high - low) + low


def _laplace(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """The difference of two exponentials."""
    return torch.empty(shape).exponential_(generator=generator) - torch.empty(shape).exponential_(generator=generator)


def _doubled(maps: Tensor) -> Tensor:
    """Twice the side, blurred by [1, 3, 3, 1]: what bilinear interpolation is."""
    return F.interpolate(maps, scale_factor=2, mode="bilinear", align_corners=False)


def _resized(maps: Tensor, side: int, mode: str) -> Tensor:
    return F.interpolate(maps, size=(side, side), mode=mode, align_corners=False, antialias=True)
