"""What a source's name leads to."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.phantoms import phantoms
from wardround.data.sources import default_data_folder, known, load
from wardround.errors import BadInput


def npz(path: Path, size: int = 4) -> Path:
    images, labels = np.zeros((4, size, size), np.uint8), np.array([[0], [1], [0], [1]])
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return path


def refusal(source: str, folder: Path, size: int | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        load(source, folder, size=size)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_phantoms_by_number(tmp_path: Path) -> None:
    data = load("phantoms:40", tmp_path)
    assert (len(data.train), data.val, len(data.test)) == (40, None, 10)
    assert data.train.sha256() == phantoms(40, 0, 10).train.sha256()


def test_phantoms_without_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr("wardround.data.sources.phantoms", lambda *counts, **_: asked.append(counts))
    load("phantoms", tmp_path)
    assert [counts[:3] for counts in asked] == [(4000, 0, 1000)]


def test_phantoms_of_a_size_with_sites(tmp_path: Path) -> None:
    data = load("phantoms:8", tmp_path, size=32, phantom_sites=4)
    assert data.train.size == 32
    assert data.train.sites is not None
    assert sorted(data.train.sites.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("phantoms:", "write phantoms:1000"),
        ("phantoms:-5", "write phantoms:1000"),
        ("phantoms:many", "write phantoms:1000"),
        ("phantoms:²", "write phantoms:1000"),
        ("phantoms:3", "3 phantoms are too few"),
    ],
)
def test_phantoms_that_cannot_be(tmp_path: Path, source: str, says: str) -> None:
    assert says in refusal(source, tmp_path)


def test_a_file_by_path(tmp_path: Path) -> None:
    path = npz(tmp_path / "mine.npz")
    assert load(str(path), tmp_path / "elsewhere").name == "mine"
    assert load(str(path), tmp_path, size=4).train.size == 4
    assert "4x4, not 28" in refusal(str(path), tmp_path, size=28)
    assert "does not exist" in refusal(str(tmp_path / "none.npz"), tmp_path)


@pytest.mark.parametrize("name", ["blood", "bloodmnist", "BloodMNIST"])
def test_an_official_set_by_name(tmp_path: Path, name: str) -> None:
    npz(tmp_path / "bloodmnist.npz")
    npz(tmp_path / "bloodmnist_64.npz", 64)
    data = load(name, tmp_path)
    assert data.name == "bloodmnist"
    assert data.train.classes[0] == "basophil"
    assert load(name, tmp_path, size=64).train.size == 64


def test_an_official_set_that_is_not_here(tmp_path: Path) -> None:
    message = refusal("derma", tmp_path)
    assert str(tmp_path / "dermamnist.npz") in message
    assert "`wardround data get dermamnist`" in message
    assert "`wardround data get dermamnist --size 64`" in refusal("derma", tmp_path, size=64)
    assert "not 32" in refusal("derma", tmp_path, size=32)
    assert "several labels at once" in refusal("chest", tmp_path)


def test_another_file_of_the_data_folder_by_name(tmp_path: Path) -> None:
    npz(tmp_path / "wards.npz")
    npz(tmp_path / "bloodmnist_64.npz")
    assert load("wards", tmp_path).name == "wards"
    assert load("bloodmnist_64", tmp_path).train.classes[0] == "basophil"


def test_a_folder_by_path(tmp_path: Path) -> None:
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (tmp_path / "cells" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 6)).save(tmp_path / "cells" / f"{name}.png")
    data = load(str(tmp_path / "cells"), tmp_path, size=5)
    assert data.train.classes == ("a", "b")
    assert data.train.size == 5


def test_a_table_of_groups_is_for_npz_files_only(tmp_path: Path) -> None:
    (tmp_path / "scans" / "a").mkdir(parents=True)
    (tmp_path / "t.csv").write_text("path,label\n")
    gone = tmp_path / "none.csv"
    for source in (str(tmp_path / "scans"), str(tmp_path / "t.csv")):
        with pytest.raises(BadInput) as caught:
            load(source, tmp_path, groups=gone)
        assert str(caught.value) == (
            f"data.groups is for .npz files and cannot be used with {source}; leave it out, and name patients in the "
            "column patient of a table of the files"
        )
    with pytest.raises(BadInput, match="with phantoms:40; leave it out, since phantoms have no patients"):
        load("phantoms:40", tmp_path, groups=gone)
    npz(tmp_path / "wards.npz")
    for source in ("wards", str(tmp_path / "wards.npz")):
        with pytest.raises(BadInput, match=r"none\.csv cannot be read"):
            load(source, tmp_path, groups=gone)
    with pytest.raises(BadInput, match="'kidneys' is no folder"):
        load("kidneys", tmp_path, groups=gone)


def test_an_unknown_name(tmp_path: Path) -> None:
    message = refusal("kidneys", tmp_path)
    assert "'kidneys'" in message
    assert "phantoms, pathmnist, " in message
    assert "`wardround data get NAME`" in message
    assert "no folder" in refusal(str(tmp_path / "none"), tmp_path)


def test_what_is_known_and_here(tmp_path: Path) -> None:
    npz(tmp_path / "bloodmnist.npz")
    found = {info.name: info for info in known(tmp_path)}
    assert next(iter(found)) == "phantoms"
    assert len(found) == 12
    assert (found["bloodmnist"].classes, found["bloodmnist"].channels, found["bloodmnist"].present) == (8, 3, True)
    assert (found["octmnist"].classes, found["octmnist"].channels, found["octmnist"].present) == (4, 1, False)
    assert found["phantoms"].present


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WARDROUND_DATA", raising=False)
    assert default_data_folder() == tmp_path / ".wardround" / "data"
    monkeypatch.setenv("WARDROUND_DATA", "~/images")
    assert default_data_folder() == tmp_path / "images"
    npz_folder = tmp_path / "images"
    npz_folder.mkdir()
    npz(npz_folder / "breastmnist.npz")
    assert [info.name for info in known() if info.present] == ["phantoms", "breastmnist"]
