"""Run folders for the tests of the board: finished ones of the report's example, and ones that are under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report.example import compare_result, run_result
from wardround.record.rundir import Log, write_json
from wardround.report import write_report


def finished(folder: Path, name: str, *methods: str, report: str | None = "<h1>a report</h1>", **changes: Any) -> Path:
    """A finished run of one method, or a comparison, with this report, the `real` one, or none."""
    path = folder / name
    path.mkdir(parents=True)
    result = compare_result(methods) if len(methods) > 1 else run_result()
    result |= {"kind": "compare" if len(methods) > 1 else "run", "name": path.name, **changes}
    write_json(path / "settings.json", result["settings"])
    write_json(path / "result.json", result)
    if report == "real":
        write_report(result, path / "report.html")
    elif report is not None:
        (path / "report.html").write_text(report)
    return path


class Study:
    """A run of one method that the test itself takes forward."""

    def __init__(self, path: Path, method: str = "fedavg", rounds: int = 4) -> None:
        self.path = path
        path.mkdir(parents=True)
        write_json(path / "settings.json", {"method": method, "rounds": rounds, "data": {"source": "phantoms:96"}})
        write_json(path / "data.json", {"sites": [{"name": "site-1"}, {"name": "site-2"}]})
        self.log = Log(path / "events.jsonl")
        (path / ".lock").touch()

    def append(self, *events: dict[str, Any]) -> None:
        """Events that are written and not yet certain."""
        for event in events:
            self.log.append(event)
        self.log.flush()

    def commit(self) -> None:
        """What is in the log now is certain."""
        write_json(self.path / "checkpoint.json", {"round": 1, "events_bytes": self.log.flush()})

    def round(self, number: int, accuracy: float) -> None:
        """A round that was measured and committed."""
        self.append(row(number, accuracy), {"kind": "round", "round": number, "seconds": 1.5 * (number + 1)})
        self.commit()


def row(number: int, accuracy: float) -> dict[str, Any]:
    """The shared model on the global test."""
    return {
        "kind": "row",
        "method": "fedavg",
        "seed": 0,
        "site": None,
        "round": number,
        "split": "global",
        "model": "shared",
        "metric": "accuracy",
        "value": accuracy,
        "n": 100,
    }


def text_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
