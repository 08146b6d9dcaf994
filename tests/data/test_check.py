"""`wardround data check` on sets in which one thing is wrong each, and the page in a real browser."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Browser

from browsing import DESK, PHONE, opened, overflow, unfold
from data.test_likeness import smooth
from dicoms import NAME, PATIENT, write_dicom
from wardround.cli import main
from wardround.data.check.findings import Finding, find
from wardround.data.check.inspected import inspect
from wardround.data.check.page import write_page
from wardround.data.looks import Look, look_at, written_corners
from wardround.data.sources import load

CLASSES = ("ash", "birch")


def chests(n: int, seed: int = 0, side: int = 96) -> list[np.ndarray]:
    """Grey pictures with a common look: bright above, a dark lung on the left, noise of their own."""
    rng = np.random.default_rng(seed)
    down, across = np.mgrid[0:side, 0:side] / side
    common = 60 + 90 * (1 - down) - 50 * np.exp(-((across - 0.3) ** 2 + (down - 0.5) ** 2) * 20)
    own = [np.asarray(Image.fromarray(p).resize((side, side))) for p in smooth(n, seed)]
    return [np.clip(common + 0.4 * (p - 128.0) + rng.normal(0, 2, p.shape), 1, 254).astype(np.uint8) for p in own]


def tree(root: Path, pictures: list[np.ndarray], change: Callable[[Path], None] = lambda _: None) -> Path:
    """Three quarters for training, both classes in turn."""
    for i, picture in enumerate(pictures):
        place = root / ("test" if i % 8 >= 6 else "train") / CLASSES[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place / f"{i:03}.png")
    change(root)
    return root


def found(path: Path, **how: object) -> dict[str, Finding]:
    return {finding.kind: finding for finding in find(inspect(str(path), path.parent, **how))}  # type: ignore[arg-type]


def spoilt(findings: dict[str, Finding]) -> set[str]:
    return {kind for kind, finding in findings.items() if finding.severity == "spoils"}


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert found(tree(tmp_path / "set", chests(80))) == {}


def test_duplicates_and_conflicting_labels(tmp_path: Path) -> None:
    pictures = chests(80)
    pictures[6] = pictures[0]  # train/ash again in test/ash
    pictures[9] = pictures[2]  # train/ash again in train/birch
    pictures[10] = pictures[4]  # train/ash twice
    near = np.clip(pictures[16] * 0.95 + 5, 0, 255).astype(np.uint8)
    pictures[22] = near  # train/ash, brighter in test/ash
    got = found(tree(tmp_path / "set", pictures))
    assert got["duplicates across training and test"].names == (
        "train/ash/000.png (train, ash) = test/ash/006.png (test, ash)",
    )
    assert got["conflicting labels"].names == ("train/ash/002.png (train, ash) = train/birch/009.png (train, birch)",)
    assert got["duplicates on one side"].count == 2
    assert got["near duplicates across training and test"].names == (
        "train/ash/016.png (train, ash) ~ test/ash/022.png (test, ash)",
    )
    assert spoilt(got) == {
        "duplicates across training and test", "conflicting labels", "near duplicates across training and test",
    }  # fmt: skip


def test_what_cannot_be_read_or_shows_nothing(tmp_path: Path) -> None:
    pictures = chests(80)
    pictures[0] = np.full((96, 96), 7, np.uint8)
    pictures[1] = (np.indices((96, 96)).sum(0) % 2 + 90).astype(np.uint8)

    def change(root: Path) -> None:
        (root / "train" / "ash" / "note.txt").write_text("no picture")
        (root / "test" / "birch" / "broken.png").write_bytes(b"\x89PNG")

    got = found(tree(tmp_path / "set", pictures, change))
    assert got["unreadable files"].names == (
        "train/ash/note.txt: is no PNG, JPEG, BMP, TIFF, DICOM or NIfTI file; convert it or leave it out",
        "test/birch/broken.png: cannot be read as a picture; mend it or move it out",
    )
    assert got["constant pictures"].names == ("train/ash/000.png",)
    assert got["blank pictures"].names == ("train/birch/001.png",)
    assert spoilt(got) == {"unreadable files"}


def test_turned_inverted_windowed_and_written_on(tmp_path: Path) -> None:
    pictures = chests(120)
    pictures[0] = np.rot90(pictures[0], 2).copy()
    pictures[1] = np.rot90(pictures[1]).copy()
    pictures[2] = 255 - pictures[2]
    pictures[3] = (pictures[3] // 8 + 100).astype(np.uint8)
    for i in range(8, 16):
        pictures[i][: 96 // 4, : 96 // 3] = 5
        image = Image.fromarray(pictures[i])
        ImageDraw.Draw(image).text((1, 2), f"DOE {i}", fill=255)
        pictures[i] = np.asarray(image).copy()
    got = found(tree(tmp_path / "set", pictures))
    assert {"train/ash/000.png", "train/birch/001.png"} <= set(got["suspected wrong orientation"].names)
    assert "train/ash/002.png" in got["suspected inversion"].names
    assert "train/birch/003.png" in got["suspected windowing"].names
    written = got["suspected text in the picture"]
    assert written.count == 8
    assert "top left" in written.text
    assert all(finding.severity == "look" for finding in got.values())
    assert got["suspected wrong orientation"].count <= 4


def test_strokes_are_text_and_bones_are_not() -> None:
    image = Image.new("L", (256, 256), 8)
    ImageDraw.Draw(image).text((200, 4), "L 12:40", fill=250)
    assert written_corners(np.asarray(image)) == ("top right",)
    bone = Image.new("L", (256, 256), 8)
    ImageDraw.Draw(bone).ellipse((-40, 180, 60, 280), fill=240)
    assert written_corners(np.asarray(bone)) == ()
    noise = np.random.default_rng(0).integers(0, 256, (256, 256), dtype=np.uint8)
    assert written_corners(noise) == written_corners(noise[:32, :32]) == ()


def test_a_look_against_the_plain_figures() -> None:
    picture = np.random.default_rng(0).integers(3, 250, (40, 30), dtype=np.uint8)
    picture[0] = 0
    look = look_at(picture, 12)
    assert (look.width, look.height, look.channels, look.bits, look.low) == (30, 40, 1, 12, 0)
    assert look.mean == pytest.approx(picture.mean(), abs=1e-3)
    assert look.spread == pytest.approx(picture.std(), abs=1e-3)
    assert look.black == pytest.approx((picture == 0).mean(), abs=1e-4)
    assert Look.from_json(json.loads(json.dumps(look.as_json()))) == look
    assert look_at(np.stack([picture] * 3, axis=2), 8).sha256 != look.sha256


def test_patients_and_classes_of_a_table(tmp_path: Path) -> None:
    lines = ["path,label,patient,split"]
    for i, picture in enumerate(chests(60)):
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
        label = "rare" if i < 3 else "ab"[i % 2]
        lines.append(f"{i}.png,{label},SECRET-{i // 2 % 25},{'test' if i >= 45 else 'train'}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    got = found(tmp_path / "t.csv")
    shared = got["patients in training and test"]
    assert shared.count == 6 == len(shared.names)  # a line for each patient
    assert shared.names[0].count(" + ") == 3
    assert shared.names[0].startswith("0.png (train, rare) + 1.png (train, rare) + 50.png (test, ")
    assert "SECRET" not in str(got)
    assert got["tiny classes"].names == ("rare: 3",)
    assert got["classes without test images"].names == ("rare",)
    assert spoilt(got) == {"patients in training and test", "classes without test images"}


def test_patients_in_training_and_validation_are_named_apart(tmp_path: Path) -> None:
    lines = ["path,label,patient,split"]
    for i, picture in enumerate(chests(40)):
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
        part = "test" if i >= 30 else "val" if i in (20, 29) else "train"
        lines.append(f"{i}.png,{'ab'[i % 2]},{3 if i in (5, 20) else 100 + i},{part}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    got = found(tmp_path / "t.csv")
    assert got["patients in training and validation"].names == ("5.png (train, b) + 20.png (val, a)",)
    assert got["patients in training and validation"].severity == "look"
    assert "patients in training and test" not in got


def test_one_class_is_a_finding_and_a_missing_file_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, picture in enumerate(chests(4)):
        (tmp_path / "set" / "ash").mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "set" / "ash" / f"{i}.png")
    assert spoilt(found(tmp_path / "set")) == {"one class"}
    (tmp_path / "t.csv").write_text("path,label\ngone.png,a\n")
    assert main(["data", "check", str(tmp_path / "t.csv")]) == 2
    assert "names gone.png, which does not exist" in capsys.readouterr().err
    assert main(["data", "check", str(tmp_path / "nothing")]) == 2
    assert main(["data", "check", "phantoms:80", "--cache"]) == 2
    assert main(["data", "check", "phantoms:80", "--out", str(tmp_path / "no" / "page.html")]) == 2


def test_a_table_of_groups_is_refused_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "set", chests(60))
    for source in (str(root), "phantoms:80"):
        assert main(["data", "check", source, "--groups", str(tmp_path / "none.csv")]) == 2
        assert f"data.groups is for .npz files and cannot be used with {source}" in capsys.readouterr().err


def test_a_set_of_which_nothing_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / f"{name}.png").write_bytes(b"no picture")
    assert main(["data", "check", str(tmp_path / "set"), "--out", str(tmp_path / "page.html")]) == 1
    assert "unreadable files (4)" in capsys.readouterr().out
    assert "a/0.png: cannot be read as a picture" in (tmp_path / "page.html").read_text()


# The command ----------------------------------------------------------------------------------------------------------


def test_exit_codes_and_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tree(tmp_path / "good", chests(80))
    assert main(["data", "check", "good"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ash +30 +0 +10", out)
    assert "Nothing was found." in out
    assert (tmp_path / "good-check.html").stat().st_mode & 0o077 == 0  # it shows patients' images
    pictures = chests(80)
    pictures[6] = pictures[0]
    tree(tmp_path / "bad", pictures)
    assert main(["data", "check", "bad", "--no-page", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["severity"], finding["kind"]) == ("spoils", "duplicates across training and test")
    assert not (tmp_path / "bad-check.html").exists()


def test_dicom_is_read_once_checked_and_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, picture in enumerate(chests(72, side=64)):
        values = picture.astype(np.uint16) * 16
        write_dicom(tmp_path / "set" / CLASSES[i % 2] / f"{i}.dcm", values, PatientID=f"{PATIENT}-{i}", BitsStored=12)
    where = ["--folder", str(tmp_path / "data"), "--out", str(tmp_path / "page.html")]
    assert main(["data", "check", str(tmp_path / "set"), "--cache", "--size", "32", *where]) == 0
    out = capsys.readouterr().out
    assert re.search(r"bits a value +12 \(72\)", out)
    assert re.search(r"patients +72", out)
    page = (tmp_path / "page.html").read_text()
    assert NAME not in out + page
    assert PATIENT not in out + page
    (cache,) = (entry for entry in (tmp_path / "data" / "cache").iterdir() if entry.is_dir())
    stored = np.fromfile(cache / "images.u8", np.uint8).reshape(-1, 1, 32, 32)
    data = load(str(tmp_path / "set"), tmp_path / "data", size=32)
    assert np.array_equal(np.concatenate([data.train.images.numpy(), data.test.images.numpy()]), stored)
    (tmp_path / "set" / "ash" / "0.dcm").write_bytes(b"\0" * 128 + b"DICM")
    assert main(["data", "check", str(tmp_path / "set"), "--cache", "--size", "32", *where]) == 1
    assert re.search(r"cache +not cached: ", capsys.readouterr().out)


# The page -------------------------------------------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)>&'\""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_page_opens_alone_and_fits(browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: str) -> None:
    pictures = chests(80)
    pictures[6], pictures[1] = pictures[0], 255 - pictures[1]
    root = tree(tmp_path / "set", pictures, lambda root: [_renamed(place) for place in root.glob("*/ash")] and None)
    (root / "train" / "birch" / ("long" * 50 + ".png")).write_bytes(b"no picture")
    seen = inspect(str(root), tmp_path)
    findings = find(seen)
    write_page(seen, findings, tmp_path / "page.html")
    with opened(browser, (tmp_path / "page.html").as_uri(), size, scheme) as page:
        assert overflow(page) <= 0
        unfold(page)
        assert overflow(page) <= 0
        shown = page.locator("section.finding h3").all_inner_texts()
        assert shown == [f"{finding.kind} ({finding.count})" for finding in findings]
        assert page.locator("main table").first.locator("tbody tr").count() == len(findings)
        assert HOSTILE.replace("/", "") in page.inner_text("main")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(251, 251, 249)", "dark": "rgb(18, 21, 27)"}[scheme]
        assert page.evaluate("[...document.images].every(i => i.naturalWidth > 0)")


def _renamed(place: Path) -> None:
    place.rename(place.with_name(HOSTILE))
