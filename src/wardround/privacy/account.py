"""What training has cost so far: (ε, δ) of all its steps together, by Opacus' accountant of Rényi privacy.

Every step is Poisson-sampled DP-SGD (Abadi et al., CCS 2016) at a noise multiplier and a sampling rate; steps compose
by Mironov's Rényi accountant. ε is for one image added or removed; a patient with several images is protected less.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wardround.errors import BadInput
from wardround.settings import Frozen

# Orders of Rényi divergence that are tried; the bound holds for each, so the best is taken. One between whole numbers
# takes a thousand times as long to compute and is needed only where ε is large.
ORDERS = (1.5, *(float(order) for order in range(2, 64)), 80.0, 96.0, 128.0, 192.0, 256.0, 512.0)
TOLERANCE = 0.01  # of ε: how far below what was asked for the noise may land
MOST_NOISE = 1e6


@dataclass(frozen=True)
class Spent:
    """Steps of one kind."""

    noise: float  # deviation of the noise over the clipping norm
    rate: float  # the chance of an image to be in a batch
    steps: int


class SpentRow(Frozen):
    """One line of the record: what a site spent, and what it has spent in all (`epsilon`, `delta`) after it."""

    site: str
    mechanism: Literal["dp-sgd", "counts"]
    steps: int
    noise: float | None = None
    rate: float | None = None
    clip: float | None = None
    epsilon: float | None = None
    delta: float | None = None


@dataclass(frozen=True)
class Account:
    """All steps of one site in one study."""

    delta: float
    spent: tuple[Spent, ...] = ()

    def epsilon(self) -> float:
        """ε at this δ; 0 where nothing was trained."""
        if not self.spent:
            return 0.0
        total = sum(spent.steps * _divergences(spent.noise, spent.rate) for spent in self.spent)
        with warnings.catch_warnings():  # an order at the edge of the list is no fault
            warnings.simplefilter("ignore", UserWarning)
            epsilon, _ = _analysis().get_privacy_spent(orders=ORDERS, rdp=total, delta=self.delta)
        return float(epsilon)

    def after(self, *more: Spent) -> Account:
        """With more steps."""
        return Account(self.delta, (*self.spent, *more))


def least_epsilon(delta: float) -> float:
    """What not even endless noise goes below: what turning Rényi privacy into (ε, δ) costs at the best order.

    The conversion is that of Balle et al. (AISTATS 2020, theorem 21), which Opacus uses, at divergence 0.
    """
    orders = np.array(ORDERS)
    found = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(found.min()))


@cache
def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The least noise multiplier, within a tolerance, at which so many steps cost at most ε."""

    def spent(noise: float) -> float:
        return Account(delta, (Spent(noise, rate, steps),)).epsilon()

    high = 1.0
    while spent(high) > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise BadInput(
                f"privacy.epsilon = {epsilon:g} cannot be reached in {steps:,} steps; raise it, or train for less"
            )
    low = 0.0
    while epsilon - spent(high) > TOLERANCE and high - low > high * 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


@lru_cache(maxsize=1024)
def _divergences(noise: float, rate: float) -> NDArray[np.float64]:
    """The Rényi divergence of one step at each order; steps add up."""
    found = _analysis().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)
    return np.asarray(found, dtype=np.float64)


def rate_and_steps(images: int, batch: int, epochs: int) -> tuple[float, int]:
    """The sampling rate whose mean batch is `batch`, and as many steps as ordinary training takes."""
    return min(1.0, batch / images), epochs * math.ceil(images / batch)


def delta_notes(delta: float, images: Mapping[str, int]) -> list[str]:
    """What whoever reads ε must know of a δ that is too large for a site's number of training images; else nothing.

    To publish one of n images, drawn by lot, is (0, 1/n)-differentially private: from 1/n on, δ allows just that.
    """
    weak = [f"{site} ({n:,} training images)" for site, n in images.items() if n and delta >= 1 / n]
    if not weak:
        return []
    return [
        f"privacy.delta = {delta:g} is not below 1/n at {', '.join(weak)}: whatever ε is, to publish one image, drawn "
        "by lot, would keep such a promise; set privacy.delta far below 1/n"
    ]


def of_rows(delta: float, rows: Iterable[SpentRow]) -> Account:
    """The account that a record's rows add up to."""
    trained = (row for row in rows if row.mechanism == "dp-sgd")
    return Account(delta, tuple(Spent(row.noise or 0.0, row.rate or 0.0, row.steps) for row in trained))


def _analysis() -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise BadInput("training with privacy needs Opacus: pip install 'wardround[privacy]'") from error
    return rdp
