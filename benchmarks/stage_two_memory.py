"""Whether the memory of a synthesis grows with its length T: FedBiCross holds the current images, FedISCA all of them.

The coordinator's work alone on one GPU, on five ResNet-18 sites that have hardly learned, bf16, with trajectories of
100 and of 500 steps: the most memory at any moment, and what is held between steps at the end of a trajectory. FedISCA,
which keeps its trajectory, is there to show that growth would be seen: in what is held, since a single step, before it
is captured in a graph, takes so much more that it hides a few hundred megabytes. Each is measured in a process of its
own, and cuDNN is kept from trying algorithms out: the memory that its choices need may differ from start to start as
much.

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
from wardround.synthesis.inversion import Iterate, Synthesis

LENGTHS = (100, 500)
OWN: dict[str, dict[str, Any]] = {"fedbicross": {"trajectories": 1, "clusters": 3}, "fedisca": {"epochs": 1}}
FLAGS, WAIT = torch.backends.cudnn.flags, Synthesis.wait


def without_trying(**flags: Any) -> Any:
    """The flags of cuDNN as asked for, but that it tries nothing out."""
    return FLAGS(**{**flags, "benchmark": False})


def memory(images: Path, work: Path, name: str, steps: int) -> dict[str, float]:
    """GiB on the device while a method works out its result: the most, and what the last step of synthesis found."""
    tree = study_tree(None, {"device": "cuda", "train": {"epochs": 1}}, "bf16")
    held = 0

    def wait(synthesis: Synthesis) -> Iterate:
        nonlocal held
        held = torch.cuda.memory_allocated()
        return WAIT(synthesis)

    with (
        mock.patch("torch.backends.cudnn.flags", without_trying),
        mock.patch.object(Synthesis, "wait", wait),
    ):
        cell = open_cell(tree, images, 0.1, 0, work)
        method = cell.make(name, steps=steps, **OWN[name])
        cell.device.release()
        torch.cuda.reset_peak_memory_stats()
        for _ in method.absorb(cell.context(method), State(), cell.answers):
            pass
    return {"most": torch.cuda.max_memory_allocated() / 2**30, "held": held / 2**30}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, help="blood cells, a MedMNIST .npz file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in OWN}
    with tempfile.TemporaryDirectory() as work:
        for name, by_length in found.items():
            for steps in LENGTHS:
                with multiprocessing.get_context("spawn").Pool(1) as pool:  # nothing of one is left for the next
                    by_length[f"T {steps}"] = pool.apply(memory, (options.images, Path(work), name, steps))
    rows = [(name, ", ".join(_words(*item) for item in by_length.items())) for name, by_length in found.items()]
    report("stage_two_memory", rows, options.out, GiB=found)


def _words(length: str, gib: dict[str, float]) -> str:
    return f"{length}: {gib['most']:.3f} GiB at most, {gib['held']:.3f} held"


if __name__ == "__main__":
    main()
