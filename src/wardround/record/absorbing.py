"""A long `absorb` in steps that survive a kill.

Methods yield states on the way that can be gone on from. Saving each would cost more than the work, so one is saved
every so often. A state becomes valid only when another has followed it: from the last one, which is the round's result,
a method must not be asked to go on. So the next one is asked for at once. Where the work diverges, the last state
before is kept: to go on from it would lead there again, but what was made until then can be looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from wardround.errors import Diverged, RunFailed
from wardround.methods.state import State

SAVE_EVERY_SECONDS = 40.0  # a step that is under way and the saving itself still fit into a minute
LONG_SAVING_SECONDS = 10.0  # where saving takes longer than this, it is done less often
Saved = TypeVar("Saved")


class Pace:
    """When a method should yield a state on the way."""

    def __init__(self) -> None:
        self.saved_at, self.took, self.waits = time.monotonic(), 0.0, False

    def due(self) -> bool:
        """Whether a state is wanted: to be saved, or to show that the one that was saved is not the last."""
        return self.waits or self.time_to_save()

    def time_to_save(self) -> bool:
        """Whether it is; a large state comes seldom enough that saving is a fifth of the time at most."""
        return time.monotonic() - self.saved_at > SAVE_EVERY_SECONDS * max(1.0, self.took / LONG_SAVING_SECONDS)

    def saved(self, began: float) -> None:
        """A state was saved, and waits for another; `began` is when saving it began."""
        self.saved_at, self.waits = time.monotonic(), True
        self.took = self.saved_at - began


def last_state(
    states: Iterator[State], pace: Pace, save: Callable[[State], Saved], commit: Callable[[Saved], object]
) -> State:
    """Run through the states; the last. `save` writes one beside what is valid, `commit` makes it valid."""
    waiting: Saved | None = None
    latest: State | None = None
    try:
        for latest in states:
            if waiting is not None:
                commit(waiting)
                waiting, pace.waits = None, False
            if pace.time_to_save():
                began = time.monotonic()
                waiting = save(latest)
                pace.saved(began)
    except Diverged:
        with suppress(RunFailed):  # a full disk is not what went wrong first
            if latest is not None:
                commit(save(latest) if waiting is None else waiting)
        raise
    if latest is None:
        raise RunFailed("the method made nothing of the answers; this is a fault of the method")
    return latest
