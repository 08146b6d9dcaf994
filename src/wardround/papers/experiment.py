"""Part of a table as plans: which cells are asked for, where their images are, and which file their results go to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wardround.data.medmnist import official_name
from wardround.errors import BadInput
from wardround.learn.device import find_device
from wardround.papers import fedkper, fedmp, one_shot, paper_setting
from wardround.papers.cells import Plan, images_hash, is_drawn
from wardround.papers.datasets import DATASETS, stands_for
from wardround.papers.families import RUNS
from wardround.papers.results import Results, read_results
from wardround.papers.runs import Runs
from wardround.papers.schema import PAPER, Level, Line, Table
from wardround.papers.summaries import averaged, grouped


@dataclass(frozen=True)
class Choice:
    """What of a table is asked for; what is empty is all of it."""

    datasets: Sequence[str] = ()
    levels: Sequence[Level] = ()
    sites: Sequence[int] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)  # over the paper's setting
    preset: str | None = None  # over the table's


@dataclass
class Part:
    """Plans whose results share a file, headed by the settings that they have in common."""

    runs: type[Runs]
    head: dict[str, Any]
    plans: list[Plan]


def parts(table: Table, choice: Choice, data: Path, device: str) -> tuple[list[Part], list[str]]:
    """Every cell that is asked for, a whole grid of one seed before the next; and what cannot be run, with reasons."""
    if table.family is None or not table.entries:
        raise BadInput(f"nothing is run for {table.id}; {table.see or 'see `wardround papers show`'}")
    runs, lines = RUNS[table.family], _lines(table, choice.methods)
    levels = _among(choice.levels, table.axes.levels, "--alphas", table)
    preset = choice.preset or table.preset
    precision = "bf16" if find_device(device).is_cuda and preset != PAPER else "fp32"
    found: dict[str, Part] = {}
    sources, missing = _sources(table, choice.datasets, data)
    hashes = {source: images_hash(source) for source in sources.values()}
    seeds = choice.seeds or table.axes.seeds
    for seed, (dataset, source), level in itertools.product(seeds, sources.items(), levels):
        for sites in _sites(table, stands_for(dataset), choice.sites):
            flags = {**choice.flags, "device": device}
            tree = paper_setting.study_tree(table, source, dataset, sites, level, flags, preset, precision)
            head = _head(table, source, dataset, tree, preset)
            part = found.setdefault(str([head[key] for key in runs.same]), Part(runs, head, []))
            where = paper_setting.cell(table, source, dataset, level, seed)
            part.plans += [paper_setting.plan(table, tree, line, where, hashes[source]) for line in lines]
    if not found:
        raise BadInput(f"no images of {table.id} are at hand: {'; '.join(missing)}")
    return list(found.values()), missing


def open_results(part: Part, place: Path) -> Results:
    """The file at `place`; or, where that is a folder, the one in it of these settings, else a new one."""
    runs = part.runs
    path = place if place.suffix == ".json" else _file_in(place, part.head, runs.same)
    keys = ("set", "alpha") if runs.family == "one-shot" else ("set",)

    def summarise(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        groups = grouped(entries, *keys)
        return [{**{key: g[0][key] for key in (*keys, "entry")}, **averaged(g, runs.measures, 6)} for g in groups]

    return Results(path, part.head, runs.same, summarise)


def _file_in(folder: Path, head: Mapping[str, Any], same: Sequence[str]) -> Path:
    name = head["benchmark"]
    paths = (folder / (f"{name}.json" if n == 1 else f"{name}-{n}.json") for n in itertools.count(1))
    for path in paths:
        if not path.exists():
            return path
        found = read_results(path, name)
        if all(found.get(key) == head[key] for key in same):
            return path
    raise AssertionError("numbers do not end")


def _head(table: Table, source: Path, dataset: str, tree: dict[str, Any], preset: str) -> dict[str, Any]:
    """What begins the file of a cell's results."""
    study = paper_setting.header(table, tree)
    if table.family == "fedkper":
        return fedkper.head(source.stem, study)
    if table.family == "fedmp":
        return fedmp.head({paper_setting.kind_of(dataset): study})
    return one_shot.head(Path(preset).name, study)


# What is asked for ----------------------------------------------------------------------------------------------------


def _lines(table: Table, methods: Sequence[str]) -> list[Line]:
    """By label, or by the name up to the comma."""
    for name in methods:
        if all(name not in (line.label, line.group) for line in table.entries):
            known = ", ".join(dict.fromkeys(line.group for line in table.entries))
            raise BadInput(f"{name!r} is not in {table.id}; choose from {known}")
    return [line for line in table.entries if not methods or {line.label, line.group} & set(methods)]


def _among(chosen: Sequence[Any], known: Sequence[Any], option: str, table: Table) -> Sequence[Any]:
    for one in chosen:
        if one not in known:
            raise BadInput(f"{option} {one} is not in {table.id}; choose from {', '.join(map(str, known))}")
    return chosen or known


def _sites(table: Table, dataset: str, chosen: Sequence[int]) -> list[int]:
    """Numbers of sites on a data set; they are chosen as the table's heading has them."""
    counts = table.site_counts(dataset)
    headings = _among(chosen, [heading for heading, _ in counts], "--sites", table)
    return [sites for heading, sites in counts if heading in headings]


def _sources(table: Table, datasets: Sequence[str], data: Path) -> tuple[dict[str, Path], list[str]]:
    """Where the images of each set are, and which are not there."""
    found: dict[str, Path] = {}
    missing: list[str] = []
    unknown: list[str] = []
    for given in dict.fromkeys(datasets or table.axes.datasets):
        name = _named(table, given)
        known = DATASETS.get(name)
        if known is not None:
            if said := known.missing(data):
                missing.append(f"{name}: {said}")
            else:
                found[name] = data / known.file
            continue
        path = Path(given)
        if not is_drawn(path) and not path.exists():
            path = data / f"{given}.npz"
            if not path.exists():
                unknown.append(repr(given))
        found[path.stem] = path
    if unknown:
        sets = ", ".join(table.axes.datasets)
        raise BadInput(f"{', '.join(unknown)}: no set of {table.id} ({sets}) and no file; check the name")
    return found, list(dict.fromkeys(missing))


def _named(table: Table, given: str) -> str:
    """`blood` means `bloodmnist`."""
    return next((name for name in (given, official_name(given)) if name in table.axes.datasets), given)
