"""A real `kill -9` of a real process: a few moments here, many in the soak test."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiny import everything

COMMAND = [
    *("run", "--data", "phantoms:120", "--sites", "3", "--partition", "iid", "--rounds", "6", "--epochs", "1"),
    *("--device", "cpu", "--quiet", "--set", "model.width=2", "--set", "workers=1", "--set", "train.batch=16"),
]


def wardround(*arguments: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "wardround", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )


def succeed(*arguments: str) -> None:
    with wardround(*arguments) as process:
        _, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint.decode()


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> None:
    limit = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)


def kill_at_moments(folder: Path, moments: int) -> None:
    """`kill -9` at random moments of the work, from the directory's first second to its last."""
    straight = folder / "straight"
    with wardround(*COMMAND, "--out", str(straight)) as process:
        wait_for(straight, process)
        began = time.monotonic()
        process.communicate(timeout=300)
        seconds = time.monotonic() - began
    assert process.returncode == 0
    draw = random.Random(moments)  # noqa: S311 - moments, no secrets
    killed = 0
    for number in range(moments):
        path = folder / str(number)
        with wardround(*COMMAND, "--out", str(path)) as process:
            wait_for(path, process)
            time.sleep(seconds * draw.uniform(0, 0.9) if moments > 2 else seconds * (0.2 + 0.4 * number))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        killed += process.returncode == -signal.SIGKILL
        succeed("resume", str(path), "--quiet")
        assert everything(path) == everything(straight)
    assert killed >= moments / 2


def test_kill_minus_nine(tmp_path: Path) -> None:
    kill_at_moments(tmp_path, 2)


@pytest.mark.soak
def test_kill_minus_nine_at_many_moments(tmp_path: Path) -> None:
    kill_at_moments(tmp_path, 20)
