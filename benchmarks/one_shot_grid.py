"""Every one-shot method on every set, level of skew and seed, as one command that can be stopped at any moment.

A cell is a set of images, a Dirichlet alpha and a seed (of the partition, the initial weights and every other draw).
Sites train as FedISCA's clients do, each from weights of its own, and every entry of a cell works on the same site
models. Each entry is a run of its own in the folder `--work`, so a killed one goes on where it stood while that folder
is there; its figures go into `--out` when it ends, and what `--out` holds is never done again. `--seconds` stops before
an entry that would take longer than what is left, judged by earlier entries. `--jobs` does several entries at once, of
one cell only when its site models are there.

    python benchmarks/one_shot_grid.py bloodmnist.npz dermamnist.npz --preset fast --out one_shot_grid.json
    python benchmarks/one_shot_grid.py --table --out one_shot_grid.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from one_shot_entries import chosen
from one_shot_summary import PUBLISHED, markdown, summarise
from scripts import add_options, begin, fill, settings_given
from wardround.errors import BadInput
from wardround.learn.device import find_device
from wardround.papers.cells import file_hash
from wardround.papers.one_shot import NAME, SAME, OneShot, cell, head, header, plan, study_tree
from wardround.papers.results import Results


def open_results(path: Path, preset: str | None, study: dict[str, Any]) -> Results:
    """The file of results of this preset and these settings."""
    whole = {**head(preset, study), "published": PUBLISHED}
    return Results(path, whole, SAME, lambda entries: summarise(entries, study["data"]["sites"]))


def _table(tree: Mapping[str, Any]) -> str:
    """The table of a file, whoever wrote it last."""
    return markdown({**tree, "summary": summarise(tree["entries"], tree["study"]["data"]["sites"])})


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of the grid, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="*", help="MedMNIST .npz files")
    parser.add_argument("--preset", help="a named preset or a TOML file; without one, every method's own defaults")
    parser.add_argument("--methods", nargs="+", help="entries by label or by its part before the comma, or any method")
    parser.add_argument(
        "--ablations", action="store_true", help="also FedBiCross's Table 2, FedISCA's and DENSE's code"
    )
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.3, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sites", type=int)
    parser.add_argument("--model")
    parser.add_argument("--epochs", type=int)
    add_options(parser)
    return begin(parser.parse_args(arguments), NAME, _table, _start)


def _start(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if not options.files:
        raise BadInput("no set is named; give the paths of MedMNIST .npz files")
    device = find_device(options.device)
    given = {"data": {"sites": options.sites}, "model": {"name": options.model}, "train": {"epochs": options.epochs}}
    flags = settings_given({**given, "device": options.device})
    tree = study_tree(options.preset, flags, "bf16" if device.is_cuda else "fp32")
    results = open_results(options.out, options.preset and Path(options.preset).name, header(tree))
    if len({path.stem for path in options.files}) < len(options.files):
        raise BadInput("two sets have the same name; results go by it, so name each set once")
    hashes = {path: file_hash(path) for path in options.files}
    # A whole grid of one seed before the next seed.
    seeds, alphas = dict.fromkeys(options.seeds), dict.fromkeys(options.alphas)
    cells = [cell(path, alpha, seed) for seed in seeds for path in hashes for alpha in alphas]
    entries = chosen(options.methods, options.ablations)
    plans = [plan(tree, entry, where, hashes[where.source]) for where in cells for entry in entries]
    return fill(options, OneShot, results, plans, markdown, began)


if __name__ == "__main__":
    sys.exit(main())
