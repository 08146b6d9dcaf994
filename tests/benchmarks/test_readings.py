"""Experiments on the same site models: readings of FedBiCross and of our distillation, and bf16 beside fp32."""

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PRESET = """
[set.fedbicross]
trajectories = 1
steps = 4
samples = 2
batch = 12
probes = 8
personal_epochs = 1
[set.consult-distilled]
epochs = 1
generator_steps = 2
kd_steps = 2
batch = 12
replayed = 12
tune_epochs = 1
[set.fedisca]
epochs = 1
steps = 3
batch = 12
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The scripts' modules, which find one another beside themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        names = {
            "readings": "fedbicross_readings",
            "precision": "synthesis_precision",
            "distilled": "consult_distilled",
            "counts": "counts_from_models",
            "robust": "consult_robust",
            "calibration": "consult_calibration",
            "heldout": "consult_heldout",
            "site_choice": "consult_site_choice",
            "two_classes": "consult_two_classes",
            "sharpness": "consult_sharpness",
            "cells": "trained_cells",
        }
        yield SimpleNamespace(**{short: importlib.import_module(name) for short, name in names.items()})


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three classes of eight-pixel images that tell by their brightness, three sites, a narrow network."""
    folder, draw, arrays = tmp_path_factory.mktemp("data"), np.random.default_rng(0), {}
    for part, n in (("train", 240), ("val", 30), ("test", 60)):
        labels = np.arange(n) % 3
        pixels = draw.integers(0, 60, (n, 8, 8, 3)) + 80 * labels.reshape(-1, 1, 1, 1)
        arrays |= {f"{part}_images": pixels.astype(np.uint8), f"{part}_labels": labels.reshape(-1, 1)}
    np.savez(folder / "blobs.npz", **arrays)
    (folder / "tiny.toml").write_text(PRESET)
    where = [str(folder / "blobs.npz"), "--preset", str(folder / "tiny.toml"), "--work", str(folder / "work")]
    return [*where, "--smoke", "--device", "cpu", "--seeds", "0", "--alphas", "0.5", "--sites", "3"]


def test_a_reading_is_worked_out_once_for_all_of_stage_three(
    scripts: Any, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    page.write_text("before\n<!-- figures: fedbicross_readings.py -->\n<!-- end of figures -->\nafter\n")
    arguments = [*options, "--out", str(out), "--readings", "as in the preset", "targets by shares"]
    assert scripts.readings.main([*arguments, "--page", str(page)]) == 0
    rows = json.loads(out.read_text())["entries"]
    assert [(row["reading"], row["personal"]) for row in rows] == [
        (reading, personal)
        for reading in ("as in the preset", "targets by shares")
        for personal in scripts.readings.PERSONAL
    ]
    bars = {tuple(row["figures"][key] for key in ("own_local", "own_global", "ensemble_global")) for row in rows}
    assert len(bars) == 1  # the same site models
    by = {row["personal"]: row["figures"]["local"] for row in rows if row["reading"] == "as in the preset"}
    assert by["none"] < by["as in the preset"]  # three steps train nothing, an epoch on these images all
    assert "targets by shares" in page.read_text()
    assert page.read_text().endswith("after\n")

    before = out.stat().st_mtime_ns
    assert scripts.readings.main(arguments) == 0  # done: nothing is done again
    assert out.stat().st_mtime_ns == before
    assert "| targets by shares |" in capsys.readouterr().out

    few = ["--out", str(tmp_path / "few.json"), "--readings", "as in the preset", "--personal", "none"]
    assert scripts.readings.main([*options, *few]) == 0
    assert [row["personal"] for row in json.loads((tmp_path / "few.json").read_text())["entries"]] == ["none"]

    other = tmp_path / "other.toml"  # the preset means something else now
    other.write_text(PRESET.replace("trajectories = 1", "trajectories = 2"))
    assert scripts.readings.main([*arguments, "--preset", str(other)]) == 2
    assert "holds results of other settings" in capsys.readouterr().err


def test_counts_are_guessed_from_models(scripts: Any, options: list[str], tmp_path: Path) -> None:
    assert scripts.counts.main([*options, "--out", str(tmp_path / "out.json")]) == 0
    ((row,), (line,)) = (json.loads((tmp_path / "out.json").read_text())[key] for key in ("entries", "summary"))
    figures = row["figures"]
    assert 0 < figures["off"] < 0.5
    assert figures["unseen"] == 0
    assert figures["cut"] <= 0.5
    assert 0.5 < figures["told"] <= 1
    assert 0.5 < figures["untold"] <= 1
    assert line == {"set": "blobs", "alpha": 0.5, "seeds": [0], **figures}


def test_one_network_of_the_panel_serves_all_readings_at_the_sites(
    scripts: Any,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one lesson at each site serves all that differ only in what is made of it."""
    out, taught = tmp_path / "out.json", []
    readings = ["as in the preset", "without the tally"]
    train_many = scripts.cells.train_many

    def watched(fits: list[Any], *rest: Any) -> Any:
        taught.extend(fit.label for fit in fits if fit.label.endswith(", at home"))
        return train_many(fits, *rest)

    monkeypatch.setattr(scripts.cells, "train_many", watched)
    assert scripts.distilled.main([*options, "--out", str(out), "--readings", *readings]) == 0
    record = json.loads(out.read_text())
    rows = record["entries"]
    assert [(row["reading"], row["site"]) for row in rows] == [
        (r, s) for r in readings for s in scripts.distilled.AT_SITES
    ]
    assert len({row["figures"]["panel_global"] for row in rows}) == 1  # the same site models
    assert len({row["figures"]["seconds"] for row in rows}) == 2  # distilled once for each
    for row in record["summary"]:
        assert row["below"] == pytest.approx(row["mean"]["panel_global"] - row["mean"]["global"])
    for row in rows:
        assert [note.split()[0] for note in row["notes"]] == ["site-1", "site-2", "site-3"]
    assert "| without the tally | new statistics | 1 |" in capsys.readouterr().out
    assert sorted(taught) == sorted([f"site-{k}, at home" for k in (1, 2, 3)] * len(readings))


def test_what_is_won_by_hand(scripts: Any) -> None:
    """Seeds of 0.4 and 0.6 on the way from 0.3 to 0.8 are 40 %; where the ensemble is no better there is no way."""

    def row(seed: int, everywhere: float, panel: float, alpha: float, clusters: int) -> dict[str, Any]:
        figures = {"local": 0.95, "global": everywhere, "own_local": 0.97, "own_global": 0.3, "ensemble_global": panel}
        place = {"set": "blood", "alpha": alpha, "seed": seed, "reading": "as in the preset", "personal": "γ = 1"}
        return {**place, "clusters": [["a"]] * clusters, "figures": figures}

    rows = [row(0, 0.4, 0.3, 0.5, 3), row(0, 0.4, 0.8, 0.1, 2), row(1, 0.6, 0.8, 0.1, 4)]
    found = scripts.readings.summarise(rows)
    assert found[0]["won"] == pytest.approx(0.4)
    assert found[1]["won"] is None
    lines = scripts.readings.markdown({"summary": found}).splitlines()
    assert lines[2] == "| blood | 0.1 | as in the preset | 2 to 4 | γ = 1 | 2 | 95.0 | 2.0 | 50.0 | 40% |"
    assert lines[3] == "| blood | 0.5 | as in the preset | 3 | γ = 1 | 1 | 95.0 | 2.0 | 40.0 | – |"


def test_the_page_has_the_figures_of_the_results(scripts: Any, tmp_path: Path) -> None:
    """Fails when results are new; then run the script with --table --page docs/oneshot.md."""
    results = ROOT / "papers" / "fedbicross_readings.json"
    if not results.exists():
        assert "fedbicross_readings.py -->\nNot run yet.\n" in (ROOT / "docs" / "oneshot.md").read_text()
        return
    shutil.copy(ROOT / "docs" / "oneshot.md", tmp_path)
    assert scripts.readings.main(["--table", "--out", str(results), "--page", str(tmp_path / "oneshot.md")]) == 0
    assert (tmp_path / "oneshot.md").read_bytes() == (ROOT / "docs" / "oneshot.md").read_bytes()


def test_both_precisions_work_on_the_same_models(
    scripts: Any, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert scripts.precision.main([*options, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["entries"]
    assert [(row["method"], row["precision"]) for row in rows] == [("fedisca", "bf16"), ("fedisca", "fp32")]
    assert "| fedisca | 1 |" in capsys.readouterr().out


def test_what_bf16_costs_by_hand(scripts: Any) -> None:
    def row(seed: int, precision: str, accuracy: float, seconds: float) -> dict[str, Any]:
        figures = {"accuracy": accuracy, "seconds": seconds}
        return {"seed": seed, "method": "fedisca", "precision": precision, "figures": figures}

    rows = [row(0, "bf16", 0.8, 10), row(0, "fp32", 0.79, 20), row(1, "bf16", 0.7, 10), row(1, "fp32", 0.73, 30)]
    (found,) = scripts.precision.summarise(rows)
    assert found["gain"] == pytest.approx(-1.0)
    assert found["standard_deviation"] == pytest.approx(8**0.5)
    last = scripts.precision.markdown({"summary": [found]}).splitlines()[-1]
    assert last == "| fedisca | 2 | 75.0 | 76.0 | -1.0 ± 2.8 | 2.5 |"


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("distilled", "consult_distilled"),
        ("counts", "counts_from_models"),
        ("robust", "consult_robust"),
        ("calibration", "consult_calibration"),
        ("heldout", "consult_heldout"),
        ("site_choice", "consult_site_choice"),
        ("two_classes", "consult_two_classes"),
        ("sharpness", "consult_sharpness"),
    ],
)
def test_the_page_of_consult_has_them(scripts: Any, short: str, name: str, tmp_path: Path) -> None:
    """Fails when results are new; then run the script with --table --page docs/consult.md."""
    shutil.copy(ROOT / "docs" / "consult.md", tmp_path)
    results, page = str(ROOT / "papers" / f"{name}.json"), tmp_path / "consult.md"
    assert getattr(scripts, short).main(["--table", "--out", results, "--page", str(page)]) == 0
    assert page.read_bytes() == (ROOT / "docs" / "consult.md").read_bytes()
