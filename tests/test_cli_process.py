"""Real processes, started from `src` in another directory: signals, locks, pipes, and what a start loads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wardround.cli import main

SOURCE = Path(__file__).resolve().parents[1] / "src"
STUDY = [
    *("run", "--data", "phantoms:96", "--sites", "2", "--partition", "iid", "--rounds", "40", "--epochs", "1"),
    *("--device", "cpu", "--set", "model.width=2", "--set", "train.batch=16", "--set", "evaluate_every=10"),
]
PATIENCE = 120.0  # seconds, for a machine that is busy with other things


@pytest.fixture(autouse=True, scope="module")
def keep_the_handler() -> Iterator[None]:
    """`main` sets one for SIGTERM, as befits a process of its own."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python -m wardround ...` in `tmp_path`; whatever still runs at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str, options: tuple[str, ...] = (), source: Path = SOURCE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *options, "-m", "wardround", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever starts the tests in the background makes them deaf to Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the study gives when nothing stops it."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert main([*STUDY, "--quiet", "--out", str(run)]) == 0
    return figures(run)


def figures(run: Path) -> dict[str, Any]:
    found = json.loads((run / "result.json").read_text())
    return {key: found[key] for key in ("rows", "headlines", "notes", "ledger")}


def halt_in_the_middle(process: subprocess.Popen[str], run: Path) -> None:
    """Freeze the process once it has committed a round, with nearly all rounds still to come."""
    deadline = time.monotonic() + PATIENCE
    while not (run / "checkpoint.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no checkpoint in time"
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)
    assert not (run / "result.json").exists()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_says_how_to_go_on_and_then_ends_alike(
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    uninterrupted: dict[str, Any],
    number: signal.Signals,
    code: int,
) -> None:
    run = tmp_path / "my run"
    process = start(*STUDY, "--quiet", "--out", "my run")
    halt_in_the_middle(process, run)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert end(process) == (code, "", "stopped; go on with: wardround resume 'my run'\n")
    assert not (run / "result.json").exists()
    assert main(["resume", str(run), "--quiet"]) == 0
    assert figures(run) == uninterrupted


def test_a_run_that_is_killed_resumes_in_a_process_of_its_own(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    process = start(*STUDY, "--out", "run")
    halt_in_the_middle(process, run)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    code, out, err = end(start("resume", "run", "--json"))
    assert (code, err) == (0, "")
    assert json.loads(out)["headlines"] == uninterrupted["headlines"]
    assert figures(run) == uninterrupted


def test_a_directory_in_use_is_refused(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    halt_in_the_middle(start(*STUDY, "--out", "run"), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["resume", str(run), "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {run} is in use by another run; ")
    assert err.count("\n") == 1
    assert main([*STUDY, "--out", str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run} exists already; ")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_it_runs_straight_from_src(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "wardround/__init__.py").write_text('__version__ = "from a copy"\n')
    assert end(start("--version", source=copy)) == (0, "from a copy\n", "")
    code, out, err = end(start("methods", "--json"))
    assert (code, err) == (0, "")
    assert "fedavg" in {method["name"] for method in json.loads(out)}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["run", "--sites", "three"], 2),
        (["run", "missing.toml"], 2),
        (["run", "--set", "train.lr=0"], 2),
        (["compare", "fedavg", "--alpha", "nan"], 2),
    ],
)
def test_help_and_slips_do_not_wait_for_torch(
    start: Callable[..., subprocess.Popen[str]], arguments: list[str], code: int
) -> None:
    found, _, err = end(start(*arguments, options=("-X", "importtime")))
    imported = {line.rpartition("|")[2].strip() for line in err.splitlines() if line.startswith("import time:")}
    assert found == code
    assert "wardround.cli" in imported
    assert not {"torch", "numpy", "sklearn"} & imported


def test_a_reader_that_goes_away_is_no_fault(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("run", "--help")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert end(process)[2] == ""
