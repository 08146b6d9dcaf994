"""A long `absorb` in steps that survive a kill.

Methods yield states on the way that can be gone on from. Saving each would cost more than the work, so one is saved
every so often, less often where saving itself takes long. A state becomes valid only when another has followed it: from
the last one, which is the round's result, a method must not be asked to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from wardround.errors import RunFailed
from wardround.methods.state import State

SAVE_EVERY_SECONDS = 40.0  # a step that is under way and the saving itself still fit into a minute
LONG_SAVING_SECONDS = 4.0  # where saving takes longer than this, it is done less often
Saved = TypeVar("Saved")


class Pace:
    """When the next state on the way should be saved."""

    def __init__(self) -> None:
        self.saved_at, self.took = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether it is time; a large state comes seldom enough to get on with the work."""
        return time.monotonic() - self.saved_at > SAVE_EVERY_SECONDS * max(1.0, self.took / LONG_SAVING_SECONDS)

    def saved(self, began: float) -> None:
        """A state was saved; `began` is when saving it began."""
        self.saved_at = time.monotonic()
        self.took = self.saved_at - began


def last_state(
    states: Iterator[State], pace: Pace, save: Callable[[State], Saved], commit: Callable[[Saved], object]
) -> State:
    """Run through the states; the last. `save` writes one beside what is valid, `commit` makes it valid."""
    waiting: Saved | None = None
    latest: State | None = None
    for latest in states:
        if waiting is not None:
            commit(waiting)
            waiting = None
        if pace.due():
            began = time.monotonic()
            waiting = save(latest)
            pace.saved(began)
    if latest is None:
        raise RunFailed("the method made nothing of the answers; this is a fault of the method")
    return latest
