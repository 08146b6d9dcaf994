"""FedMP's tables on sites with different images: against FedAvg, its two modules, its stages, few rounds, baselines.

Sites are the places of acquisition that a file names (`*_site`), and for `--shifted` files five sites with a fixed
acquisition shift each. Each entry is a run of its own in the folder `--work`, so a killed one goes on where it stood
while that folder is there; its figures go into `--out` when it ends, and what `--out` holds is never done again.
`--seconds` stops before an entry that would take longer than what is left, judged by earlier entries; `--jobs` does
several at once. All settings are in `wardround.papers`.

    python benchmarks/fedmp_table.py wbc_sites.npz dermamnist.npz --shifted bloodmnist.npz --out fedmp_tables.json
    python benchmarks/fedmp_table.py --table --out fedmp_tables.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmp_entries import FEWSHOT_EPOCHS, PARTS, chosen
from fedmp_summary import WORDS, markdown, summarise
from scripts import add_options, begin, fill, settings_given
from wardround.errors import BadInput
from wardround.learn.device import find_device
from wardround.papers.cells import images_hash
from wardround.papers.fedmp import NAME, SAME, FedMP, Kind, cell, head, plan, set_name, study_tree
from wardround.papers.multi_round import header
from wardround.papers.results import Results


def open_results(path: Path, studies: Mapping[str, Any]) -> Results:
    """The file of results under these settings; it holds several sets of images."""
    return Results(path, {**head(studies), "words": WORDS}, SAME, summarise)


def _table(tree: Mapping[str, Any]) -> str:
    """The table of a file, whoever wrote it last."""
    return markdown({**tree, "summary": summarise(tree["entries"])})


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of the tables, and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="*", help=".npz files with places of acquisition, or phantoms:N")
    parser.add_argument("--shifted", type=Path, nargs="+", default=[], help="files whose sites get fixed shifts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1], help="default: all but the baselines")
    parser.add_argument("--baselines", action="store_true", help="the baselines, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--fewshot-epochs", type=int, nargs="+", default=FEWSHOT_EPOCHS)
    parser.add_argument("--model")
    parser.add_argument("--width", type=int)
    parser.add_argument("--precision", help="fp32 or bf16 (default: bf16 on a GPU)")
    add_options(parser)
    return begin(parser.parse_args(arguments), NAME, _table, _start)


def _start(options: argparse.Namespace) -> int:
    began = time.monotonic()
    sets: list[tuple[Path, Kind]] = [(path, "natural") for path in options.files]
    sets += [(path, "shifted") for path in options.shifted]
    if not sets:
        raise BadInput("no set is named; give .npz files with places of acquisition, or --shifted FILE")
    if len({set_name(*named) for named in sets}) < len(sets):
        raise BadInput("two sets have the same name; results go by it, so name each set once")
    trees: dict[Kind, Any] = {kind: study_tree(kind, _flags(options)) for kind in ("natural", "shifted")}
    entries = chosen([*options.parts, *(["baselines"] if options.baselines else [])], options.fewshot_epochs)
    results = open_results(options.out, {kind: header(tree) for kind, tree in trees.items()})
    hashes = {path: images_hash(path) for path, _ in sets}
    # Every entry of one seed before the next seed.
    cells = [(kind, cell(path, kind, seed)) for seed in dict.fromkeys(options.seeds) for path, kind in sets]
    plans = [plan(trees[kind], entry, where, hashes[where.source]) for kind, where in cells for entry in entries]
    return fill(options, FedMP, results, plans, markdown, began)


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    """What the options set of a study."""
    precision = options.precision or ("bf16" if find_device(options.device).is_cuda else "fp32")
    given = {
        "device": options.device,
        "rounds": options.rounds,
        "model": {"name": options.model, "width": options.width},
        "train": {"epochs": options.epochs, "precision": precision},
    }
    return settings_given(given)


if __name__ == "__main__":
    sys.exit(main())
