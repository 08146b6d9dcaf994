"""FedBiCross from the sites' training to personalisation on one GPU, in seconds.

Five ResNet-18 sites trained 100 epochs as FedISCA's clients are, 20 trajectories of 500 steps, personal distillation;
alpha 0.1, bf16.

    python benchmarks/fedbicross_whole.py bloodmnist.npz [--out fedbicross_whole.json]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from common import report
from wardround.papers.one_shot import CLIENTS
from wardround.papers.runs import headlines
from wardround.progress import Silent
from wardround.run import begin_run
from wardround.settings import overlay, validate

EPOCHS, TRAJECTORIES, STEPS = 100, 20, 500


def run(images: Path) -> tuple[float, dict[str, Any]]:
    """Seconds by the clock, and the result."""
    tree = overlay(CLIENTS, {"device": "cuda", "method": "fedbicross", "train": {"precision": "bf16"}})
    own = {"steps": STEPS, "trajectories": TRAJECTORIES}
    tree = overlay(tree, {"data": {"source": str(images), "alpha": 0.1}, "train": {"epochs": EPOCHS}, "set": own})
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = begin_run(validate(tree), Path(folder) / "run", Silent()).finish()
    return time.perf_counter() - began, result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, help="blood cells, a MedMNIST .npz file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seconds, result = run(options.images)
    work = {row["part"]: row["seconds"] for row in result["work"]}
    values = headlines(result)
    accuracies = {key: values[key] for key in ("local_accuracy", "global_accuracy")}
    parts = ", ".join(f"{part} {spent:.0f}" for part, spent in work.items())
    rows = [
        ("a whole run", f"{seconds:.0f} s (limit: 180), of which {parts}"),
        ("accuracy", ", ".join(f"{key} {100 * value:.1f}" for key, value in accuracies.items())),
    ]
    report("fedbicross_whole", rows, options.out, seconds=seconds, work=work, **accuracies)


if __name__ == "__main__":
    main()
