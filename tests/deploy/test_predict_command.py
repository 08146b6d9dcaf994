"""`wardround predict` as a command: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from deploy.samples import malignant, picture
from wardround.cli import main
from wardround.deploy.cli import predict_command
from wardround.errors import BadInput

Captured = pytest.CaptureFixture[str]
HEADER = '"file","predicted","p(benign)","p(malignant)"\n'


def run(*arguments: Path | str) -> int:
    """The command within a program, as the real one runs it."""
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    app.command("predict")(predict_command)
    code: Any = typer.main.get_command(app).main(args=["predict", *map(str, arguments)], standalone_mode=False)
    return code or 0


def test_a_table_on_the_screen(model: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture(Path("=x.png"), 255)
    assert run("model", "=x.png") == 0
    assert capsys.readouterr() == (HEADER + '"\'=x.png","malignant",0.25,0.75\n', "")


def test_a_table_in_a_file(model: Path, tmp_path: Path, capsys: Captured) -> None:
    scan, out = picture(tmp_path / "Ä.png", 128), tmp_path / "table.csv"
    assert run(model, scan, "--out", out) == 0
    assert capsys.readouterr() == ("", "")
    share = malignant(128)
    assert out.read_bytes().decode() == HEADER + f'"{scan}","malignant",{1 - share:.6f},{share:.6f}\n'


def test_as_json(model: Path, tmp_path: Path, capsys: Captured) -> None:
    scan, out = picture(tmp_path / "x.png", 255), tmp_path / "table.json"
    assert run(model, scan, "--json", "--out", out) == 0
    assert run(model, scan, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    assert json.loads(out.read_text())["predictions"][0]["probabilities"] == {"benign": 0.25, "malignant": 0.75}


def test_broken_images_are_named_the_others_go_on_and_the_code_is_one(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    picture(tmp_path / "scans" / "b.png", 255, (8, 6))
    (tmp_path / "scans" / "a\x1b[2J\n.png").write_bytes(b"no")
    assert run(model, tmp_path / "scans") == 1
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    assert err.splitlines()[0] == "note: cut to the central square and resized to 4×4 pixels: 1 image"
    assert err.splitlines()[1].startswith("failed: ")
    assert "\x1b" not in err
    assert run(model, tmp_path / "scans", "--quiet") == 1
    assert capsys.readouterr().err.startswith("failed: ")


def test_nothing_is_overwritten_and_nothing_is_read_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("dear")
    with pytest.raises(BadInput, match=r"table\.csv exists already"):
        run(tmp_path / "no-model", tmp_path / "no-image", "--out", tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == "dear"


def test_a_place_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        run(model, picture(tmp_path / "x.png", 0), "--out", tmp_path / "nowhere" / "table.csv")


def test_an_unknown_device(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="device 'tpu' is unknown"):
        run(model, picture(tmp_path / "x.png", 0), "--device", "tpu")


def test_it_is_a_command_of_the_program(model: Path, tmp_path: Path, capsys: Captured) -> None:
    scan = picture(tmp_path / "x.png", 255)
    assert main(["predict", str(model), str(scan)]) == 0
    assert main(["predict", str(model), str(scan), str(tmp_path / "none\x1b.png")]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/none\\x1b.png does not exist; name pictures, folders or .npz files\n"
    )


def test_the_command_is_there_before_torch_is() -> None:
    code = "import sys, wardround.deploy.cli; sys.exit('torch' in sys.modules or 'onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
