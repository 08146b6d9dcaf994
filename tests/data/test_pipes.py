"""A pipe or a device in the place of a file is refused by name, wherever files come in; it is never waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from PIL import Image

from wardround.data.decode import decode
from wardround.data.sources import load
from wardround.deploy.about import Task
from wardround.deploy.load import open_model
from wardround.deploy.pictures import Failure, Pictures
from wardround.errors import BadInput

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no such files")


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """A test that waits for a pipe fails, and does not hang."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["x.png", "x.dcm", "x.nii", "x"])
def test_a_picture(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match=f"/{name} is a pipe or a device, which has no end; move it out"):
        decode(tmp_path / name)


def test_arrays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(BadInput, match=r"x\.npz is a pipe or a device"):
        load(str(tmp_path / "x.npz"), tmp_path)


def test_one_among_pictures_of_a_class(tmp_path: Path) -> None:
    for label in ("ash", "birch"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(np.full((8, 8), 40 * number, np.uint8)).save(tmp_path / "set" / label / f"{number}.png")
    os.mkfifo(tmp_path / "set" / "ash" / "9.png")
    with pytest.raises(BadInput, match=r"9\.png is a pipe or a device"):
        load(str(tmp_path / "set"), tmp_path)


@pytest.mark.parametrize("name", ["x.npz", "x.png"])
def test_what_a_model_is_shown(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (found,) = Pictures([tmp_path / name], Task(classes=("ash", "birch"), channels=1, size=8))
    assert isinstance(found, Failure)
    assert found.reason.endswith(f"{name} is not a file; name a picture, a folder or an .npz file")


@pytest.mark.parametrize("name", ["x.safetensors", "x.onnx"])
def test_a_model(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match=f"{name} is not a plain file"):
        open_model(tmp_path / name)
