"""A table or a figure of a paper as a record: what it measures, under which settings, and the figures that it prints.

Every file of `tables/` is one. The schema is closed, so that a slip in a file is told and not read over. Published
figures are kept as the text that the paper prints, digit for digit; they stand in these files and nowhere else.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Level = float | Literal["iid", "natural"]  # Dirichlet's α, or how else images become sites
Family = Literal["one-shot", "fedkper", "fedmp"]
PAPER = "paper"  # the preset of the one-shot methods as the papers have them
NONE = "-"  # in a row of figures: the paper has none
_FIGURE = re.compile(r"-?\d+(?:\.\d+)?(?:±\d+(?:\.\d+)?)?")


class Closed(BaseModel):
    """A record without keys of its own making."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Column(Closed):
    """One figure of a row: its heading, which measure of the results stands beside it, and how both are printed."""

    name: str
    measure: str | None = None  # None: nothing of ours stands beside it
    measure_where: dict[str, str] = {}  # another one for some data sets
    scale: float = 100.0  # from the results' unit to the paper's
    digits: Annotated[int, Field(ge=0, le=6)] = 2

    def measure_of(self, dataset: str) -> str | None:
        """The measure that stands beside the paper's figure on a data set."""
        return self.measure_where.get(dataset, self.measure)


class Line(Closed):
    """A line of ours: a method, what is set otherwise than by default, and the paper's rows beside which it stands."""

    label: str
    method: str
    rows: tuple[str, ...] = ()  # of several the highest figure counts; none: the paper has no such line
    settings: dict[str, Any] = {}
    study: dict[str, Any] = {}

    @property
    def group(self) -> str:
        """The name that `--methods` selects it by: the label up to its comma."""
        return self.label.partition(",")[0]


class Axes(Closed):
    """What a table varies. `sites_where` has the numbers of sites of a data set that differs, in the same order."""

    datasets: tuple[str, ...] = ()
    levels: tuple[Level, ...] = ()
    sites: tuple[int, ...] = ()
    sites_where: dict[str, tuple[int, ...]] = {}
    seeds: tuple[int, ...] = ()


class Published(Closed):
    """A row as printed: for each data set the figures by level, and within a level by column."""

    row: str
    sites: int | None = None  # as the table's heading has it; None: the table has one number of sites
    figures: dict[str, str]


class Table(Closed):
    """A table or a figure."""

    id: str
    title: str
    citation: str
    measures: str
    family: Family | None = None  # whose runs its cells are; None: nothing is run for it
    prints: str = ""  # of a figure: what it prints, if not numbers
    see: str = ""  # where else the same can be looked at
    protocol: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    entries: tuple[Line, ...] = ()
    published: tuple[Published, ...] = ()
    axes: Axes = Axes()
    preset: str = PAPER  # of the one-shot tables
    study: dict[str, Any] = {}  # laid over the family's protocol

    @model_validator(mode="after")
    def _fits_together(self) -> Table:
        rows = {published.row for published in self.published}
        for entry in self.entries:
            if self.published and not rows.issuperset(entry.rows):
                raise ValueError(f"the line {entry.label!r} stands beside a row that is not published")
        if len({entry.label for entry in self.entries}) < len(self.entries):
            raise ValueError("two lines have the same label")
        axes = self.axes
        if (self.entries or self.published) and not (axes.datasets and axes.levels and axes.sites and self.columns):
            raise ValueError("lines and published rows need axes and columns")
        for published in self.published:
            self._check_row(published)
        return self

    @property
    def is_of_a_paper(self) -> bool:
        """Whether a paper has it; one that prints nothing is ours."""
        return bool(self.published or self.prints)

    @property
    def whose(self) -> str:
        """Whose protocol it is, in a word."""
        return "paper" if self.is_of_a_paper else "table"

    def _check_row(self, published: Published) -> None:
        if published.sites is not None and published.sites not in self.axes.sites:
            raise ValueError(f"row {published.row!r} has {published.sites} sites, which is not on the axis")
        for dataset, text in published.figures.items():
            if dataset not in self.axes.datasets:
                raise ValueError(f"row {published.row!r} has {dataset}, which is not on the axis")
            words = text.split()
            if len(words) != len(self.axes.levels) * len(self.columns):
                raise ValueError(f"row {published.row!r} has {len(words)} figures on {dataset}")
            if not all(word == NONE or _FIGURE.fullmatch(word) for word in words):
                raise ValueError(f"row {published.row!r} on {dataset} is not made of numbers")

    def figure(self, row: str, dataset: str, sites: int, level: Level, column: int) -> str | None:
        """A published figure as printed; `sites` is the number in the table's heading."""
        for published in self.published:
            here = published.sites is None or published.sites == sites
            if published.row == row and here and dataset in published.figures:
                at = self.axes.levels.index(level) * len(self.columns) + column
                word = published.figures[dataset].split()[at]
                return None if word == NONE else word
        return None

    def beside(self, entry: Line, dataset: str, sites: int, level: Level, column: int) -> str | None:
        """The published figure that a line of ours stands beside: of several rows the highest."""
        found = [self.figure(row, dataset, sites, level, column) for row in entry.rows]
        return max((word for word in found if word is not None), key=value, default=None)

    def printed(self, label: str, dataset: str, sites: int, level: Level) -> list[str] | None:
        """What the paper prints beside our line of a label, column by column; None where it has no such line."""
        line = next((line for line in self.entries if line.label == label), None)
        if line is None or level not in self.axes.levels:
            return None
        found = [self.beside(line, dataset, sites, level, column) for column in range(len(self.columns))]
        return None if None in found else [word for word in found if word is not None]

    def site_counts(self, dataset: str) -> list[tuple[int, int]]:
        """Numbers of sites: as the table's heading has them, and as they are on this data set."""
        real = self.axes.sites_where.get(dataset, self.axes.sites)
        return list(zip(self.axes.sites, real, strict=True))


def value(printed: str) -> float:
    """The number of a printed figure, without its deviation."""
    return float(printed.partition("±")[0])
