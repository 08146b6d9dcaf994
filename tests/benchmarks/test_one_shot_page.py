"""The page of one-shot results: shares and differences by hand, and that it is not behind the results."""

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "papers" / "one_shot_grid.json"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """The script's module, which finds its neighbours beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("one_shot_page")


def row(name: str, local: float, everywhere: float, seeds: int = 2, alpha: float = 0.1) -> dict[str, Any]:
    keys = ("local_accuracy", "global_accuracy")
    return {
        "set": "blood",
        "alpha": alpha,
        "entry": name,
        "seeds": list(range(seeds)),
        "mean": dict(zip(keys, (local, everywhere), strict=True)),
        "standard_deviation": dict.fromkeys(keys, 0.01 if seeds > 1 else None),
        "published": {"local": 85.5 if name == "fedbicross" else None, "shared_global": None},
    }


def tree(*rows: dict[str, Any]) -> dict[str, Any]:
    entries = [
        {**{key: r[key] for key in ("set", "alpha", "entry")}, "seed": seed, "figures": r["mean"]}
        for r in rows
        for seed in r["seeds"]
    ]
    return {"preset": "fast", "summary": list(rows), "entries": entries}


def lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_what_was_won_by_hand(page: Any) -> None:
    """From 0.4 to 0.5 of the way to 0.8 is a quarter; where the ensemble is below `local` there is no way to go."""
    rows = [row("local", 0.99, 0.4), row("fedbicross", 0.975, 0.5), row("ensemble", 0.6, 0.8)]
    worse = [
        row("local", 0.9, 0.8, alpha=0.5),
        row("fedbicross", 0.9, 0.8, alpha=0.5),
        row("ensemble", 0.6, 0.7, 2, 0.5),
    ]
    _, _, first, second = lines(page.figures(tree(*rows, *worse))["bars"])
    assert first == ["blood", "0.1", "2", "97.5 ± 0.0", "1.5", "40.0, 50.0, 80.0", "25%"]
    assert second[-1] == "–"


def test_the_bars_are_of_the_seeds_that_all_three_have(page: Any) -> None:
    """Of `local` a second seed is there, at which it has nothing."""
    found = tree(row("local", 0.99, 0.4, 1), row("fedbicross", 0.975, 0.5, 1), row("ensemble", 0.6, 0.8, 1))
    found["entries"].append({**found["entries"][0], "seed": 1, "figures": {"local_accuracy": 0, "global_accuracy": 0}})
    *_, line = lines(page.figures(found)["bars"])
    assert line[2:] == ["1", "97.5", "1.5", "40.0, 50.0, 80.0", "25%"]


def test_methods_stand_in_the_papers_order_with_what_is_missing(page: Any) -> None:
    rows = [
        row("consult", 0.9, 0.9),
        row("fedbicross", 0.8, 0.7, 3),
        row("local", 0.99, 0.4, 1, 0.3),
        row("local", 1, 0),
    ]
    head, _, *found = lines(page.figures(tree(*rows))["methods"])
    assert head[1:4] == ["α = 0.1", "α = 0.3", "seeds"]
    assert [line[0] for line in found] == ["`local`", "`fedbicross`", "`consult`"]
    assert found[0][1:4] == ["100.0 ± 1.0 / 0.0 ± 1.0", "99.0 / 40.0", "1 to 2"]
    assert found[1][1:] == ["80.0 ± 1.0 / 70.0 ± 1.0", "–", "3", "85.50 / –", "–"]


def test_variants_stand_below_the_method_of_the_same_seed(page: Any) -> None:
    rows = [row("fedbicross", 0.9, 0.5), row("fedbicross, one cluster", 0.8, 0.4, 1), row("dense", 0.7, 0.7, 1)]
    shown = page.figures(tree(*rows))
    assert [line[2:6] for line in lines(shown["ablations"])[2:]] == [
        ["0", "fedbicross", "90.0", "50.0"],
        ["0", "fedbicross, one cluster", "80.0", "40.0"],
    ]
    assert page.figures(tree(rows[0]))["ablations"] == "Not run yet."


def test_variants_of_several_seeds_are_means_beside_the_method_over_the_same(page: Any) -> None:
    """The method has a third seed, which does not count; another variant has one seed alone."""
    rows = [
        row("fedbicross", 0.9, 0.5, 3),
        row("fedbicross, one cluster", 0.8, 0.4),
        row("fedbicross, uniform cross", 0, 0, 1),
    ]
    found = tree(*rows)
    for entry in found["entries"]:
        if entry["seed"]:
            entry["figures"] = {"local_accuracy": 0.7 if entry["seed"] == 1 else 0, "global_accuracy": 0.1}
    assert [line[2:6] for line in lines(page.figures(found)["ablations"])[2:]] == [
        ["0", "fedbicross", "90.0", "50.0"],
        ["0", "fedbicross, uniform cross", "0.0", "0.0"],
        ["0, 1", "fedbicross", "80.0", "30.0"],
        ["0, 1", "fedbicross, one cluster", "75.0", "25.0"],
    ]


def test_published_settings_are_a_part_of_their_own(page: Any) -> None:
    (part,) = page.figures({**tree(row("fedbicross", 0.8, 0.7, 1)), "preset": "paper"}).items()
    assert part[0] == "published settings"
    assert lines(part[1])[2][:2] == ["`fedbicross`", "80.0 / 70.0"]


def test_sites_with_like_patients_stand_beside_fedisca_s_table_2(page: Any) -> None:
    """The published figures are of the paper's text; the ablation of the code's adaptation has none."""
    rows = [row(name, 0.9, 0.8, 1) for name in ("deepinversion", "fedisca, not adapted", "fedisca, batch adaptation")]
    found = {**tree(*({**r, "set": "bloodmnist", "alpha": None} for r in rows)), "study": {"data": {"sites": 5}}}
    (part,) = page.figures(found).items()
    assert part[0] == "like patients"
    assert [line[1:] for line in lines(part[1])[2:]] == [
        ["deepinversion", "1", "80.0", "87.02"],
        ["fedisca, not adapted", "1", "80.0", "81.61"],
        ["fedisca, batch adaptation", "1", "80.0", "–"],
    ]


def test_the_page_has_the_figures_of_the_results(page: Any, tmp_path: Path) -> None:
    """Fails when results are new; then run benchmarks/one_shot_page.py with each file of them and docs/oneshot.md."""
    shutil.copy(ROOT / "docs" / "oneshot.md", tmp_path)
    for results in RESULTS, RESULTS.with_name("one_shot_paper.json"), RESULTS.with_name("fedisca_table2.json"):
        if results == RESULTS or results.exists():
            assert page.main([str(results), str(tmp_path / "oneshot.md")]) == 0
    assert (tmp_path / "oneshot.md").read_bytes() == (ROOT / "docs" / "oneshot.md").read_bytes()
    first = json.loads(RESULTS.read_text(encoding="utf-8"))["summary"][0]
    assert f"{100 * first['mean']['local_accuracy']:.1f}" in (tmp_path / "oneshot.md").read_text(encoding="utf-8")
