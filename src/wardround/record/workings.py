"""What a method leaves about its own work, beside its predictors: time, clusters, images.

A method says it in the last state it yields; the events that are made of it here are all that a result reads.

    facts["work"]                           {"synthesis": {"steps": 500, "seconds": 4.1}, ...}
    facts["clusters"], ["silhouettes"]      sites of each cluster; for each number of clusters tried, its silhouette
    facts["similarity"]                     {"sites", "of", "values"}: cosines between what was clustered of each site
    groups["cross"]["weights"]              (K, K): how much the model of a cluster learns from each cluster
    facts["course"]                         the same after each stretch of the work, the beginning first
    groups["gallery"], facts["gallery"]     see `wardround.synthesis.gallery`
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround.methods.state import State
from wardround.record import gallery

NOT_COMPARED: dict[str, Any] = {"sites": [], "of": "", "values": []}
IN_TURN = ("synthesis", "adaptation", "distillation")


def leave(run: Path, state: State) -> Iterator[dict[str, Any]]:
    """The events of a run's end that say how it was done; writes the gallery, which is too large for an event."""
    work = state.facts.get("work", {})
    for part in sorted(work, key=_turn):
        yield {"kind": "work", "part": part, "steps": work[part]["steps"], "seconds": work[part]["seconds"]}
    if "clusters" in state.facts:
        yield {
            "kind": "clusters",
            "clusters": state.facts["clusters"],
            "silhouettes": state.facts.get("silhouettes", {}),
            "weights": _rows(state.groups.get("cross", {}).get("weights")),
            "similarity": state.facts.get("similarity", NOT_COMPARED),
            "course": state.facts.get("course", []),
        }
    if file := gallery.write(run, state):
        yield {"kind": "gallery", "file": file}


def _turn(part: str) -> tuple[int, str]:
    """Parts in the order in which they are done; others by name: a state that was saved does not keep an order."""
    return (IN_TURN.index(part) if part in IN_TURN else len(IN_TURN)), part


def _rows(weights: Tensor | None) -> list[list[float | None]]:
    """A matrix as JSON can hold it."""
    if weights is None:
        return []
    return [[value if math.isfinite(value) else None for value in row] for row in weights.tolist()]
