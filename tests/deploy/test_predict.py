from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.samples import ABOUT, MADE, TASK, bright, malignant, noise, picture
from wardround.deploy import predict as module
from wardround.deploy import table
from wardround.deploy.export import export
from wardround.deploy.load import open_model
from wardround.deploy.model_file import write_model
from wardround.deploy.pictures import Failure
from wardround.deploy.predict import Predictions, Row, predict
from wardround.errors import BadInput
from wardround.learn.device import Device
from wardround.progress import Advance, Silent

GREYS = (0, 64, 128, 200, 255)


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    for grey in GREYS:
        picture(tmp_path / "scans" / f"{grey:03d}.png", grey)
    return tmp_path / "scans"


def refusal(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        open_model(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Probabilities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["", "model.safetensors", "model.onnx"])
def test_the_probabilities_worked_out_by_hand(which: str, model: Path, scans: Path) -> None:
    if which == "model.onnx":
        pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
    found = predict(model / which, [scans], "cpu")
    assert [row.file for row in found.rows] == [str(scans / f"{grey:03d}.png") for grey in GREYS]
    for grey, row in zip(GREYS, found.rows, strict=True):
        assert row.probabilities == pytest.approx((1 - malignant(grey), malignant(grey)), abs=1e-6)
        assert row.predicted == ("malignant" if grey >= 128 else "benign")
    assert (found.failures, found.notes, found.record) == ([], [], ABOUT.record)


@pytest.mark.parametrize("file", ["model.safetensors", "model.onnx"])
def test_images_that_are_not_familiar_are_marked(file: str, scans: Path, tmp_path: Path) -> None:
    """The highest score is h·log 3 with h = grey/127.5 - 1 or 0: 0, 0, 0.004, 0.62, 1.10. A prior changes no mark."""
    if file == "model.onnx":
        pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
    predictor = replace(bright(), least_familiar=torch.tensor(0.6), log_prior=torch.tensor([5.0, 5.0]))
    card = export(predictor, tmp_path / "model", ABOUT, made=MADE).card
    assert card.marks
    assert not export(bright(), tmp_path / "plain", ABOUT, made=MADE).card.marks
    found = predict(tmp_path / "model" / file, [scans], "cpu")
    assert [row.unfamiliar for row in found.rows] == [True, True, True, False, False]
    assert found.notes == ["unfamiliar, unlike what the model was trained on, so not to be relied on: 3 of 5"]
    lines = table.as_csv(found).splitlines()
    assert lines[0].endswith(',"p(malignant)","unfamiliar"')
    assert [line.rpartition(",")[2] for line in lines[1:]] == ["1", "1", "1", "0", "0"]
    assert [row["unfamiliar"] for row in json.loads(table.as_json(found))["predictions"]] == [True] * 3 + [False] * 2


def test_more_images_than_are_held_at_once(model: Path, scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = predict(model, [scans], "cpu")
    for at_once in (1, 2, 5):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        assert predict(model, [scans], "cpu").rows == whole.rows


def test_failures_are_told_and_the_order_is_kept(model: Path, scans: Path) -> None:
    (scans / "100.png").write_bytes(b"no")
    np.savez(scans / "more.npz", images=np.full((2, 8, 8), 255, np.uint8))
    found = predict(model, [scans], "cpu")
    assert [Path(row.file).name for row in found.rows] == [
        *("000.png", "064.png", "128.png", "200.png", "255.png", "more.npz[images 0]", "more.npz[images 1]"),
    ]
    assert found.failures == [
        Failure(str(scans / "100.png"), f"{scans / '100.png'} cannot be read as a picture; mend it or move it out")
    ]
    assert found.notes == ["cut to the central square and resized to 4×4 pixels: 2 images"]


def test_a_model_that_overflows_gives_no_row(tmp_path: Path, scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    predictor = bright()
    predictor.members[0].weights["head.weight"].mul_(1e38)
    predictor.members[0].weights["stages.fc.1.weight"].mul_(1e38)
    export(predictor, tmp_path / "model", ABOUT, made=MADE)
    found = predict(tmp_path / "model", [scans / "255.png", scans / "000.png"], "cpu")
    assert [failure.reason for failure in found.failures] == [
        f"{scans / '255.png'} gets no finite probabilities from this model"
    ]
    assert [Path(row.file).name for row in found.rows] == ["000.png"]


class Counting(Silent):
    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}

    @contextmanager
    def task(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        counts = self.steps.setdefault(label, [0, total])

        def advance() -> None:
            counts[0] += 1

        yield advance


def test_progress_hears_of_every_image(model: Path, scans: Path) -> None:
    np.savez(scans / "more.npz", images=np.zeros((7, 4, 4), np.uint8))
    (scans / "100.png").write_bytes(b"no")
    progress = Counting()
    predict(model, [scans], "cpu", progress)
    assert progress.steps == {"images": [7, 7], "more.npz, images": [7, 7]}


# Which model ----------------------------------------------------------------------------------------------------------


def test_paths_that_are_no_model(tmp_path: Path, scans: Path) -> None:
    assert "scans holds no model.safetensors and no model.onnx" in refusal(scans)
    assert "is no model; give the folder of an export" in refusal(picture(tmp_path / "x.png", 0))
    assert "none.safetensors cannot be read (No such file" in refusal(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"12345678")
    assert "cut.safetensors: these bytes are not a wardround tensor file" in refusal(tmp_path / "cut.safetensors")


def test_a_folder_whose_card_is_of_another_model_is_refused_but_the_file_itself_may_be_used(model: Path) -> None:
    other = bright()
    other.members[0].weights["head.bias"][0] = 1
    write_model(model / "model.safetensors", other, ABOUT.record)
    assert "is not the card of the model.safetensors beside it" in refusal(model)
    assert open_model(model / "model.safetensors").record == ABOUT.record


def test_an_onnx_file_of_another_model_in_the_folder_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.onnx").write_bytes(b"of another model, with other classes")
    assert "is not the card of the model.onnx beside it" in refusal(model)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a model card"),
        (b"\xff\xfe", "is not a model card"),
        (b"[" * 100_000, "is not a model card"),
        (b"{}", "is not as wardround writes it (made: Field required)"),
        (b"[]", "is not as wardround writes it (the record: "),
    ],
)
def test_a_card_that_is_none(content: bytes, says: str, model: Path) -> None:
    (model / "model_card.json").write_bytes(content)
    assert says in refusal(model)


def test_a_folder_without_a_card_is_refused(model: Path) -> None:
    (model / "model_card.json").unlink()
    assert "model_card.json cannot be read" in refusal(model)


def test_a_card_that_does_not_list_the_file(model: Path) -> None:
    tree = json.loads((model / "model_card.json").read_bytes())
    del tree["files"]["model.safetensors"]
    (model / "model_card.json").write_text(json.dumps(tree))
    assert "is not the card of the model.safetensors beside it" in refusal(model)


def test_places_with_spaces_and_other_letters(model: Path, scans: Path, tmp_path: Path) -> None:
    odd = tmp_path / "Läsionen und mehr (2)"
    shutil.copytree(model, odd / "model 1")
    shutil.copytree(scans, odd / "größer")
    assert len(predict(odd / "model 1", [odd / "größer"], "cpu").rows) == len(GREYS)


# The table ------------------------------------------------------------------------------------------------------------


def sample() -> Predictions:
    task = TASK.model_copy(update={"classes": ("=benign\x1b", 'mal "x"')})
    record = ABOUT.record.model_copy(update={"task": task})
    rows = [
        Row("-1+1.png", "=benign\x1b", (2 / 3, 1 / 3)),
        Row('a;=1,"b"\n.png', 'mal "x"', (0.0, 1.0)),
        Row("\udcff.png", 'mal "x"', (1e-9, 1 - 1e-9)),
    ]
    return Predictions(record, rows, [Failure("\x07.png", "broken")], ["a note"])


def test_the_table_as_csv() -> None:
    assert table.as_csv(sample()) == (
        '"file","predicted","p(=benign\\x1b)","p(mal ""x"")"\n'
        '"\'-1+1.png","\'=benign\\x1b",0.666667,0.333333\n'
        '"a;=1,""b""\\n.png","mal ""x""",0.0,1.0\n'
        '"\\udcff.png","mal ""x""",0.0,1.0\n'
    )


def test_a_reader_of_csv_gets_the_cells_back() -> None:
    rows = list(csv.reader(io.StringIO(table.as_csv(sample()))))
    assert [len(row) for row in rows] == [4] * 4
    assert rows[2][0] == 'a;=1,"b"\\n.png'


def test_the_table_as_json() -> None:
    tree = json.loads(table.as_json(sample()))
    assert tree["predictions"][0] == {
        "file": "-1+1.png",
        "predicted": "=benign\x1b",
        "probabilities": {"=benign\x1b": 0.666667, 'mal "x"': 0.333333},
    }
    assert tree["failures"] == [{"file": "\x07.png", "reason": "broken"}]
    assert tree["notes"] == ["a note"]
    assert tree["model"]["origin"]["study_id"] == "0123456789abcdef"
    assert table.as_json(sample()).isascii()


def test_a_predictor_and_its_export_agree(model: Path) -> None:
    images = noise(5, TASK)
    expected = bright().scores(images, Device(torch.device("cpu"), 1)).softmax(dim=1)
    assert torch.equal(open_model(model, "cpu").answer(images)[0], expected)
