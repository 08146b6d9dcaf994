"""The page of what several rounds gain: its picture by hand, its marks, and that it is not behind the results."""

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """The script's module, which finds its neighbours beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("rounds_page")


def entry(name: str, accuracies: list[float]) -> dict[str, Any]:
    return {"entry": name, "rounds": {"shared_global_accuracy": accuracies}}


def test_the_picture_is_of_running_means_over_rounds_and_means_over_seeds(page: Any) -> None:
    runs = [entry("fedavg", [0.0, 0.1, 0.2, 0.3, 0.4, 1.4]), entry("fedavg", [0.2, 0.3, 0.4, 0.5, 0.6, 1.6])]
    others = [entry(name, [0.5] * 6) for name in page.DRAWN if name != "fedavg"]
    tips = re.findall("<title>(.*?)</title>", page.picture([*runs, *others]))
    # Means over seeds 0.1 to 0.5, then 1.5; of the first five 0.3, of the last five 0.58.
    assert {"fedavg, round 5: 0.300", "fedavg, round 6: 0.580", "fedkper, round 6: 0.500"} <= set(tips)


def test_a_page_without_a_mark_is_left_alone(page: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "rounds.md"
    text = (ROOT / "docs" / "rounds.md").read_text(encoding="utf-8")
    copy.write_text(text.replace("<!-- figures: rounds_page.py, readings -->", ""), encoding="utf-8")
    before = copy.read_bytes()
    assert page.main([str(ROOT / "papers"), str(copy)]) == 2
    assert "has no <!-- figures: rounds_page.py, readings -->" in capsys.readouterr().err
    assert copy.read_bytes() == before
    assert not copy.with_suffix(".svg").exists()


def test_the_page_has_the_figures_of_the_results(page: Any, tmp_path: Path) -> None:
    """Fails when results are new; then run: benchmarks/rounds_page.py papers docs/rounds.md."""
    shutil.copy(ROOT / "docs" / "rounds.md", tmp_path)
    assert page.main([str(ROOT / "papers"), str(tmp_path / "rounds.md")]) == 0
    for name in ("rounds.md", "rounds.svg"):
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / name).read_bytes()
    first = json.loads((ROOT / "papers" / "fedkper_table1.json").read_text(encoding="utf-8"))["summary"][0]
    assert f"{first['mean']['mean_shared_global_accuracy']:.3f}" in (tmp_path / "rounds.md").read_text(encoding="utf-8")
