"""What the coordinator's work in bf16 costs in accuracy: the same site models distilled in bf16 and in fp32.

A cell is a level of skew and a seed (of the partition and every other draw). Its sites train once, in the study's
precision; then the method makes images and distils in either precision from the same models and the same draws. Single
distillations scatter by points, so it is the mean over cells that tells. All networks are tested in fp32.

    python benchmarks/synthesis_precision.py bloodmnist.npz --preset fast [--method fedisca] [--out precision.json]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import report, told
from wardround.errors import BadInput
from wardround.examine import GLOBAL, Examiner
from wardround.exchange.inprocess import InProcess
from wardround.learn.device import find_device
from wardround.learn.fit import Fit, Fitted
from wardround.learn.side_by_side import train_many
from wardround.methods.base import Context
from wardround.methods.registry import own_settings
from wardround.methods.state import State
from wardround.papers.one_shot import study_tree
from wardround.progress import Silent
from wardround.run import Prepared, prepare
from wardround.settings import overlay, validate

PRECISIONS = ("bf16", "fp32")
ACCURACY = "accuracy"


def prepared(tree: Mapping[str, Any], method: str, place: Mapping[str, Any], precision: str | None) -> Prepared:
    """The study of one cell, with another precision where one is given."""
    common = {key: value for key, value in tree.items() if key != "set"}
    whole = overlay(common, {"method": method, "seed": place["partition_seed"], "data": place})
    if precision is not None:
        whole = overlay(whole, {"train": {"precision": precision}})
    own = own_settings(tree.get("set", {}), method)
    return prepare(validate({**whole, "set": own}), [(method, own)], Silent())


def context(of: Prepared) -> Context:
    """Round one of its study; what the coordinator itself trains must succeed."""

    def train(fits: list[Fit]) -> list[Fitted]:
        found = train_many(fits, of.device)
        return [fitted for fitted in found if isinstance(fitted, Fitted)]

    return Context(of.study, 0, of.device, train)


def cell(tree: Mapping[str, Any], method: str, place: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Global accuracy of the distilled network, and seconds, by precision."""
    first = prepared(tree, method, place, None)
    ctx, (of,) = context(first), first.methods
    sites = InProcess(first.federation, lambda fits: train_many(fits, first.device), lambda bundle: None)
    asked = of.ask(ctx, of.begin(ctx)) or {}
    answers = sites.exchange(ctx, of, asked, lambda site: State(), lambda site, memory: None).answers
    examiner = Examiner(first.federation, first.device, "fp32", method, place["partition_seed"], Silent())
    found = {}
    for precision in PRECISIONS:
        again = prepared(tree, method, place, precision)
        ctx, (of,) = context(again), again.methods
        began, state = time.perf_counter(), of.begin(ctx)
        for newer in of.absorb(ctx, state, answers):
            state = newer
        seconds, network = time.perf_counter() - began, of.predictor(ctx, state)
        if network is None:
            raise BadInput(f"{method} ends with no network that all sites share; choose another method")
        rows = examiner.shared(0, network)
        accuracy = next(row["value"] for row in rows if (row["split"], row["metric"]) == (GLOBAL, ACCURACY))
        found[precision] = {ACCURACY: accuracy, "seconds": seconds}
        examiner.forget()
        first.device.release()
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, help="a MedMNIST .npz file")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--method", default="fedisca", help="one that ends with one network for all")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.3, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    return told(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> int:
    precision = "bf16" if find_device(options.device).is_cuda else "fp32"
    tree = study_tree(options.preset, {"device": options.device}, precision)
    cells, rows = [], []
    for alpha in options.alphas:
        for seed in options.seeds:
            place = {"source": str(options.images), "alpha": alpha, "partition_seed": seed}
            found = cell(tree, options.method, place)
            cells.append({"alpha": alpha, "seed": seed, **found})
            words = [f"{name} {100 * of[ACCURACY]:.1f} % in {of['seconds']:.0f} s" for name, of in found.items()]
            rows.append((f"alpha {alpha:g}, seed {seed}", ", ".join(words)))
            print(*rows[-1], flush=True)
    gains = [100 * (of["bf16"][ACCURACY] - of["fp32"][ACCURACY]) for of in cells]
    spread = f" ± {stdev(gains):.1f}" if len(gains) > 1 else ""
    rows.append(("bf16 less fp32, points", f"{mean(gains):+.1f}{spread}, n = {len(gains)}"))
    report("synthesis_precision", rows, options.out, method=options.method, preset=options.preset, cells=cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
