"""docs/airgap.md, followed word by word: every command in it, in order, and the rules it lists."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Captured, cli
from wardround.remote.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "airgap.md"
TEXT = PAGE.read_text(encoding="utf-8")


def lines() -> list[str]:
    blocks = re.findall(r"^```shell\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_commands_work_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """In this process, which has torch loaded; the soak test does it in a shell."""
    monkeypatch.chdir(tmp_path)
    said = ""
    for line in lines():
        word, *rest = shlex.split(line)
        if word == "cd":
            monkeypatch.chdir(rest[0])
        elif word == "mkdir":
            for name in rest:
                Path(name).mkdir()
        elif word == "cp":
            shutil.copy(*rest)
        else:
            assert word == "wardround", line
            code, out, err = cli(capsys, *rest)
            assert code == 0, (line, err)
            said += out
    practice = tmp_path / "practice"
    for name in ("north", "south"):
        models = {file.name for file in (practice / name / "models" / "blood").iterdir()}
        assert {"model.safetensors", "model_card.md", "model_card.json"} <= models
    assert (practice / "coordinator" / "rehearsal" / "report.html").is_file()
    for promised in (
        "WHAT LEAVES A HOSPITAL",
        "already here",
        "stored: north, round 2",
        "verified:",
        "balanced accuracy",
    ):
        assert promised in said


@pytest.mark.soak
def test_the_commands_work_in_a_shell(tmp_path: Path) -> None:
    script = "\n".join(["set -e", f'PATH="{Path(sys.executable).parent}:$PATH"', *lines()])
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, timeout=600)


def test_every_rule_is_in_the_table() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| (.+) \|$", TEXT, re.MULTILINE)
    assert dict(rows) == RULES
