"""Acquisition shifts: what another stain, lamp, lens or sensor does to the images of one site.

Public sets with real scanner differences are few, so a study can make them: one fixed shift a site, as in the stand-in
for FedMP's feature skew, or shifts drawn per site. A shift depends on (seed, site index) alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from wardround.errors import BadInput
from wardround.streams import Streams

VALUES_AT_ONCE = 1 << 22  # float values worked on together, about 16 MB each for a handful of temporaries
MOST_STRENGTH = 4.0

ColourMix = tuple[tuple[float, ...], ...]  # three rows of three


@dataclass(frozen=True)
class Shift:
    """One site's acquisition, on intensities from 0 to 1, applied in the order of the fields.

    `colour_mix` gives each output channel as a mix of the input channels (rows that sum to 1 keep grey grey); it has no
    effect on images without three channels. `light` is the brightening across the image along `light_angle`: a factor
    from 1 - light to 1 + light. Brightness multiplies, contrast is about mid-grey. `blur` is a Gaussian's σ in pixels,
    `speckle` noise proportional to the intensity, `noise` noise that is not.
    """

    colour_mix: ColourMix | None = None
    light: float = 0.0
    light_angle: float = 0.0
    gamma: float = 1.0
    brightness: float = 1.0
    contrast: float = 1.0
    blur: float = 0.0
    speckle: float = 0.0
    noise: float = 0.0

    def apply(self, images: Tensor, generator: Generator) -> Tensor:
        """Shift uint8 images `(n, channels, height, width)`, a few at a time; the identity returns them as they are."""
        if self == Shift():
            return images
        result = torch.empty_like(images)
        step = max(1, VALUES_AT_ONCE // max(1, math.prod(images.shape[1:])))
        for start in range(0, len(images), step):
            values = self._shifted(images[start : start + step].float() / 255, generator)
            result[start : start + step] = (values.clamp(0, 1) * 255).round().to(torch.uint8)
        return result

    def describe(self) -> str:
        """The shift in words, such as "gamma 0.6, blur σ 0.8"."""
        parts = [
            ("colour mix", self.colour_mix is not None and _rows(self.colour_mix)),
            ("light gradient", self.light and f"±{self.light:.2g} at {math.degrees(self.light_angle):.0f}°"),
            ("gamma", self.gamma != 1 and f"{self.gamma:.3g}"),
            ("brightness", self.brightness != 1 and f"×{self.brightness:.3g}"),
            ("contrast", self.contrast != 1 and f"×{self.contrast:.3g}"),
            ("blur", self.blur and f"σ {self.blur:.2g}"),
            ("speckle", self.speckle and f"{self.speckle:.2g}"),
            ("noise", self.noise and f"{self.noise:.2g}"),
        ]
        return ", ".join(f"{name} {value}" for name, value in parts if value) or "none"

    def _shifted(self, x: Tensor, generator: Generator) -> Tensor:
        if self.colour_mix is not None and x.shape[1] == 3:
            x = torch.einsum("oc,nchw->nohw", torch.tensor(self.colour_mix, device=x.device), x)
        if self.light:
            x = x * _gradient(x.shape[-2], x.shape[-1], self.light, self.light_angle).to(x.device)
        if self.gamma != 1:
            x = x.clamp(min=0) ** self.gamma
        x = (x * self.brightness - 0.5) * self.contrast + 0.5
        if self.blur:
            x = _blurred(x, self.blur)
        if self.speckle:
            x = x * (1 + self.speckle * torch.randn(x.shape, generator=generator).to(x.device))
        if self.noise:
            x = x + self.noise * torch.randn(x.shape, generator=generator).to(x.device)
        return x


STAIN = ((0.7, 0.3, 0.0), (0.0, 0.7, 0.3), (0.3, 0.0, 0.7))


def fixed_shifts(n: int, channels: int = 3) -> tuple[Shift, ...]:
    """Five shifts of clearly different kinds, in turn: the stand-in for FedMP's feature skew.

    None; gamma 0.6; brightness ×1.3 with contrast ×0.7; blur σ 0.8; and 30 % of the neighbouring colour channel for
    colour images or speckle 0.2 for grey ones, where colours cannot mix.
    """
    last = Shift(colour_mix=STAIN) if channels == 3 else Shift(speckle=0.2)
    kinds = (Shift(), Shift(gamma=0.6), Shift(brightness=1.3, contrast=0.7), Shift(blur=0.8), last)
    return tuple(kinds[site % len(kinds)] for site in range(n))


def drawn_shifts(n: int, seed: int, strength: float = 1.0, channels: int = 3) -> tuple[Shift, ...]:
    """For every site a mixture of its own of stain, light gradient, blur and noise; strength 0 is no shift at all.

    At strength 1 a site mixes up to 40 % of its colours, is lit up to ±30 % across the image, blurred up to σ 0.8 and
    given noise up to 0.05. Site i gets the same shift whatever the number of sites.
    """
    if not 0 <= strength <= MOST_STRENGTH:
        raise BadInput(f"shift strength must be from 0 to {MOST_STRENGTH:g}, not {strength}; 1 is a clear shift")
    return tuple(_drawn(seed, site, strength, channels) for site in range(n))


def _drawn(seed: int, site: int, strength: float, channels: int) -> Shift:
    rng = Streams(seed).numpy("acquisition shift", index=site)
    mixed, light, blur, noise = (strength * rng.random(4) * (0.4, 0.3, 0.8, 0.05)).tolist()
    angle = 2 * math.pi * rng.random()
    target = rng.dirichlet((1.0, 1.0, 1.0), size=3)
    if strength == 0:
        return Shift()
    share = min(mixed, 1.0)
    mix = tuple(map(tuple, (share * target + (1 - share) * np.eye(3)).tolist()))
    return Shift(mix if channels == 3 else None, light, angle, blur=blur, noise=noise)


def _gradient(height: int, width: int, light: float, angle: float) -> Tensor:
    """A plane through 1 at the centre that reaches 1 ± light at the edge of the image's inscribed circle."""
    y = torch.linspace(-1, 1, height)[:, None]
    x = torch.linspace(-1, 1, width)[None, :]
    return (1 + light * (math.cos(angle) * x + math.sin(angle) * y)).clamp(min=0)


def _blurred(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur, along rows then columns; edge pixels repeat, so a constant image stays what it is.

    Summed tap by tap: on a CPU that is several times faster than a depthwise convolution.
    """
    radius = math.ceil(3 * sigma)
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float64) / sigma
    weights = torch.softmax(-(offsets**2) / 2, dim=0).tolist()
    for dim, pad in ((-1, (radius, radius, 0, 0)), (-2, (0, 0, radius, radius))):
        padded, length = F.pad(x, pad, mode="replicate"), x.shape[dim]
        x = torch.zeros_like(x)
        for start, weight in enumerate(weights):
            x.add_(padded.narrow(dim, start, length), alpha=weight)
    return x


def _rows(mix: ColourMix) -> str:
    return " / ".join(" ".join(f"{value:.2f}" for value in row) for row in mix)
