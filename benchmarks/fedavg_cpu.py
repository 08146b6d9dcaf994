"""FedAvg with everything included against a bare loop of the same optimiser steps, in CPU seconds on one thread.

cnn4, 20 sites of 28×28 images, 2 sampled a round, 5 epochs, batch 12: FedKPer's setting. "Everything" is a real run
in a real directory: settings, partition, rounds, payload checks, ledger, evaluation on global and local tests,
events, checkpoint every round, personal predictors, result and report. The baseline is the smallest loop that takes
the same steps: gather a batch, normalise, forward, backward, `torch.optim.SGD` (its fused form, the fastest), and one
pass over the test images per round.

    python benchmarks/fedavg_cpu.py [--out fedavg_cpu.json]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from common import report
from wardround.learn.device import one_thread_per_worker
from wardround.models import build
from wardround.progress import Silent
from wardround.run import Job, begin_run
from wardround.settings import validate

SETTINGS = {
    "method": "fedavg",
    "participants": 0.1,
    "workers": 1,
    "device": "cpu",
    "model": {"name": "cnn4"},
    "train": {"epochs": 5, "batch": 12, "lr": 0.01, "weight_decay": 1e-5},
    "data": {"source": "phantoms:9600", "sites": 20, "alpha": 0.1},
}


def whole_run(rounds: int, folder: Path) -> tuple[float, Job]:
    """CPU seconds of the run after its images are read."""
    job = begin_run(validate({**SETTINGS, "rounds": rounds}), folder, Silent())
    began = time.process_time()
    job.finish()
    return time.process_time() - began, job


def bare_loop(job: Job, rounds: int) -> float:
    """CPU seconds of the same steps and one evaluation a round, nothing else."""
    study = job.prepared.study
    sites = {site.name: site.train for site in job.prepared.federation.sites}
    test = job.prepared.federation.test
    net = build(study.common_spec)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.load_state_dict(study.initial())
    began = time.process_time()
    for number in range(rounds):
        for name in study.participants(number):
            data = sites[name]
            net.train()
            optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, fused=True)
            for _ in range(5):
                for index in torch.split(torch.randperm(len(data)), 12):
                    pixels = data.images[index].float().div_(127.5).sub_(1)
                    loss = F.cross_entropy(
                        net(pixels.contiguous(memory_format=torch.channels_last)), data.labels[index]
                    )
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
        net.eval()
        with torch.no_grad():
            for images in torch.split(test.images, 128):
                net(images.float().div_(127.5).sub_(1))
    return time.process_time() - began


def main() -> None:
    """Measure in pairs, so that both see the same noise, and print the median ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as folder, one_thread_per_worker():
        for number in range(options.n + 1):
            ours, job = whole_run(options.rounds, Path(folder) / str(number))
            pairs.append((ours, bare_loop(job, options.rounds)))
    pairs = pairs[1:]  # the first warms caches up
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    rows = [
        ("baseline: bare loop", f"{statistics.median(bare for _, bare in pairs):.2f} CPU s"),
        ("wardround, everything included", f"{statistics.median(ours for ours, _ in pairs):.2f} CPU s"),
        ("ratio", f"{ratio:.3f} (limit 1.2)"),
        ("n", f"median of {options.n} pairs, {options.rounds} rounds each"),
    ]
    report("fedavg_cpu", rows, options.out, n=options.n, rounds=options.rounds, pairs=pairs, ratio=ratio)


if __name__ == "__main__":
    main()
