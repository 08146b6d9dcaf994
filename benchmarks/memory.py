"""Peak memory: 100 rounds against 10, and 500 `cnn4` sites that all take part in a round.

Each case is a process of its own, so that its peak resident size is its own. The baseline of the first is ten rounds;
the limit of the second is 4 GiB (500 models alone are 3.3 GB).

    python benchmarks/memory.py [--out memory.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import report
from wardround.progress import Silent
from wardround.run import begin_run
from wardround.settings import validate

MIB = 2**20
ROUNDS = {"model": {"name": "cnn4"}, "train": {"epochs": 1}, "data": {"source": "phantoms:200", "partition": "iid"}}
MANY = {
    "rounds": 1,
    "model": {"name": "cnn4"},
    "train": {"epochs": 1},
    "data": {"source": "phantoms:6000", "partition": "iid", "sites": 500},
}


def peak(settings: dict[str, Any]) -> float:
    """Peak resident MiB of a process that does one run."""
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def child(settings: dict[str, Any]) -> None:
    """One run, then its peak."""
    with tempfile.TemporaryDirectory() as folder:
        begin_run(validate(settings), Path(folder) / "run", Silent()).finish()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    ten, hundred = peak({**ROUNDS, "rounds": 10}), peak({**ROUNDS, "rounds": 100})
    many = peak(MANY)
    rows = [
        ("baseline: 10 rounds", f"{ten:.0f} MiB"),
        ("100 rounds", f"{hundred:.0f} MiB, {hundred / ten:.3f} times"),
        ("500 cnn4 sites, all in one round", f"{many:.0f} MiB (limit 4096)"),
        ("n", "one process each"),
    ]
    report("memory", rows, options.out, n=1, ten_rounds_mib=ten, hundred_rounds_mib=hundred, many_sites_mib=many)


if __name__ == "__main__":
    main()
