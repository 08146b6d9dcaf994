"""What the rounds that results keep tell: accuracy at matched seconds of work, and the longest window of forgetting."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wardround.measure.forgetting import forgetting_intervals

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the seconds that the fastest run took

Record = Mapping[str, Any]


@dataclass(frozen=True)
class ByTime:
    """The shared model's accuracy on the global test at some seconds of work, mean over seeds, by line."""

    seconds: tuple[float, ...]
    accuracies: dict[str, tuple[float, ...]]
    jobs: int  # entries that shared a machine, at most: they slow each other down


def by_time(entries: Iterable[Record], labels: Sequence[str]) -> ByTime | None:
    """Lines at matched seconds: shares of the time that the fastest of their runs took. None where one has no run."""
    runs = {label: [entry for entry in entries if entry["entry"] == label] for label in labels}
    if not all(runs.values()):
        return None
    every = [entry for found in runs.values() for entry in found]
    whole = min(entry["rounds"]["seconds"][-1] for entry in every)
    seconds = tuple(share * whole for share in SHARES)
    accuracies = {
        label: tuple(statistics.fmean(_reached(entry["rounds"], by) for entry in found) for by in seconds)
        for label, found in runs.items()
    }
    return ByTime(seconds, accuracies, max(entry.get("jobs", 1) for entry in every))


def _reached(rounds: Record, seconds: float) -> float:
    """The accuracy of the last round that had ended by then; 0 before the first had."""
    ended = [a for a, end in zip(rounds["shared_global_accuracy"], rounds["seconds"], strict=True) if end <= seconds]
    return float(ended[-1]) if ended else 0.0


@dataclass(frozen=True)
class Window:
    """From a record to the first later round that is at least as good; measured rounds, counted from 1."""

    peak: int
    regained: int
    record: float
    lowest: float


def longest_window(accuracies: Sequence[float]) -> Window | None:
    """The longest time in which a record was lost and regained; None where it never was."""
    lost = list(forgetting_intervals(accuracies))
    if not lost:
        return None
    peak, end = max(lost, key=lambda window: window[1] - window[0])
    return Window(peak + 1, end + 1, accuracies[peak], min(accuracies[peak:end]))
