"""How long each part of the coordinator's work takes: FedISCA's Figure 5, for every method that makes images."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Work = dict[str, dict[str, float]]  # by part: "steps" and "seconds"


@dataclass
class Lap:
    """A block that is being timed; `steps` may be counted up within it."""

    steps: int


class Stopwatch:
    """Steps and seconds by part; begins with what an earlier, stopped run had measured."""

    def __init__(self, device: torch.device, before: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self.device = device
        self.work: Work = {part: dict(found) for part, found in (before or {}).items()}

    @contextmanager
    def time(self, part: str, steps: int = 0) -> Iterator[Lap]:
        """Add a block of so many steps; what the device still had to do before and within it is waited for."""
        self._wait()
        began, lap = time.perf_counter(), Lap(steps)
        yield lap
        self._wait()
        found = self.work.setdefault(part, {"steps": 0, "seconds": 0.0})
        found["steps"] += lap.steps
        found["seconds"] += time.perf_counter() - began

    def record(self) -> Work:
        """A copy, for a state."""
        return {part: {**found, "seconds": round(found["seconds"], 4)} for part, found in self.work.items()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
