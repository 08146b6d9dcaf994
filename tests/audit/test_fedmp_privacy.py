"""FedMP's Table 5 as a command: published figures, means over sites, going on, and its refusals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ("phantoms:48", "--smoke", "--decoder-epochs", "1", "--most", "24", "--device", "cpu")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.setattr("wardround.run.write_report", lambda result, path: None)
        yield importlib.import_module("fedmp_privacy")


def test_the_table_is_filled_and_gone_on_with(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "table.json"
    attack = script.attack
    stages: list[int] = []

    def stopped(member: Any, site: Any, stage: int, *rest: Any) -> Any:
        stages.append(stage)
        if stage == 3 and stages.count(3) == 1:
            raise KeyboardInterrupt
        return attack(member, site, stage, *rest)

    monkeypatch.setattr(script, "attack", stopped)
    with pytest.raises(KeyboardInterrupt):
        script.main([*SMALL, "--out", str(out)])
    assert list(json.loads(out.read_text())["means"]) == ["1", "2"]
    assert script.main([*SMALL, "--out", str(out)]) == 0
    assert stages == [1, 2, 3, 3, 4]
    record = json.loads(out.read_text())
    assert record["published"]["1"] == {"fid": 820, "max_ssim": 0.7661, "min_l2": 0.0801}
    assert [len(shape) for shape in record["shapes"].values()] == [3, 3, 3, 1]
    assert list(record["means"]) == ["1", "2", "3", "4"]
    assert record["means"]["4"]["min_l2"] == record["rows"][3]["figures"]["min_l2"]
    assert "not Inception" in record["feature_network"]
    assert len(script.markdown(record).splitlines()) == 6


def test_means_wait_for_every_site(script: Any) -> None:
    def row(stage: int, site: str, value: float) -> dict[str, Any]:
        return {"stage": stage, "site": site, "figures": dict.fromkeys(script.FIGURES, value)}

    found = script.summary([row(1, "a", 1.0), row(1, "b", 2.0), row(2, "a", 5.0)], ["a", "b"])
    assert found == {"1": dict.fromkeys(script.FIGURES, 1.5)}


def test_other_settings_are_refused(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    out.write_text(json.dumps({"benchmark": "fedmp_table5", "settings": {}, "rows": []}))
    assert script.main([*SMALL, "--out", str(out)]) == 2
    assert "made with other settings" in capsys.readouterr().err


def test_the_page_shows_what_is_stored(script: Any) -> None:
    stored = json.loads((BENCHMARKS.parent / "papers" / "fedmp_table5.json").read_text(encoding="utf-8"))
    for stage, means in script.summary(stored["rows"], stored["sites"]).items():
        assert means == pytest.approx(stored["means"][stage], rel=1e-12)
    assert script.markdown(stored) in (BENCHMARKS.parent / "docs" / "audit.md").read_text(encoding="utf-8")
