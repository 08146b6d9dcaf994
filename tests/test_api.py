"""wardround from Python: the same runs as the commands make, in a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import wardround
from commands import cli, empty_place, figures
from wardround import api
from wardround.errors import BadInput
from wardround.notebook import NotebookBars, in_notebook
from wardround.progress import Bars, Silent

SMALL: dict[str, Any] = {
    "data": "phantoms:96",
    "sites": 3,
    "partition": "iid",
    "rounds": 2,
    "epochs": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield from empty_place(tmp_path_factory.mktemp("api"), patch)


@pytest.fixture(scope="module")
def one(place: Path) -> wardround.Result:
    return wardround.simulate("fedavg", **SMALL, settings={"model.width": 4}, out=place / "one")


@pytest.fixture(scope="module")
def two(place: Path) -> wardround.Result:
    return wardround.compare(["fedprox", "local"], **SMALL, settings={"model.width": 4, "fedprox.mu": 0.5}, out="two")


def test_a_run_is_that_of_the_command(one: wardround.Result, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--data phantoms:96 --sites 3 --partition iid --rounds 2 --epochs 1 --set model.width=4"
    assert cli(capsys, "run", "--method", "fedavg", *arguments.split(), "--out", "by-command", "-q")[0] == 0
    assert figures(one.path) == figures("by-command")
    assert wardround.open("by-command").headlines == one.headlines


def test_a_comparison_is_that_of_the_command(two: wardround.Result, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--data phantoms:96 --sites 3 --partition iid --rounds 2 --epochs 1 --set model.width=4"
    command = ("compare", "fedprox", "local", *arguments.split(), "--set", "fedprox.mu=0.5", "--out", "both", "-q")
    assert cli(capsys, *command)[0] == 0
    assert figures(two.path) == figures("both")
    assert two.record["settings"]["set"] == {"fedprox": {"mu": 0.5}}


def test_headlines_rows_and_the_table_are_those_of_the_record(two: wardround.Result) -> None:
    assert two.methods == ["fedprox", "local"]
    assert two.rows == two.record["rows"]
    fedprox, local = two.table()
    assert list(fedprox) == ["method", "local", "global", "balance", "worst", "shared", "up", "down", "seconds"]
    assert fedprox["local"] == two.headlines["fedprox"]["local_accuracy"]
    assert (local["method"], local["shared"], local["up"]) == ("local", None, 0)
    assert fedprox["up"] == sum(t["bytes"] for t in two.record["ledger"]["totals"] if t["direction"] == "up")
    assert two.report_path == Path("two/report.html")
    assert two.report_path.is_file()


def test_it_is_shown_as_a_table(two: wardround.Result) -> None:
    lines = str(two).splitlines()
    assert [line.split()[0] for line in lines] == ["method", "fedprox", "local"]
    assert len({len(line) for line in lines}) == 1
    assert repr(two) == "<wardround result of fedprox, local in two>"
    html = two._repr_html_()
    assert html.count("<tr>") == 3
    assert '<a href="two/report.html">' in html


def test_hostile_text_in_a_record_is_only_text() -> None:
    record = {
        "methods": ["<b>"],
        "headlines": [],
        "ledger": {"totals": []},
        "seconds": {},
        "notes": [{"method": "<b>", "text": "<script>\x1b[2J"}],
    }
    html = wardround.Result(Path("<i>"), record)._repr_html_()
    assert not any(tag in html for tag in ("<b>", "<script>", "<i>", "\x1b"))


def test_the_predictor_of_a_site_is_the_one_it_would_deploy(one: wardround.Result, two: wardround.Result) -> None:
    for result, run, method in (
        (one, one.path, None),
        (two, two.path / "local", "local"),
        (two, two.path / "fedprox", "fedprox"),
    ):
        for site in ("site-1", "site-3"):
            found, expected = result.predictor(site, method), tiny.deployed(run, site)
            assert found.members[0].spec == expected.members[0].spec
            for name, tensor in expected.members[0].weights.items():
                assert torch.equal(found.members[0].weights[name], tensor)
    with pytest.raises(BadInput, match="there are several methods; say which: method='fedprox'"):
        two.predictor("site-1")
    with pytest.raises(BadInput, match="there is no method 'moon' in this result; there are fedprox, local"):
        two.predictor("site-1", "moon")
    with pytest.raises(BadInput, match="there is no site 'site-9' in this result; there are site-1, site-2, site-3"):
        one.predictor("site-9")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: wardround.simulate("fedaverage"), "there is no method 'fedaverage'; did you mean"),
        (lambda: wardround.simulate(sites=-1), "data.sites = -1 cannot be used"),
        (lambda: wardround.simulate(settings={"trian.lr": 1}), "trian.lr: no study and no method that runs here"),
        (lambda: wardround.simulate(data="nothing.npz"), "nothing.npz"),
        (lambda: wardround.simulate(preset="none"), "there is no preset 'none'"),
        (lambda: wardround.simulate(study="none.toml"), "cannot read study file none.toml"),
        (lambda: wardround.compare("fedavg"), r"compare takes a list of methods, such as \['fedavg', 'local'\]"),
        (lambda: wardround.compare([]), "compare takes a list of methods"),
        (lambda: wardround.open("nowhere"), "there is no nowhere; give the directory of a run"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(place: Path, call: Any, said: str) -> None:
    before = sorted(place.iterdir())
    with pytest.raises(BadInput, match=said):
        call()
    assert sorted(place.iterdir()) == before


def test_the_package_loads_nothing_until_it_is_asked() -> None:
    code = "import sys, wardround; print({'torch', 'numpy', 'rich', 'wardround.api'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    assert {"Result", "compare", "open", "simulate", "__version__"} <= set(dir(wardround))
    names: dict[str, Any] = {}
    exec("from wardround import *", names)  # noqa: S102
    assert "simulate" in names
    assert "open" not in names
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        wardround.nothing  # noqa: B018


def test_progress_is_shown_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    assert type(api._progress(False)) is Silent
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    assert type(api._progress(True)) is Bars
    monkeypatch.setattr("wardround.notebook.in_notebook", lambda: True)
    assert type(api._progress(True)) is NotebookBars
