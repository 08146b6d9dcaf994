"""Progress on long work: bars with the time left on a terminal, nothing for scripts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from wardround.show import printable

REDRAW_SECONDS = 0.1
SAY_SECONDS = 30.0  # between two lines of a log
Advance = Callable[[], None]
T = TypeVar("T")


class Silent:
    """Shows nothing; the default, and what `--quiet` and `--json` use."""

    @contextmanager
    def task(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """A piece of work of `total` steps, `done` of which are; call what it gives after each."""
        yield lambda: None

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """The items, one step each."""
        with self.task(label, len(items)) as advance:
            for item in items:
                yield item
                advance()

    def say(self, text: str) -> None:
        """A line for the person who watches."""


NO_PROGRESS = Silent()


class NowAndThen(Silent):
    """A line on standard error every half minute, of the innermost work: for a log that somebody may be watching."""

    def __init__(self) -> None:
        self._said = time.monotonic()
        self._lock = threading.Lock()

    @contextmanager
    def task(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Work that may be long enough to be spoken of."""

        def advance() -> None:
            nonlocal done
            with self._lock:
                done += 1
                now = time.monotonic()
                if now - self._said >= SAY_SECONDS:
                    self._said = now
                    sys.stderr.write(f"{printable(label)}: {done:,} of {total:,}\n")

        yield advance


class Lines(NowAndThen):
    """What is said, too: for a log, or for whoever reads one later."""

    def say(self, text: str) -> None:
        """One line on standard error, in which nothing can steer a terminal."""
        sys.stderr.write(f"{printable(text)}\n")


class Bars(Silent):
    """Bars on a terminal. Steps may come from several threads, thousands a second: drawing is rationed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._open = 0

    @contextmanager
    def task(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """A bar for as long as the block lasts."""
        if self._open == 0:
            self._bars.start()
        self._open += 1
        bar = self._bars.add_task(printable(label), total=total, completed=done)
        lock = threading.Lock()
        drawn = time.monotonic()

        def advance() -> None:
            nonlocal done, drawn
            with lock:
                done += 1
                now = time.monotonic()
                if now - drawn < REDRAW_SECONDS:
                    return
                drawn = now
                self._bars.update(bar, completed=done)  # under the lock, or a slower thread takes the bar back

        try:
            yield advance
        finally:
            self._bars.remove_task(bar)
            self._open -= 1
            if self._open == 0:
                self._bars.stop()

    def say(self, text: str) -> None:
        """Printed above the bars."""
        self.console.print(printable(text), highlight=False, markup=False)
