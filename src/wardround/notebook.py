"""Progress in a notebook: one output that is written over, and gone when the work is done.

A terminal's bars move the cursor, which a notebook prints as garbage or as line after line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from wardround.progress import Advance, Silent

REDRAW_SECONDS = 0.25


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs us; IPython on a terminal has one of its own."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBars(Silent):
    """A line for each piece of work that is under way. Steps may come from several threads."""

    def __init__(self) -> None:
        self._tasks: dict[int, list[Any]] = {}  # label, done, total
        self._lock = threading.Lock()
        self._drawn = 0.0
        self._output: Any = None

    @contextmanager
    def task(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        """A line for as long as the block lasts."""
        with self._lock:
            number = max(self._tasks, default=0) + 1
            self._tasks[number] = [label, done, total]

        def advance() -> None:
            with self._lock:
                self._tasks[number][1] += 1
                if time.monotonic() - self._drawn > REDRAW_SECONDS:
                    self._draw()

        try:
            yield advance
        finally:
            with self._lock:
                del self._tasks[number]
                if not self._tasks:
                    self._draw()

    def _draw(self) -> None:
        """Write over the one output there is."""
        from IPython import display as ipython

        self._drawn = time.monotonic()
        lines, html = [], []
        for label, done, total in self._tasks.values():
            lines.append(f"{label}: {done} of {total}")
            html.append(f'<progress value="{done}" max="{max(total, 1)}"></progress> {escape(lines[-1])}')
        shown = {"text/plain": "\n".join(lines), "text/html": "<br>".join(html)}
        if self._output is not None:
            self._output.update(shown, raw=True)
        elif self._tasks:
            display: Any = ipython.display  # which has no types
            self._output = display(shown, raw=True, display_id=True)
