"""Laps, and totals that go on after a resume; the clock is the test's own."""

import pytest
import torch

from wardround.synthesis import stopwatch
from wardround.synthesis.stopwatch import Stopwatch

CPU = torch.device("cpu")


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(stopwatch, "time", found)
    return found


def test_laps_of_a_part_add_up(clock: Clock) -> None:
    watch = Stopwatch(CPU)
    for steps, seconds in ((3, 1.5), (2, 0.25)):
        with watch.time("synthesis", steps):
            clock.now += seconds
        clock.now += 1000  # between laps no time counts
    with watch.time("distillation") as lap:
        clock.now += 2
        lap.steps += 4
    assert watch.record() == {
        "synthesis": {"steps": 5, "seconds": 1.75},
        "distillation": {"steps": 4, "seconds": 2.0},
    }


def test_a_lap_of_no_steps_counts_its_time(clock: Clock) -> None:
    watch = Stopwatch(CPU)
    with watch.time("adaptation"):
        clock.now += 1
    assert watch.record() == {"adaptation": {"steps": 0, "seconds": 1.0}}


def test_nothing_measured_is_nothing() -> None:
    assert Stopwatch(CPU).record() == {}
    assert Stopwatch(CPU, None).record() == {}
    assert Stopwatch(CPU, {}).record() == {}


def test_totals_go_on_after_a_resume(clock: Clock) -> None:
    first = Stopwatch(CPU)
    with first.time("synthesis", 3):
        clock.now += 1.5
    kept = first.record()
    again = Stopwatch(CPU, kept)
    assert again.record() == kept
    with again.time("synthesis", 2):
        clock.now += 0.5
    with again.time("distillation", 1):
        clock.now += 0.125
    assert again.record() == {
        "synthesis": {"steps": 5, "seconds": 2.0},
        "distillation": {"steps": 1, "seconds": 0.125},
    }
    assert kept == {"synthesis": {"steps": 3, "seconds": 1.5}}  # a state is not changed by who goes on from it


def test_a_record_is_a_copy_in_tenths_of_milliseconds(clock: Clock) -> None:
    watch = Stopwatch(CPU)
    with watch.time("synthesis", 1):
        clock.now += 0.00016
    kept = watch.record()
    assert kept["synthesis"]["seconds"] == 0.0002
    kept["synthesis"]["steps"] = 7
    assert watch.record()["synthesis"]["steps"] == 1
    for _ in range(9):  # what a record rounds away is not lost to the next
        with watch.time("synthesis", 1):
            clock.now += 0.00016
    assert watch.record() == {"synthesis": {"steps": 10, "seconds": 0.0016}}


def test_a_lap_within_a_lap_counts_for_both(clock: Clock) -> None:
    watch = Stopwatch(CPU)
    with watch.time("synthesis", 1):
        clock.now += 1
        with watch.time("adaptation", 2):
            clock.now += 2
    assert watch.record() == {"adaptation": {"steps": 2, "seconds": 2.0}, "synthesis": {"steps": 1, "seconds": 3.0}}
