"""Follow a run's event log while it is written, without ever telling what a resumed run would take back.

Only what a checkpoint counts on is certain: what comes after it in the log may be cut off and happen again. So events
are told up to the length that `checkpoint.json` names, and to the end once the run has a result. Each is told once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wardround.record.plain import read, stamp

EVENTS, CHECKPOINT, RESULT = "events.jsonl", "checkpoint.json", "result.json"


class Follower:
    """What has become certain in one run's log since it was last asked."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.offset = 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can come."""
        return stamp(self.run / RESULT) is not None

    def news(self) -> Iterator[dict[str, Any]]:
        """Every event that is certain and was not told yet; a line that holds none is passed over."""
        certain = self._certain()
        if certain <= self.offset:
            return
        text = read(self.run / EVENTS, self.offset, certain - self.offset) or b""
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                yield event

    def _certain(self) -> int:
        """How many bytes of the log are certain."""
        log = stamp(self.run / EVENTS)
        if log is None:
            return 0
        if self.is_finished:
            return log.size
        try:
            length = json.loads(read(self.run / CHECKPOINT) or b"{}")["events_bytes"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return 0
        return min(length, log.size) if isinstance(length, int) else 0
