"""Heat maps as inline SVG: a number in every cell where there is room, the shade only helps the eye."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.report.svg import (
    CHAR,
    Format,
    Label,
    box,
    drawing,
    finite,
    name_width,
    shortened,
    tooltip,
    within,
    words,
)

SHADES = 10  # the style sheet has one class for each
ROOMY = 26.0  # units of a cell that holds a number


def heat_map(
    label: Label,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    show: Format,
    groups: Sequence[int] = (),
    width: float = 360,
) -> str:
    """A row and a column for each name, shaded from 0 to 1; `groups` numbers rows that a gap keeps together.

    Columns are headed by numbers, which stand before the names of the rows where both are the same.
    """
    same = list(rows) == list(columns)
    names = [f"{i} {name}" if same else name for i, name in enumerate(rows, 1)]
    heads = [str(i) for i in range(1, len(columns) + 1)] if same else list(columns)
    gaps = [sum(a != b for a, b in zip(groups[1 : i + 1], groups[:i], strict=False)) * 4.0 for i in range(len(rows))]
    gaps = gaps if groups else [0.0] * len(rows)
    left = name_width(names)
    room = width - left - (gaps[-1] if same and gaps else 0.0)
    cell = min(room / max(len(columns), 1), 44.0)
    high, top = min(cell, 30.0), 18.0
    out = []
    for j, head in enumerate(heads):
        x = left + cell * (j + 0.5) + (gaps[j] if same else 0.0)
        if len(columns) <= 40:
            out.append(words(x, 12, shortened(head, max(cell, 3 * CHAR)), "tick", "middle"))
    for i, name in enumerate(names):
        y = top + high * i + gaps[i]
        if high >= 10:
            out.append(words(0, y + high / 2 + 4, shortened(name, left), "name"))
        for j, value in enumerate(list(values[i])[: len(columns)]):
            x = left + cell * j + (gaps[j] if same else 0.0)
            known = finite(value)
            said = "–" if known is None else show(known)
            shade = 0 if known is None else round(SHADES * within(known))
            inside = words(x + cell / 2, y + high / 2 + 4, said, f"cell t{shade}", "middle") if cell >= ROOMY else ""
            tip = tooltip(f"{rows[i]}, {columns[j]}: {said}")
            out.append(f"<g>{tip}{box(f'heat h{shade}', x, y, cell - 1, high - 1)}{inside}</g>")
    return drawing(label, width, top + high * len(rows) + (gaps[-1] if gaps else 0.0) + 4, out)
