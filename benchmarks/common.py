"""What every benchmark prints: the ratio, its baseline, the machine and n."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """The machine in one line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, torch {torch.__version__}, Python {platform.python_version()}"


def median(measure: Callable[[], float], n: int) -> float:
    """The median of n measurements."""
    return statistics.median(measure() for _ in range(n))


def report(name: str, rows: list[tuple[str, str]], out: Path | None, **figures: Any) -> None:
    """A short table, and the figures as JSON where asked."""
    print(f"\n{name}  ({machine()})")
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"  {label:<{width}}  {value}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"benchmark": name, "machine": machine(), **figures}, indent=1) + "\n")
