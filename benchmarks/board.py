"""How long the board takes to list a thousand runs: the whole page over a real connection, first and again.

The runs are copies of one real run of FedAvg (five sites, twenty rounds) whose name and figures differ. The baseline is
the plain way to get the same figures: parse each `result.json` whole. All files are in the system's cache, as they are
on the machine that made them.

    python benchmarks/board.py [--runs 1000] [--out board.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from common import report
from wardround.board.server import Board, Server
from wardround.progress import NO_PROGRESS
from wardround.record.rundir import write_json
from wardround.run import begin_run
from wardround.settings import validate

SETTINGS = {
    "method": "fedavg",
    "rounds": 20,
    "device": "cpu",
    "data": {"source": "phantoms:400", "sites": 5},
    "model": {"width": 2},
    "train": {"epochs": 1},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--n", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, original = Path(place) / "runs", Path(place) / "original"
        result = begin_run(validate(SETTINGS), original, NO_PROGRESS).finish()
        for number in range(options.runs):
            path = folder / f"run-{number:04}"
            path.mkdir(parents=True)
            write_json(path / "settings.json", result["settings"])
            write_json(path / "result.json", {**result, "name": path.name})
            (path / "report.html").write_bytes(b"")
        began = time.perf_counter()
        for file in folder.glob("*/result.json"):
            json.loads(file.read_bytes())
        whole = time.perf_counter() - began
        first, again, size = zip(*(timed(folder) for _ in range(options.n)), strict=True)
        first_s, next_s = statistics.median(first), statistics.median(again)
        report(
            "board",
            [
                (f"parsing {options.runs:,} records whole", f"{whole:.2f} s"),
                ("the first list", f"{first_s:.2f} s ({whole / first_s:.1f} times faster)"),
                ("the next list", f"{next_s:.2f} s"),
            ],
            options.out,
            n=options.n,
            runs=options.runs,
            result_bytes=(original / "result.json").stat().st_size,
            page_bytes=size[0],
            parse_all_s=whole,
            first_list_s=first_s,
            next_list_s=next_s,
        )


def timed(folder: Path) -> tuple[float, float, int]:
    """Seconds of the first list of a board that has just begun and of the next one, and the bytes of the page."""
    with Server(Board(folder), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        seconds, page = [], b""
        for _ in range(2):
            began = time.perf_counter()
            with urllib.request.urlopen(server.address, timeout=60) as response:  # noqa: S310 - our own server
                page = response.read()
            seconds.append(time.perf_counter() - began)
        server.shutdown()
        thread.join()
    if page.count(b"<tr data-run") != sum(1 for _ in folder.iterdir()):
        raise SystemExit("the page does not list every run")
    return seconds[0], seconds[1], len(page)


if __name__ == "__main__":
    main()
