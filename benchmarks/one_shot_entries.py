"""The lines of `one_shot_grid.py`: FedBiCross's Table 1 and our own methods, and on request ablations."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.methods.registry import find
from wardround.papers.library import table
from wardround.papers.schema import Line

ENTRIES = table("fedbicross-1").entries
OURS = tuple(line for line in table("consult-1").entries if line.group in ("consult", "consult-distilled"))
ABLATIONS = (
    Line(label="fedbicross, τ = 20 at the site", method="fedbicross", settings={"personal_temperature": 20.0}),
    *(line for line in table("fedbicross-2").entries if line not in ENTRIES and line.label != "fedbicross"),
    *(line for line in table("fedisca-2").entries if line.label == "fedisca, batch adaptation"),
    Line(label="dense, as released", method="dense", settings={"bn_weight": 0.0}),  # its hooks find no layer
)


def chosen(methods: Sequence[str] | None, ablations: bool) -> list[Line]:
    """The lines that are named, by label or all of a method; or all. A method that has no line is one of its own."""
    found = [*ENTRIES, *OURS, *(ABLATIONS if ablations else ())]
    if methods is None:
        return found
    lines: list[Line] = []
    for name in dict.fromkeys(methods):
        named = [line for line in found if name in (line.group, line.label)]
        named = named or [Line(label=find(name).name, method=name)]
        lines += [line for line in named if line not in lines]
    return lines
