"""Files that are written whole or not at all."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wardround.files import write_atomically, write_for_owner


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == [path.name]


def _disk_full(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _interrupted(_: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("failure", "error"), [(_disk_full, OSError), (_interrupted, KeyboardInterrupt)])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[[int], None], error: type[BaseException]
) -> None:
    path = tmp_path / "state.safetensors"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", failure)
    with pytest.raises(error):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]


def test_a_failed_rename_leaves_nothing_behind(tmp_path: Path) -> None:
    place = tmp_path / "taken"
    (place / "inner").mkdir(parents=True)
    with pytest.raises(OSError):
        write_atomically(place, b"new")
    assert os.listdir(tmp_path) == ["taken"]
    assert (place / "inner").is_dir()


@pytest.mark.skipif(os.name != "posix", reason="Windows has neither such links nor such modes")
def test_what_lies_in_the_place_of_the_unfinished_file_is_neither_followed_nor_used(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    for write in (write_atomically, write_for_owner):
        path = tmp_path / "report.html"
        planted = tmp_path / f".report.html.{os.getpid()}.part"
        planted.symlink_to(other)
        write(path, b"page")
        assert (path.read_bytes(), other.read_bytes(), path.is_symlink()) == (b"page", b"mine", False)
        planted.touch()
        planted.chmod(0o666)
        write(path, b"page")
    assert path.stat().st_mode & 0o777 == 0o600  # what was there could be read by all
