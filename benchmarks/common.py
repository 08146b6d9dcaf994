"""What every benchmark prints: the ratio, its baseline, the machine and n."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wardround.papers.runs import machine

__all__ = ["machine", "median", "report"]


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
