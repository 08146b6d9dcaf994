"""How often a soak test does its thing: as often as it says, or at most WARDROUND_SOAK_TIMES, for a quick look."""

from __future__ import annotations

import os


def times(usual: int) -> int:
    """The number of repetitions."""
    return min(usual, int(os.environ.get("WARDROUND_SOAK_TIMES", usual)))
