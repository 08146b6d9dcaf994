"""The one-shot grid: exact summaries, what may be skipped, and a real `kill -9`."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wardround.errors import BadInput
from wardround.papers import one_shot
from wardround.papers.results import read_results
from wardround.papers.runs import expected_seconds

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIGURES = {
    "local_accuracy": 0.5,
    "global_accuracy": 0.25,
    "balance": 0.375,
    "worst_site_accuracy": 0.1,
    "shared_global_accuracy": None,
    "shared_local_accuracy": None,
}
TINY = '[model]\nname = "small"\nwidth = 2\n[train]\nepochs = 1\nbatch = 16\n[data]\nsites = 2\n'
FAILS = """
from wardround.errors import RunFailed
from wardround.methods.majority import Majority

class Fails(Majority):
    name = "fails"

    def begin(self, ctx):
        raise RunFailed("it had to be")
"""
DIES = """
import os, signal
from wardround.methods.majority import Majority

class Dies(Majority):
    name = "dies"

    def begin(self, ctx):
        os.kill(os.getpid(), signal.SIGKILL)
"""
SLEEPS = """
import time
from pathlib import Path
from wardround.methods.majority import Majority

class Sleeps(Majority):
    name = "sleeps"

    def begin(self, ctx):
        Path(__file__).with_name("asleep").touch()
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def grid() -> Iterator[Any]:
    """The scripts' modules, which are no package: they find one another beside the script that runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        names = ("one_shot_grid", "one_shot_entries", "one_shot_summary", "published")
        yield SimpleNamespace(**{name.removeprefix("one_shot_"): importlib.import_module(name) for name in names})


def entry(seed: int = 0, /, **changes: Any) -> dict[str, Any]:
    """A finished entry as `--out` holds it."""
    figures = {**FIGURES, **changes.pop("figures", {})}
    line = {"set": "bloodmnist", "alpha": 0.1, "seed": seed, "entry": "local", "recipe": "r", "seconds": 10.0}
    return {**line, "figures": figures, **changes}


# Published figures and summary ----------------------------------------------------------------------------------------


def test_published_figures(grid: Any) -> None:
    assert grid.published.local("bloodmnist", 0.1, "fedbicross") == 85.57  # K=4
    assert grid.published.local("bloodmnist", 0.3, "fedbicross") == 87.67  # K=3
    assert grid.published.local("dermamnist", 0.5, "fedbicross, not personalised") == 73.05
    assert grid.published.local("oct3", 0.1, "fedavg, own init") == 28.86
    assert grid.published.shared_global("bloodmnist", 0.3, "fedisca") == 46.59
    assert grid.published.shared_global("octmnist", 0.3, "deepinversion") == 49.20


@pytest.mark.parametrize(
    ("images", "alpha", "label"),
    [
        ("breastmnist", 0.1, "fedisca"),  # in no table
        ("bloodmnist", 0.4, "fedisca"),  # no such level
        ("bloodmnist", 0.1, "local"),  # no such row
        ("bloodmnist", 0.1, "fedavg, common init"),  # theirs begins each site by itself
    ],
)
def test_nothing_published(grid: Any, images: str, alpha: float, label: str) -> None:
    assert grid.published.local(images, alpha, label) is None
    assert grid.published.shared_global(images, alpha, label) is None


def test_summary_is_exact(grid: Any) -> None:
    lines = [
        entry(1, figures={"local_accuracy": 0.7, "shared_global_accuracy": 0.4}, seconds=20.0),
        entry(0, figures={"local_accuracy": 0.5}),
        entry(2, figures={"local_accuracy": 0.9}, seconds=30.0),
    ]
    (row,) = grid.summary.summarise(lines, sites=5)
    assert (row["set"], row["alpha"], row["entry"], row["seeds"]) == ("bloodmnist", 0.1, "local", [0, 1, 2])
    assert row["mean"]["local_accuracy"] == 0.7
    assert row["standard_deviation"]["local_accuracy"] == 0.2  # sqrt((0.04 + 0 + 0.04) / 2)
    assert row["standard_deviation"]["balance"] == 0.0
    assert (row["mean"]["shared_global_accuracy"], row["standard_deviation"]["shared_global_accuracy"]) == (0.4, None)
    assert (row["mean"]["shared_local_accuracy"], row["seconds"]) == (None, 20.0)


def test_summary_mixes_neither_settings_nor_cells(grid: Any) -> None:
    lines = [entry(0), entry(1, recipe="other"), entry(0, alpha=0.3), entry(0, set="oct3"), entry(0, entry="fedisca")]
    assert [row["seeds"] for row in grid.summary.summarise(lines, sites=5)] == [[0], [1], [0], [0], [0]]


def test_published_figures_stand_beside_five_sites_only(grid: Any) -> None:
    lines = [entry(entry="fedisca", alpha=0.3)]
    assert grid.summary.summarise(lines, sites=5)[0]["published"] == {"local": 53.28, "shared_global": 46.59}
    assert grid.summary.summarise(lines, sites=10)[0]["published"] == {"local": None, "shared_global": None}


def test_markdown_is_exact(grid: Any) -> None:
    lines = [
        entry(0, figures={"local_accuracy": 0.5}),
        entry(1, figures={"local_accuracy": 0.75}),
        entry(0, set="oct3", alpha=0.3, entry="fedisca", figures={"shared_global_accuracy": 0.625}),
    ]
    shown = grid.summary.markdown({"summary": grid.summary.summarise(lines, sites=5)}).splitlines()
    assert shown[0] == "### bloodmnist, α = 0.1"
    assert shown[4] == "| local | 2 | 62.5 ± 17.7 | 25.0 ± 0.0 | 37.5 ± 0.0 | 10.0 ± 0.0 | – | 10 | – | – |"
    assert shown[6] == "### oct3, α = 0.3"
    assert shown[10] == "| fedisca | 1 | 50.0 | 25.0 | 37.5 | 10.0 | 62.5 | 10 | 60.47 | 60.50 |"
    assert any(line.startswith("- oct3 is not OCTMNIST") for line in shown)
    without = grid.summary.markdown({"summary": grid.summary.summarise(lines[:2], sites=5)})
    assert "oct3" not in without
    assert "on the authors' protocol, single run" in without


# Entries and settings -------------------------------------------------------------------------------------------------


def test_entries_are_chosen_by_name(grid: Any) -> None:
    def labels(methods: list[str] | None, ablations: bool = False) -> list[str]:
        return [line.label for line in grid.entries.chosen(methods, ablations)]

    assert labels(["fedavg", "local"]) == ["fedavg, own init", "fedavg, common init", "local"]
    assert labels(["fedbicross"]) == ["fedbicross"]
    assert len(labels(["fedbicross"], ablations=True)) == 8
    assert labels(["dense"], ablations=True) == ["dense", "dense, as released"]
    assert labels(["fedbicross, one cluster", "dense", "dense, as released"], ablations=True) == [
        "fedbicross, one cluster",
        "dense",
        "dense, as released",
    ]
    assert "consult, prior 0.5" in labels(["consult"])
    assert labels(["single"]) == ["single"]
    everything = labels(None, ablations=True)
    assert len(set(everything)) == len(everything)
    with pytest.raises(BadInput, match="did you mean fedisca"):
        labels(["fedisc"])


def planned(grid: Any, tree: dict[str, Any], label: str = "fedisca", seed: int = 0, **changes: Any) -> Any:
    (line,) = [e for e in (*grid.entries.ENTRIES, *grid.entries.ABLATIONS) if e.label == label]
    cell = one_shot.cell(changes.get("source", Path("bloodmnist.npz")), changes.get("alpha", 0.1), seed)
    return one_shot.plan(tree, line, cell, changes.get("images", "hash"))


def test_settings_are_the_clients_then_the_preset_then_flags_then_the_entry(grid: Any, tmp_path: Path) -> None:
    preset = tmp_path / "own.toml"
    preset.write_text('[train]\nepochs = 7\nlr = 0.5\n[set.fedisca]\nepochs = 3\nadaptation = "ema"\nsteps = 9\n')
    tree = one_shot.study_tree(str(preset), {"train": {"epochs": 2}}, "fp32")
    found = planned(grid, tree, "fedisca, batch adaptation", seed=4)
    train = found.settings.train
    assert (train.epochs, train.lr, train.batch, train.keep, train.precision) == (2, 0.5, 128, "best", "fp32")
    assert (found.settings.seed, found.settings.data.partition_seed, found.settings.init) == (4, 4, "own")
    assert {key: found.record["settings"][key] for key in ("epochs", "adaptation", "steps", "temperature")} == {
        "epochs": 3,
        "adaptation": "batch",
        "steps": 9,
        "temperature": 20.0,
    }
    assert planned(grid, tree, "fedavg, common init").settings.init == "common"
    assert planned(grid, tree, "fedbicross").record["settings"]["steps"] != 9  # another method's table


def test_an_entry_is_known_by_all_that_its_figures_depend_on(grid: Any) -> None:
    tree = one_shot.study_tree(None, {}, "fp32")
    first = planned(grid, tree)
    assert planned(grid, tree, source=Path("elsewhere/bloodmnist.npz")).id == first.id
    others = [
        planned(grid, tree, seed=1),
        planned(grid, tree, alpha=0.3),
        planned(grid, tree, images="other"),
        planned(grid, one_shot.study_tree(None, {}, "bf16")),
        planned(grid, {**tree, "set": {"fedisca": {"steps": 9}}}),
        planned(grid, tree, "fedisca, batch adaptation"),
    ]
    assert len({first.id, *(other.id for other in others)}) == 7
    assert [other.recipe == first.recipe for other in others] == [True, True, True, True, False, False]
    assert planned(grid, {**tree, "device": "cuda", "workers": 3}).id == first.id


def test_bad_presets_are_told_before_any_work(grid: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no preset 'slowest'"):
        one_shot.study_tree("slowest", {}, "fp32")
    preset = tmp_path / "own.toml"
    preset.write_text("[set.fedisca]\nstep = 9\n")
    with pytest.raises(BadInput, match=r"no setting 'fedisca\.step'; did you mean fedisca\.steps"):
        planned(grid, one_shot.study_tree(str(preset), {}, "fp32"))
    preset.write_text("set = 3\n")
    with pytest.raises(BadInput, match="set = 3 cannot be used: it should be a table"):
        one_shot.study_tree(str(preset), {}, "fp32")


def test_expected_seconds_are_of_the_nearest_entries(grid: Any) -> None:
    lines = [
        entry(seconds=100.0, entry="fedbicross"),
        entry(seconds=200.0, entry="fedbicross", set="oct3"),
        entry(seconds=300.0, entry="fedbicross, one cluster", set="oct3"),
    ]
    assert expected_seconds(lines, "bloodmnist", "fedbicross") == pytest.approx(1.1 * 100 + 5)
    assert expected_seconds(lines, "dermamnist", "fedbicross") == pytest.approx(1.1 * 200 + 5)
    assert expected_seconds(lines, "bloodmnist", "fedbicross, uniform cross") == pytest.approx(1.1 * 300 + 5)
    assert expected_seconds(lines, "bloodmnist", "fedisca") == 0


# The results' file ----------------------------------------------------------------------------------------------------


def test_an_entry_under_new_settings_takes_the_place_of_the_old(grid: Any, tmp_path: Path) -> None:
    tree = one_shot.study_tree(None, {}, "fp32")
    path = tmp_path / "new folder" / "grid.json"
    results = grid.grid.open_results(path, None, one_shot.header(tree))
    old, other = planned(grid, tree), planned(grid, tree, seed=1)
    new = planned(grid, {**tree, "set": {"fedisca": {"steps": 9}}})
    for plan, local in ((old, 0.1), (other, 0.2), (new, 0.3)):
        results.add(plan, {"figures": {**FIGURES, "local_accuracy": local}, "seconds": 1.0}, {"images": [1]})
    again = grid.grid.open_results(path, None, one_shot.header(tree))
    assert [again.has(plan) for plan in (old, other, new)] == [False, True, True]
    assert [line["figures"]["local_accuracy"] for line in again.entries] == [0.2, 0.3]
    assert set(again.tree["recipes"]) == {other.recipe, new.recipe}
    assert sorted(cell["seed"] for cell in again.tree["cells"]) == [0, 1]
    assert again.tree == results.tree == json.loads(path.read_text())


def test_other_results_are_refused(grid: Any, tmp_path: Path) -> None:
    tree = one_shot.study_tree(None, {}, "fp32")
    path = tmp_path / "grid.json"
    results = grid.grid.open_results(path, "fast", one_shot.header(tree))
    results.add(planned(grid, tree), {"figures": FIGURES, "seconds": 1.0}, {})
    with pytest.raises(BadInput, match="another preset or other settings; use another --out"):
        grid.grid.open_results(path, None, one_shot.header(tree))
    changed = one_shot.study_tree(None, {"train": {"epochs": 1}}, "fp32")
    with pytest.raises(BadInput, match="another preset or other settings"):
        grid.grid.open_results(path, "fast", one_shot.header(changed))
    for text in ("{", "[]", '{"benchmark": "memory"}'):
        path.write_text(text)
        with pytest.raises(BadInput, match=r"cannot be used: .*; give the results of an earlier start"):
            read_results(path, grid.grid.NAME)


# The whole ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny set in MedMNIST's layout, and a preset for a tiny network."""
    folder = tmp_path_factory.mktemp("inputs")
    draw = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for part, n in (("train", 120), ("val", 20), ("test", 30)):
        labels = np.arange(n) % 2
        pixels = draw.integers(0, 120, (n, 28, 28)) + 100 * labels[:, None, None]
        arrays |= {f"{part}_images": pixels.astype(np.uint8), f"{part}_labels": labels[:, None].astype(np.uint8)}
    np.savez(folder / "spots.npz", **arrays)  # type: ignore[arg-type]
    (folder / "tiny.toml").write_text(TINY)
    for name, text in (("fails", FAILS), ("dies", DIES), ("sleeps", SLEEPS)):
        (folder / f"{name}.py").write_text(text)
    return folder


def arguments(inputs: Path, folder: Path, *more: str) -> list[str]:
    ends = ["--out", str(folder / "grid.json"), "--work", str(folder / "work")]
    grid = ["--device", "cpu", "--alphas", "0.5", "1", "--seeds", "0", "1", "--preset", str(inputs / "tiny.toml")]
    return [str(inputs / "spots.npz"), *ends, *grid, *(more or ("--methods", "majority", "local", "ensemble"))]


def figures(folder: Path) -> list[Any]:
    lines = json.loads((folder / "grid.json").read_text())["entries"]
    return [{key: line[key] for key in ("set", "alpha", "seed", "entry", "id", "figures")} for line in lines]


def test_kill_minus_nine_then_go_on(
    grid: Any, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    command = [sys.executable, str(BENCHMARKS / "one_shot_grid.py"), *arguments(inputs, killed)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while process.poll() is None and not (killed / "grid.json").exists():
            time.sleep(0.001)
        process.kill()
    done = figures(killed)
    assert 0 < len(done) < 12
    assert grid.grid.main(arguments(inputs, killed)) == 0
    assert grid.grid.main(arguments(inputs, straight)) == 0
    assert figures(killed)[: len(done)] == done
    assert figures(killed) == figures(straight)
    assert len(figures(straight)) == 12
    assert [path.name for path in (killed / "work").iterdir()] == [".lock"]

    trained = [line["fits"] for line in json.loads((straight / "grid.json").read_text())["entries"][:3]]
    assert trained == [{"trained": 0, "reused": 0}, {"trained": 2, "reused": 0}, {"trained": 0, "reused": 2}]

    written = (straight / "grid.json").stat()
    capsys.readouterr()
    assert grid.grid.main(arguments(inputs, straight)) == 0
    assert capsys.readouterr().out.startswith("\n12 of 12 entries are done")
    assert grid.grid.main(["--table", "--out", str(straight / "grid.json")]) == 0
    assert capsys.readouterr().out.count("\n| local | 2 |") == 2
    assert (straight / "grid.json").stat() == written


def test_no_entry_begins_that_would_not_end_in_time(
    grid: Any, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [*arguments(inputs, tmp_path, "--methods", "majority"), "--alphas", "1", "--seeds", "0"]
    assert grid.grid.main(first) == 0
    path = tmp_path / "grid.json"
    tree = json.loads(path.read_text())
    tree["entries"][0]["seconds"] = 1000.0
    path.write_text(json.dumps(tree))
    capsys.readouterr()
    more = [*arguments(inputs, tmp_path, "--methods", "majority"), "--seconds", "500"]
    assert grid.grid.main(more) == 0
    assert capsys.readouterr().out.startswith("\n1 of 4 entries are done")
    assert grid.grid.main([*more, "--seconds", "5000"]) == 0
    assert "4 of 4 entries are done" in capsys.readouterr().out


def test_one_entry_that_fails_does_not_stop_the_others(
    grid: Any, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*arguments(inputs, tmp_path, "--methods", str(inputs / "fails.py"), "majority"), "--seeds", "0"]
    assert grid.grid.main(line) == 1
    shown = capsys.readouterr().out
    assert "spots-alpha0.5-seed0, fails: failed: it had to be" in shown
    assert "2 of 4 entries are done" in shown
    assert [found["entry"] for found in figures(tmp_path)] == ["majority", "majority"]


# Several at once ------------------------------------------------------------------------------------------------------


def by_name(folder: Path) -> list[Any]:
    lines = json.loads((folder / "grid.json").read_text())["entries"]
    kept = ("set", "alpha", "seed", "entry", "id", "figures", "fits")
    return sorted(([line[key] for key in kept] for line in lines), key=str)


def test_entries_of_a_cell_wait_for_its_site_models(grid: Any, tmp_path: Path) -> None:
    runs, tree = one_shot.OneShot(tmp_path, None), one_shot.study_tree(None, {}, "fp32")
    first, second, other = (planned(grid, tree, *which) for which in (("local",), ("fedisca",), ("local", 1)))
    assert runs.apart(first) == runs.apart(second) != runs.apart(other)
    (tmp_path / first.cell.folder / "fits").mkdir(parents=True)
    assert runs.apart(first) == runs.apart(second)  # none is finished yet
    (tmp_path / first.cell.folder / "fits" / "a.safetensors").touch()
    assert len({runs.apart(one) for one in (first, second, other)}) == 3


def test_several_at_once_give_the_same_figures_and_train_the_sites_of_a_cell_once(
    grid: Any, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grid.grid.main([*arguments(inputs, tmp_path / "one"), "--seeds", "0"]) == 0
    assert grid.grid.main([*arguments(inputs, tmp_path / "two"), "--seeds", "0", "--jobs", "2"]) == 0
    assert "6 of 6 entries are done" in capsys.readouterr().out
    assert by_name(tmp_path / "one") == by_name(tmp_path / "two")
    assert {line["jobs"] for line in json.loads((tmp_path / "two" / "grid.json").read_text())["entries"]} == {2}
    assert [path.name for path in (tmp_path / "two" / "work").iterdir()] == [".lock"]


def test_what_a_killed_process_was_at_is_lost_and_the_others_go_on(
    grid: Any, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*arguments(inputs, tmp_path, "--methods", str(inputs / "dies.py"), "majority"), "--seeds", "0"]
    assert grid.grid.main([*line, "--alphas", "0.5", "--jobs", "2"]) == 1
    shown = capsys.readouterr().out
    assert "spots-alpha0.5-seed0, dies: lost: its process ended with exit code -9" in shown
    assert "1 of 2 entries are done" in shown
    assert [found["entry"] for found in figures(tmp_path)] == ["majority"]


def test_jobs_begin_nothing_that_would_not_end_in_time(
    grid: Any, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*arguments(inputs, tmp_path, "--methods", "majority"), "--jobs", "2", "--seconds", "0"]
    assert grid.grid.main(line) == 0
    assert capsys.readouterr().out.startswith("\n0 of 4 entries are done")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(inputs: Path, tmp_path: Path, by: signal.Signals) -> None:
    asleep = inputs / "asleep"
    asleep.unlink(missing_ok=True)
    line = [*arguments(inputs, tmp_path, "--methods", str(inputs / "sleeps.py")), "--jobs", "2"]
    command = [sys.executable, str(BENCHMARKS / "one_shot_grid.py"), *line]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not asleep.exists():
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(by)
        _, said = process.communicate()
    assert asleep.exists()
    assert children
    assert process.returncode == (130 if by == signal.SIGINT else -by)
    assert (said.startswith("stopped; the same command goes on") and said.count("\n") == 1) or by == signal.SIGKILL
    while any(Path(f"/proc/{child}/exe").exists() for child in children):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["absent.npz", "--jobs", "0"], "--jobs 0 cannot be used; it should be 1 or more"),
        ([], "no set is named"),
        (["absent.npz"], "cannot read absent.npz: No such file"),
        (["a/one.npz", "b/one.npz"], "two sets have the same name"),
        (["absent.npz", "--preset", "slowest"], "there is no preset 'slowest'"),
        (["absent.npz", "--epochs", "-1"], "train.epochs = -1 cannot be used"),
    ],
)
def test_bad_input_is_one_line(
    grid: Any, given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grid.grid.main([*given, "--out", str(tmp_path / "grid.json"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
