"""FedKPer's Table 1: twelve methods, three seeds, on one partition, as one command that can be stopped at any moment.

Each entry is a run of its own in the folder `--work`, so a killed one goes on where it stood while that folder is
there; its figures go into `--out` when it ends, and what `--out` holds is never done again. `--seconds` stops before an
entry that would take longer than what is left, judged by earlier entries. `--jobs` does several at once; their seconds
are then those of entries that share a machine. All settings are in `fedkper_entries.py`.

    python benchmarks/fedkper_table.py bloodmnist.npz --out papers/fedkper_table1.json --ablations
    python benchmarks/fedkper_table.py --table --out papers/fedkper_table1.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkper_entries import Cell, chosen, header, plan, study_tree
from fedkper_summary import MEASURES, PUBLISHED_WORDS, SECONDS, SERIES, markdown, summarise
from resumable import Plan, Results, Runs, add_options, begin, fill, images_hash
from wardround.errors import BadInput

NAME = "fedkper_table1"


class Table(Runs):
    """Entries with their figures over rounds, and the rounds themselves."""

    def figures(self, planned: Plan, run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
        """Every measure, and a list by round of every series."""
        values = {headline["key"]: headline["value"] for headline in result["headlines"]}
        rounds = {key: [_short(point[key]) for point in result["rounds"]] for key in SERIES}
        return {"figures": {key: _short(values.get(key)) for key in MEASURES}, "rounds": rounds}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def open_results(path: Path, images: str, study: dict[str, Any]) -> Results:
    """The file of results of these images and settings."""
    head = {
        "benchmark": NAME,
        "set": images,
        "study": study,
        "measures": {**MEASURES, "seconds": SECONDS},
        "series": SERIES,
        "published": PUBLISHED_WORDS,
    }
    return Results(path, head, ("set", "study"), lambda entries: summarise(entries, study))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of the table, and print it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, nargs="?", help="a MedMNIST .npz file, or phantoms:N")
    parser.add_argument("--methods", nargs="+", help="methods of the table by name")
    parser.add_argument("--ablations", action="store_true", help="also FedKPer's components, its code and its cap")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--sites", type=int)
    add_options(parser)
    return begin(parser.parse_args(arguments), NAME, markdown, _start)


def _start(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if options.images is None:
        raise BadInput("no set is named; give the path of a MedMNIST .npz file, or phantoms:N")
    flags: dict[str, Any] = {"device": options.device, "rounds": options.rounds, "data": {"sites": options.sites}}
    flags = {key: value for key, value in flags.items() if value is not None and value != {"sites": None}}
    tree = study_tree(options.images, flags)
    entries = chosen(options.methods, options.ablations)
    results = open_results(options.out, options.images.stem, header(tree))
    hashed = images_hash(options.images)
    # Every entry of one seed before the next seed.
    cells = [Cell(options.images, seed) for seed in dict.fromkeys(options.seeds)]
    plans = [plan(tree, entry, cell, hashed) for cell in cells for entry in entries]
    return fill(options, Table, results, plans, markdown, began)


if __name__ == "__main__":
    sys.exit(main())
