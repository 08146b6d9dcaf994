"""Sites whose images look different, end to end: natural sites, one file per site in three views, fixed shifts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import Captured, cli, empty_place, ok, read
from wardround.data.medmnist import OFFICIAL

REAL = Path(__file__).parents[2] / "shared" / "data"
QUICK = ("--rounds", "2", "--epochs", "1", "--device", "cpu", "--set", "model.width=2", "--quiet")
VIEWS = {"axial": "organamnist", "coronal": "organcmnist", "sagittal": "organsmnist"}
ORGANS = "[data.files]\n" + "".join(f'{view} = "{name}"\n' for view, name in VIEWS.items())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


def save(path: Path, sizes: dict[str, int], classes: int, channels: tuple[int, ...] = (), **more: Any) -> None:
    """A file in MedMNIST's layout whose brightness follows the class; `more` gives further arrays by part."""
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, n in sizes.items():
        labels = np.arange(n) % classes
        shade = (180 // classes * labels).reshape(n, 1, 1, *(1 for _ in channels))
        arrays[f"{part}_images"] = (draw.integers(0, 70, (n, 28, 28, *channels)) + shade).astype(np.uint8)
        arrays[f"{part}_labels"] = labels[:, None].astype(np.uint8)
        arrays |= {f"{part}_{key}": make(n) for key, make in more.items()}
    np.savez(path, **arrays)


def test_three_views_of_organs_are_three_sites(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grey images, the classes of the official sets, found by name in the data folder."""
    monkeypatch.setenv("WARDROUND_DATA", ".")
    for number, name in enumerate(VIEWS.values()):
        save(Path(f"{name}.npz"), {"train": 33 + 11 * number, "val": 11, "test": 22}, classes=11)
    Path("organs.toml").write_text(ORGANS)
    ok(capsys, "compare", "fedavg", "fedmp", "--study", "organs.toml", *QUICK, "--out", "x")
    data = read("x/result.json")["data"]
    assert [(site["name"], site["train"] + site["val"]) for site in data["sites"]] == [
        *(("axial", 44), ("coronal", 55), ("sagittal", 66)),
    ]
    assert data["classes"] == list(OFFICIAL["organamnist"].classes)
    assert data["global_protocol"] == "accuracy on the official test parts of all sites merged (66 images)"
    assert data["local_protocol"] == "accuracy of each site on its own official test part (22 images a site)"
    rows = read("x/result.json")["rows"]
    assert {row["n"] for row in rows if row["split"] == "global"} == {66}


def test_views_that_do_not_agree_are_refused(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARDROUND_DATA", ".")
    for name in VIEWS.values():
        save(Path(f"{name}.npz"), {"train": 33, "test": 22}, classes=11, channels=(3,) * (name == "organsmnist"))
    Path("organs.toml").write_text(ORGANS)
    code, _, said = cli(capsys, "run", "organs.toml", *QUICK, "--out", "x")
    assert code == 2
    assert "28×28 pixels with 1 channel and site sagittal of 28×28 pixels with 3 channels" in said
    assert not Path("x").exists()


def test_places_of_acquisition_are_sites(capsys: Captured) -> None:
    places = np.array(["north", "east", "north"])
    save(Path("scans.npz"), {"train": 60, "test": 30}, 2, (3,), site=lambda n: places[np.arange(n) // 2 % 3])
    ok(capsys, "run", "--method", "fedmp", "--data", "scans.npz", *QUICK, "--partition", "natural", "--sites", "0")
    data = read("runs/fedmp-scans/result.json")["data"]
    assert [site["train"] + site["val"] for site in data["sites"]] == [20, 40]
    assert [site["test"] for site in data["sites"]] == [10, 20]
    assert "0 = east, 1 = north" in data["provenance"]


@pytest.mark.parametrize(("channels", "last"), [((), "speckle 0.2"), ((3,), "colour mix")])
def test_fixed_shifts_on_any_set(capsys: Captured, channels: tuple[int, ...], last: str) -> None:
    """Every site's images differ from the source's but the first one's, and its local test goes with them."""
    save(Path("any.npz"), {"train": 60, "test": 20}, 2, channels)
    study = ("--data", "any.npz", "--partition", "iid", "--method", "fedmp", *QUICK)
    ok(capsys, "run", *study, "--out", "plain")
    ok(capsys, "run", *study, "--set", "data.shift=fixed", "--out", "shifted")
    plain, shifted = (read(f"{name}/result.json")["data"] for name in ("plain", "shifted"))
    assert plain["partition_hash"] == shifted["partition_hash"]
    pairs = zip(plain["sites"], shifted["sites"], strict=True)
    assert [a["sha256"] == b["sha256"] for a, b in pairs] == [True, False, False, False, False]
    assert f"(4) blur σ 0.8, (5) {last}" in shifted["provenance"]
    assert shifted["local_protocol"].endswith("under its own acquisition shift")


@pytest.mark.shared_data
@pytest.mark.parametrize(("name", "sites"), [("wbc_sites", 4), ("dermamnist", 4)])
def test_real_places_of_acquisition(capsys: Captured, name: str, sites: int) -> None:
    file = REAL / f"{name}.npz"
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    line = ("--method", "fedmp", "--data", str(file), "--partition", "natural", "--sites", "0")
    ok(capsys, "run", *line, *QUICK, "--rounds", "1", "--set", "evaluate_features=true", "--out", "x")
    result = read("x/result.json")
    assert len(result["data"]["sites"]) == len(result["features"]) == sites
    assert all(row["images"] <= 500 and row["distance"] > 0 for row in result["features"])
