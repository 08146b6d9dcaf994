"""A comparison as text, Markdown, LaTeX or CSV, with the protocol, the images and every deviation printed with it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wardround.papers.cells import images_hash, is_drawn
from wardround.papers.comparison import Block, Comparison, Figure
from wardround.papers.datasets import DATASETS, is_official
from wardround.papers.further import NONE, Further, further
from wardround.papers.schema import Level
from wardround.papers.stored import Finished
from wardround.papers.summaries import cells, headed

Format = Literal["text", "markdown", "latex", "csv"]
STUB = ("line", "", "seeds")  # headings before the figures'
Lines = list[list[str]]
SPECIAL = {char: f"\\{char}" for char in "&%$#_{}"}
SPECIAL |= {"–": "--", "±": r"$\pm$", "α": r"$\alpha$", "λ": r"$\lambda$", "\\": r"\textbackslash{}"}


def render(found: Comparison, form: Format, data: Path, everything: bool = False, width: int | None = None) -> str:
    """The whole table. `data` is where missing images are looked for; `everything` shows what was not measured, too.

    Text that would be wider than `width` characters comes in parts, one for each level at least.
    """
    if form == "csv":
        return _csv(found)
    shown = [block for block in found.blocks if everything or block.has_ours] or found.blocks
    parts = [_title(found, form)]
    for block in shown:
        for sheet in _sheets(found, block, width if form == "text" else None):
            parts.append(_table(found.heading(block) + sheet.of, sheet.head, sheet.lines, form))
    more = further(found)
    for below in more:
        title = f"{below.place}: {below.title}" if below.place else below.title
        parts.append(_table(title, below.head, below.lines, form, stub=1))
    notes = _notes(found, more, data)
    parts += [_list(title, lines, form) for title, lines in notes if lines]
    return "\n\n".join(part for part in parts if part) + "\n"


# Parts ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sheet:
    """Some columns of a block, with their headings; `of` says of which level they are, where not of all."""

    of: str
    head: list[str]
    lines: Lines

    @property
    def width(self) -> int:
        """In characters, as text."""
        widths = _widths(self.head, self.lines)
        return sum(widths) + 2 * (len(widths) - 1)


def _sheets(found: Comparison, block: Block, width: int | None) -> list[_Sheet]:
    """The block whole where it fits; else level by level, each cut into as many columns as fit."""
    levels, columns = found.table.axes.levels, found.table.columns
    several = len(levels) > 1
    names = [f"{_level(level)} {column.name if len(columns) > 1 else ''}" if several else column.name
             for level in levels for column in columns]  # fmt: skip
    whole = _sheet(block, "", [name.strip() for name in names], 0)
    if width is None or whole.width <= width:
        return [whole]
    sheets: list[_Sheet] = []
    for number, level in enumerate(levels):
        of, begin = f", {_level(level)}" if several else "", 0
        while begin < len(columns):
            rest = [_sheet(block, of, [c.name for c in columns[begin:end]], number * len(columns) + begin)
                    for end in range(len(columns), begin, -1)]  # fmt: skip
            widest = next((sheet for sheet in rest if sheet.width <= width), rest[-1])
            sheets.append(widest)
            begin += len(widest.head) - len(STUB)
    return sheets


def _sheet(block: Block, of: str, names: Sequence[str], begin: int) -> _Sheet:
    return _Sheet(of, [*STUB, *names], _rows(block, slice(begin, begin + len(names))))


def _level(level: Level) -> str:
    return f"α {level:g}" if isinstance(level, float) else level


def _rows(block: Block, columns: slice) -> Lines:
    """For each line ours, the paper's and the difference, as far as there are such in these columns."""
    lines: Lines = []
    for row in block.rows:
        here = row.figures[columns]
        most = max(len(f.ours) for f in here)
        kinds = {"ours": [ours(f, most) for f in here], "paper": [f.published or NONE for f in here]}
        kinds["difference"] = [difference(f) for f in here]
        label = row.line.label
        for kind, figures in kinds.items():
            if any(figure != NONE for figure in figures):
                lines.append([label, kind, str(most) if kind == "ours" else "", *figures])
                label = ""
    return lines


def ours(figure: Figure, seeds: int) -> str:
    """Our mean with its deviation over seeds, in the paper's digits; where it is of fewer than `seeds`, of how many."""
    if figure.mean is None:
        return NONE
    digits = figure.column.digits
    spread = "" if figure.deviation is None else f"±{figure.deviation:.{digits}f}"
    fewer = f" ({len(figure.ours)})" if len(figure.ours) < seeds else ""
    return f"{figure.mean:.{digits}f}{spread}{fewer}"


def difference(figure: Figure) -> str:
    """Ours less the paper's."""
    return NONE if figure.difference is None else f"{figure.difference:+.{figure.column.digits}f}"


def _notes(found: Comparison, more: Sequence[Further], data: Path) -> list[tuple[str, list[str]]]:
    table = found.table
    words = [text for text in (table.prints, table.see) if text]
    words += dict.fromkeys(below.words for below in more)
    if found.finished:
        less = "; difference: ours less the paper's" if table.published else ""
        words.append(f"ours: mean ± sample deviation over seeds; (n): over n of them only{less}")
    return [
        ("What it shows", [table.measures, *words]),
        (f"The {table.whose}'s protocol", list(table.protocol)),
        (f"Ours is not the {table.whose}'s setting in", [*table.deviations, *found.deviations()]),
        ("Images", list(_provenance(found, data))),
        ("Not measured", list(_missing(found, data))),
        ("Reference", [table.citation]),
    ]


def _provenance(found: Comparison, data: Path) -> Iterable[str]:
    """Where the images of ours came from, and whether they are the official file."""
    lines: dict[str, None] = {}
    for block in found.blocks:
        for one in block.finished:
            name, said = one.entry["set"], one.cell.get("provenance", "not recorded")
            lines[f"{name}: {said}; {_officially(one, data)}; results in {one.file}"] = None
    return lines


def _officially(one: Finished, data: Path) -> str:
    """Kept with the results, or found out from the file in the data folder where it is the very one."""
    images = one.entry["set"].partition(",")[0]
    if is_drawn(Path(images)):
        return "drawn, not read from a file"
    official = one.cell.get("official")
    path = data / f"{images}.npz"
    if official is None and path.is_file() and one.was_run_on(images_hash(path)):
        official = is_official(path)
    if official is None:
        return "whether it is an official file is not recorded"
    return "the official file" if official else "not the official file: rebuilt or changed"


def _missing(found: Comparison, data: Path) -> Iterable[str]:
    """What was not measured, set by set: the file that is missing and how to get it, or the command."""
    left: dict[str, dict[str, list[str]]] = {}
    for block in found.blocks:
        if block.at_hand < block.cells and block.dataset in found.table.axes.datasets and found.table.family:
            kind = "sites in part" if block.has_ours else "sites"
            left.setdefault(block.dataset, {}).setdefault(kind, []).append(str(block.sites))
    for dataset, sites in left.items():
        command = f"wardround papers run {found.table.id} --datasets {dataset}"
        why = DATASETS[dataset].missing(data) or f"the images are at hand: {command}"
        parts = "; ".join(f"{', '.join(counts)} {kind}" for kind, counts in sites.items())
        yield f"{dataset} ({parts}): {why}"


# Forms ----------------------------------------------------------------------------------------------------------------


def _title(found: Comparison, form: Format) -> str:
    marks = {"markdown": "## ", "latex": "% "}
    return marks.get(form, "") + found.table.title


def _table(title: str, head: list[str], lines: Lines, form: Format, stub: int = 2) -> str:
    """A titled table; its first `stub` columns are words and stand to the left."""
    if not lines:
        return ""
    if form == "markdown":
        return "\n".join([f"### {title}", "", *headed(head), *map(cells, lines)])
    if form == "latex":
        rows = [" & ".join(map(_escaped, line)) + r" \\" for line in lines]
        top = " & ".join(map(_escaped, head)) + r" \\"
        shape = "l" * stub + "r" * (len(head) - stub)
        rules = [r"\hline", top, r"\hline", *rows, r"\hline"]
        return "\n".join([f"% {title}", rf"\begin{{tabular}}{{{shape}}}", *rules, r"\end{tabular}"])
    shown = [_aligned(line, _widths(head, lines), stub) for line in [head, *lines]]
    return "\n".join([title, "-" * len(title), *shown])


def _widths(head: list[str], lines: Lines) -> list[int]:
    return [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]


def _aligned(line: list[str], widths: list[int], stub: int) -> str:
    both = enumerate(zip(line, widths, strict=True))
    return "  ".join(text.ljust(w) if i < stub else text.rjust(w) for i, (text, w) in both).rstrip()


def _list(title: str, lines: Iterable[str], form: Format) -> str:
    if form == "latex":
        return "\n".join([f"% {title}:", *(f"% - {line}" for line in lines)])
    mark = "**" if form == "markdown" else ""
    gap = [""] if form == "markdown" else []
    return "\n".join([f"{mark}{title}{mark}", *gap, *(f"- {line}" for line in lines)])


def _escaped(text: str) -> str:
    return "".join(SPECIAL.get(char, char) for char in text)


def _csv(found: Comparison) -> str:
    """One line for every figure, measured or published, and for every one of the sheets below."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ("table", "dataset", "images", "sites", "level", "line", "column", "seeds", "mean", "deviation", "published")
    writer.writerow([*head, "difference"])
    for block in found.blocks:
        for row in block.rows:
            for f in row.figures:
                if f.mean is None and f.published is None:
                    continue
                place = [found.table.id, block.dataset, " ".join(block.images), block.sites, f.level]
                numbers = [_number(x, f) for x in (f.mean, f.deviation)]
                figures = [len(f.ours), *numbers, f.published or "", _number(f.difference, f)]
                writer.writerow([*place, row.line.label, f.column.name, *figures])
    for below in further(found):
        for label, *values in below.lines:
            for heading, value in zip(below.head[1:], values, strict=True):
                column, mean = f"{below.title}, {heading}", "" if value == NONE else value
                writer.writerow([found.table.id, below.dataset, "", "", "", label, column, "", mean, "", "", ""])
    return out.getvalue()


def _number(x: float | None, figure: Figure) -> str:
    return "" if x is None else f"{x:.{figure.column.digits + 2}f}"
