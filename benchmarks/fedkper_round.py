"""A round of FedKPer against a round of FedAvg, in CPU seconds on one thread.

cnn4, 20 sites of 28×28 images, 2 asked a round, 5 epochs, batch 12: FedKPer's setting. A round is what the method
itself does: asking, training at the sites, answering, averaging; nothing is measured or written, which would dilute
the ratio. Both methods go through the same rounds with the same sites, in turn, one round of each at a time.

    python benchmarks/fedkper_round.py [--out fedkper_round.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from common import report
from wardround.exchange.inprocess import InProcess
from wardround.learn.device import Device, one_thread_per_worker
from wardround.learn.side_by_side import train_many
from wardround.methods.base import Context, Method
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.papers.fedkper import study_tree
from wardround.progress import Silent
from wardround.run import Prepared, prepare
from wardround.settings import validate

LIMIT = 1.5


class Rounds:
    """One method on the way; each call is its next round."""

    def __init__(self, prepared: Prepared, method: Method) -> None:
        self.prepared, self.method, self.number = prepared, method, 0
        self.study = prepared.study.with_method(method.name, method.settings.model_dump(mode="json"))
        self.device = Device(prepared.device.torch, 1)
        self.transport = InProcess(prepared.federation, lambda fits: train_many(fits, self.device), lambda bundle: None)
        self.state = method.begin(self._context())

    def __call__(self) -> float:
        """CPU seconds of the next round."""
        began = time.process_time()
        ctx = self._context()
        requests = self.method.ask(ctx, self.state) or {}
        found = self.transport.exchange(ctx, self.method, requests, lambda site: State(), lambda site, memory: None)
        *_, self.state = self.method.absorb(ctx, self.state, found.answers)
        self.number += 1
        return time.process_time() - began

    def _context(self) -> Context:
        return Context(self.study, self.number, self.device, lambda fits: [])


def main() -> None:
    """Measure in pairs, so that both see the same noise and the same sites, and print the median ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=9, help="pairs of rounds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tree = study_tree(Path("phantoms:9600"), {"device": "cpu", "workers": 1, "rounds": options.n + 1})
    prepared = prepare(validate(tree), [("fedavg", {})], Silent())
    with one_thread_per_worker():
        fedavg, fedkper = (Rounds(prepared, make(name, {})) for name in ("fedavg", "fedkper"))
        pairs = [(fedavg(), fedkper()) for _ in range(options.n + 1)][1:]  # the first warms caches up
    ratio = statistics.median(ours / baseline for baseline, ours in pairs)
    rows = [
        ("baseline: a round of fedavg", f"{statistics.median(baseline for baseline, _ in pairs):.2f} CPU s"),
        ("a round of fedkper", f"{statistics.median(ours for _, ours in pairs):.2f} CPU s"),
        ("ratio", f"{ratio:.3f} (limit {LIMIT})"),
        ("n", f"median of {options.n} pairs of rounds"),
    ]
    report("fedkper_round", rows, options.out, n=options.n, pairs=pairs, ratio=ratio)


if __name__ == "__main__":
    main()
