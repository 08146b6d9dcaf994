"""Files of results made without a run: what the tests of the papers' tables share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wardround.papers import fedkper, fedmp, one_shot
from wardround.papers.cells import Plan
from wardround.papers.library import table
from wardround.papers.results import Results
from wardround.papers.schema import Level, Line

SOURCES = {"provenance": "made up", "partition_rule": "made up"}


def line(id: str, label: str) -> Line:
    return next(line for line in table(id).entries if line.label == label)


def one_shot_plan(
    label: str,
    images: str = "bloodmnist",
    level: Level = 0.1,
    seed: int = 0,
    preset: str | None = "paper",
    hashed: str = "hash",
    **flags: Any,
) -> tuple[dict[str, Any], Plan]:
    """The head of a file, and one plan of FedBiCross's Table 1."""
    tree = one_shot.study_tree(preset, flags, "fp32")
    plan = one_shot.plan(tree, line("fedbicross-1", label), one_shot.cell(Path(f"{images}.npz"), level, seed), hashed)
    return one_shot.head(preset, one_shot.header(tree)), plan


def write(
    path: Path,
    planned: Sequence[tuple[dict[str, Any], Plan]],
    figures: Sequence[Mapping[str, float | None]],
    rounds: Sequence[Mapping[str, list[float]]] | None = None,
) -> Path:
    """A file of results of one head."""
    same = {"one_shot_grid": one_shot.SAME, "fedkper_table1": fedkper.SAME, "fedmp_tables": fedmp.SAME}
    head = planned[0][0]
    results = Results(path, head, same[head["benchmark"]], lambda entries: [])
    for (own, plan), values, course in zip(planned, figures, rounds or [{}] * len(planned), strict=True):
        assert own == head
        results.add(plan, {"figures": dict(values), "rounds": course, "seconds": 2.0, "jobs": 1}, SOURCES)
    return path


def blood(path: Path) -> Path:
    """A tiny set in MedMNIST's layout, under an official name."""
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, n in (("train", 200), ("val", 24), ("test", 48)):
        labels = np.arange(n) % 8
        pixels = draw.integers(0, 60, (n, 28, 28, 3)) + 24 * labels[:, None, None, None]
        arrays |= {f"{part}_images": pixels.astype(np.uint8), f"{part}_labels": labels[:, None].astype(np.uint8)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path
