"""States on the way: when one is saved, when it is valid, and what is left of work that diverges."""

from collections.abc import Iterator

import pytest

from wardround.errors import Diverged, RunFailed
from wardround.methods.state import State
from wardround.record import absorbing
from wardround.record.absorbing import Pace, last_state


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(absorbing.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def state(number: int) -> State:
    return State({}, {"number": number})


class Disk:
    """What was saved and made valid, and when; saving takes `seconds`."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        self.clock, self.seconds = clock, seconds
        self.saved: list[tuple[float, int]] = []
        self.valid: list[tuple[float, int]] = []

    def save(self, found: State) -> int:
        self.saved.append((self.clock.now, found.facts["number"]))
        self.clock.now += self.seconds
        return int(found.facts["number"])

    def commit(self, number: int) -> None:
        self.valid.append((self.clock.now, number))


def steps(clock: Clock, pace: Pace, count: int) -> Iterator[State]:
    """As `Parts` does: a step a second, a state whenever one is due, and one at the end."""
    for number in range(1, count + 1):
        clock.now += 1
        if pace.due() or number == count:
            yield state(number)


def test_what_is_saved_is_valid_one_step_later(clock: Clock) -> None:
    """Saved after 41 seconds, 41 more than the 41st, and so on; the last state is nobody's to go on from."""
    pace, disk = Pace(), Disk(clock)
    assert last_state(steps(clock, pace, 100), pace, disk.save, disk.commit).facts == {"number": 100}
    assert disk.saved == [(41, 41), (82, 82)]
    assert disk.valid == [(42, 41), (83, 82)]


def test_what_is_saved_last_is_not_valid(clock: Clock) -> None:
    pace, disk = Pace(), Disk(clock)
    last_state(steps(clock, pace, 41), pace, disk.save, disk.commit)
    assert disk.saved == [(41, 41)]
    assert disk.valid == []


@pytest.mark.parametrize(("seconds", "apart"), [(5, 41), (10, 41), (60, 241)])
def test_saving_takes_a_fifth_of_the_time_at_most(seconds: float, apart: float, clock: Clock) -> None:
    pace, disk = Pace(), Disk(clock, seconds)
    last_state(steps(clock, pace, 400), pace, disk.save, disk.commit)
    (first, _), (second, _), *_ = disk.saved
    assert second - first == seconds + apart


@pytest.mark.parametrize(("after", "valid"), [(30, [29]), (42, [41]), (60, [41, 59])])
def test_work_that_diverges_keeps_the_last_state_before(after: int, valid: list[int], clock: Clock) -> None:
    """States come at every step; the one that was saved already is not saved again."""
    pace, disk = Pace(), Disk(clock)

    def diverging() -> Iterator[State]:
        for number in range(1, after):
            clock.now += 1
            yield state(number)
        raise Diverged("the student diverged; use a smaller lr")

    with pytest.raises(Diverged, match="the student diverged"):
        last_state(diverging(), pace, disk.save, disk.commit)
    assert [number for _, number in disk.valid] == valid
    assert [number for _, number in disk.saved] == valid


def test_a_full_disk_does_not_hide_that_it_diverged(clock: Clock) -> None:
    def diverging() -> Iterator[State]:
        yield state(1)
        raise Diverged("the student diverged; use a smaller lr")

    def save(found: State) -> int:
        raise RunFailed("no space left on the disk")

    with pytest.raises(Diverged, match="the student diverged"):
        last_state(diverging(), Pace(), save, lambda saved: None)


def test_no_state_at_all(clock: Clock) -> None:
    disk = Disk(clock)
    with pytest.raises(RunFailed, match="made nothing of the answers"):
        last_state(iter(()), Pace(), disk.save, disk.commit)

    def at_once() -> Iterator[State]:
        raise Diverged("the synthesis diverged")
        yield

    with pytest.raises(Diverged):
        last_state(at_once(), Pace(), disk.save, disk.commit)
    assert disk.valid == []
