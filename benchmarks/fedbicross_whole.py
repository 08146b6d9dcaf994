"""FedBiCross from the sites' training to personalisation on one GPU: seconds, and whether memory grows with T.

Five ResNet-18 sites trained 100 epochs as FedISCA's clients are, 20 trajectories of 500 steps, personal distillation;
alpha 0.1, bf16. Then Stages 1 and 2 alone, on three clusters of sites that have hardly learned, with trajectories of
100 and of 500 steps, whose peak memory must be the same: FedBiCross holds the current images only.

    python benchmarks/fedbicross_whole.py bloodmnist.npz [--out fedbicross_whole.json]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common import report
from wardround.papers.one_shot import CLIENTS
from wardround.papers.runs import headlines
from wardround.progress import Silent
from wardround.run import begin_run
from wardround.settings import overlay, validate

EPOCHS, TRAJECTORIES, STEPS = 100, 20, 500


def run(images: Path, epochs: int, **own: Any) -> tuple[float, float, dict[str, Any]]:
    """Seconds by the clock, GiB at most on the device, and the result."""
    tree = overlay(CLIENTS, {"device": "cuda", "method": "fedbicross", "train": {"precision": "bf16"}})
    tree = overlay(tree, {"data": {"source": str(images), "alpha": 0.1}, "train": {"epochs": epochs}, "set": own})
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = begin_run(validate(tree), Path(folder) / "run", Silent()).finish()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 2**30, result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, help="blood cells, a MedMNIST .npz file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seconds, _, result = run(options.images, EPOCHS, steps=STEPS, trajectories=TRAJECTORIES)
    memory = {}
    for steps in (STEPS // 5, STEPS):
        _, memory[f"T {steps}"], _ = run(options.images, 1, steps=steps, trajectories=1, clusters=3, personal=False)
    work = {row["part"]: row["seconds"] for row in result["work"]}
    values = headlines(result)
    accuracies = {key: values[key] for key in ("local_accuracy", "global_accuracy")}
    parts = ", ".join(f"{part} {spent:.0f}" for part, spent in work.items())
    rows = [
        ("a whole run", f"{seconds:.0f} s (limit: 180), of which {parts}"),
        ("peak memory, GiB", ", ".join(f"{name}: {peak:.2f}" for name, peak in memory.items())),
        ("accuracy", ", ".join(f"{key} {100 * value:.1f}" for key, value in accuracies.items())),
    ]
    report("fedbicross_whole", rows, options.out, seconds=seconds, work=work, GiB=memory, **accuracies)


if __name__ == "__main__":
    main()
