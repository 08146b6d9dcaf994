"""The lines of `fedkper_table.py`: FedKPer's Table 1, its Figure 4, and readings of λ that are ours."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.errors import BadInput
from wardround.papers.library import table
from wardround.papers.schema import Line, value

TABLE = table("fedkper-1")
ENTRIES = TABLE.entries
ABLATIONS = tuple(line for line in table("fedkper-fig4").entries if "," in line.label)
COLUMNS = {column.measure: column.name for column in TABLE.columns if column.measure}  # in the paper's order


def published(images: str, label: str) -> dict[str, float] | None:
    """Table 1's row on a set, by measure."""
    found = TABLE.printed(label, images, TABLE.axes.sites[0], TABLE.axes.levels[0])
    return None if found is None else dict(zip(COLUMNS, map(value, found), strict=True))


def chosen(methods: Sequence[str] | None, ablations: bool) -> list[Line]:
    """The entries of the table that are named, or all; with ablations, those of a method that is named, too."""
    found = [*ENTRIES, *(ABLATIONS if ablations else ())]
    for name in methods or ():
        if all(line.group != name for line in found):
            raise BadInput(f"{name!r} is not in the table; choose from {', '.join(e.label for e in ENTRIES)}")
    return [line for line in found if methods is None or line.group in methods]
