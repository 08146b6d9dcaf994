"""From measured values to 8-bit grey: a window where someone chose one, else the percentiles of the values.

A window is DICOM's (PS3.3, C.11.2.1.2 and C.11.2.1.3): its centre becomes the middle grey, its width goes from black to
white. Where nobody chose a window, black is the 0.5th percentile of the values and white the 99.5th (of at most 65,536
values, evenly spaced), so that a single hot pixel or an implant does not darken the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = 0.5, 99.5  # percentiles
SAMPLE = 65_536

Pixels = NDArray[np.uint8]
Values = NDArray[Any]


@dataclass(frozen=True)
class Window:
    """What of the values is shown. `function` is LINEAR, LINEAR_EXACT or SIGMOID."""

    centre: float
    width: float
    function: str = "LINEAR"

    @property
    def is_usable(self) -> bool:
        """Whether the standard allows it: a linear window is at least 1 wide, the others more than 0."""
        least = 1.0 if self.function == "LINEAR" else 1e-30
        return math.isfinite(self.centre) and math.isfinite(self.width) and self.width >= least

    def grey(self, values: Values) -> Pixels:
        """The values under this window."""
        if self.function == "SIGMOID":
            steps = np.clip(-4.0 * (values.astype(np.float32) - self.centre) / self.width, -80, 80)
            return _eight_bits(255.0 / (1.0 + np.exp(steps)))
        if self.function == "LINEAR_EXACT":
            return between(values, self.centre - self.width / 2, self.centre + self.width / 2)
        # A linear window of width w reaches from c - w/2 to c + w/2 - 1: it counts whole values, both ends included.
        return between(values, self.centre - self.width / 2, self.centre + self.width / 2 - 1)


def between(values: Values, black: float, white: float) -> Pixels:
    """`black` and below as 0, `white` and above as 255; where the two are one, black up to it and white above."""
    if not white > black:
        return np.where(values > black, np.uint8(255), np.uint8(0))
    grey = values.astype(np.float32)
    grey -= np.float32(black)
    grey *= np.float32(255 / (white - black))
    return _eight_bits(grey)


def stretched(values: Values, counted: NDArray[np.bool_] | None = None) -> Pixels:
    """Black at the 0.5th, white at the 99.5th percentile of the finite values (among the `counted` ones)."""
    black, white = percentiles(values, counted)
    if black == white:
        return np.zeros(values.shape, np.uint8)
    return between(values, black, white)


def percentiles(values: Values, counted: NDArray[np.bool_] | None = None) -> tuple[float, float]:
    """The two ends that `stretched` uses; (0, 0) where no value counts."""
    shown = (values if counted is None else values[counted]).reshape(-1)
    sample = shown[:: -(-shown.size // SAMPLE) | 1]  # an odd step, or it would see the same columns in every row
    sample = sample[np.isfinite(sample)]
    if sample.size == 0:
        return 0.0, 0.0
    black, white = np.percentile(sample, (LOW, HIGH))
    if black == white:  # nearly all values are one, such as a thin line on an empty ground
        finite = shown[np.isfinite(shown)]
        black, white = finite.min(), finite.max()
    return float(black), float(white)


def _eight_bits(grey: NDArray[np.float32]) -> Pixels:
    """Rounded and cut off, in place; what is no number is black, since `fmax` prefers the number."""
    grey += np.float32(0.5)
    np.fmax(grey, np.float32(0), out=grey)
    np.minimum(grey, np.float32(255), out=grey)
    return grey.astype(np.uint8)
