"""A real `kill -9` of a real process: two moments here, many in the soak test."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiny import everything
from wardround import run
from wardround.progress import Silent
from wardround.settings import validate

ROUNDS = 6
STUDY: dict[str, Any] = {
    "rounds": ROUNDS,
    "device": "cpu",
    "data": {"source": "phantoms:120", "sites": 3, "partition": "iid"},
    "model": {"width": 2},
    "train": {"epochs": 1, "batch": 16},
}


def wardround(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "wardround", *arguments, "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def rounds_done(path: Path) -> int:
    file = path / "checkpoint.json"
    return int(json.loads(file.read_text())["round"]) if file.exists() else 0


def kill_in_round(path: Path, study: Path, round: int, delay: float) -> None:
    """Start a run, and kill it a moment after that many rounds are through (unless it was faster)."""
    with wardround("run", str(study), "--out", str(path)) as process:
        while process.poll() is None and (not path.exists() or rounds_done(path) < round):
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        _, complaint = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), complaint.decode()


def resume(path: Path) -> None:
    with wardround("resume", str(path)) as process:
        _, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint.decode()


def kill_and_compare(folder: Path, moments: list[tuple[int, float]]) -> None:
    study = folder / "study.json"
    study.write_text(json.dumps(STUDY))
    run.begin_run(validate(STUDY), folder / "straight", Silent()).finish()
    for number, (round, delay) in enumerate(moments):
        path = folder / str(number)
        kill_in_round(path, study, round, delay)
        resume(path)
        assert everything(path) == everything(folder / "straight"), f"killed {delay} s after round {round}"


def test_kill_minus_nine(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, [(0, 0.05), (3, 0.01)])


@pytest.mark.soak
def test_kill_minus_nine_at_many_moments(tmp_path: Path) -> None:
    draw = random.Random(20)  # noqa: S311 - moments, no secrets
    kill_and_compare(tmp_path, [(draw.randrange(ROUNDS + 1), draw.uniform(0, 0.1)) for _ in range(20)])
