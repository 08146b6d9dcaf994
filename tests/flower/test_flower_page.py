"""docs/flower.md, followed word by word: every command in it, in order, with real Flower processes.

In `make test` Flower's apps are forked from a process that has torch loaded; in the soak test nothing is helped along.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'wardround[flower]'")

from commands import Captured, cli
from flower import starter
from flower.deployment import HURRY, children, free_port, until
from wardround.remote import commands_flower
from wardround.remote.flower import launch

PAGE = Path(__file__).parents[2] / "docs" / "flower.md"


def lines() -> list[str]:
    """The commands, with ports that are free here."""
    text = PAGE.read_text(encoding="utf-8")
    for port in ("9443", "9094", "9095"):
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    blocks = re.findall(r"^```shell\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def staying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that the page leaves running; ended with all that they have started."""
    monkeypatch.chdir(tmp_path)
    for name, value in HURRY.items():
        monkeypatch.setenv(name, value)
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for pid in [pid for process in started for pid in (process.pid, *children(process.pid))]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in started:
        process.wait(30)


def follow(stay: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch, capfd: Captured) -> None:
    """Do what the page says, where this process is; those commands that end, in this process."""
    said = ""
    root = Path.cwd()
    for line in lines():
        word, *rest = shlex.split(line)
        if word == "cd":
            monkeypatch.chdir(rest[0])
        elif word == "mkdir":
            for name in rest:
                Path(name).mkdir()
        elif word == "cp":
            shutil.copy(*rest)
        elif rest[-1] == "&":
            assert word == "wardround", line
            stay(rest[:-1])
        else:
            assert word == "wardround", line
            code, out, err = cli(capfd, *rest)
            logs = [file.read_text(errors="replace")[-3000:] for file in sorted(root.glob("log-*"))]
            assert code == 0, (line, out, err, *logs)
            said += out
    for name in ("north", "south"):
        models = {file.name for file in (root / "online" / name / "models" / "blood").iterdir()}
        assert {"model.safetensors", "model_card.md", "model_card.json"} <= models
        assert f"{name} has taken its parcel home" in said
    assert "stored: south, round 2" in said
    assert "study blood is over" in said
    assert not (root / "online" / ".flwr").exists()


def start(staying: list[subprocess.Popen[bytes]], root: Path, command: list[str], environment: Any = None) -> None:
    with (root / f"log-{len(staying)}").open("wb") as log:
        staying.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))


def test_the_commands_work_as_they_stand(
    staying: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    door = tmp_path / "door"
    starter.install(tmp_path / "bin")
    start(staying, tmp_path, [sys.executable, starter.__file__, str(door)], launch.environment(tmp_path / "starter"))

    def become(command: list[str], environment: dict[str, str]) -> None:
        """What would take this process's place, beside it."""
        path = os.pathsep.join([str(tmp_path / "bin"), environment["PATH"]])
        start(staying, tmp_path, command, {**environment, "PATH": path, starter.PLACE: str(door)})

    def stay(arguments: list[str]) -> None:
        assert cli(capfd, *arguments)[0] == 0

    monkeypatch.setattr(commands_flower, "_become", become)
    until(door.exists, "the starter")
    follow(stay, monkeypatch, capfd)


@pytest.mark.soak
def test_the_commands_work_in_processes_of_their_own(
    staying: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    def stay(arguments: list[str]) -> None:
        start(staying, tmp_path, [sys.executable, "-m", "wardround", *arguments])

    follow(stay, monkeypatch, capfd)
    for name in ("north", "south"):
        assert (tmp_path / "online" / name / "models" / "blood" / "model.onnx").is_file()
