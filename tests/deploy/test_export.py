from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from deploy.samples import ABOUT, MADE, bright, noise
from wardround.deploy import export as module
from wardround.deploy import onnx_file
from wardround.deploy.card import Card, markdown
from wardround.deploy.export import export
from wardround.deploy.load import open_model
from wardround.errors import BadInput

RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10))}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_card(folder: Path) -> Card:
    return Card.model_validate_json((folder / "model_card.json").read_bytes())


@pytest.fixture
def without_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)


def test_what_is_written(whole_export: Path) -> None:
    pytest.importorskip("onnx", reason="needs the extra [onnx]")
    names = sorted(file.name for file in whole_export.iterdir())
    assert names == ["model.onnx", "model.safetensors", "model_card.json", "model_card.md"]
    card = read_card(whole_export)
    for name in ("model.onnx", "model.safetensors"):
        entry = card.files[name]
        assert (entry.bytes, entry.sha256) == ((whole_export / name).stat().st_size, sha256(whole_export / name))
    assert (card.made, card.about) == (MADE, ABOUT)
    assert card.networks == ("cnn4, width 1, 1×4×4 images, 2 classes",)
    assert card.onnx.difference is not None
    assert card.onnx.difference <= 1e-6
    assert (card.onnx.images, card.onnx.not_written) == (18, "")
    assert set(card.versions) == {"wardround", "python", "torch", "onnx", "onnxruntime", "onnxscript"}
    assert (whole_export / "model_card.md").read_text(encoding="utf-8") == markdown(card)


def test_names_are_allowed_on_windows(whole_export: Path) -> None:
    for file in whole_export.iterdir():
        assert re.fullmatch(r"[a-z_]+\.[a-z]+", file.name)
        assert file.stem not in RESERVED


def test_without_the_extra_all_else_is_written_and_it_is_said(without_onnx: None, tmp_path: Path) -> None:
    done = export(bright(), tmp_path / "a" / "b", ABOUT, made=MADE)
    assert sorted(file.name for file in done.folder.iterdir()) == [
        "model.safetensors",
        "model_card.json",
        "model_card.md",
    ]
    reason = "ONNX needs the package onnx, which is not installed here: pip install 'wardround[onnx]'"
    assert read_card(done.folder).onnx.not_written == reason
    assert done.lines == [
        f"model: {done.folder / 'model.safetensors'} ({(done.folder / 'model.safetensors').stat().st_size:,} bytes)",
        f"card: {done.folder / 'model_card.md'}",
        f"model.onnx was not written: {reason}",
    ]
    assert "`model.onnx` was not written: " in (done.folder / "model_card.md").read_text(encoding="utf-8")
    assert set(read_card(done.folder).versions) == {"wardround", "python", "torch"}


def test_an_export_replaces_the_one_before_with_all_its_files(model: Path, without_onnx: None) -> None:
    before = (model / "model_card.json").read_bytes()
    (model / "model.onnx").write_bytes(b"of an earlier model")
    export(bright(), model, ABOUT.model_copy(update={"images": 1}), made=MADE)
    assert not (model / "model.onnx").exists()
    assert (model / "model_card.json").read_bytes() != before
    assert open_model(model).record == ABOUT.record


def test_the_same_export_is_the_same_bytes(without_onnx: None, tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(bright(), tmp_path / name, ABOUT, made=MADE)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("difference", "written"), [(0.0, True), (1e-4, True), (1.0001e-4, False), (math.nan, False), (math.inf, False)]
)
def test_an_onnx_file_that_answers_otherwise_is_not_written(
    difference: float, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "make_onnx", lambda *_: b"graph")
    monkeypatch.setattr(onnx_file, "OnnxModel", lambda data, name: None)
    monkeypatch.setattr(onnx_file, "largest_difference", lambda *_: difference)
    monkeypatch.setattr(onnx_file, "versions", dict)
    done = export(bright(), tmp_path / "model", ABOUT, made=MADE)
    assert (done.folder / "model.onnx").exists() == written
    assert ("model.onnx" in done.card.files) == written
    assert bool(done.card.onnx.not_written) != written
    if math.isfinite(difference) and not written:
        assert done.lines[-1].endswith("its probabilities differ from the model's by 1.0e-04, more than 1e-04")


def test_the_two_are_compared_on_noise_and_on_the_given_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compare(_: object, expected: torch.Tensor, images: torch.Tensor) -> float:
        seen.append((expected, images))
        return 0.0

    monkeypatch.setattr(onnx_file, "make_onnx", lambda *_: b"graph")
    monkeypatch.setattr(onnx_file, "OnnxModel", lambda data, name: None)
    monkeypatch.setattr(onnx_file, "largest_difference", compare)
    monkeypatch.setattr(onnx_file, "versions", dict)
    given = noise(100, ABOUT.task)
    done = export(bright(), tmp_path / "model", ABOUT, made=MADE, images=given)
    ((expected, images),) = seen
    assert done.card.onnx.images == len(images) == 16 + 2 + 64
    assert torch.equal(images[18:], given[:64])
    assert len(images[:16].unique(dim=0)) == 16
    assert expected[16].tolist() == pytest.approx([0.5, 0.5])  # black
    assert expected[17].tolist() == pytest.approx([0.25, 0.75])  # white


@pytest.mark.parametrize("images", [torch.zeros(2, 1, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.uint8)])
def test_images_of_another_kind_are_refused_before_anything_is_written(images: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"must be uint8 \(n, 1, 4, 4\)"):
        export(bright(), tmp_path / "model", ABOUT, made=MADE, images=images)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_in_the_middle_leaves_no_card_that_vouches_for_the_rest(
    model: Path, without_onnx: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "markdown", stop)
    with pytest.raises(KeyboardInterrupt):
        export(bright(), model, ABOUT, made=MADE)
    with pytest.raises(BadInput, match=r"model_card\.json cannot be read"):
        open_model(model)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot be written"):
        export(bright(), tmp_path / "file" / "model", ABOUT, made=MADE)


def test_the_json_card_is_plain_json(whole_export: Path) -> None:
    tree = json.loads((whole_export / "model_card.json").read_text(encoding="utf-8"))
    assert tree["format"] == "wardround-card-1"
    assert tree["about"]["task"]["classes"] == ["benign", "malignant"]
