"""Ours beside the published: for every cell of a table the mean over seeds, its deviation, the paper's figure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from wardround.papers.datasets import DATASETS, STAND_INS, stands_for
from wardround.papers.paper_setting import method_deviations, study_deviations
from wardround.papers.schema import Column, Level, Line, Table, value
from wardround.papers.stored import Finished

Seeds = Sequence[Finished]


@dataclass(frozen=True)
class Figure:
    """One figure: ours over seeds in the paper's unit, and the paper's as printed."""

    column: Column
    level: Level
    ours: tuple[float, ...]
    published: str | None

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return statistics.fmean(self.ours) if self.ours else None

    @property
    def deviation(self) -> float | None:
        """Of a sample, n - 1; none of a single seed."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.published is None else self.mean - value(self.published)


@dataclass(frozen=True)
class Row:
    """A line in a block: a figure for every level and column."""

    line: Line
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Block:
    """The part of a table on one data set with one number of sites; `images` are what ours was measured on."""

    dataset: str
    sites: int
    images: tuple[str, ...]
    rows: tuple[Row, ...]
    finished: tuple[Finished, ...]
    cells: int  # seeds of every line and level, as many as the paper has
    at_hand: int  # of these

    @property
    def has_ours(self) -> bool:
        """Whether anything of it was measured."""
        return bool(self.finished)


@dataclass(frozen=True)
class Comparison:
    """A whole table. `files` are all results at hand, for a table whose figures no run of the harness makes."""

    table: Table
    finished: tuple[Finished, ...]
    files: tuple[Path, ...] = ()

    @cached_property
    def blocks(self) -> list[Block]:
        """One for every data set and number of sites of the table, then one for every other set of ours."""
        own = [(dataset, *count) for dataset in self.table.axes.datasets for count in self.table.site_counts(dataset)]
        found = [self._block(dataset, heading, sites) for dataset, heading, sites in own]
        labels = {line.label for line in self.table.entries}
        mine = (f for f in self.finished if f.family == self.table.family and f.entry["entry"] in labels)
        others = dict.fromkeys((stands_for(f.entry["set"]), f.study["data"]["sites"]) for f in mine)
        further = [place for place in others if place[0] not in self.table.axes.datasets]
        return found + [self._block(name, self.table.axes.sites[0], sites) for name, sites in further]

    def heading(self, block: Block) -> str:
        """A block's name: its data set, its sites where they are counted, and what stands in for it."""
        known = DATASETS.get(block.dataset)
        of_places = self.table.family == "fedmp" or (known is not None and known.places)
        stand_ins = [images for images in block.images if images != block.dataset]
        by = f", measured on {', '.join(stand_ins)}" if stand_ins else ""
        return f"{block.dataset}{'' if of_places else f', {block.sites} sites'}{by}"

    def done(self) -> tuple[int, int]:
        """How many seeds of cells of the paper's own axes are at hand, and how many there are in all."""
        if self.table.family is None:
            return 0, 0
        own = [block for block in self.blocks if block.dataset in self.table.axes.datasets]
        return sum(block.at_hand for block in own), sum(block.cells for block in own)

    def _block(self, dataset: str, heading: int, sites: int) -> Block:
        rows: list[Row] = []
        used: list[Finished] = []
        most, at_hand = len(self.table.axes.seeds), 0
        for line in self.table.entries:
            figures = []
            for level in self.table.axes.levels:
                seeds = self._seeds(line, dataset, sites, level)
                used += seeds
                at_hand += min(len(seeds), most)
                for number, column in enumerate(self.table.columns):
                    printed = self.table.beside(line, dataset, heading, level, number)
                    figures.append(Figure(column, level, _values(column, dataset, seeds), printed))
            rows.append(Row(line, tuple(figures)))
        rows += self._published_alone(dataset, heading)
        images = tuple(dict.fromkeys(found.entry["set"] for found in used))
        cells = len(self.table.entries) * len(self.table.axes.levels) * most
        return Block(dataset, sites, images, tuple(rows), tuple(used), cells, at_hand)

    def _published_alone(self, dataset: str, heading: int) -> list[Row]:
        """The rows of a table that nothing of ours stands beside."""
        taken = {row for line in self.table.entries for row in line.rows}
        rows = []
        for row in dict.fromkeys(published.row for published in self.table.published):
            if row in taken:
                continue
            figures = [
                Figure(column, level, (), self.table.figure(row, dataset, heading, level, number))
                for level in self.table.axes.levels
                for number, column in enumerate(self.table.columns)
            ]
            rows.append(Row(Line(label=row, method=""), tuple(figures)))
        return rows

    def _seeds(self, line: Line, dataset: str, sites: int, level: Level) -> Seeds:
        """The seeds of a cell under one setting: of several settings that which is nearest the paper's."""
        groups: dict[str, dict[int, Finished]] = defaultdict(dict)
        for found in self.finished:
            if found.is_of(self.table, line, dataset, sites, level):
                groups[f"{found.entry['set']} {found.settings}"].setdefault(found.entry["seed"], found)
        alike = list(groups.values())
        if not alike:
            return []

        def distance(seeds: dict[int, Finished]) -> tuple[int, int]:
            one = next(iter(seeds.values()))
            apart = study_deviations(self.table, dataset, sites, level, one.study)
            return len(apart) + len(method_deviations(self.table, line, one.record)), -len(seeds)

        nearest = alike[0] if len(alike) == 1 else min(alike, key=distance)
        return [nearest[seed] for seed in sorted(nearest)]

    def deviations(self) -> list[str]:
        """Everything in which ours is not the paper's setting: of the study, then line by line, then of the images."""
        lines = {line.label: line for line in self.table.entries}
        studies: dict[str, dict[str, None]] = defaultdict(dict)
        methods: dict[str, None] = {}
        for block in self.blocks:
            for found in _distinct(block.finished):
                label, preset = found.entry["entry"], f"preset {found.preset}; " if found.preset else ""
                place = (self.table, block.dataset, block.sites, found.level, found.study)
                if words := ", ".join(study_deviations(*place)):
                    studies[f"{preset}{words}"][found.entry["set"]] = None
                if words := ", ".join(method_deviations(self.table, lines[label], found.record)):
                    methods[f"{label}: {words}"] = None
        said = {f"the study on {', '.join(sets)}: {words}": None for words, sets in studies.items()} | methods
        for block in self.blocks:
            for images in block.images:
                if images in STAND_INS:
                    said[STAND_INS[images]] = None
                elif stands_for(images) not in self.table.axes.datasets:
                    said[f"{images} is not a set of the paper's"] = None
        return list(said)


def _distinct(finished: Sequence[Finished]) -> list[Finished]:
    """One of each set, level and setting."""
    return list({(one.entry["set"], one.level, one.settings): one for one in reversed(finished)}.values())[::-1]


def _values(column: Column, dataset: str, seeds: Seeds) -> tuple[float, ...]:
    measure = column.measure_of(dataset)
    if measure is None:
        return ()
    found = (one.entry["figures"].get(measure) for one in seeds)
    return tuple(column.scale * number for number in found if number is not None)
