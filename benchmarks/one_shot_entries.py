"""The lines of `one_shot_grid.py`: those of FedBiCross's Tables 1 and 2, and FedISCA as its public code adapts."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.methods.registry import find
from wardround.papers.library import table
from wardround.papers.schema import Line

ENTRIES = table("fedbicross-1").entries
ABLATIONS = (
    *(line for line in table("fedbicross-2").entries if line not in ENTRIES and line.label != "fedbicross"),
    *(line for line in table("fedisca-2").entries if line.label == "fedisca, batch adaptation"),
)


def chosen(methods: Sequence[str] | None, ablations: bool) -> list[Line]:
    """The entries of the table that are named, or all; a method that is in no table is an entry of its own."""
    found = [*ENTRIES, *(ABLATIONS if ablations else ())]
    if methods is None:
        return found
    lines: list[Line] = []
    for name in dict.fromkeys(methods):
        lines += [line for line in found if line.group == name] or [Line(label=find(name).name, method=name)]
    return lines
