"""The lines of `one_shot_grid.py`: FedBiCross's Table 1 and our own methods, and on request ablations and readings."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.methods.registry import find
from wardround.papers.library import table
from wardround.papers.schema import Line

ENTRIES = table("fedbicross-1").entries
OURS = tuple(line for line in table("consult-1").entries if line.group in ("consult", "consult-distilled"))
ABLATIONS = (
    *(line for line in table("fedbicross-2").entries if line not in ENTRIES and line.label != "fedbicross"),
    *(line for line in table("fedisca-2").entries if line.label == "fedisca, batch adaptation"),
)
READINGS = (  # what the papers leave open, tried for docs/oneshot.md
    *(Line(label=f"fedbicross, K = {k}", method="fedbicross", settings={"clusters": k}) for k in (2, 3, 4)),
    Line(label="fedbicross, known targets", method="fedbicross", settings={"targets": "known"}),
    Line(label="fedbicross, targets by shares", method="fedbicross", settings={"targets": "shares"}),
    Line(
        label="fedbicross, targets by shares, K = 4", method="fedbicross", settings={"targets": "shares", "clusters": 4}
    ),
    Line(label="fedbicross, from a member", method="fedbicross", settings={"begin": "member"}),
    Line(label="fedbicross, learning at every step", method="fedbicross", settings={"inner": "all"}),
    Line(label="fedbicross, 16 trajectories", method="fedbicross", settings={"trajectories": 16, "lr": 0.05}),
    Line(label="fedbicross, γ = 2", method="fedbicross", settings={"gamma": 2.0}),
    Line(label="fedbicross, 5 personal epochs", method="fedbicross", settings={"personal_epochs": 5}),
    Line(label="dense, as released", method="dense", settings={"bn_weight": 0.0}),
)


def chosen(methods: Sequence[str] | None, ablations: bool, readings: bool) -> list[Line]:
    """The lines that are named, or all; a method that has no line is one of its own."""
    found = [*ENTRIES, *OURS, *(ABLATIONS if ablations else ()), *(READINGS if readings else ())]
    if methods is None:
        return found
    lines: list[Line] = []
    for name in dict.fromkeys(methods):
        lines += [line for line in found if line.group == name] or [Line(label=find(name).name, method=name)]
    return lines
