"""Fits that are stopped and gone on with, for the tests of `resumable`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bare_loop import BN, CPU, a_fit, images, same
from wardround.learn.fit import Fit, Fitted
from wardround.learn.resumable import train_resumable

STEPS = 3  # of an epoch of `a_fit`


class Stopped(Exception):
    """Stands for whatever ends a process."""


class Watch:
    """Counts the steps of a call, and stops it when it has taken `stop` of them."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.steps = stop, 0

    def __call__(self) -> None:
        """After a step."""
        self.steps += 1
        if self.steps == self.stop:
            raise Stopped


def stopped(fit: Fit, file: Path, step: int, **how: Any) -> None:
    """Train, up to this step and no further."""
    with pytest.raises(Stopped):
        train_resumable(fit, CPU, file, Watch(step), **{"every_seconds": 0.0, **how})


def finished(fit: Fit, file: Path, **how: Any) -> tuple[Fitted, int]:
    """The result, and how many steps this call took."""
    watch = Watch()
    return train_resumable(fit, CPU, file, watch, **{"every_seconds": 0.0, **how}), watch.steps


def assert_same(found: Fitted, expected: Fitted) -> None:
    """All but the seconds, bit for bit."""
    assert same(found.weights, expected.weights)
    assert replace(found, weights={}, seconds=0.0) == replace(expected, weights={}, seconds=0.0)


def the_best(**recipe: Any) -> Fit:
    """Six epochs, of which the best is neither the first nor the last."""
    fit = a_fit(BN, epochs=6, keep="best", lr=0.05, **recipe)
    return replace(fit, validation=images(12, seed=2))
