"""What benchmarks share: what each prints (the ratio, its baseline, the machine, n), and results kept as they come."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wardround.errors import BadInput, WardroundError
from wardround.files import disk_errors, write_atomically
from wardround.papers.results import read_results
from wardround.papers.runs import machine

__all__ = ["keep", "machine", "median", "report", "stored", "told"]


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


def stored(out: Path, head: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """What is finished in a file that begins with this head; one of other settings is refused."""
    if not out.exists():
        return []
    record = read_results(out, head["benchmark"], (key,))
    if {name: record.get(name) for name in head} != json.loads(json.dumps(head)):
        raise BadInput(f"{out} was made with other settings; choose another --out")
    found: list[dict[str, Any]] = record[key]
    return found


def keep(out: Path, record: Mapping[str, Any]) -> None:
    """Write a file of results whole."""
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def told(work: Callable[[], int]) -> int:
    """The exit code of some work; what a person can mend becomes one line and its own code."""
    try:
        return work()
    except WardroundError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
