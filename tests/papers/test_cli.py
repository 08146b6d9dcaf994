"""`wardround papers` as a user meets it: list, show, a real little run that is stopped and goes on, and its table."""

import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import Captured, cli, empty_place, ok
from papers.filed import blood
from wardround.cli import app
from wardround.papers.library import ids
from wardround.progress import Silent

ROOT = Path(__file__).parents[2]
TINY = [
    *("--set", "model.name=small", "--set", "model.width=2", "--set", "train.epochs=1", "--set", "train.batch=16"),
    *("--data", "data", "--device", "cpu", "--alphas", "0.5", "--sites", "5", "--seeds", "1"),
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


def cells_that_ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of the bar over the cells, as they are taken."""
    taken: list[str] = []

    class Watched(Silent):
        @contextmanager
        def task(self, label: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
            yield lambda: taken.append(label)

    monkeypatch.setattr("wardround.papers.cli.Silent", Watched)
    return taken


def entries(name: str = "one_shot_grid") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(f"papers/{name}.json").read_text())["entries"]
    return found


def test_list_has_every_table_and_what_is_done(capsys: Captured) -> None:
    shown = ok(capsys, "papers", "list")
    assert [text.split()[0] for text in shown.splitlines() if text.startswith(("consult", "fed"))] == list(ids())
    assert re.search(r"fedkper-1 +0 of 108 +FedKPer, Table 1", shown)
    assert re.search(r"fedisca-fig4 +– ", shown)


def test_show_has_protocol_settings_lines_and_deviations(capsys: Captured) -> None:
    shown = ok(capsys, "papers", "show", "fedbicross-2").splitlines()
    assert shown[0] == "FedBiCross, Table 2: ablations"
    for text in (
        "- dermamnist: DermaMNIST; sites: 5, 10, 15; dermamnist.npz (docs/data/medmnist.md)",
        "- train.epochs = 100",
        "- fedbicross.trajectories = 100",
        "- fedbicross, not personalised: fedbicross (personal = false); beside w/o PKD",
        "- seeds change the partition, too; the paper has one run",
    ):
        assert text in shown, text
    for id in ids():
        assert ok(capsys, "papers", "show", id)


def test_run_skips_what_is_done_and_table_prints_it(capsys: Captured) -> None:
    blood(Path("data/bloodmnist.npz"))
    line = ["papers", "run", "fedbicross-1", "--datasets", "blood", *TINY]
    code, out, err = cli(capsys, *line, "--methods", "majority,ensemble", "--seconds", "0")
    assert (code, out.startswith("0 of 2 cells are done; go on with: wardround")) == (0, True)
    assert len(out.splitlines()) == 1  # no file of results was written, so none is named
    code, out, err = cli(capsys, *line, "--methods", "majority,local")
    assert code == 0, err
    assert out.splitlines() == ["2 of 2 cells are done", "results: papers/one_shot_grid.json"]
    assert re.search(r"^bloodmnist-alpha0.5-seed0, majority: \d+ s; 1 left", err, re.MULTILINE)
    first = entries()
    code, out, err = cli(capsys, *line, "--methods", "majority,local,ensemble", "--work", "work")
    assert (code, out.splitlines()[0]) == (0, "3 of 3 cells are done")
    assert err.splitlines()[0] == "2 of 3 cells are done"
    assert entries()[:2] == first
    assert json.loads(Path("papers/one_shot_grid.json").read_text())["cells"][0]["official"] is False

    shown = ok(capsys, "papers", "table", "fedbicross-1", "--data", "data")
    local = next(text.split() for text in shown.splitlines() if text.startswith("local "))
    assert local[:3] == ["local", "ours", "1"]
    assert float(local[-1]) == pytest.approx(100 * first[1]["figures"]["local_accuracy"], abs=0.006)
    assert "model.name = small (paper: resnet18)" in shown
    assert "not the official file" in shown
    assert "fedbicross  " in shown
    assert "3 of 2016" in ok(capsys, "papers", "list")
    ok(capsys, "papers", "table", "fedbicross-1", "--format", "latex", "--out", "table.tex")
    assert Path("table.tex").read_text().startswith("% FedBiCross, Table 1")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_cell_that_was_stopped_goes_on_without_being_told_where(
    number: signal.Signals, exit_code: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["papers", "run", "fedkper-1", "--datasets", "phantoms:100", "--methods", "fedavg", "--seeds", "1"]
    line += ["--set", "data.sites=2", "--set", "rounds=2", "--set", "participants=1.0", "--set", "train.epochs=1"]

    def stop(*_: Any) -> None:
        signal.raise_signal(number)

    ended = cells_that_ended(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr("wardround.papers.fedkper.FedKPer.figures", stop)
        code, _, err = cli(capsys, *line, "--device", "cpu")
    assert code == exit_code
    assert "stopped; go on with: " in err
    assert ended == []
    (run,) = Path("papers/unfinished").glob("*/*/result.json")
    before = run.read_bytes()
    found: list[bytes] = []
    monkeypatch.setattr(
        "wardround.papers.fedkper.FedKPer.prepare", lambda self, planned, path: found.append(run.read_bytes())
    )
    ok(capsys, *line, "--device", "cpu")
    assert found == [before]
    assert ended == ["cells"]
    assert not run.exists()


def test_lines_of_a_cell_share_the_site_models(capsys: Captured) -> None:
    blood(Path("data/bloodmnist.npz"))
    ok(capsys, "papers", "run", "fedbicross-1", "--datasets", "blood", *TINY, "--methods", "local,ensemble", "--quiet")
    assert [entry["fits"] for entry in entries()] == [{"trained": 5, "reused": 0}, {"trained": 0, "reused": 5}]


def test_a_cell_that_fails_is_told_and_the_exit_code_is_one(capsys: Captured) -> None:
    line = ["papers", "run", "fedkper-1", "--datasets", "phantoms:60", "--methods", "fedavg", "--seeds", "1"]
    code, out, err = cli(capsys, *line, "--device", "cpu")
    assert code == 1
    assert "phantoms:60-seed0, fedavg: failed: 60 images cannot give 20 sites min_size = 10 each" in err
    assert out.startswith("0 of 1 cells are done; go on with: ")


def test_a_real_ray_does_the_same(capsys: Captured) -> None:
    pytest.importorskip("ray")
    blood(Path("data/bloodmnist.npz"))
    line = ["papers", "run", "fedbicross-1", "--datasets", "blood", *TINY, "--methods", "local,majority"]
    ok(capsys, *line, "--ray", "local", "--jobs", "2", "--results", "papers/one_shot_grid.json", "--work", "work")
    ok(capsys, *line, "--results", "papers/alone.json")
    ours, alone = ({entry["entry"]: entry["figures"] for entry in entries(name)} for name in ("one_shot_grid", "alone"))
    assert ours == alone
    assert set(ours) == {"local", "majority"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("table fedbicros-1", "there is no table 'fedbicros-1'; did you mean fedbicross-1?"),
        ("table fedkper-1 --format pdf", "--format 'pdf' is unknown; use text, markdown, latex, csv"),
        ("table fedkper-1 --results absent.json", "there is no absent.json"),
        ("run fedkper-1", "no images of fedkper-1 are at hand: bloodmnist: "),
        ("run fedkper-1 --jobs 0", "--jobs 0 cannot be used; it should be 1 or more"),
        ("run fedkper-1 --seeds three", "--seeds 'three' is no number"),
        ("run fedkper-1 --seeds 0", "--seeds 0 cannot be used"),
        ("run fedkper-1 --alphas a", "--alphas 'a' is no number"),
        ("run fedkper-1 --datasets phantoms:60 --set rounds", "--set 'rounds' is not key=value"),
        ("run fedkper-1 --datasets phantoms:60 --set rouns=2", "there is no setting 'rouns'; did you mean rounds?"),
        ("run fedbicross-1 --datasets phantoms:60 --preset slow", "there is no preset 'slow'"),
        ("run fedmp-5", "nothing is run for fedmp-5; docs/audit.md"),
    ],
)
def test_bad_input_is_one_line(words: str, message: str, capsys: Captured) -> None:
    code, out, err = cli(capsys, "papers", *shlex.split(words))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_ray_that_is_not_installed_is_told(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    line = ["papers", "run", "fedkper-1", "--datasets", "phantoms:60", "--methods", "fedavg", "--ray", "local"]
    code, _, err = cli(capsys, *line, "--device", "cpu")
    assert code == 2
    assert "--ray needs Ray; install it: pip install 'wardround[ray]'" in err


# Pages ----------------------------------------------------------------------------------------------------------------

PAGES = [ROOT / "docs" / "papers.md", *sorted((ROOT / "docs" / "data").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_and_links_of_the_pages_are_right(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 130
    for target in re.findall(r"\]\(([^)\s#]+)", text):
        assert (page.parent / target).exists(), target
    blocks = re.findall(r"^```(?:console|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for words in (shlex.split(text) for block in blocks for text in block.splitlines()):
        assert words.pop(0) == "wardround"
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("wardround", words)
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        compile(block, page.name, "exec")
