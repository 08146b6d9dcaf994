"""A site's images as the agreement wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dicoms import write_dicom
from remote.parties import agreement
from wardround.agreement import Agreement
from wardround.errors import BadInput
from wardround.progress import Silent
from wardround.remote.practice import draw_hospitals
from wardround.settings import checked
from wardround.sitedata import read_site

CLASSES = ("ash", "birch", "cedar", "durmast")


def agreed(**task: Any) -> Agreement:
    tree = agreement().model_dump(exclude_none=True)
    return checked(Agreement, {**tree, "task": {**tree["task"], **task}})


def folder(path: Path, classes: tuple[str, ...], n: int = 5, size: int = 8, mode: str = "RGB") -> str:
    """Pictures whose brightness is 40 times the number of their class in the agreement."""
    for name in classes:
        (path / name).mkdir(parents=True)
        shade = 40 * CLASSES.index(name) if name in CLASSES else 255
        for number in range(n):
            Image.new(mode, (size, size), (shade,) * 3 if mode == "RGB" else shade).save(path / name / f"{number}.png")
    return str(path)


def test_classes_get_the_numbers_of_the_agreement(tmp_path: Path) -> None:
    order = ["durmast", "cedar", "birch", "ash"]
    site = read_site(agreed(classes=order), "site-1", folder(tmp_path / "x", CLASSES))
    assert site.train.classes == tuple(order)
    for part in (site.train, site.val, site.test.images):
        assert len(part)
        shades = part.images[:, 0, 0, 0].to(torch.int64)
        assert torch.equal(3 - shades // 40, part.labels)


def test_a_site_may_lack_classes_and_has_no_others(tmp_path: Path) -> None:
    site = read_site(agreed(), "site-1", folder(tmp_path / "some", ("durmast", "birch")))
    assert site.train.classes == CLASSES
    assert (site.train.counts() + site.val.counts()).tolist() == [0, 4, 0, 4]
    one = read_site(agreed(), "site-1", folder(tmp_path / "one", ("cedar",)))
    assert (one.train.counts() + one.val.counts()).tolist() == [0, 0, 4, 0]
    assert one.test.images.counts().tolist() == [0, 0, 1, 0]
    table = tmp_path / "one.csv"
    table.write_text("path,label\n" + "".join(f"one/cedar/{n}.png,cedar\n" for n in range(5)))
    assert torch.equal(read_site(agreed(), "site-1", str(table)).train.counts(), one.train.counts())
    with pytest.raises(
        BadInput, match="has the class 'elm', which the study does not know; its classes are ash, birch"
    ):
        read_site(agreed(), "site-1", folder(tmp_path / "other", ("ash", "elm")))


def test_other_sizes_and_kinds(tmp_path: Path) -> None:
    large = folder(tmp_path / "large", CLASSES, size=20)
    assert read_site(agreed(), "site-1", large).train.size == 8
    grey = folder(tmp_path / "grey", CLASSES, mode="L")
    assert read_site(agreed(), "site-1", grey).train.channels == 3
    assert read_site(agreed(channels=1), "site-1", grey).train.channels == 1
    with pytest.raises(BadInput, match="has colour images, the study has grey ones"):
        read_site(agreed(channels=1), "site-1", large)


def test_a_file_counts_its_classes_as_the_agreement_does(tmp_path: Path) -> None:
    def file(name: str, labels: list[int], size: int = 8) -> str:
        pixels = np.zeros((len(labels), size, size, 3), np.uint8)
        path = tmp_path / f"{name}.npz"
        np.savez(path, train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
        return str(path)

    site = read_site(agreed(), "site-1", file("three", [0, 1, 2] * 4))
    assert site.train.classes == CLASSES
    assert set(site.train.labels.tolist()) == {0, 1, 2}
    with pytest.raises(BadInput, match="has labels up to 4, the study has 4 classes"):
        read_site(agreed(), "site-1", file("five", [0, 1, 2, 3, 4] * 3))
    with pytest.raises(BadInput, match="holds images of 12x12, not 8"):
        read_site(agreed(), "site-1", file("large", [0, 1] * 4, size=12))


def test_the_split_is_the_sites_own_and_does_not_change(tmp_path: Path) -> None:
    source = folder(tmp_path / "x", CLASSES, n=20)
    one, again, other = (read_site(agreed(), name, source) for name in ("site-1", "site-1", "site-2"))
    assert one.train.sha256() == again.train.sha256() != other.train.sha256()
    assert len(one.val) == 6  # a tenth of the 64 that are not the test's
    assert len(read_site(agreed(val_share=0.0), "site-1", source).val) == 0


def test_practice_images_can_be_read_as_a_hospitals(tmp_path: Path) -> None:
    classes = draw_hospitals(tmp_path, ["north", "south"], 40)
    task = {"classes": classes, "size": 28}
    north, south = (read_site(agreed(**task), name, str(tmp_path / name)) for name in ("north", "south"))
    assert (len(north.train) + len(north.val), len(north.test.images)) == (40, 10)
    assert len(south.train) + len(south.val) == 40
    assert north.train.sha256() != south.train.sha256()
    with pytest.raises(BadInput, match="exists already"):
        draw_hospitals(tmp_path, ["south"], 40)
    with pytest.raises(BadInput, match="too few for eight classes"):
        draw_hospitals(tmp_path / "few", ["north"], 10)


def test_a_site_never_splits_a_patient_and_is_told_of_those_in_its_test(tmp_path: Path) -> None:
    n = 40
    parts = {f"{part}_images": np.zeros((n, 8, 8, 3), np.uint8) for part in ("train", "test")}
    parts |= {f"{part}_labels": np.arange(n) % 4 for part in ("train", "test")}
    parts |= {"train_patient": np.arange(n) // 4, "test_patient": np.arange(n) // 4 + 9}
    np.savez(tmp_path / "scans.npz", **parts)
    said: list[str] = []
    progress = Silent()
    progress.say = said.append  # type: ignore[method-assign]
    site = read_site(agreed(val_share=0.2), "site-1", str(tmp_path / "scans.npz"), progress)
    kept, held = (set(part.patients.tolist()) for part in (site.train, site.val) if part.patients is not None)
    assert len(kept) + len(held) == 10
    assert not kept & held
    assert len(held) == 2
    assert said == [
        "note: 1 patients (or lesions) are in both training and test, with 4 of the 40 test images: accuracies on "
        "these parts are too good"
    ]


def test_the_agreement_says_which_slices(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(16):
        film = rng.integers(0, 99, (3, 8, 8), dtype=np.uint8)
        write_dicom(tmp_path / "films" / CLASSES[i % 4] / f"{i}.dcm", film, PatientID=str(i))
    with pytest.raises(BadInput, match="has 3 frames"):
        read_site(agreed(channels=1), "site-1", str(tmp_path / "films"))
    site = read_site(agreed(channels=1, slices="all"), "site-1", str(tmp_path / "films"))
    assert len(site.train) + len(site.val) + len(site.test.images) == 48
