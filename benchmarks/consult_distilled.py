"""How much of the panel one network keeps: `consult-distilled` with and without its parts, on the same site models.

A network is distilled once for each reading of the coordinator's work; then sites make of it what each reading of
theirs says, and their notes about it are kept. Everything else is as in the preset. A cell and a reading are kept in
`--out` when they are done and are not done again; trained models wait in `--work`.

    python benchmarks/consult_distilled.py bloodmnist.npz --preset fast --out papers/consult_distilled.json
    python benchmarks/consult_distilled.py --table --out papers/consult_distilled.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments import Experiment, Rows, by_place, main_of, means
from trained_cells import Cell
from wardround.methods.state import State
from wardround.papers.summaries import cells, headed

NAME = "consult_distilled"
METHOD = "consult-distilled"
READINGS: dict[str, dict[str, Any]] = {  # of the coordinator's work
    "as in the preset": {},
    "without the tally": {"tally_weight": 0.0},
    "without features": {"feature_weight": 0.0},
    "without either": {"tally_weight": 0.0, "feature_weight": 0.0},
    "from a random start": {"begin": "random"},
    "250 steps of the student": {"kd_steps": 250},
    "750 steps of the student": {"kd_steps": 750},
}
AT_SITES: dict[str, dict[str, Any]] = {  # of what sites make of it
    "as it came": {"prior": 0.0, "retake": False, "tune_epochs": 0},
    "new statistics": {"prior": 0.0, "tune_epochs": 0},
    "taught": {"prior": 0.0},
    "from a quarter of the prior": {"least_prior": 0.25, "with_own": False},
    "in one network": {"with_own": False},
    "as in the preset": {},
}
FIGURES = {
    "local": "what sites deploy, on their local tests, averaged over sites",
    "global": "the same on the global test",
    "panel_global": "the panel of `consult`, on the global test",
    "seconds": "of the coordinator's work",
}
PLACE = ("set", "alpha", "reading", "site")


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One network, and all that sites make of it."""
    reading = READINGS[place["reading"]]
    method = cell.make(METHOD, **reading)
    ctx = cell.context(method)
    began = time.perf_counter()
    *_, state = method.absorb(ctx, State(), cell.answers)
    seconds = time.perf_counter() - began
    *_, panel = cell.shared("consult", cell.answers)
    bar = cell.tally(panel).accuracy()
    cell.forget()
    cell.lessons = {}
    for name, changed in AT_SITES.items():
        made = cell.make(METHOD, **reading, **changed)
        notes: list[str] = []
        local, everywhere = cell.at_sites(made, replace(ctx, note=notes.append), state)
        figures = {"local": local, "global": everywhere, "panel_global": bar, "seconds": seconds}
        rounded = {key: round(value, 6) for key, value in figures.items()}
        yield {**place, "site": name, "figures": rounded, "jobs": options.jobs, "notes": sorted(notes)}
    cell.device.release()


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """Means over seeds, and how far below the panel."""
    summary = []
    for head, found in by_place(rows, PLACE):
        values = means(found, FIGURES)
        below, jobs = values["panel_global"] - values["global"], max(row["jobs"] for row in found)
        summary.append({**head, "mean": values, "below": below, "jobs": jobs})
    return sorted(summary, key=_order)


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """As the readings are listed above, whichever cell was done first."""
    return row["set"], row["alpha"], [*READINGS].index(row["reading"]), [*AT_SITES].index(row["site"])


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set, alpha and pair of readings, in percent."""
    head = ["set", "α", "at the coordinator", "at the site", "seeds", "local", "global", "below the panel", "seconds"]
    lines = headed(head)
    for row in record["summary"]:
        values = row["mean"]
        figures = [f"{100 * value:z.1f}" for value in (values["local"], values["global"], row["below"])]
        words = [row["set"], f"{row['alpha']:g}", row["reading"], row["site"], str(len(row["seeds"]))]
        beside = f" (up to {row['jobs']} at once)" if row["jobs"] > 1 else ""
        lines.append(cells([*words, *figures, f"{values['seconds']:.0f}{beside}"]))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    *(NAME, FIGURES, (METHOD, "consult"), entries, summarise, markdown),
    parts=lambda options: [{"reading": name} for name in options.readings],
)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS)[:1], metavar="READING")
    parser.add_argument(
        "--jobs", type=int, default=1, help="so many of these share the device now; kept beside seconds"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments, _options)


if __name__ == "__main__":
    sys.exit(main())
