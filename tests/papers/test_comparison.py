"""Ours beside the published: exact means and differences, what is never mixed, deviations, and every format."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from papers.filed import blood, line, one_shot_plan, write
from wardround.errors import BadInput
from wardround.papers import fedkper, fedmp, multi_round
from wardround.papers.cells import images_hash
from wardround.papers.communication import costs
from wardround.papers.comparison import Comparison
from wardround.papers.library import table
from wardround.papers.render import render
from wardround.papers.stored import Finished, read_finished, result_files


def finished(path: Path, family: Any = "one-shot") -> tuple[Finished, ...]:
    return tuple(read_finished([path], family))


@pytest.fixture
def grid(tmp_path: Path) -> Comparison:
    """Two seeds of FedISCA and one of local on blood with five sites, and one on the stand-in for OCT."""
    planned = [
        one_shot_plan("fedisca", seed=0),
        one_shot_plan("fedisca", seed=1),
        one_shot_plan("local"),
        one_shot_plan("fedisca", "oct3", 0.3),
    ]
    values = [0.5, 0.7, 0.98, 0.25]
    path = write(
        tmp_path / "grid.json", planned, [{"local_accuracy": v, "shared_global_accuracy": None} for v in values]
    )
    return Comparison(table("fedbicross-1"), finished(path))


def test_means_deviations_and_differences_are_exact(grid: Comparison) -> None:
    block = next(block for block in grid.blocks if (block.dataset, block.sites) == ("bloodmnist", 5))
    rows = {row.line.label: row for row in block.rows}
    figure = rows["fedisca"].figures[0]
    assert (figure.level, len(figure.ours)) == (0.1, 2)
    assert figure.mean == pytest.approx(60.0)
    assert figure.deviation == pytest.approx(14.142, abs=1e-3)  # 20 / √2
    assert figure.difference == pytest.approx(60.0 - 48.49)
    assert rows["local"].figures[0].published is None
    assert rows["local"].figures[0].deviation is None
    assert rows["fedisca"].figures[1].mean is None
    assert grid.done() == (4, 2016)


def test_a_stand_in_is_beside_the_papers_set_and_says_so(grid: Comparison, tmp_path: Path) -> None:
    shown = render(grid, "text", tmp_path)
    assert "octmnist, 5 sites, measured on oct3" in shown
    assert "- oct3 is not OCTMNIST: " in shown
    assert "tissuemnist (5, 10, 20 sites): " in shown
    assert f"{tmp_path / 'tissuemnist.npz'} is missing: wardround data get tissuemnist" in shown
    assert "bloodmnist (5 sites in part; 10, 20 sites): " in shown
    assert shown.count("bloodmnist.npz is missing") == 1
    assert "the study on" not in shown  # the preset is the paper's


def test_other_sites_partitions_and_networks_are_other_cells(tmp_path: Path) -> None:
    others = [
        one_shot_plan("fedisca", data={"sites": 10}),
        one_shot_plan("fedisca", level="iid", data={"partition": "iid"}),
        one_shot_plan("fedisca", level=0.3, model={"per_site": dict(table("fedisca-4").study["model"]["per_site"])}),
    ]
    paths = [write(tmp_path / f"{n}.json", [one], [{"shared_global_accuracy": 0.5}]) for n, one in enumerate(others)]
    stored = tuple(found for path in paths for found in finished(path))

    def cells(id: str) -> set[tuple[str, int, Any]]:
        blocks = Comparison(table(id), stored).blocks
        return {(block.dataset, block.sites, one.level) for block in blocks for one in block.finished}

    assert cells("fedbicross-1") == {("bloodmnist", 10, 0.1)}
    assert cells("fedisca-1") == {("bloodmnist", 5, "iid")}
    assert cells("fedisca-3") == set()
    assert cells("fedisca-4") == {("bloodmnist", 5, 0.3)}
    assert cells("fedkper-1") == set()


def test_of_several_settings_the_nearest_to_the_papers_is_shown_and_none_are_mixed(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[train]\nepochs = 7\n[set.fedisca]\nepochs = 8\nreuse = true\n")
    quick = write(tmp_path / "a.json", [one_shot_plan("fedisca", preset=str(own))], [{"local_accuracy": 0.1}])
    paper = write(tmp_path / "b.json", [one_shot_plan("fedisca", seed=1)], [{"local_accuracy": 0.5}])
    (block,) = [b for b in Comparison(table("fedbicross-1"), finished(quick) + finished(paper)).blocks if b.has_ours]
    (row,) = [row for row in block.rows if any(figure.ours for figure in row.figures)]
    assert row.figures[0].ours == (50.0,)
    fast = Comparison(table("fedbicross-1"), finished(quick)).deviations()
    assert fast == [
        f"the study on bloodmnist: preset {own}; train.epochs = 7 (paper: 100), train.keep = best (paper: first-best)",
        "fedisca: epochs = 8 (paper: 100), reuse = true (paper: false)",
    ]
    assert Comparison(table("fedbicross-1"), finished(paper)).deviations() == []


def test_the_official_file_is_told_by_its_content(tmp_path: Path) -> None:
    path = blood(tmp_path / "data" / "bloodmnist.npz")
    planned = one_shot_plan("local", hashed=images_hash(path))
    found = finished(write(tmp_path / "grid.json", [planned], [{"local_accuracy": 0.5}]))
    shown = Comparison(table("fedbicross-1"), found)
    assert "not the official file: rebuilt or changed; results in" in render(shown, "text", path.parent)
    assert "whether it is an official file is not recorded" in render(shown, "text", tmp_path)
    blood(path)
    path.write_bytes(path.read_bytes() + b"another file by now")
    assert "whether it is an official file is not recorded" in render(shown, "text", path.parent)


# FedKPer and FedMP ----------------------------------------------------------------------------------------------------


def test_fedkpers_table_has_all_twelve_methods_on_blood(tmp_path: Path) -> None:
    source = Path("bloodmnist.npz")
    tree = fedkper.study_tree(source, {"rounds": 10})
    head = fedkper.head("bloodmnist", multi_round.header(tree))
    lines = table("fedkper-1").entries
    planned = [(head, multi_round.plan(tree, one, fedkper.cell(source, 0), "hash")) for one in lines]
    path = write(tmp_path / "k.json", planned, [dict.fromkeys(fedkper.MEASURES, 0.5)] * 12)
    shown = render(Comparison(table("fedkper-1"), finished(path, "fedkper")), "text", tmp_path)
    assert "organcmnist, 30 sites" not in shown
    rows = [text.split() for text in shown.splitlines()]
    ours = [words for words in rows if words[1:2] == ["ours"]]
    assert [words[0] for words in ours] == [line.label for line in lines]
    assert ours[-1] == ["fedkper", "ours", "1", *["0.500"] * 7]
    at = rows.index(ours[-1])
    assert rows[at + 1][:3] == ["paper", "0.645±0.188", "-0.127±0.101"]
    assert rows[at + 2] == ["difference", "-0.145", "+0.627", "-0.323", "-0.368", "-0.296", "-0.296", "-0.257"]
    assert "- the study on bloodmnist: rounds = 10 (paper: 100)" in shown


def test_fedmps_tables_on_sets_that_are_not_the_papers(tmp_path: Path) -> None:
    studies = {kind: multi_round.header(fedmp.study_tree(kind, {})) for kind in ("natural", "shifted")}
    head = fedmp.head(studies)
    tree = fedmp.study_tree("natural", {})
    planned = [
        (head, fedmp.plan(tree, line("fedmp-1", "fedavg"), fedmp.cell(Path("wbc_sites.npz"), "natural", 0), "hash")),
        (
            head,
            fedmp.plan(
                fedmp.study_tree("shifted", {}),
                line("fedmp-1", "fedmp"),
                fedmp.cell(Path("bloodmnist.npz"), "shifted", 0),
                "hash",
            ),
        ),
    ]
    path = write(tmp_path / "m.json", planned, [{"shared_global_accuracy": 0.5}, {"shared_global_accuracy": 0.75}])
    shown = render(Comparison(table("fedmp-1"), finished(path, "fedmp")), "text", tmp_path)
    headings = [text for text in shown.splitlines() if text in ("wbc_sites", "bloodmnist, shifted", "tb", "dr")]
    assert headings == ["wbc_sites", "bloodmnist, shifted"]
    assert "fedmp  ours      1     75.00" in shown
    assert "- wbc_sites is not a set of the paper's" in shown
    assert "model.name = resnet18 (paper: resnet50)" in shown
    assert "data.size = not set (paper: 256)" in shown
    assert f"tb (3 sites): {tmp_path / 'tb.csv'} is missing" in shown


def test_fedmps_communication_prints_the_published_digits() -> None:
    """All but FRAug's, whose generator the paper does not describe."""
    found = {cost.label: cost for cost in costs(table("fedmp-4"))}
    assert len(found) == 9
    assert [label for label, cost in found.items() if f"{cost.counted:.2f}" != cost.printed] == ["fraug"]
    assert found["fedavg"].counted == 65 * 6 * 4 * 23_512_130 / 1e9
    embeddings = 60 * 763 + 59 * 300 + (60 + 59) * 6
    assert found["fedmp"].counted * 1e9 == pytest.approx(60 * 6 * 4 * 23_512_130 + embeddings * 4 * 2048)
    assert all(cost.declared >= cost.counted for cost in found.values())
    shown = render(Comparison(table("fedmp-4"), ()), "text", Path("nowhere"))
    assert "fedmp-fewshot       3          1.71              1.71                 1.71\n" in shown


def test_a_figure_of_fewer_seeds_says_of_how_many(tmp_path: Path) -> None:
    head = fedmp.head({"natural": multi_round.header(fedmp.study_tree("natural", {}))})
    wbc, tree = Path("wbc_sites.npz"), fedmp.study_tree("natural", {})
    planned = [
        (head, fedmp.plan(tree, line("fedmp-4", "fedavg"), fedmp.cell(wbc, "natural", seed), "hash")) for seed in (0, 1)
    ]
    values = {"shared_global_accuracy": 0.5, "bytes_to_convergence": None}
    path = write(tmp_path / "m.json", planned, [{**values, "rounds_to_convergence": count} for count in (40.0, None)])
    shown = render(Comparison(table("fedmp-4"), finished(path, "fedmp")), "text", tmp_path)
    assert ["fedavg", "ours", "2", "40", "(1)", "–", "50.00±0.00"] in [text.split() for text in shown.splitlines()]


@pytest.mark.parametrize(
    ("converged", "rounds", "expected"),
    [
        (None, [1, 2, 3], (3.0, 300)),  # too short for the rule: it counts whole
        (None, [1, 2, 3, 4, 5], (None, None)),
        (1.0, [1, 2, 3, 4, 5], (1.0, 100)),
        (None, [20, 40, 60], (None, None)),  # long, but measured too seldom
        (40.0, [20, 40, 60, 80, 100, 120], (40.0, 4000)),  # rounds, not places in a list
    ],
)
def test_rounds_and_bytes_to_convergence(
    converged: float | None, rounds: list[int], expected: tuple[float | None, int | None]
) -> None:
    found = fedmp.to_convergence(converged, {round: 100 * round for round in rounds})
    assert (found["rounds_to_convergence"], found["bytes_to_convergence"]) == expected


def test_table_5_has_what_the_audit_measured_below_it(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "papers" / "fedmp_table5.json"
    shown = render(Comparison(table("fedmp-5"), (), (stored,)), "text", tmp_path)
    mean = json.loads(stored.read_text(encoding="utf-8"))["means"]["4"]
    expected = [f"{mean['frechet']:.3f}", f"{mean['max_ssim']:.4f}", f"{mean['min_l2']:.4f}"]
    (line,) = [text.split() for text in shown.splitlines() if text.startswith("stage 4 ")]
    assert line[2:] == [*expected, f"{mean['identified']:.3f}"]
    assert "not Inception" in shown
    assert "reconstruction, ours" not in render(Comparison(table("fedmp-5"), ()), "text", tmp_path)


# What the rounds tell -------------------------------------------------------------------------------------------------


def courses(tmp_path: Path, id: str, rounds: dict[str, dict[str, list[float]]]) -> Comparison:
    """A table of FedKPer's with one seed of each line, which went so."""
    source = Path("bloodmnist.npz")
    tree = fedkper.study_tree(source, {})
    head = fedkper.head("bloodmnist", multi_round.header(tree))
    planned = [(head, multi_round.plan(tree, line(id, label), fedkper.cell(source, 0), "hash")) for label in rounds]
    figures = [{"shared_global_accuracy": course["shared_global_accuracy"][-1]} for course in rounds.values()]
    path = write(tmp_path / "k.json", planned, figures, [*rounds.values()])
    return Comparison(table(id), finished(path, "fedkper"))


def test_figure_5_is_accuracy_at_matched_seconds(tmp_path: Path) -> None:
    rounds = {
        "fedavg": {"shared_global_accuracy": [0.25, 0.5, 0.4], "seconds": [1.0, 2.0, 4.0]},
        "fedkper": {"shared_global_accuracy": [0.3, 0.75, 0.9], "seconds": [2.0, 4.0, 8.0]},
    }
    found = courses(tmp_path, "fedkper-fig5", rounds)
    shown = render(found, "text", tmp_path)
    assert "bloodmnist, 20 sites: accuracy at matched seconds of work\n---" in shown
    lines = [text.split() for text in shown.splitlines()]
    at = lines.index(["line", "1.0", "s", "2.0", "s", "3.0", "s", "4.0", "s"])
    assert lines[at + 1 : at + 4] == [
        ["fedavg", "0.250", "0.500", "0.500", "0.400"],
        ["fedkper", "0.000", "0.300", "0.300", "0.750"],
        ["fedkper", "over", "fedavg,", "%", "-100.0", "-40.0", "-40.0", "+87.5"],
    ]
    rows = list(csv.DictReader(io.StringIO(render(found, "csv", tmp_path))))
    assert [(row["line"], row["column"], row["mean"]) for row in rows][2:4] == [
        ("fedavg", "accuracy at matched seconds of work, 1.0 s", "0.250"),
        ("fedavg", "accuracy at matched seconds of work, 2.0 s", "0.500"),
    ]
    assert r"\begin{tabular}{lrrrr}" in render(found, "latex", tmp_path)
    alone = courses(tmp_path / "alone", "fedkper-fig5", {"fedavg": rounds["fedavg"]})
    assert "matched seconds" not in render(alone, "text", tmp_path)


def test_figure_3_is_the_longest_window_of_forgetting(tmp_path: Path) -> None:
    accuracies = [0.3, 0.2, 0.35, 0.5, 0.3, 0.45, 0.1, 0.6, 0.2]  # what is lost at the end is never regained
    found = courses(tmp_path, "fedkper-fig3", {"fedavg": {"shared_global_accuracy": accuracies}})
    shown = [text.split() for text in render(found, "text", tmp_path).splitlines()]
    assert ["fedavg,", "seed", "0", "4", "8", "0.500", "0.100"] in shown
    steady = courses(tmp_path / "steady", "fedkper-fig3", {"fedavg": {"shared_global_accuracy": [0.1, 0.2, 0.3]}})
    assert "the longest window" not in render(steady, "text", tmp_path)


# Formats --------------------------------------------------------------------------------------------------------------


def test_text_that_is_too_wide_comes_level_by_level_and_then_in_columns(tmp_path: Path) -> None:
    values = {"local_accuracy": 0.98, "global_accuracy": 0.5, "balance": 0.74}
    shared = {"shared_local_accuracy": 0.25, "shared_global_accuracy": 0.375}
    planned = [one_shot_plan("local", level=0.1), one_shot_plan("ensemble", level=0.5)]
    found = finished(write(tmp_path / "grid.json", planned, [values, {**values, **shared}]))
    consult = Comparison(table("consult-1"), found)

    def sheets(width: int | None) -> list[str]:
        parts = render(consult, "text", tmp_path, width=width).split("\n\n")
        return [part for part in parts if part.startswith("bloodmnist")]

    (whole,) = sheets(None)
    width = max(map(len, whole.splitlines()))
    assert sheets(width) == [whole]
    first, last = sheets(100)  # nothing was measured at α 0.3
    assert first.splitlines() == [
        "bloodmnist, 5 sites, α 0.1",
        "-" * 26,
        "line         seeds  local  global  balance  shared, local  shared, global",
        "local  ours      1  98.00   50.00    74.00              –               –",
    ]
    assert last.splitlines()[0] == "bloodmnist, 5 sites, α 0.5"
    assert last.splitlines()[3].split() == ["ensemble", "ours", "1", "98.00", "50.00", "74.00", "25.00", "37.50"]
    narrow = sheets(48)
    assert all(len(line) <= 48 for sheet in narrow for line in sheet.splitlines())
    shown = [word for sheet in narrow if "α 0.5" in sheet for word in sheet.splitlines()[3].split()[3:]]
    assert shown == ["98.00", "50.00", "74.00", "25.00", "37.50"]
    assert len(sheets(1)) == 5 + 3  # a column is never cut; the shared model of `local` has none


def test_a_table_of_ours_is_held_against_its_own_protocol(tmp_path: Path) -> None:
    path = write(tmp_path / "grid.json", [one_shot_plan("fedisca", preset="fast")], [{"local_accuracy": 0.5}])
    fast = finished(path)
    assert Comparison(table("consult-1"), fast).deviations() == []
    assert len(Comparison(table("fedbicross-1"), fast).deviations()) == 2
    paper = write(tmp_path / "paper.json", [one_shot_plan("local")], [{"local_accuracy": 0.5}])
    (said,) = Comparison(table("consult-1"), finished(paper)).deviations()
    assert "preset paper; " in said
    assert "train.epochs = 100 (table: 40)" in said
    shown = render(Comparison(table("consult-1"), finished(paper)), "text", tmp_path)
    assert "The table's protocol" in shown
    assert "paper's" not in shown


def test_text_markdown_and_latex(grid: Comparison, tmp_path: Path) -> None:
    text = render(grid, "text", tmp_path).splitlines()
    assert text[0] == "FedBiCross, Table 1: methods across client counts and heterogeneity levels"
    at = text.index("bloodmnist, 5 sites")
    assert text[at + 2].split() == ["line", "seeds", "α", "0.1", "α", "0.2", "α", "0.3", "α", "0.5"]
    assert text[at + 3].split() == ["local", "ours", "1", "98.00", "–", "–", "–"]
    at = next(n for n, found in enumerate(text) if found.startswith("fedisca "))
    assert text[at].split() == ["fedisca", "ours", "2", "60.00±14.14", "–", "–", "–"]
    assert text[at + 1].split() == ["paper", "48.49", "50.64", "53.28", "79.83"]
    assert text[at + 1].index("paper") == text[at].index("ours")
    assert text[at + 2].split() == ["difference", "+11.51", "–", "–", "–"]
    markdown = render(grid, "markdown", tmp_path)
    assert (
        "| fedisca | ours | 2 | 60.00±14.14 | – | – | – |\n|  | paper |  | 48.49 | 50.64 | 53.28 | 79.83 |" in markdown
    )
    latex = render(grid, "latex", tmp_path)
    assert r"fedisca & ours & 2 & 60.00$\pm$14.14 & -- & -- & -- \\" in latex
    assert latex.count(r"\begin{tabular}{llrrrrr}") == latex.count(r"\end{tabular}") == 2
    assert all(part.startswith("%") for part in latex.splitlines() if part.lstrip("% ").startswith("- "))


def test_all_shows_what_was_not_measured_too(grid: Comparison, tmp_path: Path) -> None:
    assert "dermamnist, 15 sites\n" not in render(grid, "text", tmp_path)
    assert "dermamnist, 15 sites\n" in render(grid, "text", tmp_path, everything=True)


def test_csv_has_a_line_for_every_figure(grid: Comparison, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(render(grid, "csv", tmp_path))))
    (found,) = [
        r for r in rows if (r["dataset"], r["sites"], r["level"], r["line"]) == ("bloodmnist", "5", "0.1", "fedisca")
    ]
    assert (found["mean"], found["deviation"], found["published"]) == ("60.0000", "14.1421", "48.49")
    assert (found["seeds"], found["difference"], found["images"]) == ("2", "11.5100", "bloodmnist")
    assert len(rows) == 3 * 4 * 4 * 6 + 1  # six published lines everywhere, and `local` in one place


# Files ----------------------------------------------------------------------------------------------------------------


def test_results_are_found_in_the_usual_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert result_files([]) == []
    first = write(tmp_path / "papers" / "x.json", [one_shot_plan("local")], [{"local_accuracy": 0.5}])
    other = tmp_path / "benchmarks" / "results" / "memory.json"
    other.parent.mkdir(parents=True)
    other.write_text('{"benchmark": "memory"}')
    assert [path.resolve() for path in result_files([])] == [first, other]
    assert result_files([first]) == [first]
    assert len(read_finished(result_files([]), "one-shot")) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as results"),
        ('{"benchmark": "one_shot_grid", "cells": [], "recipes": {}}', "it has no entries"),
        (
            json.dumps({"benchmark": "one_shot_grid", "cells": [], "recipes": {}, "entries": [{"recipe": "r"}]}),
            "is not as this version writes results",
        ),
    ],
)
def test_results_that_cannot_be_read_are_told(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        read_finished([tmp_path / "bad.json"], "one-shot")
    absent, other = tmp_path / "absent.json", tmp_path / "other.json"
    with pytest.raises(BadInput, match=f"there is no {absent}, {other}; give"):
        result_files([absent, tmp_path, other, absent])
