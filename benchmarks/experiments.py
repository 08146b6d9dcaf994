"""What experiments on cells of trained sites share: their options, and a file of cells that grows cell by cell."""

from __future__ import annotations

import argparse
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pages
from common import keep, machine, told
from trained_cells import Cell, open_cell
from wardround.data.federation import Site
from wardround.errors import BadInput
from wardround.learn.device import find_device, one_thread_per_worker
from wardround.methods.registry import make, own_settings
from wardround.papers.one_shot import header, study_tree
from wardround.papers.results import read_results

SMOKE: dict[str, Any] = {
    "model": {"name": "small", "width": 4},
    "train": {"epochs": 8, "batch": 32, "lr": 1e-2, "schedule": "cosine"},
}
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """A name, what its figures mean, the methods that it asks, the rows of one cell, and what all rows come to.

    `parts` names the parts of a cell that train on their own and are kept on their own, and `change` what each does to
    a site before it trains. `images` makes of a file, in a folder, the one that is dealt to sites.
    """

    name: str
    figures: Mapping[str, str]
    methods: Sequence[str]
    rows: Callable[[Cell, Mapping[str, Any], argparse.Namespace], Iterable[dict[str, Any]]]
    summarise: Callable[[Rows], list[dict[str, Any]]]
    markdown: Callable[[Mapping[str, Any]], str]
    parts: Callable[[argparse.Namespace], Sequence[dict[str, Any]]] = lambda options: [{}]
    change: Callable[[Site, Mapping[str, Any]], Site] = lambda site, part: site
    images: Callable[[Path, Path], Path] = lambda source, folder: source


def by_place(rows: Rows, place: Sequence[str]) -> Iterable[tuple[dict[str, Any], Rows]]:
    """Rows that differ in their seed alone, under what they have in common and their seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in place), []).append(row)
    for key, found in groups.items():
        yield {**dict(zip(place, key, strict=True)), "seeds": sorted(row["seed"] for row in found)}, found


def means(rows: Rows, figures: Iterable[str]) -> dict[str, float]:
    """Of each figure."""
    return {name: mean(row["figures"][name] for row in rows) for name in figures}


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Which cells, where results go, and where it runs."""
    parser.add_argument("files", type=Path, nargs="*", help="MedMNIST .npz files")
    parser.add_argument("--out", type=Path, default=Path("papers") / f"{name}.json")
    parser.add_argument("--table", action="store_true", help="print the table of --out as Markdown and do nothing else")
    parser.add_argument("--page", type=Path, help="a page with this script's marks, for the table")
    parser.add_argument("--work", type=Path, help="folder of trained models (default: a temporary one)")
    parser.add_argument("--preset", help="a named preset or a TOML file")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.3, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a narrow network, a few epochs: minutes on one core")
    parser.add_argument("--seconds", type=float, help="begin no cell after so many seconds")
    parser.add_argument("--device", default="auto")


def main_of(
    experiment: Experiment,
    about: str | None,
    arguments: Sequence[str] | None,
    more: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> int:
    """A script's whole work: do what is left of the cells, print the table, fill the page where one is named.

    `about` is the script's docstring, `more` adds options of its own. What a person can mend becomes one line and an
    exit code.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    _add_options(parser, experiment.name)
    more(parser)
    options = parser.parse_args(arguments)
    return told(lambda: _start(experiment, options))


def _start(experiment: Experiment, options: argparse.Namespace) -> int:
    if not options.table:
        _work(experiment, options, read_results(options.out, experiment.name, ()) if options.out.exists() else {})
    if not options.out.exists():
        raise BadInput(f"{options.out} holds no results; name the file of an earlier start with --out")
    record = read_results(options.out, experiment.name, ("entries",))
    table = experiment.markdown({**record, "summary": experiment.summarise(record["entries"])})
    print(table)
    return 0 if options.page is None else pages.fill(options.page, {f"{experiment.name}.py": table})


def _work(experiment: Experiment, options: argparse.Namespace, record: dict[str, Any]) -> None:
    began = time.monotonic()
    if not options.files:
        raise BadInput("no set is named; give the paths of MedMNIST .npz files")
    precision = "bf16" if find_device(options.device).is_cuda else "fp32"
    flags = {"device": options.device, "data": {"sites": options.sites}, **(SMOKE if options.smoke else {})}
    tree = study_tree(options.preset, flags, precision)
    head = {"study": header(tree), "methods": {name: _settings(tree, name) for name in experiment.methods}}
    if any(record.get(key, value) != value for key, value in head.items()):
        raise BadInput(f"{options.out} holds results of other settings; use another --out")
    record |= {"benchmark": experiment.name, **head, "measures": dict(experiment.figures), "machine": machine()}
    for key in ("cells", "entries", "summary"):
        record.setdefault(key, [])
    with tempfile.TemporaryDirectory() as folder, one_thread_per_worker():
        for place, source, part in _places(experiment, options):
            if place in record["cells"]:
                continue
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                break
            change = lambda site, part=part: experiment.change(site, part)  # noqa: E731
            images = experiment.images(source, Path(folder))
            cell = open_cell(tree, images, place["alpha"], place["seed"], options.work or Path(folder), change)
            record = _kept(experiment, options.out, record, place, list(experiment.rows(cell, place, options)))
            print(f"{time.monotonic() - began:.0f} s: {place}", flush=True)


def _kept(
    experiment: Experiment, out: Path, record: dict[str, Any], place: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The file with one cell more, written whole; what other processes have added to it since stays."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        now = read_results(out, experiment.name, ("cells", "entries")) if out.exists() else record
        cells, entries = now["cells"], now["entries"]
        if place not in cells:
            cells, entries = [*cells, place], [*entries, *rows]
        record = {**record, "cells": cells, "entries": entries, "summary": experiment.summarise(entries)}
        keep(out, record)
    finally:
        os.close(folder)
    return record


def _settings(tree: Mapping[str, Any], method: str) -> dict[str, Any]:
    """A method's own settings in full, as a results file has them."""
    found: dict[str, Any] = make(method, own_settings(tree.get("set", {}), method)).settings.model_dump(mode="json")
    return found


def _places(
    experiment: Experiment, options: argparse.Namespace
) -> Iterable[tuple[dict[str, Any], Path, dict[str, Any]]]:
    """A whole grid of one seed before the next seed."""
    for seed in options.seeds:
        for source in options.files:
            for alpha in options.alphas:
                for part in experiment.parts(options):
                    yield {"set": source.stem, "alpha": alpha, "seed": seed, **part}, source, part
