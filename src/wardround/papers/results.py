"""The file of results of some runs: one format for every table, read once and written whole after every entry."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.papers.cells import Plan, at

Summarise = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
PARTS = ("recipes", "cells", "entries")


class Results:
    """What is finished under settings that the file's head has in full."""

    def __init__(self, path: Path, head: Mapping[str, Any], same: Sequence[str], summarise: Summarise) -> None:
        """`head` begins the file; one whose values of the keys `same` differ holds something else and is refused."""
        self.path, self._summarise = path, summarise
        self.tree: dict[str, Any] = {**head, "recipes": {}, "cells": [], "entries": [], "summary": []}
        if path.exists():
            found = read_results(path, head["benchmark"])
            if any(found.get(key) != head[key] for key in same):
                raise BadInput(f"{path} holds results of another preset or other settings; use another --out")
            self.tree |= {key: found[key] for key in PARTS}
            self.tree["summary"] = summarise(self.entries)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What is finished, in the order it finished."""
        found: list[dict[str, Any]] = self.tree["entries"]
        return found

    def has(self, planned: Plan) -> bool:
        """Whether this very entry is finished."""
        return any(entry["id"] == planned.id for entry in self.entries)

    def add(self, planned: Plan, found: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Keep an entry, in place of the one of the same cell and label under earlier settings, and write the file."""
        place = planned.cell.place
        line = {**place, "entry": planned.label, "recipe": planned.recipe, "id": planned.id, **found}
        kept = [entry for entry in self.entries if not (at(entry, place) and entry["entry"] == line["entry"])]
        self.tree["entries"] = [*kept, line]
        self.tree["recipes"][planned.recipe] = planned.record
        used = {entry["recipe"] for entry in self.entries}
        self.tree["recipes"] = {key: value for key, value in self.tree["recipes"].items() if key in used}
        cells = [cell for cell in self.tree["cells"] if not at(cell, place)]
        self.tree["cells"] = [*cells, {**place, **data}]
        self.tree["summary"] = self._summarise(self.entries)
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, compact(self.tree).encode())


def compact(tree: Mapping[str, Any]) -> str:
    """JSON with a line for every value, but lists of numbers in one line."""
    text = json.dumps(tree, indent=1, allow_nan=False)
    return re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def read_results(path: Path, benchmark: str, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """What an earlier start wrote; `parts` are keys that it must have."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("benchmark") != benchmark:
            raise ValueError("it is not of this benchmark")
        if lacking := [key for key in parts if key not in found]:
            raise ValueError(f"it has no {lacking[0]}")
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path} cannot be used: {error}; give the results of an earlier start, or a new path"
        ) from error
    return found
