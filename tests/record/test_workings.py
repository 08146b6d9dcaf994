"""What a method leaves about its own work: events, `result.json`, and the gallery file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from record.painter import CLUSTERS, COURSE, Painter
from tiny import QUICK, coordinate, events, give_tiny_data, settings
from wardround import run, tensorfile
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle
from wardround.methods.base import Context
from wardround.methods.fedavg import FedAvg
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.progress import Silent
from wardround.record import gallery
from wardround.record.rundir import Log


def test_workings_are_events_of_the_end(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", Painter())
    found = list(Log(tmp_path / "run" / "events.jsonl").rows())
    assert found[-5:-1] == [
        {"kind": "work", "part": "synthesis", "steps": 500, "seconds": 4.1},
        {"kind": "work", "part": "adaptation", "steps": 0, "seconds": 0.0},
        {
            "kind": "clusters",
            "clusters": CLUSTERS,
            "silhouettes": {"2": 0.25},
            "weights": [[0.75, 0.25], [0.5, None]],
            "similarity": {"sites": [], "of": "", "values": []},
            "course": COURSE,
        },
        {"kind": "gallery", "file": "gallery.safetensors"},
    ]
    assert found[-1]["kind"] == "end"
    assert {"kind": "work", "part": "synthesis", "steps": 500} in events(tmp_path / "run")


def test_a_result_names_them(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", Painter())
    assert result["work"] == [
        {"method": "painter", "part": "synthesis", "steps": 500, "seconds": 4.1, "ms_per_step": 8.2},
        {"method": "painter", "part": "adaptation", "steps": 0, "seconds": 0.0, "ms_per_step": None},
    ]
    (clusters,) = result["clusters"]
    assert clusters == {
        "method": "painter",
        "clusters": CLUSTERS,
        "silhouettes": {"2": 0.25},
        "weights": [[0.75, 0.25], [0.5, None]],
        "similarity": {"sites": [], "of": "", "values": []},
        "course": COURSE,
    }
    assert result["galleries"] == [{"method": "painter", "file": "gallery.safetensors"}]


def test_fedbicross_says_how_alike_sites_are_and_how_its_weights_came_about(tmp_path: Path) -> None:
    (found,) = coordinate(tmp_path / "run", make("fedbicross", {**QUICK["fedbicross"], "clusters": 2}))["clusters"]
    assert (found["similarity"]["sites"], found["similarity"]["of"]) == (["site-1", "site-2", "site-3"], "predictions")
    values = torch.tensor(found["similarity"]["values"])
    assert torch.equal(values, values.T)
    assert values.diagonal().tolist() == [1.0] * 3
    assert found["course"][0] == [[0.5, 0.5], [0.5, 0.5]]
    assert found["course"][-1] == [[round(weight, 4) for weight in row] for row in found["weights"]]
    assert len(found["course"]) == 2  # the beginning and the one trajectory


def test_a_method_without_workings_leaves_none(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", FedAvg())
    assert (result["work"], result["clusters"], result["galleries"]) == ([], [], [])
    assert not (tmp_path / "run" / "gallery.safetensors").exists()


def test_clusters_need_neither_silhouettes_nor_weights(tmp_path: Path) -> None:
    class Plain(Painter):
        def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
            for found in FedAvg.absorb(self, ctx, state, answers):
                yield State(found.groups, {"clusters": [["site-1", "site-2", "site-3"]]})

    (clusters,) = coordinate(tmp_path / "run", Plain())["clusters"]
    assert (clusters["silhouettes"], clusters["weights"]) == ({}, [])


def test_the_gallery_is_kept_as_it_was_made(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", Painter())
    found = gallery.read(tmp_path / "run" / "gallery.safetensors")
    assert (found.labels, found.steps, found.left_out) == ((0, 1, 2, 3), (1, 2), ())
    (pictures,) = found.pictures.values()
    assert pictures.shape == (2, 4, 3, 8, 8)
    assert pictures[0].unique().tolist() == [0]
    assert pictures[1].unique().tolist() == [128]


# Runs and comparisons -------------------------------------------------------------------------------------------------


def test_a_comparison_names_and_shows_the_gallery_of_each_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_tiny_data(monkeypatch, Painter)
    methods: list[tuple[str, dict[str, Any]]] = [("painter", {}), ("local", {})]
    result = run.begin_comparison(settings(), methods, tmp_path / "both", Silent()).finish()
    assert result["galleries"] == [{"method": "painter", "file": "painter/gallery.safetensors"}]
    assert [entry["method"] for entry in result["work"]] == ["painter", "painter"]
    inner = run.read_result(tmp_path / "both" / "painter")
    assert inner["galleries"] == [{"method": "painter", "file": "gallery.safetensors"}]
    for path in (tmp_path / "both", tmp_path / "both" / "painter"):
        page = (path / "report.html").read_text(encoding="utf-8")
        assert page.count("<img ") == 8
        (path / "report.html").unlink()
        assert run.rewrite_report(path).read_text(encoding="utf-8") == page


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_report_outlives_its_gallery(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiny_data(monkeypatch, Painter)
    run.begin_run(settings(method="painter"), tmp_path / "out", Silent()).finish()
    file = tmp_path / "out" / "gallery.safetensors"
    whole = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(whole[: {"empty": 0, "cut": len(whole) - 100}[damage]])
    page = run.rewrite_report(tmp_path / "out").read_text(encoding="utf-8")
    assert "The images of painter cannot be shown: " in page
    assert "<img " not in page


def test_a_run_that_is_stopped_before_its_end_keeps_its_workings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is before the end: what the events are made of must be in its state."""
    straight = coordinate(tmp_path / "straight", Painter())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Painter, "deliver", stop)
        with pytest.raises(KeyboardInterrupt):
            coordinate(tmp_path / "stopped", Painter())
    again = coordinate(tmp_path / "stopped", Painter())
    for key in ("work", "clusters", "galleries"):
        assert again[key] == straight[key]
    files = [tmp_path / name / "gallery.safetensors" for name in ("straight", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()


# Files that cannot be shown -------------------------------------------------------------------------------------------

PICTURE = torch.zeros((1, 2, 3, 4, 4), dtype=torch.uint8)
FACTS = {"labels": [0, 1], "steps": [5]}


@pytest.mark.parametrize(
    ("groups", "record", "words"),
    [
        ({"model": {"w": PICTURE}}, {"gallery": FACTS}, "holds no gallery"),
        ({"gallery": {"a": PICTURE}}, {}, "holds no gallery"),
        ({"gallery": {"a": PICTURE}}, {"gallery": None}, "holds no gallery"),
        ({"gallery": {"a": PICTURE}}, {"gallery": {"labels": [0, 1]}}, "0 frames of 2 images"),
        ({"gallery": {"a": PICTURE}}, {"gallery": {**FACTS, "labels": [0]}}, "1 frames of 1 images"),
        ({"gallery": {"a": PICTURE}}, {"gallery": {**FACTS, "labels": [0, -1]}}, "lists of whole numbers"),
        ({"gallery": {"a": PICTURE}}, {"gallery": {**FACTS, "steps": ["5"]}}, "lists of whole numbers"),
        ({"gallery": {"a": PICTURE}}, {"gallery": {**FACTS, "steps": 5}}, "lists of whole numbers"),
        ({"gallery": {"a": PICTURE.float()}}, {"gallery": FACTS}, "torch.float32"),
        ({"gallery": {"a": PICTURE[0]}}, {"gallery": FACTS}, "expected uint8"),
        ({"gallery": {"a": PICTURE[:, :, :2]}}, {"gallery": FACTS}, "1 or 3 channels"),
        ({"gallery": {"a": PICTURE[..., :0]}}, {"gallery": FACTS}, "expected uint8"),
    ],
)
def test_a_file_that_is_no_gallery_is_refused_in_one_line(
    groups: dict[str, dict[str, torch.Tensor]], record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tensorfile.write(tmp_path / "gallery.safetensors", groups, record)
    with pytest.raises(BadInput, match=words) as caught:
        gallery.read(tmp_path / "gallery.safetensors")
    assert "\n" not in str(caught.value)


def test_a_state_without_a_gallery_writes_no_file(tmp_path: Path) -> None:
    assert gallery.write(tmp_path, State({"model": {"w": PICTURE}})) is None
    assert list(tmp_path.iterdir()) == []
