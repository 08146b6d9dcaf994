"""What FedBiCross leaves open, read in other ways: what each reading gains, on the same site models.

The paper is silent on what of its models' answers is clustered, how fast cross-cluster weights move, how many classes a
cluster's images are drawn for, and much of Stage 3 (`fedbicross.py` lists it). A reading of Stages 1 and 2 costs half a
minute on a GPU, one of Stage 3 a few seconds; so each of the former is worked out once, and sites make of the result
what each of the latter says. Everything else is as in the preset. A cell and a reading are kept in `--out` when they
are done and are not done again; trained models wait in `--work`. `--page` puts the table into a page.

    python benchmarks/fedbicross_readings.py bloodmnist.npz --preset fast --alphas 0.1 --out fedbicross_readings.json
    python benchmarks/fedbicross_readings.py --table --out fedbicross_readings.json --page docs/oneshot.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from experiments import Experiment, Rows, by_place, main_of
from one_shot_summary import NONE
from trained_cells import Cell
from wardround.learn.predictor import single
from wardround.methods.base import join_groups
from wardround.methods.state import State
from wardround.papers.summaries import cells, headed

NAME = "fedbicross_readings"
METHOD = "fedbicross"
FOUR = {"clusters": 4, "probe": "logits"}  # the paper's K at alpha 0.1; many softmax answers to noise are one point
READINGS: dict[str, dict[str, Any]] = {  # of Stages 1 and 2
    "as in the preset": {},
    "clustered by logits": {"probe": "logits"},
    "K = 4 by logits": FOUR,
    "K = 4 by logits, η_w = 0.05": {**FOUR, "eta_w": 0.05},
    "K = 4 by logits, η_w = 0.05, targets by shares": {**FOUR, "eta_w": 0.05, "targets": "shares"},
    "targets by shares": {"targets": "shares"},
    "known targets": {"targets": "known"},
    "mean of probabilities": {"mean": "probabilities"},
    "mean of probabilities, known targets": {"mean": "probabilities", "targets": "known"},
    "mean of probabilities, one cluster": {"mean": "probabilities", "clusters": 1},
    "from a member": {"begin": "member"},
    "learning at every step": {"inner": "all"},
    "16 trajectories": {"trajectories": 16},
    "τ = 20 in Stage 2": {"temperature": 20.0},
}
WARM = {"personal_temperature": 20.0}  # the paper's, if its τ is Eq. 10's, too
PERSONAL: dict[str, dict[str, Any]] = {  # of Stage 3
    "none": {"personal": False},
    "none, statistics of made images": {"personal": False, "recalibrate": "synthetic"},
    "as in the preset": {},
    "γ = 0.7": {"gamma": 0.7},
    "γ = 1": {"gamma": 1.0},
    "δ = 0": {"delta": 0.0},
    "τ = 20": WARM,
    "τ = 20, γ = 1": {**WARM, "gamma": 1.0},
    "τ = 20, 10 epochs": {**WARM, "personal_epochs": 10},
}
FIGURES = {
    "local": "what sites deploy, on their local tests, averaged over sites",
    "global": "the same on the global test",
    "own_local": "each site's own model, on its local test, averaged over sites",
    "own_global": "the same on the global test",
    "ensemble_global": "the mean of all models' logits, on the global test",
}
PLACE = ("set", "alpha", "reading", "personal")


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One reading of Stages 1 and 2, and on it those of Stage 3."""
    reading = READINGS[place["reading"]]
    method = cell.make(METHOD, **reading)
    ctx = cell.context(method)
    *_, state = method.absorb(ctx, State(), cell.answers)
    bars, clusters = _bars(cell), state.facts["clusters"]
    for name in options.personal:
        made = cell.make(METHOD, **reading, **PERSONAL[name])
        figures = dict(zip(("local", "global"), cell.at_sites(made, ctx, state), strict=True))
        rounded = {key: round(value, 6) for key, value in {**figures, **bars}.items()}
        yield {**place, "personal": name, "clusters": clusters, "figures": rounded}
    cell.device.release()


def _bars(cell: Cell) -> dict[str, float]:
    """What needs no FedBiCross."""
    alone = {name: single(cell.study.spec(name), join_groups(answer)) for name, answer in cell.answers.items()}
    local, everywhere = cell.accuracies(alone)
    *_, panel = cell.shared("ensemble", cell.answers)
    return {"own_local": local, "own_global": everywhere, "ensemble_global": cell.tally(panel).accuracy()}


# The table ------------------------------------------------------------------------------------------------------------


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """Means over seeds; how far below the sites' own models at home, and how much of the way to the ensemble is won.

    In the order of the readings above, whenever each was done.
    """
    summary = []
    for head, found in by_place(rows, PLACE):
        means = {name: mean(row["figures"][name] for row in found) for name in FIGURES}
        way = means["ensemble_global"] - means["own_global"]
        won = (means["global"] - means["own_global"]) / way if way > 0 else None
        counts = sorted({len(row["clusters"]) for row in found})
        summary.append({**head, "clusters": counts, "mean": means, "won": won})
    first, then = list(READINGS), list(PERSONAL)
    return sorted(
        summary, key=lambda row: (row["set"], row["alpha"], first.index(row["reading"]), then.index(row["personal"]))
    )


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each set, alpha and pair of readings, in percent."""
    head = ["set", "α", "Stages 1 and 2", "K", "Stage 3", "seeds", "local", "below `local`", "global", "won"]
    lines = headed(head)
    for row in record["summary"]:
        values, won = row["mean"], NONE if row["won"] is None else f"{row['won']:.0%}"
        below = values["own_local"] - values["local"]
        figures = [f"{100 * value:.1f}" for value in (values["local"], below, values["global"])]
        count = " to ".join(map(str, dict.fromkeys((row["clusters"][0], row["clusters"][-1]))))
        words = [row["set"], f"{row['alpha']:g}", row["reading"], count, row["personal"], str(len(row["seeds"]))]
        lines.append(cells([*words, *figures, won]))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    *(NAME, FIGURES, (METHOD,), entries, summarise, markdown),
    parts=lambda options: [{"reading": name} for name in options.readings],
)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS), metavar="READING")
    parser.add_argument("--personal", nargs="+", choices=PERSONAL, default=list(PERSONAL), metavar="READING")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments, _options)


if __name__ == "__main__":
    sys.exit(main())
