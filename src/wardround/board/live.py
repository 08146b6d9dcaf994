"""How a run that is still going gets on: rounds done, accuracy so far, what it had to say."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from wardround.board.index import Run, logs
from wardround.methods.registry import known
from wardround.record.follow import Follower
from wardround.record.plain import json_object, read
from wardround.report.values import as_count, as_number, as_text, mean_of
from wardround.study import ROUNDS

NOTES = 12  # the last ones; the report has all
CURVES = {  # (split, model): what it is called on the page
    ("global", "shared"): "shared model, global test",
    ("local", "shared"): "shared model, local tests",
    ("local", "trained"): "after training, local tests",
    ("local", "personal"): "personal predictors, local tests",
}


@dataclass
class Course:
    """What the log of one method has told so far."""

    method: str
    total: int | None  # rounds it will take, where that is known
    rounds: int = 0
    fits: int = 0
    seconds: float | None = None
    is_over: bool = False
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES))
    measured: dict[tuple[str, str], dict[int, list[float | None]]] = field(default_factory=dict)

    def add(self, events: Iterable[dict[str, Any]]) -> None:
        """Take in what happened."""
        for event in events:
            kind, place = event["kind"], (as_text(event.get("split")), as_text(event.get("model")))
            if kind == "row" and event.get("metric") == "accuracy" and place in CURVES:
                rounds = self.measured.setdefault(place, {})
                rounds.setdefault(as_count(event.get("round")), []).append(as_number(event.get("value")))
            elif kind == "note":
                self.notes.append(as_text(event.get("text")))
            elif kind == "fit":
                self.fits += 1
            elif kind == "round":
                self.rounds = max(self.rounds, as_count(event.get("round")) + 1)
                self.seconds = as_number(event.get("seconds"))
            elif kind == "end":
                self.is_over, self.seconds = True, as_number(event.get("seconds"))

    def curve(self, place: tuple[str, str]) -> list[tuple[float, float | None]]:
        """Mean accuracy by round, counted from 1."""
        return [(number + 1, mean_of(values)) for number, values in sorted(self.measured.get(place, {}).items())]


class Watch:
    """Follows the logs of the runs that somebody looks at; safe to ask from several threads."""

    def __init__(self) -> None:
        self._followed: dict[str, tuple[Follower, Course]] = {}
        self._lock = threading.Lock()

    def courses(self, run: Run) -> list[Course]:
        """How each method of a run gets on, those that have not begun left out."""
        with self._lock:
            found = []
            for log in logs(run):
                key = str(log)
                if key not in self._followed:
                    self._followed[key] = Follower(log.parent), _fresh(run, log.parent.name)
                follower, course = self._followed[key]
                course.add(follower.news())
                found.append(course)
            return found


def _fresh(run: Run, folder: str) -> Course:
    method = folder if run.kind == "compare" else next(iter(run.methods), folder)
    info = known().get(method)
    rounds = as_count(json_object(read(run.path / "settings.json")).get("rounds")) or ROUNDS
    return Course(method, rounds if info is not None and info.family == "multi-round" else None)
