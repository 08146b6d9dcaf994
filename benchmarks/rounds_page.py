"""The figures of docs/rounds.md, from the stored results of the tables with several rounds.

Run it when a file of results is new; a test says when the page is behind.

    python benchmarks/rounds_page.py papers docs/rounds.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fedkper_readings
import fedkper_summary
import fedmp_summary
from pages import fill
from wardround.report.charts import Line, lines
from wardround.report.plots import standing_alone
from wardround.report.svg import Label

DRAWN = ("fedkper", "fedntd", "fedavg", "fedper")
WINDOW = 5  # rounds of the running mean that is drawn
SOURCES = {  # the mark of a part, the file it is from, the set of images in it, and how it is written
    "fedkper": ("fedkper_table1", "bloodmnist", fedkper_summary.markdown),
    "readings": ("fedkper_readings", "bloodmnist", fedkper_readings.markdown),
    "wbc_sites": ("fedmp_tables", "wbc_sites", fedmp_summary.markdown),
    "dermamnist": ("fedmp_tables_30_rounds", "dermamnist", fedmp_summary.markdown),
    "dermamnist, 100 rounds": ("fedmp_tables", "dermamnist", fedmp_summary.markdown),
}


def figures(folder: Path) -> tuple[str, dict[str, str]]:
    """The picture, and what stands between the marks of the page."""
    trees = {part: _of_set(folder / f"{name}.json", images) for part, (name, images, _) in SOURCES.items()}
    parts = {part: _below_a_heading(write(trees[part])) for part, (_, _, write) in SOURCES.items()}
    return picture(trees["fedkper"]["entries"]), parts


def _of_set(path: Path, images: str) -> dict[str, Any]:
    """A file of results, with what it has of one set of images."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    return {**tree, **{key: [line for line in tree[key] if line["set"] == images] for key in ("entries", "summary")}}


def _below_a_heading(text: str) -> str:
    """The page has headings of its own."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("### ")).strip()


def picture(entries: Sequence[Mapping[str, Any]]) -> str:
    """The shared model's accuracy on the global test by round, for some of the methods."""
    label = Label(
        "rounds",
        "Global accuracy over rounds",
        f"The shared model on the global test after each round: running mean of {WINDOW} rounds, mean over seeds",
    )
    series = [Line(name, tuple(enumerate(_course(entries, name), WINDOW))) for name in DRAWN]
    return standing_alone(lines(label, series, "{:.3f}".format, "{:g}".format, "round", width=640)) + "\n"


def _course(entries: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    runs = [entry["rounds"]["shared_global_accuracy"] for entry in entries if entry["entry"] == name]
    means = [statistics.fmean(values) for values in zip(*runs, strict=True)]
    return [statistics.fmean(means[end - WINDOW : end]) for end in range(WINDOW, len(means) + 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture beside the page, and the page's figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="the folder of stored results")
    parser.add_argument("page", type=Path)
    given = parser.parse_args(arguments)
    drawn, parts = figures(given.results)
    return fill(given.page, {f"rounds_page.py, {part}": text for part, text in parts.items()}, drawn)


if __name__ == "__main__":
    sys.exit(main())
