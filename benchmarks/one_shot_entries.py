"""The lines of `one_shot_grid.py`: FedBiCross's Table 1 and our own methods, and on request ablations and readings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wardround.methods.registry import find
from wardround.papers.library import table
from wardround.papers.schema import Line

ENTRIES = table("fedbicross-1").entries
OURS = tuple(line for line in table("consult-1").entries if line.group in ("consult", "consult-distilled"))
ABLATIONS = (
    *(line for line in table("fedbicross-2").entries if line not in ENTRIES and line.label != "fedbicross"),
    *(line for line in table("fedisca-2").entries if line.label == "fedisca, batch adaptation"),
)


def _tried(words: str, **settings: Any) -> Line:
    return Line(label=f"fedbicross, {words}", method="fedbicross", settings=settings)


READINGS = (  # what the papers leave open, tried for docs/oneshot.md
    *(_tried(f"K = {k}", clusters=k) for k in (2, 3, 4)),
    _tried("K = 4, not personalised", clusters=4, personal=False),
    _tried("known targets", targets="known"),
    _tried("targets by shares", targets="shares"),
    _tried("targets by shares, K = 4", targets="shares", clusters=4),
    _tried("from a member", begin="member"),
    _tried("from a member, not personalised", begin="member", personal=False),
    _tried("from a member, K = 4", begin="member", clusters=4),
    _tried("from a member, K = 4, not personalised", begin="member", clusters=4, personal=False),
    _tried("learning at every step", inner="all"),
    _tried("16 trajectories", trajectories=16, lr=0.05),
    _tried("16 trajectories, targets by shares, from a member", trajectories=16, targets="shares", begin="member"),
    _tried("γ = 2", gamma=2.0),
    _tried("5 personal epochs", personal_epochs=5),
    Line(label="dense, as released", method="dense", settings={"bn_weight": 0.0}),
)


def chosen(methods: Sequence[str] | None, ablations: bool, readings: bool) -> list[Line]:
    """The lines that are named, by label or all of a method; or all. A method that has no line is one of its own."""
    found = [*ENTRIES, *OURS, *(ABLATIONS if ablations else ()), *(READINGS if readings else ())]
    if methods is None:
        return found
    lines: list[Line] = []
    for name in dict.fromkeys(methods):
        named = [line for line in found if name in (line.group, line.label)]
        named = named or [Line(label=find(name).name, method=name)]
        lines += [line for line in named if line not in lines]
    return lines
