"""What a round costs beyond averaging: ten ResNet-18 sites in-process that answer with the model they were given.

The baseline is the averaging itself, the same weighted mean of the same ten models, timed in the same run. The
difference is everything else a round does: asking, checking every bundle against the declared payload, counting it to
the byte, stepping the sites, collecting the answers, and writing the checkpoint.

    python benchmarks/exchange_overhead.py [--out exchange_overhead.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from common import report
from wardround.data.federate import federate
from wardround.data.phantoms import phantoms
from wardround.exchange.bundle import SIZE
from wardround.exchange.inprocess import InProcess
from wardround.exchange.ledger import Entry
from wardround.learn.device import find_device
from wardround.methods.base import Answer, Context
from wardround.methods.fedavg import FedAvg
from wardround.methods.state import State
from wardround.methods.template import average
from wardround.record.rundir import Checkpoint, RunDir
from wardround.settings import validate
from wardround.study import agree

SITES = 10


class Echo(FedAvg):
    """FedAvg whose sites answer with what they were given."""

    name = "fedavg"

    def answer(self, ctx, site, request, memory):  # type: ignore[no-untyped-def]
        """Train nothing."""
        groups = {**request.groups, SIZE: {"images": torch.tensor(len(site.train))}}
        return Answer(ctx.bundle("answer", site.name, groups), memory)
        yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = validate({"model": {"name": "resnet18"}, "data": {"sites": SITES}})
    federation, _ = federate(phantoms(n_train=400, n_test=20), rule="iid", sites=SITES)
    method, device = Echo(), find_device("cpu")
    ctx = Context(agree(settings, federation), 0, device, lambda fits: [])
    counted: list[Entry] = []
    transport = InProcess(federation, lambda fits: [], lambda bundle: counted.append(Entry.of(bundle)))
    state = method.begin(ctx)

    def round_seconds(run: RunDir, number: int) -> tuple[float, float, float]:
        began = time.perf_counter()
        requests = method.ask(ctx, state) or {}
        found = transport.exchange(ctx, method, requests, lambda site: State(), lambda site, memory: None)
        exchanged = time.perf_counter()
        model = average(found.answers, method.weigh)
        averaged = time.perf_counter()
        run.commit(Checkpoint(number, run.save(f"state-{number}.safetensors", State({"model": model}))))
        return exchanged - began, averaged - exchanged, time.perf_counter() - averaged

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run", lambda part: None)
        measured = [round_seconds(run, number) for number in range(options.n + 2)][2:]
    beyond, averaging, saving = (statistics.median(times) for times in zip(*measured, strict=True))
    whole = beyond + averaging + saving
    rows = [
        ("baseline: averaging ten ResNet-18", f"{1000 * averaging:.1f} ms"),
        ("the whole round", f"{1000 * whole:.1f} ms, {whole / averaging:.2f} times"),
        ("beyond averaging: ask, check, count, collect", f"{1000 * beyond:.1f} ms"),
        ("beyond averaging: the checkpoint (45 MB)", f"{1000 * saving:.1f} ms"),
        ("beyond averaging in all", f"{1000 * (beyond + saving):.1f} ms (limit 50)"),
        ("n", f"median of {options.n}"),
    ]
    report(
        "exchange_overhead",
        rows,
        options.out,
        n=options.n,
        averaging_s=averaging,
        exchange_s=beyond,
        checkpoint_s=saving,
    )


if __name__ == "__main__":
    main()
