"""The papers' tables as files: all there, to the printed digit, and a slip in one is told in a line."""

from pathlib import Path
from typing import Any

import pytest

from wardround.errors import BadInput
from wardround.methods.registry import find
from wardround.papers.datasets import DATASETS, is_official, stands_for
from wardround.papers.library import ids, read_table, table, tables
from wardround.papers.paper_setting import cell, plan, study_tree
from wardround.papers.schema import value

IDS = {
    "consult-1",
    *("fedbicross-1", "fedbicross-2", "fedbicross-fig2", "fedbicross-fig3", "fedbicross-fig4"),
    *(f"fedisca-{n}" for n in ("1", "2", "3", "4", "5", "6", "fig4", "fig5", "fig6")),
    *("fedkper-1", "fedkper-fig3", "fedkper-fig4", "fedkper-fig5"),
    *(f"fedmp-{n}" for n in ("1", "2", "3", "4", "5", "fig5", "fig6", "fig7")),
}
GOOD = """
id = "own-1"
title = "a table"
citation = "somebody"
measures = "something"
family = "one-shot"
columns = [{ name = "accuracy", measure = "local_accuracy" }]
entries = [{ label = "local", method = "local", rows = ["Local"] }]
published = [{ row = "Local", figures = { bloodmnist = "1.0 2.0" } }]
[axes]
datasets = ["bloodmnist"]
levels = [0.1, 0.3]
sites = [5]
seeds = [0]
"""


def test_every_table_and_figure_is_there_tables_first() -> None:
    assert set(ids()) == IDS
    assert list(ids())[6:9] == ["fedisca-1", "fedisca-2", "fedisca-3"]
    assert [found.id for found in tables()] == list(ids())


@pytest.mark.parametrize(
    ("id", "row", "dataset", "sites", "level", "column", "printed"),
    [
        ("fedbicross-1", "K=4", "bloodmnist", 5, 0.1, 0, "85.57"),
        ("fedbicross-1", "K=8", "tissuemnist", 20, 0.5, 0, "58.70"),
        ("fedbicross-1", "Co-Boosting", "dermamnist", 20, 0.1, 0, "31.22"),
        ("fedbicross-2", "w/o PKD", "octmnist", 10, 0.3, 0, "61.62"),
        ("fedisca-1", "E-FedISCA", "isic-centres", 5, "iid", 0, "27.01"),
        ("fedisca-2", "FedISCA w/ N", "rsna", 5, "iid", 0, "50.00"),
        ("fedisca-3", "DENSE", "tissuemnist", 5, 0.3, 0, "9.33"),
        ("fedisca-4", "FedISCA w/ IS", "tissuemnist", 5, 0.3, 0, "39.89"),
        ("fedisca-5", "E-FedISCA 2-shot", "bloodmnist", 20, "iid", 0, "86.23"),
        ("fedisca-6", "DAFL", "cifar10", 5, 0.1, 0, "47.34"),
        ("fedkper-1", "FedKPer", "bloodmnist", 20, 0.1, 0, "0.645±0.188"),
        ("fedkper-1", "FedKD", "organcmnist", 20, 0.1, 6, "0.530"),
        ("fedmp-1", "FedMR", "covid-qu-ex", 5, "natural", 0, "96.09±0.14"),
        ("fedmp-2", "FedMP (1st stage)", "dr", 3, "natural", 1, "170"),
        ("fedmp-3", "Only SFMC", "dr", 3, "natural", 0, "74.10"),
        ("fedmp-4", "FRAug", "tb", 3, "natural", 1, "163.92"),
        ("fedmp-5", "4th stage", "dr", 3, "natural", 2, "0.1979"),
    ],
)
def test_figures_are_as_printed(
    id: str, row: str, dataset: str, sites: int, level: Any, column: int, printed: str
) -> None:
    assert table(id).figure(row, dataset, sites, level, column) == printed


def test_rows_of_several_papers_agree_where_they_repeat_one_another() -> None:
    for dataset in ("bloodmnist", "dermamnist", "octmnist", "pathmnist", "tissuemnist"):
        for row in ("FedISCA", "E-FedISCA"):
            found = {id: table(id).figure(row, dataset, 5, "iid", 0) for id in ("fedisca-1", "fedisca-2", "fedisca-5")}
            assert len(set(found.values())) == 1, found
    for published in table("fedmp-4").published:
        row = published.row.replace("Few-Shot FedMP", "")
        accuracy = table("fedmp-1").figure(row, "tb", 5, "natural", 0)
        assert accuracy is None or accuracy.startswith(published.figures["tb"].split()[2])


def test_fedkpers_balance_is_the_mean_of_global_and_local() -> None:
    for published in table("fedkper-1").published:
        for text in published.figures.values():
            numbers = [value(word) for word in text.split()]
            assert numbers[6] == pytest.approx((numbers[0] + numbers[3]) / 2, abs=0.0011)


def test_a_line_stands_beside_the_highest_of_its_rows() -> None:
    found = table("fedbicross-1")
    line = found.entries[-1]
    assert line.rows == ("K=2", "K=3", "K=4", "K=5", "K=8")
    assert found.beside(line, "bloodmnist", 5, 0.3, 0) == "87.67"
    assert found.beside(line, "bloodmnist", 20, 0.1, 0) == "66.73"
    assert found.beside(found.entries[0], "bloodmnist", 5, 0.3, 0) is None
    assert found.site_counts("dermamnist") == [(5, 5), (10, 10), (20, 15)]


@pytest.mark.parametrize("id", sorted(IDS))
def test_every_line_of_every_table_can_be_planned(id: str) -> None:
    found = table(id)
    assert found.entries or found.prints or found.see
    for line in found.entries:
        find(line.method)
        for dataset in found.axes.datasets:
            source = Path(DATASETS[dataset].file)
            for _, sites in found.site_counts(dataset):
                for level in found.axes.levels[:1]:
                    tree = study_tree(found, source, dataset, sites, level, {})
                    planned = plan(found, tree, line, cell(found, source, dataset, level, 0), "hash")
                    if found.family != "fedkper":
                        assert planned.settings.data.size == DATASETS[dataset].size
                    if not DATASETS[dataset].places and found.family != "fedmp":
                        assert planned.settings.data.sites == sites


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('measures = "something"', "", "measures: Field required"),
        ('title = "a table"', 'titel = "a table"\ntitle = "a table"', "titel: Extra inputs are not permitted"),
        ("1.0 2.0", "1.0", "row 'Local' has 1 figures on bloodmnist"),
        ("1.0 2.0", "1.0 two", "row 'Local' on bloodmnist is not made of numbers"),
        ("figures = { blood", "sites = 7, figures = { blood", "row 'Local' has 7 sites, which is not on the axis"),
        ("figures = { bloodmnist", "figures = { blood", "row 'Local' has blood, which is not on the axis"),
        ('rows = ["Local"]', 'rows = ["Lokal"]', "the line 'local' stands beside a row that is not published"),
        ("entries = [{", 'entries = [{ label = "local", method = "local" }, {', "two lines have the same label"),
        ("levels = [0.1, 0.3]", "levels = []", "lines and published rows need axes and columns"),
        ('id = "own-1"', 'id = "own-2"', "its id is 'own-2'; name the file own-2.toml"),
        ("[axes]", "[axes", "Expected ']'"),
    ],
)
def test_a_bad_file_is_told_in_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own-1.toml"
    path.write_text(GOOD)
    assert read_table(path).id == "own-1"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        read_table(path)
    assert str(caught.value).startswith("own-1.toml is no table of a paper: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_table_is_told_with_a_guess() -> None:
    with pytest.raises(BadInput, match="there is no table 'fedbicros-1'; did you mean fedbicross-1"):
        table("fedbicros-1")
    with pytest.raises(BadInput, match="`wardround papers list` shows all"):
        table("zzz")


# Data sets ------------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_every_set_of_a_table_is_known_and_has_a_recipe_that_names_its_file() -> None:
    used = {name for found in tables() for name in found.axes.datasets}
    assert used == set(DATASETS)
    for name, known in DATASETS.items():
        text = (ROOT / known.page).read_text(encoding="utf-8")
        assert (known.file if not known.file.endswith(".npz") else f"`{name}`") in text, name


def test_what_is_missing_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    missing = f"{tmp_path}/bloodmnist.npz is missing: wardround data get bloodmnist (docs/data/medmnist.md)"
    assert DATASETS["bloodmnist"].missing(tmp_path) == missing
    (tmp_path / "bloodmnist.npz").write_bytes(b"not the official one")
    assert DATASETS["bloodmnist"].missing(tmp_path) == ""
    assert is_official(tmp_path / "bloodmnist.npz") is False
    assert is_official(tmp_path / "octmnist.npz") is None  # not there
    (tmp_path / "oct3.npz").touch()
    assert is_official(tmp_path / "oct3.npz") is None
    assert (stands_for("oct3"), stands_for("bloodmnist"), stands_for("own")) == ("octmnist", "bloodmnist", "own")
