"""FedKPer's Table 1: twelve methods, three seeds, on one partition, as one command that can be stopped at any moment.

Each entry is a run of its own in the folder `--work`, so a killed one goes on where it stood while that folder is
there; its figures go into `--out` when it ends, and what `--out` holds is never done again. `--seconds` stops before an
entry that would take longer than what is left, judged by earlier entries. `--jobs` does several at once; their seconds
are then those of entries that share a machine. All settings are in `wardround.papers`.

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

from fedkper_entries import chosen
from fedkper_summary import PUBLISHED_WORDS, markdown, summarise
from scripts import add_options, begin, fill, settings_given
from wardround.errors import BadInput
from wardround.papers.cells import images_hash
from wardround.papers.fedkper import NAME, SAME, FedKPer, cell, head, study_tree
from wardround.papers.multi_round import header, plan
from wardround.papers.results import Results


def open_results(path: Path, images: str, study: dict[str, Any]) -> Results:
    """The file of results of these images and settings."""
    whole = {**head(images, study), "published": PUBLISHED_WORDS}
    return Results(path, whole, SAME, lambda entries: summarise(entries, study))


def _table(tree: Mapping[str, Any]) -> str:
    """The table of a file, whoever wrote it last."""
    return markdown({**tree, "summary": summarise(tree["entries"], tree["study"])})


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
    return begin(parser.parse_args(arguments), NAME, _table, _start)


def _start(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if options.images is None:
        raise BadInput("no set is named; give the path of a MedMNIST .npz file, or phantoms:N")
    given = {"device": options.device, "rounds": options.rounds, "data": {"sites": options.sites}}
    tree = study_tree(options.images, settings_given(given))
    entries = chosen(options.methods, options.ablations)
    results = open_results(options.out, options.images.stem, header(tree))
    hashed = images_hash(options.images)
    # Every entry of one seed before the next seed.
    cells = [cell(options.images, seed) for seed in dict.fromkeys(options.seeds)]
    plans = [plan(tree, entry, where, hashed) for where in cells for entry in entries]
    return fill(options, FedKPer, results, plans, markdown, began)


if __name__ == "__main__":
    sys.exit(main())
