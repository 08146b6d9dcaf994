"""`docs/deploy.md`, executed: its commands and its programs, from top to bottom in one folder."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image

from deploy.test_predict_command import run
from wardround.cli import main
from wardround.data.phantoms import phantoms
from wardround.deploy.cli import predict_command

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```(console|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="needs the extra [onnx]")
    monkeypatch.chdir(tmp_path)
    Path("scans").mkdir()
    images = phantoms(4, 0, 4, 28, 0, 0).test.images
    for number, image in enumerate(images, 1):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(f"scans/{number:03d}.png")
    for kind, block in SHOWN:
        if kind == "python":
            exec(compile(block, "deploy.md", "exec"), {})  # noqa: S102 - the block is ours
            continue
        _, program, command, *words = shlex.split(block)
        assert program == "wardround"
        assert (run(*words) if command == "predict" else main([command, *words])) == 0
    table = list(csv.DictReader(Path("table.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["file"] for row in table] == [str(Path("scans") / f"{n:03d}.png") for n in range(1, len(images) + 1)]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == table[0]["predicted"]
    assert f"card: {Path('model') / 'model_card.md'}" in printed
    card = json.loads(Path("model/model_card.json").read_text(encoding="utf-8"))
    assert [figure["label"] for figure in card["about"]["accuracies"]] == ["Shared model, global"]


def test_every_file_and_flag_is_in_the_page(whole_export: Path) -> None:
    listed = re.findall(r"^\| `(model\S+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in whole_export.iterdir())
    app = typer.Typer()
    app.command()(predict_command)
    command: Any = typer.main.get_command(app)
    flags = {name for parameter in command.params for name in parameter.opts if name.startswith("-")}
    cells = " ".join(re.findall(r"^\| (`-.*?) \|", PAGE, re.MULTILINE))
    assert set(re.findall(r"`([^`]+)`", cells)) == flags - {"--help", "--install-completion", "--show-completion"}
