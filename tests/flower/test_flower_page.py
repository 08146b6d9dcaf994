"""docs/flower.md, followed word by word: every command in it, in order, with real Flower processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'wardround[flower]'")

from commands import cli
from flower.deployment import HURRY, children, free_port

PAGE = Path(__file__).parents[2] / "docs" / "flower.md"


def lines() -> list[str]:
    """The commands, with ports that are free here."""
    text = PAGE.read_text(encoding="utf-8")
    for port in ("9443", "9094", "9095"):
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    blocks = re.findall(r"^```shell\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_commands_work_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those that stay in processes of their own, the others in this one, which has torch loaded."""
    monkeypatch.chdir(tmp_path)
    for name, value in HURRY.items():
        monkeypatch.setenv(name, value)
    said, staying = "", []
    try:
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
                with (tmp_path / f"log-{len(staying)}").open("wb") as log:
                    command = [sys.executable, "-m", "wardround", *rest[:-1]]
                    staying.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
            else:
                assert word == "wardround", line
                code, out, err = cli(capfd, *rest)
                logs = [file.read_text(errors="replace")[-3000:] for file in sorted(tmp_path.glob("log-*"))]
                assert code == 0, (line, out, err, *logs)
                said += out
    finally:
        for pid in [pid for process in staying for pid in (process.pid, *children(process.pid))]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in staying:
            process.wait(30)
    for name in ("north", "south"):
        models = {file.name for file in (tmp_path / "online" / name / "models" / "blood").iterdir()}
        assert {"model.safetensors", "model_card.md", "model_card.json"} <= models
        assert f"{name} has taken its parcel home" in said
    assert "stored: south, round 2" in said
    assert "study blood is over" in said
    assert not (tmp_path / "online" / ".flwr").exists()
