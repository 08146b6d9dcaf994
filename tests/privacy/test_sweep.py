"""The sweep over ε: its points, its chart, going on, and its refusals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = (
    *("phantoms:80", "--width", "2", "--rounds", "1", "--epochs", "1", "--batch", "20", "--shadows", "1"),
    *("--most", "20", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.setattr("wardround.run.write_report", lambda result, path: None)
        yield importlib.import_module("privacy_sweep")


def test_points_are_added_and_drawn(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    assert script.main([*SMALL, "--out", str(out), "--epsilons", "inf"]) == 0
    first = json.loads(out.read_text())["points"][0]
    assert script.main([*SMALL, "--out", str(out), "--epsilons", "8,inf"]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["epsilon"] for point in points] == ["8", "inf"]
    assert points[1] == first
    assert all(0 < epsilon <= 8 for epsilon in points[0]["figures"]["spent"].values())
    assert points[1]["figures"]["spent"] == {}
    assert set(points[0]["figures"]["attacks"]) == {"loss-threshold", "lira-offline"}
    drawing = ElementTree.fromstring(out.with_suffix(".svg").read_text())  # noqa: S314 - written a line above
    assert len(drawing.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert "| 8 |" in capsys.readouterr().out


def test_what_cannot_be_swept_is_refused(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    assert script.main([*SMALL, "--out", str(out), "--epsilons", "some"]) == 2
    assert "are no numbers" in capsys.readouterr().err
    out.write_text(json.dumps({"benchmark": "privacy_sweep", "settings": {}, "points": []}))
    assert script.main([*SMALL, "--out", str(out), "--epsilons", "inf"]) == 2
    assert "made with other settings" in capsys.readouterr().err
