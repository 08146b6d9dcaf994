"""A process that finishes plans of the papers' tables: `python -m wardround.papers.worker`, started by the harness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wardround.papers.cells import Plan
from wardround.papers.families import RUNS
from wardround.papers.jobs import serve

COMMAND = (sys.executable, "-m", "wardround.papers.worker")


def do(task: dict[str, Any]) -> Any:
    """Finish a plan; `task` is what `Runs.task` gave."""
    runs = RUNS[task["family"]](Path(task["folder"]), task["workers"])
    return runs.finish(Plan.from_json(task["plan"]))


if __name__ == "__main__":
    serve(do)
