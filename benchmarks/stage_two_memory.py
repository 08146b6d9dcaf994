"""Whether the memory of a synthesis grows with its length T: FedBiCross holds the current images, FedISCA all of them.

The coordinator's work alone on one GPU, on five ResNet-18 sites that have hardly learned, bf16: peak memory with
trajectories of 100 and of 500 steps. FedISCA, which declares that memory, is there to show that growth would be seen.
Each is measured in a process of its own, and cuDNN is kept from trying algorithms out: the memory that its choices need
may differ from start to start as much as trajectories of these lengths do.

    python benchmarks/stage_two_memory.py bloodmnist.npz [--out stage_two_memory.json]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from common import report
from trained_cells import open_cell
from wardround.methods.state import State
from wardround.papers.one_shot import study_tree

LENGTHS = (100, 500)
OWN: dict[str, dict[str, Any]] = {"fedbicross": {"trajectories": 1, "clusters": 3}, "fedisca": {"epochs": 1}}
FLAGS = torch.backends.cudnn.flags


def without_trying(**flags: Any) -> Any:
    """The flags of cuDNN as asked for, but that it tries nothing out."""
    return FLAGS(**{**flags, "benchmark": False})


def peak(images: Path, name: str, steps: int) -> float:
    """GiB at most on the device while a method works out its result."""
    tree = study_tree(None, {"device": "cuda", "train": {"epochs": 1}}, "bf16")
    with tempfile.TemporaryDirectory() as folder, mock.patch("torch.backends.cudnn.flags", without_trying):
        cell = open_cell(tree, images, 0.1, 0, Path(folder))
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
    memory: dict[str, dict[str, float]] = {name: {} for name in OWN}
    for name, found in memory.items():
        for steps in LENGTHS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # nothing of one is left for the next
                found[f"T {steps}"] = pool.apply(peak, (options.images, name, steps))
    rows = [(name, ", ".join(f"{t}: {most:.3f} GiB" for t, most in found.items())) for name, found in memory.items()]
    report("stage_two_memory", rows, options.out, GiB=memory)


if __name__ == "__main__":
    main()
