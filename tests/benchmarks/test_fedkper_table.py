"""FedKPer's table: its protocol as settings, exact summaries, and a table that is stopped and goes on."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wardround.errors import BadInput
from wardround.papers.fedkper import cell, study_tree
from wardround.papers.multi_round import header, plan
from wardround.papers.results import compact
from wardround.progress import Silent
from wardround.run import prepare

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PHANTOMS = Path("phantoms:240")


@pytest.fixture(scope="module")
def table() -> Iterator[Any]:
    """The scripts' modules, which are no package: they find one another beside the script that runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        names = ("fedkper_table", "fedkper_entries", "fedkper_summary", "fedkper_readings")
        yield SimpleNamespace(**{name.removeprefix("fedkper_"): importlib.import_module(name) for name in names})


# The protocol ---------------------------------------------------------------------------------------------------------


def test_every_line_has_settings_that_are_valid_and_every_method_a_published_row(table: Any) -> None:
    assert len(table.entries.ENTRIES) == 12
    tree = study_tree(Path("bloodmnist.npz"), {})
    for line in (*table.entries.ENTRIES, *table.entries.ABLATIONS):
        plan(tree, line, cell(Path("bloodmnist.npz"), 0), "hash")
        assert (table.entries.published("bloodmnist", line.label) is None) == (line in table.entries.ABLATIONS)


def test_the_published_row_of_fedkper_on_blood(table: Any) -> None:
    found = table.entries.published("bloodmnist", "fedkper")
    assert tuple(found.values()) == (0.645, -0.127, 0.823, 0.868, 0.796, 0.796, 0.757)
    assert list(found) == list(table.entries.COLUMNS)
    other = table.entries.published("organcmnist", "fedkd")
    assert tuple(other.values()) == (0.328, -0.179, 0.692, 0.731, 0.570, 0.741, 0.530)
    assert table.entries.published("dermamnist", "fedkd") is None


def test_the_protocol_is_the_papers(table: Any) -> None:
    tree = study_tree(Path("bloodmnist.npz"), {})
    (entry,) = (e for e in table.entries.ENTRIES if e.label == "fedprox")
    found = plan(tree, entry, cell(Path("bloodmnist.npz"), 2), "hash").settings
    assert (found.data.sites, found.participants, found.rounds, found.seed) == (20, 0.1, 100, 2)
    assert (found.data.alpha, found.data.capped, found.data.min_size, found.data.merge_val) == (0.1, True, 10, False)
    assert (found.data.test, found.data.test_share, found.data.val_share) == ("balanced", 0.2, 0.0)
    train = found.train
    assert (train.epochs, train.batch, train.lr, train.momentum) == (5, 12, 0.01, 0.9)
    assert (train.weight_decay, train.round_decay, train.clip_norm) == (1e-5, 0.99, None)
    assert (found.set, found.model.name, found.evaluate_trained) == ({"mu": 1.0}, "cnn4", True)
    assert study_tree(Path("organsmnist.npz"), {})["data"]["sites"] == 50


def test_seeds_share_the_partition_and_who_is_asked(table: Any) -> None:
    tree = study_tree(PHANTOMS, {"device": "cpu", "data": {"sites": 5}, "participants": 0.4})
    seeds = []
    for seed in (0, 1):
        planned = plan(tree, table.entries.ENTRIES[0], cell(PHANTOMS, seed), "hash")
        seeds.append(prepare(planned.settings, [("fedavg", {})], Silent()))
    one, other = seeds
    assert one.partition.sha256 == other.partition.sha256
    assert [one.study.participants(r) for r in range(9)] == [other.study.participants(r) for r in range(9)]
    assert {len(one.study.participants(r)) for r in range(9)} == {2}
    for a, b in zip(one.federation.sites, other.federation.sites, strict=True):
        assert (a.train.sha256(), a.test.images.sha256()) == (b.train.sha256(), b.test.images.sha256())
        assert len(a.val) == 0
    assert not (one.study.initial()["head.weight"] == other.study.initial()["head.weight"]).all()


def test_entries_are_chosen_by_name(table: Any) -> None:
    choose = table.entries.chosen
    assert [e.label for e in choose(["fedkper", "fedavg"], False)] == ["fedavg", "fedkper"]
    assert len(choose(["fedkper"], True)) == 1 + len(table.entries.ABLATIONS)
    with pytest.raises(BadInput, match="'fedkpr' is not in the table; choose from fedavg, "):
        choose(["fedkpr"], False)


# Summary --------------------------------------------------------------------------------------------------------------


def entry(table: Any, label: str, seed: int, value: float) -> dict[str, Any]:
    figures = dict.fromkeys(table.summary.MEASURES, value)
    rounds = {"shared_global_accuracy": [0.25, value], "seconds": [1.0, 4.0]}
    place = {"set": "bloodmnist", "seed": seed, "entry": label, "recipe": label, "seconds": 10.0 * (seed + 1)}
    return {**place, "figures": figures, "rounds": rounds}


def test_summary_is_exact(table: Any) -> None:
    lines = [
        entry(table, "fedkper", 0, 0.5),
        entry(table, "fedkper, no cap", 0, 0.9),
        entry(table, "fedavg", 0, 0.25),
        entry(table, "fedkper", 1, 0.75),
    ]
    study = header(study_tree(Path("bloodmnist.npz"), {}))
    rows = table.summary.summarise(lines, study)
    assert [row["entry"] for row in rows] == ["fedavg", "fedkper", "fedkper, no cap"]
    fedkper = rows[1]
    assert (fedkper["seeds"], fedkper["seconds"]) == ([0, 1], 15.0)
    assert fedkper["mean"]["backward_transfer"] == 0.625
    assert fedkper["standard_deviation"]["backward_transfer"] == pytest.approx(0.17678)  # 0.25 / √2
    assert fedkper["rank"]["balance_over_rounds"] == "1 of 2"  # an ablation is not of the table
    assert rows[0]["rank"]["balance_over_rounds"] == "2 of 2"
    assert rows[2]["rank"] == {}
    assert fedkper["published"]["mean_shared_global_accuracy"] == 0.645
    assert rows[2]["published"] is None


def test_published_figures_stand_beside_the_papers_protocol_only(table: Any) -> None:
    for flags in ({"rounds": 10}, {"data": {"sites": 10}}):
        study = header(study_tree(Path("bloodmnist.npz"), flags))
        assert table.summary.summarise([entry(table, "fedavg", 0, 0.5)], study)[0]["published"] is None


def test_markdown_is_exact(table: Any) -> None:
    study = header(study_tree(Path("bloodmnist.npz"), {}))
    lines = [entry(table, "fedavg", 0, 0.5), entry(table, "fedkper", 0, 0.75), entry(table, "fedkper", 1, 1.0)]
    lines[0]["rounds"]["seconds"] = [1.0, 2.0]
    tree = {"set": "bloodmnist", "entries": lines, "summary": table.summary.summarise(lines, study)}
    shown = table.summary.markdown(tree).splitlines()
    assert shown[4] == f"| fedavg | 1 | {' | '.join(['0.500 (2)'] * 7)} | 10 |"
    assert shown[5] == "| published |  | 0.409 | -0.255 | 0.721 | 0.775 | 0.664 | 0.747 | 0.592 |  |"
    assert shown[6] == f"| fedkper | 2 | {' | '.join(['0.875 ± 0.177 (1)'] * 7)} | 15 |"
    assert shown[11] == "| seconds of work | 0.5 | 1.0 | 1.5 | 2.0 |"
    assert shown[13] == "| fedavg | 0.000 | 0.250 | 0.250 | 0.500 |"
    assert shown[14] == "| fedkper | 0.000 | 0.250 | 0.250 | 0.250 |"


def test_lists_of_numbers_take_one_line(table: Any) -> None:
    tree = {"a": [1, 2.5, None], "b": [{"c": [[1], "two"]}], "d": "as [it  is, a", "e": []}
    text = compact(tree)
    assert json.loads(text) == tree
    assert ' "a": [ 1, 2.5, null ],' in text


# The whole ------------------------------------------------------------------------------------------------------------


def arguments(folder: Path, *more: str) -> list[str]:
    ends = ["--out", str(folder / "papers" / "table.json"), "--work", str(folder / "work")]
    grid = ["--device", "cpu", "--rounds", "2", "--sites", "5", "--methods", "fedavg", "fedkper"]
    return [str(PHANTOMS), *ends, *grid, *more]


def entries_of(folder: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = json.loads((folder / "papers" / "table.json").read_text())["entries"]
    return lines


def test_two_rounds_stopped_and_gone_on(table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.table.main(arguments(tmp_path, "--seeds", "0")) == 0
    assert capsys.readouterr().out.count("phantoms:240-seed0, fed") == 2
    first = entries_of(tmp_path)
    assert table.table.main(arguments(tmp_path, "--seeds", "0", "1", "--ablations", "--seconds", "0.001")) == 0
    assert "2 of 16 entries are done" in capsys.readouterr().out
    assert table.table.main(arguments(tmp_path, "--seeds", "0", "1")) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 entries are done" in shown
    found = entries_of(tmp_path)
    assert found[:2] == first
    assert [(line["entry"], line["seed"]) for line in found] == [
        ("fedavg", 0),
        ("fedkper", 0),
        ("fedavg", 1),
        ("fedkper", 1),
    ]
    for line in found:
        assert {len(values) for values in line["rounds"].values()} == {2}
        assert None not in line["figures"].values() or line["figures"]["rounds_to_convergence"] is None
        mean = sum(line["rounds"]["shared_global_accuracy"]) / 2
        assert line["figures"]["mean_shared_global_accuracy"] == pytest.approx(mean, abs=1e-5)
    assert [path.name for path in (tmp_path / "work").iterdir()] == [".lock"]
    assert table.table.main(["--table", "--out", str(tmp_path / "papers" / "table.json")]) == 0
    assert capsys.readouterr().out.strip() == shown.partition("\n\n")[2].partition("\n\n")[2].strip()
    with pytest.raises(BadInput, match="other settings; use another --out"):
        table.table.open_results(tmp_path / "papers" / "table.json", "bloodmnist", {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no set is named"),
        (["absent.npz"], "cannot read absent.npz: No such file"),
        (["absent.npz", "--methods", "fedsgd"], "'fedsgd' is not in the table"),
        (["absent.npz", "--rounds", "0"], "rounds = 0 cannot be used"),
    ],
)
def test_bad_input_is_one_line(
    table: Any, given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.table.main([*given, "--out", str(tmp_path / "table.json"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# Other readings -------------------------------------------------------------------------------------------------------


def test_two_readings_and_nothing_is_done_twice(table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "readings.json"
    chosen = ["--readings", "as in the table", "batch 50", "--rounds", "2"]
    line = ["phantoms:480", "--out", str(out), "--work", str(tmp_path / "work"), "--device", "cpu"]
    assert table.readings.main([*line, *chosen]) == 0
    shown = capsys.readouterr().out
    assert shown.count("phantoms:480-as_in_the_table-seed0, fed") == 2
    assert "4 of 4 entries are done" in shown
    tree = json.loads(out.read_text())
    assert tree["benchmark"] == "fedkper_readings"
    places = [(e["set"], e["reading"], e["seed"], e["entry"]) for e in tree["entries"]]
    assert places == [
        ("phantoms:480", reading, 0, label)
        for reading in ("as in the table", "batch 50")
        for label in ("fedavg", "fedkper")
    ]
    assert len({e["id"] for e in tree["entries"]}) == 4
    assert list(tree["readings"]) == list(table.readings.READINGS)
    assert tree["readings"]["batch 50"]["train"]["batch"] == 50

    before = out.read_bytes()
    assert table.readings.main([*line, *chosen]) == 0
    again = capsys.readouterr().out
    assert out.read_bytes() == before
    assert "-seed0, fed" not in again
    assert table.readings.main(["--table", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.strip() == again.partition("\n\n")[2].strip()
    assert [row.split(" | ")[:3] for row in text.splitlines() if row.startswith("| fed")] == [
        [f"| {label}", reading, "1"] for label in ("fedavg", "fedkper") for reading in ("as in the table", "batch 50")
    ]
    assert table.readings.main([*line, "--rounds", "3"]) == 2
    assert "other settings; use another --out" in capsys.readouterr().err


def reading(table: Any, images: str, label: str, seed: int, value: float) -> dict[str, Any]:
    return {**entry(table, label, seed, value), "set": images, "reading": "batch 50"}


def test_published_lines_stand_below_whole_runs_on_the_papers_sets(table: Any) -> None:
    found = table.readings
    sets = ("organcmnist", "scans")
    lines = [reading(table, images, label, 0, 0.5) for images in sets for label in ("fedkper", "fedavg")]
    lines.append(reading(table, "scans", "fedavg", 1, 0.25))
    studies = {name: {"rounds": 100} for name in found.READINGS}
    tree = {"readings": studies, "summary": found.summarise(lines)}
    shown = [text for text in found.markdown(tree).splitlines() if text.startswith(("###", "| fed"))]
    assert shown == [
        "### organcmnist",
        f"| fedavg | batch 50 | 1 | {' | '.join(['0.500'] * 7)} |",
        "| fedavg | published |  | 0.568 | -0.077 | 0.818 | 0.844 | 0.717 | 0.747 | 0.706 |",
        f"| fedkper | batch 50 | 1 | {' | '.join(['0.500'] * 7)} |",
        "| fedkper | published |  | 0.660 | -0.013 | 0.924 | 0.889 | 0.797 | 0.868 | 0.774 |",
        "### scans",
        f"| fedavg | batch 50 | 2 | {' | '.join(['0.375'] * 7)} |",
        f"| fedkper | batch 50 | 1 | {' | '.join(['0.500'] * 7)} |",
    ]
    short = {"readings": {**studies, "uncapped": {"rounds": 2}}, "summary": tree["summary"]}
    assert "published" not in found.markdown(short)


def test_readings_need_a_set(table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.readings.main(["--out", str(tmp_path / "readings.json")]) == 2
    assert capsys.readouterr().err.startswith("error: no set is named; give ")
