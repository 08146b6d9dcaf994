"""What the coordinator's work in bf16 costs in accuracy: the same site models distilled in bf16 and in fp32.

The sites of a cell train once, in the study's precision; then the method makes images and distils in either precision
from the same models and the same draws. Single distillations scatter by points, so it is the mean over cells that
tells. A cell is kept in `--out` when it is done and is not done again; trained models wait in `--work`.

    python benchmarks/synthesis_precision.py bloodmnist.npz --preset fast --alphas 0.3 0.5 --out precision.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from experiments import Experiment, Rows, main_of
from trained_cells import Cell, shared_predictor
from wardround.methods.base import Context
from wardround.methods.state import State
from wardround.papers.summaries import cells, headed

NAME = "synthesis_precision"
METHODS = ("fedisca", "efedisca", "deepinversion", "dense", "coboosting", "dafl")  # which end with one network for all
PRECISIONS = ("bf16", "fp32")
FIGURES = {
    "accuracy": "the distilled network on the global test",
    "seconds": "of the coordinator's work",
}


def entries(cell: Cell, place: Mapping[str, Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Either precision on the same models."""
    method = cell.make(options.method)
    for precision in PRECISIONS:
        ctx = _in(precision, cell.context(method))
        began = time.perf_counter()
        *_, state = method.absorb(ctx, State(), cell.answers)
        seconds = time.perf_counter() - began
        accuracy = cell.tally(shared_predictor(method, ctx, state)).accuracy()
        cell.forget()
        cell.device.release()
        figures = {"accuracy": round(accuracy, 6), "seconds": round(seconds, 1)}
        yield {**place, "method": method.name, "precision": precision, "figures": figures}


def _in(precision: str, ctx: Context) -> Context:
    """The same questions, worked out in another precision."""
    settings = ctx.study.settings
    train = settings.train.model_copy(update={"precision": precision})
    return replace(ctx, study=replace(ctx.study, settings=settings.model_copy(update={"train": train})))


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """By method, what bf16 gains or loses in points of accuracy over all cells, and how much faster it is."""
    summary = []
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {
            precision: [row["figures"] for row in rows if (row["method"], row["precision"]) == (method, precision)]
            for precision in PRECISIONS
        }
        pairs = list(zip(*found.values(), strict=True))
        gains = [100 * (ours["accuracy"] - plain["accuracy"]) for ours, plain in pairs]
        times = [sum(figures["seconds"] for figures in of) for of in found.values()]
        summary.append(
            {
                "method": method,
                "cells": len(pairs),
                "accuracy": {name: mean(figures["accuracy"] for figures in of) for name, of in found.items()},
                "gain": mean(gains),
                "standard_deviation": stdev(gains) if len(gains) > 1 else None,
                "times_faster": times[1] / times[0] if times[0] else None,
            }
        )
    return summary


def markdown(record: Mapping[str, Any]) -> str:
    """One line for each method."""
    head = ["method", "cells", *(f"{name}, global" for name in PRECISIONS), "bf16 gains, points", "times faster"]
    lines = headed(head)
    for row in record["summary"]:
        spread = "" if row["standard_deviation"] is None else f" ± {row['standard_deviation']:.1f}"
        accuracies = [f"{100 * row['accuracy'][name]:.1f}" for name in PRECISIONS]
        faster = "–" if row["times_faster"] is None else f"{row['times_faster']:.1f}"
        lines.append(cells([row["method"], str(row["cells"]), *accuracies, f"{row['gain']:+.1f}{spread}", faster]))
    return "\n".join(lines)


EXPERIMENT = Experiment(
    *(NAME, FIGURES, METHODS, entries, summarise, markdown), parts=lambda options: [{"method": options.method}]
)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments, _options)


if __name__ == "__main__":
    sys.exit(main())
