"""Why our figures differ from FedKPer's Table 1: its two ends, FedAvg and FedKPer, under other readings of the study.

The paper and its code leave open which draw of the partition was used (it is cached without its seed), and differ from
each other in momentum, batch size and decay of the rate. Each reading changes what its name says and nothing else. It
is stopped and goes on as `fedkper_table.py` does.

    python benchmarks/fedkper_readings.py bloodmnist.npz --out papers/fedkper_readings.json --jobs 2
    python benchmarks/fedkper_readings.py --table --out papers/fedkper_readings.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkper_entries import COLUMNS, chosen, published
from fedkper_summary import figure
from scripts import add_options, begin, fill, settings_given
from wardround.errors import BadInput
from wardround.papers.cells import Cell, images_hash
from wardround.papers.fedkper import MEASURES, PROTOCOL, SERIES, FedKPer, study_tree
from wardround.papers.multi_round import header, plan
from wardround.papers.results import Results
from wardround.papers.runs import SECONDS
from wardround.papers.summaries import averaged, cells, grouped, headed

NAME = "fedkper_readings"
SAME = ("readings",)
COMPARED = ("fedavg", "fedkper")
READINGS: dict[str, dict[str, Any]] = {
    "as in the table": {},
    **{f"partition {seed}": {"data": {"partition_seed": seed}} for seed in range(1, 7)},
    "rate not decayed": {"train": {"round_decay": 1.0}},  # the paper has no decay, its code 0.99 a round
    "no momentum": {"train": {"momentum": 0.0}},  # the paper has none, its code 0.9
    "batch 50": {"train": {"batch": 50}},  # the code's default; its script has 12
    "no momentum, batch 50": {"train": {"momentum": 0.0, "batch": 50}},
    "uncapped": {"data": {"capped": False}},  # a plain Dirichlet draw
}


def summarise(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds by method and reading, in the order above."""
    rows = [
        {key: found[0][key] for key in ("set", "reading", "entry")} | averaged(found, MEASURES, 5)
        for found in grouped(entries, "set", "reading")
    ]
    order = list(READINGS)
    return sorted(rows, key=lambda row: (row["set"], COMPARED.index(row["entry"]), order.index(row["reading"])))


def markdown(results: Mapping[str, Any]) -> str:
    """A table for each set: a line for every reading of each method, and the published one below whole runs."""
    head = ["entry", "reading", "seeds", *COLUMNS.values()]
    whole = all(study["rounds"] == PROTOCOL["rounds"] for study in results["readings"].values())
    lines = []
    for images in dict.fromkeys(row["set"] for row in results["summary"]):
        lines += [f"### {images}", "", *headed(head)]
        for label in COMPARED:
            rows = [row for row in results["summary"] if (row["set"], row["entry"]) == (images, label)]
            for row in rows:
                lines.append(_line(label, row["reading"], str(len(row["seeds"])), row["mean"]))
            stated = published(images, label) if rows and whole else None
            if stated is not None:
                lines.append(_line(label, "published", "", stated))
        lines.append("")
    return "\n".join([*lines, *(f"- {name}: {MEASURES[key]}" for key, name in COLUMNS.items())])


def _line(label: str, reading: str, seeds: str, figures: Mapping[str, float | None]) -> str:
    return cells([label, reading, seeds, *map(figure, (figures[key] for key in COLUMNS))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left of the readings, and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, nargs="?", help="a MedMNIST .npz file, or phantoms:N")
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=READINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int)
    add_options(parser)
    return begin(parser.parse_args(arguments), NAME, markdown, _start)


def _start(options: argparse.Namespace) -> int:
    began = time.monotonic()
    if options.images is None:
        raise BadInput("no set is named; give the path of a MedMNIST .npz file, or phantoms:N")
    flags = settings_given({"device": options.device, "rounds": options.rounds})
    trees = {name: study_tree(options.images, {**changed, **flags}) for name, changed in READINGS.items()}
    head = {
        "benchmark": NAME,
        "readings": {name: header(tree) for name, tree in trees.items()},
        "measures": {**MEASURES, "seconds": SECONDS},
        "series": SERIES,
    }
    results = Results(options.out, head, SAME, summarise)
    hashed = images_hash(options.images)
    plans = [
        plan(trees[name], line, _cell(options.images, name, seed), hashed)
        for seed in dict.fromkeys(options.seeds)
        for name in dict.fromkeys(options.readings)
        for line in chosen(COMPARED, ablations=False)
    ]
    return fill(options, FedKPer, results, plans, markdown, began)


def _cell(source: Path, reading: str, seed: int) -> Cell:
    place = {"set": source.stem, "reading": reading, "seed": seed}
    return Cell(source, place, f"{source.stem}-{reading.replace(' ', '_')}-seed{seed}")


if __name__ == "__main__":
    sys.exit(main())
