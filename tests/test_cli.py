"""The commands, called in this process on tiny studies."""

from __future__ import annotations

import functools
import io
import json
import shlex
import signal
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from wardround import __version__, show
from wardround.cli import main
from wardround.data import download
from wardround.models import NetSpec, fresh
from wardround.models.weights import save_weights

TINY = [
    *("--data", "phantoms:96", "--sites", "3", "--partition", "iid", "--rounds", "1", "--epochs", "1"),
    *("--device", "cpu", "--set", "model.width=4", "--set", "train.batch=8"),
]
FILES = [
    *("settings.json", "partition.json", "data.json", "environment.json", "events.jsonl", "ledger.jsonl"),
    *("checkpoint.json", "result.json", "report.html"),
]
FIGURES = ("rows", "headlines", "notes", "ledger")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, an empty data folder elsewhere, a terminal of 80 columns, no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARDROUND_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


def cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = main(list(arguments))
    return code, *capsys.readouterr()


def ok(capsys: Captured, *arguments: str) -> str:
    """The stdout of a command that must do its work."""
    code, out, err = cli(capsys, *arguments)
    assert code == 0, err
    return out


def read(path: Path | str) -> Any:
    return json.loads(Path(path).read_text())


def figures(directory: Path | str) -> dict[str, Any]:
    """All of a result that must not depend on the day, the directory or the clock."""
    return {key: read(Path(directory) / "result.json")[key] for key in FIGURES}


def images(n: int = 40, classes: int = 4) -> tuple[Any, Any]:
    """Noise of 8x8 pixels with labels in turn."""
    pixels = np.random.default_rng(0).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    return pixels, np.arange(n) % classes


def save_npz(path: Path, **changes: Any) -> Path:
    pixels, labels = images()
    parts = {"train_images": pixels, "train_labels": labels, "test_images": pixels, "test_labels": labels}
    np.savez(path, **{**parts, **changes})
    return path


# run ------------------------------------------------------------------------------------------------------------------


def test_run_prints_a_table_and_leaves_a_whole_directory(capsys: Captured) -> None:
    code, out, err = cli(capsys, "run", *TINY)
    assert code == 0
    run = Path("runs/fedavg-phantoms-96")
    assert [name for name in FILES if not (run / name).is_file()] == []
    result = read(run / "result.json")
    found = {headline["key"]: headline["value"] for headline in result["headlines"]}
    header, row = (line.split() for line in out.strip().splitlines()[:2])
    assert header == ["method", "local", "global", "balance", "worst", "shared", "up", "down", "seconds"]
    shown = ("local_accuracy", "global_accuracy", "balance", "worst_site_accuracy", "shared_global_accuracy")
    assert row[:6] == ["fedavg", *(f"{100 * found[key]:.1f}" for key in shown)]
    assert out.endswith("\nreport: runs/fedavg-phantoms-96/report.html\n")
    opening = dict(line.split(maxsplit=1) for line in err.splitlines())
    assert opening["method"].strip() == "fedavg"
    assert opening["sites"].strip() == "IID, 3 sites, partition seed 0; 87 training images"
    assert opening["in"].strip() == str(run)


def test_bytes_in_the_table_are_those_of_the_ledger(capsys: Captured) -> None:
    row = ok(capsys, "run", *TINY).strip().splitlines()[1].split()
    totals = read("runs/fedavg-phantoms-96/result.json")["ledger"]["totals"]
    for direction, shown in (("up", row[6:8]), ("down", row[8:10])):
        count = sum(total["bytes"] for total in totals if total["direction"] == direction)
        assert 10_000 < count < 1_000_000
        assert shown == [f"{count / 1000:.1f}", "kB"]


def test_a_name_that_is_taken_gets_a_number(capsys: Captured) -> None:
    for name in ("majority-phantoms-96", "majority-phantoms-96-2", "majority-phantoms-96-3"):
        assert f"runs/{name}/report.html" in ok(capsys, "run", *TINY, "--method", "majority")
    assert len({(run / "partition.json").read_text() for run in Path("runs").iterdir()}) == 1
    ok(capsys, "run", *TINY, "--method", "majority", "--set", "name=mine")
    assert Path("runs/mine/result.json").is_file()


@pytest.mark.parametrize(
    ("folder", "source", "name"),
    [
        ("scans", ".", "majority-scans"),
        ("my scans (2024)", "../my scans (2024)", "majority-my-scans-2024"),
        ("\x1b[2J", "../\x1b[2J", "majority-2J"),
    ],
)
def test_a_default_name_is_plain_whatever_the_images_are_called(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, here: Path, folder: str, source: str, name: str
) -> None:
    for label in ("a", "b"):
        (here / folder / label).mkdir(parents=True)
        for i in range(8):
            Image.new("L", (8, 8), 9 * i).save(here / folder / label / f"{i}.png")
    monkeypatch.chdir(here / folder)
    args = ("--data", source, "--method", "majority", "--partition", "iid", "--sites", "2", "--set", "data.min_size=1")
    code, out, err = cli(capsys, "run", *args)
    assert code == 0, err
    assert "\x1b" not in out + err
    assert [path.name for path in Path("runs").iterdir()] == [name]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_an_existing_out_is_refused_and_left_alone(capsys: Captured, here: Path, kind: str) -> None:
    out = here / "there"
    out.mkdir() if kind == "directory" else out.write_text("mine")
    code, printed, err = cli(capsys, "run", *TINY, "--out", str(out))
    assert (code, printed) == (2, "")
    assert err == f"error: {out} exists already; choose another --out, or go on with: wardround resume {out}\n"
    assert list(here.iterdir()) == [out]
    assert (list(out.iterdir()) if kind == "directory" else out.read_text()) in ([], "mine")


def test_out_is_where_the_run_goes(capsys: Captured) -> None:
    assert ok(capsys, "run", *TINY, "--out", "deep/er").endswith("\nreport: deep/er/report.html\n")
    assert Path("deep/er/result.json").is_file()
    assert not Path("runs").exists()


def test_json_is_all_there_is_on_stdout(capsys: Captured) -> None:
    code, out, err = cli(capsys, "run", *TINY, "--json")
    assert (code, err) == (0, "")
    printed = json.loads(out)
    result = read("runs/fedavg-phantoms-96/result.json")
    assert printed["directory"] == "runs/fedavg-phantoms-96"
    assert printed["methods"] == ["fedavg"]
    assert printed["headlines"] == result["headlines"]
    assert all(headline["definition"].endswith(".") for headline in printed["headlines"])


def test_quiet_prints_the_result_only(capsys: Captured) -> None:
    code, out, err = cli(capsys, "run", *TINY, "--quiet")
    assert (code, err) == (0, "")
    assert out.strip().splitlines()[1].startswith("fedavg ")
    assert "local test" not in out
    assert "report: " in out


def test_a_run_that_cannot_go_on_ends_with_code_1_and_the_way_back(capsys: Captured) -> None:
    code, out, err = cli(capsys, "run", *TINY, "--quiet", "--set", "train.lr=1e30", "--epochs", "3", "--out", "x y")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.endswith("; then go on with: wardround resume 'x y'\n")
    assert err.count("\n") == 1


# Settings, from everywhere --------------------------------------------------------------------------------------------


def test_a_study_file_and_the_settings_of_a_run_give_the_same_numbers(capsys: Captured, here: Path) -> None:
    (here / "study.toml").write_text(
        'method = "fedprox"\nrounds = 1\ndevice = "cpu"\n'
        '[data]\nsource = "phantoms:96"\nsites = 3\npartition = "iid"\n'
        "[model]\nwidth = 4\n[train]\nepochs = 1\nbatch = 8\n[set.fedprox]\nmu = 0.5\n[set.single]\n"
    )
    ok(capsys, "run", "study.toml", "--out", "a")
    assert read("a/settings.json")["set"] == {"mu": 0.5}
    ok(capsys, "run", "a/settings.json", "--out", "b")
    ok(capsys, "run", *TINY, "--method", "fedprox", "--set", "fedprox.mu=0.5", "--out", "c")
    assert figures("a") == figures("b") == figures("c")
    assert read("a/settings.json") == read("b/settings.json") == read("c/settings.json")
    ok(capsys, "run", *TINY, "--method", "fedprox", "--set", "mu=50", "--out", "d")
    assert figures("d")["rows"] != figures("a")["rows"]


def test_flags_win_over_the_preset_and_the_preset_over_the_file(capsys: Captured, here: Path) -> None:
    (here / "study.toml").write_text(
        "seed = 1\n[train]\nlr = 0.1\nmomentum = 0.5\n[data]\nalpha = 1.0\npartition_seed = 1"
    )
    (here / "preset.toml").write_text("seed = 2\n[train]\nlr = 0.2\n[data]\nalpha = 2.0\npartition_seed = 2")
    flags = ("--seed", "3", "--partition-seed", "3", "--set", "data.alpha=3.0", "--alpha", "4")
    ok(capsys, "run", "study.toml", "--preset", "preset.toml", *TINY, *flags, "--method", "majority", "--out", "x")
    settings = read("x/settings.json")
    assert settings["seed"] == settings["data"]["partition_seed"] == 3
    assert settings["train"]["lr"] == 0.2
    assert settings["train"]["momentum"] == 0.5
    assert settings["data"]["alpha"] == 3.0  # --set reaches everything, so it has the last word


@pytest.mark.parametrize(
    ("assignment", "place", "value"),
    [
        ("train.lr=0.25", ("train", "lr"), 0.25),
        ("train.epochs=[1, 0]", ("train", "epochs"), [1, 0]),
        ("model.per_site.site-2=cnn4", ("model", "per_site"), {"site-2": "cnn4"}),
        ('model.per_site={site-2 = "cnn4"}', ("model", "per_site"), {"site-2": "cnn4"}),
        ("data.folder=elsewhere", ("data", "folder"), "elsewhere"),
        ("train.clip_norm=1", ("train", "clip_norm"), 1.0),
    ],
)
def test_set_reaches_every_key_of_a_study(
    capsys: Captured, assignment: str, place: tuple[str, str], value: object
) -> None:
    ok(capsys, "run", *TINY, "--method", "majority", "--set", assignment, "--out", "x")
    table, key = place
    assert read("x/settings.json")[table][key] == value


def test_set_chooses_the_method_and_its_settings_alike(capsys: Captured) -> None:
    ok(capsys, "run", *TINY, "--set", "fedprox.mu=0.5", "--set", "method=fedprox", "--out", "x")
    settings = read("x/settings.json")
    assert (settings["method"], settings["set"]) == ("fedprox", {"mu": 0.5})


def test_a_bare_key_on_the_command_line_wins_over_the_file(capsys: Captured, here: Path) -> None:
    (here / "study.toml").write_text('method = "fedprox"\n[set.fedprox]\nmu = 0.5\n[set.fedavg]\n')
    ok(capsys, "run", "study.toml", *TINY, "--set", "mu=0.25", "--out", "x")
    assert read("x/settings.json")["set"] == {"mu": 0.25}


def test_a_method_of_ones_own_is_a_file(capsys: Captured, here: Path) -> None:
    (here / "mine.py").write_text(
        "from wardround.methods.majority import Majority\n"
        "class Mine(Majority):\n    name = 'mine'\n    summary = 'as majority'\n"
    )
    ok(capsys, "run", *TINY, "--method", "mine.py")
    ok(capsys, "run", *TINY, "--method", "majority")
    mine, theirs = (read(f"runs/{name}-phantoms-96/result.json") for name in ("mine", "majority"))
    assert [row["value"] for row in mine["rows"]] == [row["value"] for row in theirs["rows"]]
    ok(capsys, *shlex.split(mine["command"])[1:], "--out", "again")
    assert figures("again") == figures("runs/mine-phantoms-96")


def test_a_file_per_site(capsys: Captured, here: Path) -> None:
    for name in ("north", "south"):
        save_npz(here / f"{name}.npz")
    files = ("--set", "data.files.north=north.npz", "--set", "data.files.south=south.npz")
    _, _, err = cli(capsys, "run", "--method", "majority", *files)
    assert "one source per site, 2 sites" in err
    assert [site["name"] for site in read("runs/majority-files/data.json")["sites"]] == ["north", "south"]
    code, _, err = cli(capsys, "run", "--method", "majority", *files, "--set", "data.by_patient=true")
    assert code == 2, "by_patient holds for files too, and these have no patients"
    assert "patient" in err


# compare --------------------------------------------------------------------------------------------------------------


def test_compare_shares_the_partition_and_the_trained_models(capsys: Captured) -> None:
    out = ok(capsys, "compare", "local", "ensemble", "majority", *TINY)
    rows = [line.split()[0] for line in out.strip().splitlines()[1:4]]
    assert rows == ["local", "ensemble", "majority"]
    base = Path("runs/compare-phantoms-96")
    hashes = {read(base / name / "data.json")["partition_hash"] for name in ("", "local", "ensemble", "majority")}
    assert len(hashes) == 1
    events = {
        name: [json.loads(line) for line in (base / name / "events.jsonl").read_text().splitlines()]
        for name in ("local", "ensemble")
    }
    reused = {name: [event["reused"] for event in log if event["kind"] == "fit"] for name, log in events.items()}
    assert reused == {"local": [False] * 3, "ensemble": [True] * 3}
    result = read(base / "result.json")
    assert result["methods"] == ["local", "ensemble", "majority"]
    assert {row["method"] for row in result["rows"]} == {"local", "ensemble", "majority"}
    assert result["settings"]["set"] == {}


def test_compared_methods_have_the_numbers_of_their_own_runs(capsys: Captured) -> None:
    ok(capsys, "compare", "fedavg", "fedprox", *TINY, "--set", "fedprox.mu=5", "--out", "c")
    ok(capsys, "run", *TINY, "--method", "fedprox", "--set", "mu=5", "--out", "r")
    assert figures("c/fedprox") == figures("r")
    values = [[row["value"] for row in figures(f"c/{name}")["rows"]] for name in ("fedavg", "fedprox")]
    assert values[0] != values[1]


def test_the_command_in_a_result_repeats_it(capsys: Captured, here: Path) -> None:
    (here / "mine.py").write_text(
        "from wardround.methods.majority import Majority\nclass Mine(Majority):\n    name = 'mine'\n"
    )
    ok(capsys, "compare", "fedprox", "mine.py", *TINY, "--set", "fedprox.mu=5", "--out", "c")
    command = shlex.split(read("c/result.json")["command"])
    assert command == ["wardround", "compare", "fedprox", "mine.py", "--study", "c/settings.json"]
    ok(capsys, *command[1:], "--out", "d")
    assert figures("c") == figures("d")
    ok(capsys, *shlex.split(read("c/mine/result.json")["command"])[1:], "--out", "e")
    assert figures("c/mine") == figures("e")


def test_compare_fits_80_columns(capsys: Captured) -> None:
    code, out, err = cli(capsys, "compare", "centralised", "ensemble", *TINY)
    assert code == 0
    lines = [*out.splitlines(), *err.splitlines()]
    assert max(len(line) for line in lines) <= 80
    (row,) = (line for line in lines if line.startswith("centralised "))
    assert len(row.split()) == 11  # a name, five figures, two amounts with their units, seconds


# What follows a run ---------------------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_changes_nothing(capsys: Captured) -> None:
    first = ok(capsys, "run", *TINY, "--out", "x")
    before = {path: path.read_bytes() for path in Path("x").rglob("*") if path.is_file()}
    assert ok(capsys, "resume", "x") == first
    assert {path: path.read_bytes() for path in Path("x").rglob("*") if path.is_file()} == before


def test_resume_of_a_finished_comparison_changes_nothing(capsys: Captured) -> None:
    first = ok(capsys, "compare", "majority", "local", *TINY, "--out", "x")
    assert ok(capsys, "resume", "x") == first


def test_resume_refuses_other_images(capsys: Captured, here: Path) -> None:
    save_npz(here / "a.npz")
    ok(capsys, "run", "--data", "a.npz", "--method", "majority", "--sites", "2", "--partition", "iid", "--out", "x")
    (here / "x/result.json").unlink()
    pixels, _ = images()
    save_npz(here / "a.npz", train_images=255 - pixels)
    code, _, err = cli(capsys, "resume", "x")
    assert code == 2
    assert err == "error: the images or the partition have changed since x was begun; use the same data\n"


def test_report_writes_the_page_again(capsys: Captured) -> None:
    ok(capsys, "run", *TINY, "--out", "x")
    page = Path("x/report.html")
    before = page.read_bytes()
    page.unlink()
    assert ok(capsys, "report", "x") == "x/report.html\n"
    assert page.read_bytes() == before
    assert ok(capsys, "report", "x/result.json") == "x/report.html\n"


# Lists ----------------------------------------------------------------------------------------------------------------


def test_methods(capsys: Captured) -> None:
    out = ok(capsys, "methods")
    listed = json.loads(ok(capsys, "methods", "--json"))
    assert isinstance(listed, list)
    assert all({"name", "family", "paper"} <= set(method) for method in listed)
    names = [method["name"] for method in listed]
    assert names == sorted(names)
    assert {"majority", "local", "centralised", "single", "ensemble", "fedavg", "fedprox"} <= set(names)
    assert [name for name in names if f"\n{name} " not in out] == []


def test_models(capsys: Captured) -> None:
    out = ok(capsys, "models")
    names = [model["name"] for model in json.loads(ok(capsys, "models", "--json"))]
    assert {"small", "cnn4", "resnet18", "wrn16-2", "vgg8"} <= set(names)
    assert [name for name in names if f"\n{name} " not in out] == []


def test_data_list_says_what_is_here(capsys: Captured, here: Path) -> None:
    (here / "images").mkdir()
    save_npz(here / "images/bloodmnist.npz")
    listed = json.loads(ok(capsys, "data", "list", "--folder", "images", "--json"))
    assert {item["name"] for item in listed if item["present"]} == {"phantoms", "bloodmnist"}
    out = ok(capsys, "data", "list")
    (row,) = (line.split() for line in out.splitlines() if line.startswith("bloodmnist "))
    assert row[:4] == ["bloodmnist", "8", "3", "no"]
    assert f"data folder: {here / 'no-data'} " in out


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_data_get_without_a_network(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, here: Path, quiet: list[str]
) -> None:
    def unreachable(*_: object, **__: object) -> object:
        raise urllib.error.URLError("name cannot be resolved")

    fetch = functools.partial(download.fetch, opener=unreachable)
    monkeypatch.setattr(download, "fetch", fetch)
    code, out, err = cli(capsys, "data", "get", "bloodmnist", "--folder", "images", *quiet)
    assert (code, out) == (2, "")
    assert err.strip("\n").count("\n") == 0
    assert err.strip("\n").startswith("error: the network cannot be reached (name cannot be resolved): tried https://")
    assert "copy the file by hand into images" in err
    assert list((here / "images").iterdir()) == []


# Help -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["data"], ["data", "--help"]])
def test_help_is_no_error(capsys: Captured, arguments: list[str]) -> None:
    code, out, err = cli(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: wardround")
    assert "Commands:" in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", "STUDY is a study file"),
        ("compare", "Run several METHODS"),
        ("resume", "DIRECTORY"),
        ("report", "DIRECTORY"),
        ("methods", "--json"),
        ("models", "--json"),
        ("data list", "--folder"),
        ("data get", "NAME is one of"),
    ],
)
def test_every_command_explains_itself(capsys: Captured, command: str, words: str) -> None:
    out = ok(capsys, *command.split(), "--help")
    assert words in out
    assert "\\[" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_version(capsys: Captured) -> None:
    assert ok(capsys, "--version") == f"{__version__}\n"


# The terminal ---------------------------------------------------------------------------------------------------------


def test_what_the_user_named_cannot_steer_the_terminal(capsys: Captured) -> None:
    code, out, err = cli(capsys, "run", *TINY, "--method", "majority", "--out", "a\x1b[2Jb")
    assert code == 0
    assert "\x1b" not in out + err
    assert "report: a\\x1b[2Jb/report.html" in out
    assert "a\\x1b[2Jb" in err


def test_a_terminal_without_the_characters_gets_the_result_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    assert main(["models"]) == 0
    sys.stdout.flush()
    assert b"four 3\\xd73 convolutions" in screen.getvalue()


def test_a_table_of_figures_is_never_cut() -> None:
    screen = io.StringIO()
    name = "a-method-with-a-name-of-fifty-characters-and-more-x"
    headline = {"method": name, "key": "local_accuracy", "value": 0.5}
    found = {
        "methods": [name],
        "headlines": [headline],
        "ledger": {"totals": [{"method": name, "direction": "up", "bytes": 1_234_567}]},
        "seconds": {name: 12.34},
        "notes": [{"method": name, "text": "[red]as it is[/red]\x1b"}],
    }
    show.result(Console(file=screen, width=80), found, Path("x"), brief=True)
    lines = screen.getvalue().splitlines()
    assert lines[2].split() == [name, "50.0", "–", "–", "–", "–", "1.2", "MB", "0", "B", "12.3"]
    assert "[red]as it is[/red]\\x1b" in screen.getvalue().replace("\n", " ").replace("  ", " ")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (36_680_000_000, "36.7 GB"),
        (2_500_000_000_000_000, "2500.0 TB"),
    ],
)
def test_bytes_are_decimal(count: int, text: str) -> None:
    assert show.size(count) == text


def test_printable_is_one_line_without_control_characters() -> None:
    assert show.printable("a\n  b\x1b[2J\x07\x9b‮é  c\udc80\t") == "a b\\x1b[2J\\x07\\x9b\\u202eé  c\\udc80"


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that may be wrong with a file."""
    folder = tmp_path_factory.mktemp("files")
    texts = {
        "broken.toml": "rounds = = 3",
        "unknown.toml": "[train]\nlearning_rat = 3",
        "toplevel.json": "[1]",
        "set.toml": "set = 5",
        "set-fedprox.toml": "[set]\nfedprox = 3",
        "data.toml": "data = 5",
        "corrupt.npz": "not a zip",
        "short.safetensors": "short",
        "partition.json": "{}",
        "syntax.py": "def method(:\n",
        "raises.py": "x = 1\nimport nothing_of_this_name\n",
        "none.py": "x = 1\n",
        "abstract.py": "from wardround.methods.base import Method\nclass Half(Method):\n    name = 'half'\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "no-classes").mkdir()
    pixels, labels = images()
    save_npz(folder / "good.npz")
    save_npz(folder / "bloodmnist.npz", train_labels=labels + 5)
    save_npz(folder / "negative.npz", train_labels=labels - 1)
    save_npz(folder / "nan.npz", train_images=np.full(pixels.shape, np.nan, dtype=np.float32))
    spec = NetSpec("small", 3, 8, 28, width=2)
    save_weights(fresh(spec, torch.Generator()), folder / "narrow.safetensors")
    return folder


BAD = [
    # names
    (["--method", "fedavgg"], "did you mean fedavg?"),
    (["--method", "qqq"], "there is no method 'qqq'; known are "),
    (["--model", "resnet19"], "there is no network 'resnet19'; did you mean resnet18?"),
    (["--partition", "dirichle"], "data.partition = 'dirichle'"),
    (["--preset", "qqq"], "there is no preset 'qqq'"),
    (["--preset", "FILES/none.toml"], "none.toml"),
    (["--device", "cuda"], "device 'cuda' is not there (0 CUDA devices found); use --device cpu"),
    (["--device", "cuda:7"], "device 'cuda:7' is not there"),
    (["--device", "toaster"], "device 'toaster'"),
    # settings
    (["--set", "train.lrr=1"], "there is no setting 'train.lrr'; did you mean train.lr?"),
    (["--set", "trian.lr=1"], "--set trian.lr: no study and no method that runs here has this setting; did you mean"),
    (["--set", "epochs=1"], "there is no setting 'fedavg.epochs'; did you mean train.epochs?"),
    (["--set", "fedprox.mu=1"], "--set fedprox.mu: no study and no method that runs here"),
    (["--method", "fedprox", "--set", "muu=1"], "there is no setting 'fedprox.muu'; did you mean fedprox.mu?"),
    (["--method", "fedprox", "--set", "mu=-1"], "fedprox.mu = -1"),
    (["--set", "train.lr"], "--set 'train.lr' is not key=value"),
    (["--set", "=1"], "--set '=1' is not key=value"),
    (["--set", "rounds.x=1"], "rounds.x cannot be set: rounds is a value, not a table"),
    (["--set", "data=5"], "data = 5"),
    (["--set", "name=../x"], "name = '../x'"),
    (["--set", "model.width=0"], "model.width = 0"),
    (["--set", "model.width=100000000"], "model.width = 100000000"),
    (["--set", "model.stem=imagenet"], "small has no stem 'imagenet'"),
    (["--set", "data.test=natural"], "no site ids"),
    (["--set", "data.by_patient=true"], "no patient ids"),
    (["--set", "data.min_size=50"], "min_size = 50"),
    # numbers
    (["--alpha", "0"], "data.alpha = 0.0"),
    (["--alpha", "-1"], "data.alpha = -1.0"),
    (["--alpha", "nan"], "data.alpha = nan"),
    (["--alpha", "inf"], "data.alpha = inf"),
    (["--sites", "0"], "at least 1 site, not 0"),
    (["--sites", "-1"], "data.sites = -1"),
    (["--sites", "97"], "97 sites are more than the 96 images"),
    (["--epochs", "-1"], "train.epochs = -1"),
    (["--set", "train.epochs=[]"], "train.epochs = []"),
    (["--rounds", "0"], "rounds = 0"),
    (["--set", "train.lr=0"], "train.lr = 0"),
    (["--set", "train.lr=nan"], "train.lr = nan"),
    (["--set", "train.lr=fast"], "train.lr = 'fast'"),
    (["--seed", "-1"], "seed = -1"),
    (["--partition-seed", "-1"], "data.partition_seed = -1"),
    (["--set", "participants=0"], "participants = 0"),
    (["--data", "phantoms:99999999999999"], "do not fit into memory"),
    # study files
    (["FILES/missing.toml"], "missing.toml: No such file or directory"),
    (["FILES"], "Is a directory"),
    (["FILES/broken.toml"], "broken.toml is not valid TOML"),
    (["FILES/unknown.toml"], "there is no setting 'train.learning_rat'"),
    (["FILES/toplevel.json"], "toplevel.json holds no settings"),
    (["FILES/set.toml"], "set = 5"),
    (["FILES/set-fedprox.toml", "--method", "fedprox"], "set.fedprox = 3"),
    (["FILES/data.toml"], "data = 5"),
    # images
    (["--data", "qqq"], "'qqq' is no folder"),
    (["--data", "bloodmnist"], "wardround data get bloodmnist"),
    (["--data", "phantoms:many"], "'phantoms:many'"),
    (["--data", "~nobody-of-this-name/x.npz"], "~nobody-of-this-name/x.npz does not exist"),
    (["--data", "FILES/missing.npz"], "missing.npz does not exist"),
    (["--data", "FILES/corrupt.npz"], "corrupt.npz is not an .npz file"),
    (["--data", "FILES/no-classes"], "no-classes holds no folders"),
    (["--data", "FILES/bloodmnist.npz"], "bloodmnist.npz has label 8, but bloodmnist has 8 classes"),
    (["--data", "FILES/negative.npz"], "train_labels"),
    (["--data", "FILES/nan.npz"], "NaN"),
    (["--data", "FILES/good.npz", "--partition", "natural"], "no site ids"),
    (["--set", "data.partition_file=FILES/partition.json"], "partition.json"),
    # networks
    (["--set", "model.weights=FILES/missing.safetensors"], "missing.safetensors"),
    (["--set", "model.weights=FILES/short.safetensors"], "short.safetensors"),
    (["--set", "model.weights=FILES/narrow.safetensors"], "narrow.safetensors does not fit this network"),
    (["--set", "model.per_site.site-9=cnn4"], "'site-9', which is no site"),
    (["--set", "model.per_site.site-1=cnn4"], "fedavg needs the same model at every site"),
    (["--method", "local", "--set", "model.per_site.site-1=cnn5"], "there is no network 'cnn5'"),
    # methods of one's own
    (["--method", "FILES/missing.py"], "missing.py"),
    (["--method", "FILES/syntax.py"], "syntax.py cannot be loaded as Python: invalid syntax in line 1"),
    (["--method", "FILES/raises.py"], "No module named 'nothing_of_this_name' in line 2"),
    (["--method", "FILES/none.py"], "none.py must define exactly one Method"),
    (["--method", "FILES/abstract.py"], "abstract.py does not answer every question of a Method; add absorb, answer"),
    # flags
    (["--sites", "three"], "'--sites'"),
    (["--alpha", "small"], "'--alpha'"),
    (["--qqq", "1"], "--qqq"),
    (["--set"], "--set"),
    (["one.toml", "two.toml"], "two.toml"),
    # places
    (["--out", "FILES/good.npz"], "good.npz exists already"),
    (["--out", "FILES/good.npz/x"], "good.npz/x cannot be written"),
    (["--out", "x" * 300], "File name too long"),
    # the terminal
    (["--data", "\x1b[31mred\x07"], "\\x1b[31mred\\x07"),
    (["\x1b[2J\n.toml"], "\\x1b[2J"),
    (["--method", "\x9b2J\r.py"], "\\x9b2J"),
]


@pytest.mark.parametrize(("arguments", "culprit"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_ends_before_anything_is_written(
    capsys: Captured, here: Path, files: Path, arguments: list[str], culprit: str
) -> None:
    given = [argument.replace("FILES", str(files)) for argument in arguments]
    assert_refused(cli(capsys, "run", *TINY, *given), culprit)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["compare"], "(see: wardround compare --help)"),
        (["compare", "fedavg", "fedavg", *TINY], "named twice"),
        (["compare", "fedavg", "fedavgg", *TINY], "did you mean fedavg?"),
        (["compare", "fedavg", "fedprox", *TINY, "--set", "mu=1"], "--set mu: no study and no method"),
        (["compare", "fedavg", "fedprox", *TINY, "--set", "fedprox.mu=-1"], "fedprox.mu = -1"),
        (["compare", "local", "fedavg", *TINY, "--set", "model.per_site.site-1=cnn4"], "fedavg needs the same model"),
        (["qqq"], "'qqq'"),
        (["--qqq"], "--qqq"),
        (["methods", "--jso"], "--jso"),
        (["resume"], "(see: wardround resume --help)"),
        (["resume", "qqq"], "qqq is not the directory of a run"),
        (["report", "qqq"], "there is no qqq"),
        (["report", "FILES"], "files0 has no result.json"),
        (["report", "FILES/set.toml"], "set.toml cannot be read"),
        (["data", "qqq"], "'qqq'"),
        (["data", "get"], "(see: wardround data get --help)"),
        (["data", "get", "qqq", "--quiet"], "no set qqq"),
        (["data", "get", "bloodmnist", "--size", "5", "--quiet"], "28, 64, 128, 224 pixels, not 5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_to_the_other_commands(
    capsys: Captured, here: Path, files: Path, arguments: list[str], culprit: str
) -> None:
    given = [argument.replace("FILES", str(files)) for argument in arguments]
    assert_refused(cli(capsys, *given), culprit)
    assert list(here.iterdir()) == []


def assert_refused(said: tuple[int, str, str], culprit: str) -> None:
    """Code 2, nothing on stdout, and on stderr one printable line that begins with `error: ` and names the culprit."""
    code, out, err = said
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    line = err.removesuffix("\n")
    assert line.isprintable()
    assert line.startswith("error: ")
    assert culprit in line


@pytest.mark.parametrize("name", ["settings.json", "data.json", "comparison.json", "result.json"])
def test_a_damaged_run_directory_is_refused(capsys: Captured, name: str) -> None:
    ok(capsys, "compare", "majority", *TINY, "--out", "x")
    (Path("x") / name).write_text('{"rounds')
    assert_refused(cli(capsys, "resume", "x", "--quiet"), f"x/{name}")
