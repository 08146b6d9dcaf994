"""CIFAR-10's binary version."""

from pathlib import Path

import numpy as np
import pytest

from wardround.data.cifar import CLASSES, RECORD, TEST, TRAIN
from wardround.data.sources import load
from wardround.errors import BadInput


def batches(folder: Path, n: int = 20) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in (*TRAIN, *TEST):
        records = rng.integers(0, 256, (n, RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(n) % 10
        (folder / name).write_bytes(records.tobytes())
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load(str(folder), folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_parts_and_the_order_of_bytes(tmp_path: Path) -> None:
    folder = batches(tmp_path / "cifar-10-batches-bin")
    data = load(str(folder), tmp_path)
    assert (len(data.train), len(data.test), data.val) == (100, 20, None)
    assert data.train.classes == CLASSES
    assert data.train.labels[:12].tolist() == [*range(10), 0, 1]
    raw = (folder / "data_batch_2.bin").read_bytes()[:RECORD]
    assert raw[1:] == data.train.images[20].numpy().tobytes()  # red, green, blue; each row by row
    assert data.provenance == "CIFAR-10, binary version: 100 train, 20 test images of 32x32"


def test_what_is_wrong(tmp_path: Path) -> None:
    folder = batches(tmp_path / "c")
    (folder / "data_batch_3.bin").unlink()
    assert "data_batch_3.bin cannot be read" in refusal(folder)
    (folder / "data_batch_3.bin").write_bytes(b"\0" * (RECORD + 1))
    assert "3,074 bytes, not 10,000 records of 3,073" in refusal(folder)
    (folder / "data_batch_3.bin").write_bytes(b"\xff" * RECORD)
    assert "a label above 9" in refusal(folder)
    with pytest.raises(BadInput, match="32x32, not 28"):
        load(str(batches(tmp_path / "d")), tmp_path, size=28)


def test_the_pickled_version_is_refused(tmp_path: Path) -> None:
    for name in ("data_batch_1", "batches.meta"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
    assert "a pickle, which is never read" in refusal(tmp_path)
