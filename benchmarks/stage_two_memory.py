"""Whether the memory of a synthesis grows with its length T: FedBiCross holds the current images, FedISCA all of them.

The coordinator's work alone on one GPU, on five ResNet-18 sites that have hardly learned, bf16: peak memory with
trajectories of 100 and of 500 steps. FedISCA, which declares that memory, is there to show that growth would be seen.

    python benchmarks/stage_two_memory.py bloodmnist.npz [--out stage_two_memory.json]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from common import report
from trained_cells import Cell, open_cell
from wardround.methods.state import State
from wardround.papers.one_shot import study_tree

LENGTHS = (100, 500)
OWN: dict[str, dict[str, Any]] = {"fedbicross": {"trajectories": 1, "clusters": 3}, "fedisca": {"epochs": 1}}


def peak(cell: Cell, name: str, steps: int) -> float:
    """GiB at most on the device while a method works out its result."""
    method = cell.make(name, steps=steps, **OWN[name])
    cell.device.release()
    torch.cuda.reset_peak_memory_stats()
    for _ in method.absorb(cell.context(method), State(), cell.answers):
        pass
    return torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, help="blood cells, a MedMNIST .npz file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tree = study_tree(None, {"device": "cuda", "train": {"epochs": 1}}, "bf16")
    with tempfile.TemporaryDirectory() as folder:
        cell = open_cell(tree, options.images, 0.1, 0, Path(folder))
        memory = {name: {f"T {steps}": peak(cell, name, steps) for steps in LENGTHS} for name in OWN}
    ratios = {name: max(found.values()) / min(found.values()) for name, found in memory.items()}
    rows = [
        (name, ", ".join(f"{length}: {peak:.2f} GiB" for length, peak in found.items()) + f"; ratio {ratios[name]:.2f}")
        for name, found in memory.items()
    ]
    report("stage_two_memory", rows, options.out, GiB=memory, ratio=ratios)


if __name__ == "__main__":
    main()
