"""What the tests of the commands share: a place to run in, a tiny study, and the commands called in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wardround.cli import main

TINY = [
    *("--data", "phantoms:96", "--sites", "3", "--partition", "iid", "--rounds", "1", "--epochs", "1"),
    *("--device", "cpu", "--set", "model.width=4", "--set", "train.batch=8"),
]
FIGURES = ("rows", "headlines", "notes", "ledger")
Captured = pytest.CaptureFixture[str]


def empty_place(path: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, no data folder, a terminal of 80 columns, no GPU; signals as they were afterwards."""
    patch.chdir(path)
    patch.setenv("WARDROUND_DATA", str(path / "no-data"))
    patch.setenv("COLUMNS", "80")
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    handler = signal.getsignal(signal.SIGTERM)
    yield path
    signal.signal(signal.SIGTERM, handler)


def cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = main(list(arguments))
    return code, *capsys.readouterr()


def ok(capsys: Captured, *arguments: str) -> str:
    """The stdout of a command that must do its work."""
    code, out, err = cli(capsys, *arguments)
    assert code == 0, err
    return out


def read(path: Path | str) -> Any:
    return json.loads(Path(path).read_text())


def figures(directory: Path | str) -> dict[str, Any]:
    """All of a result that must not depend on the day, the directory or the clock."""
    return {key: read(Path(directory) / "result.json")[key] for key in FIGURES}


def images(n: int = 40, classes: int = 4) -> tuple[Any, Any]:
    """Noise of 8x8 pixels with labels in turn."""
    pixels = np.random.default_rng(0).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    return pixels, np.arange(n) % classes


def save_npz(path: Path, **changes: Any) -> Path:
    pixels, labels = images()
    parts = {"train_images": pixels, "train_labels": labels, "test_images": pixels, "test_labels": labels}
    np.savez(path, **{**parts, **changes})
    return path
