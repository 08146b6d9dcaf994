"""`wardround report RUN --real-images`: another file, for its owner alone, of the run's very images, or a refusal."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from commands import Captured, cli, empty_place, ok, save_npz
from commands import images as noise
from report.test_real import WARNING
from report.test_workings import pictures_of, pixels
from wardround.cli import main
from wardround.report.patients import PAGE
from wardround.report.real import PER_COLUMN

QUICK = [word for key, value in tiny.QUICK["fedisca"].items() for word in ("--set", f"fedisca.{key}={value}")]
SMALL = ["--sites", "2", "--partition", "iid", "--rounds", "1", "--epochs", "1", "--device", "cpu"]
MODEL = ["--set", "model.width=2", "--set", "train.batch=8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a comparison on them; each test has a copy."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        for _ in empty_place(folder, patch):
            save_npz(folder / "scans.npz")
            given = ["--data", "scans.npz", *SMALL, *MODEL]
            assert main(["compare", "fedisca", "local", *given, *QUICK, "--out", "x", "-q"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(finished, tmp_path / "here")
    yield from empty_place(tmp_path / "here", monkeypatch)


def refused(capsys: Captured, *arguments: str) -> str:
    """The complaint; and no page."""
    code, out, err = cli(capsys, "report", *arguments)
    assert (code, out) == (2, "")
    assert list(Path().rglob(PAGE)) == []
    assert err.count("\n") == 1
    return err


def test_the_command_writes_another_file_for_its_owner_and_leaves_the_report_alone(capsys: Captured) -> None:
    before = Path("x/report.html").read_bytes()
    assert ok(capsys, "report", "x", "--real-images") == f"x/{PAGE}\nIt shows patients' images: it stays at the site.\n"
    page = Path("x", PAGE)
    assert page.stat().st_mode & 0o777 == 0o600
    assert Path("x/report.html").read_bytes() == before
    real = [image for image in pictures_of(page.read_text(encoding="utf-8")) if "real image" in image["alt"]]
    assert len(real) == 4 * PER_COLUMN
    known = {bytes(picture.tobytes()) for picture in noise()[0]}
    assert all(pixels(image).tobytes() in known for image in real)
    assert not any(pixels(image).tobytes() in known for image in pictures_of(before.decode()))


def test_a_report_afterwards_is_plain_again(capsys: Captured) -> None:
    before = Path("x/report.html").read_bytes()
    ok(capsys, "report", "x", "--real-images")
    ok(capsys, "report", "x", "--plots", "plots")
    assert Path("x/report.html").read_bytes() == before
    assert not [file for file in Path("plots").iterdir() if WARNING in file.read_bytes().decode("utf-8", "ignore")]


def test_a_run_within_a_comparison_and_a_result_file_will_do(capsys: Captured) -> None:
    assert ok(capsys, "report", "x/fedisca", "--real-images").startswith(f"x/fedisca/{PAGE}\n")
    assert ok(capsys, "report", "x/result.json", "--real-images").startswith(f"x/{PAGE}\n")


def test_neither_the_runs_device_nor_its_weights_are_needed(capsys: Captured) -> None:
    settings = json.loads(Path("x/settings.json").read_text())
    settings["device"] = "cuda"
    settings["model"]["weights"] = "gone.safetensors"
    Path("x/settings.json").write_text(json.dumps(settings))
    ok(capsys, "report", "x", "--real-images")


def test_images_that_moved_are_named(capsys: Captured) -> None:
    Path("scans.npz").rename("moved.npz")
    assert "scans.npz" in refused(capsys, "x", "--real-images")
    ok(capsys, "report", "x", "--real-images", "--data", "moved.npz")


def test_images_that_are_not_the_runs_are_refused(capsys: Captured, here: Path) -> None:
    save_npz(here / "scans.npz", train_images=255 - noise()[0])
    assert refused(capsys, "x", "--real-images") == (
        "error: these are not the images of x: their hashes differ from its data.json; name the run's own images with "
        "--data\n"
    )


def test_a_run_without_a_gallery_is_refused_before_images_are_read(capsys: Captured) -> None:
    Path("scans.npz").unlink()
    assert refused(capsys, "x/local", "--real-images") == (
        "error: x/local has no gallery to put real images beside: none of its methods makes images; write its report "
        "without --real-images\n"
    )


def test_a_gallery_that_is_gone_is_refused(capsys: Captured) -> None:
    Path("x/fedisca/gallery.safetensors").unlink()
    said = refused(capsys, "x", "--real-images")
    assert said.startswith(
        "error: there is no gallery to put real images beside: The images of fedisca cannot be shown"
    )


@pytest.mark.parametrize("file", ["settings.json", "data.json"])
@pytest.mark.parametrize("text", [None, "no json", "[]"])
def test_a_directory_without_its_opening_files_is_refused(capsys: Captured, file: str, text: str | None) -> None:
    Path("x", file).unlink() if text is None else Path("x", file).write_text(text)
    assert f"x/{file}" in refused(capsys, "x", "--real-images")


def test_data_without_real_images_is_refused(capsys: Captured) -> None:
    assert "--data is for --real-images" in refused(capsys, "x", "--data", "scans.npz")


def test_one_source_cannot_stand_for_a_file_of_each_site(capsys: Captured) -> None:
    settings = json.loads(Path("x/settings.json").read_text())
    settings["data"]["files"] = {"north": "a.npz", "south": "b.npz"}
    Path("x/settings.json").write_text(json.dumps(settings))
    assert "a file for each site" in refused(capsys, "x", "--real-images", "--data", "scans.npz")
