"""The commands that run studies, called in this process on tiny ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from commands import TINY, Captured, cli, empty_place, figures, images, ok, read, save_npz

FILES = [
    *("settings.json", "partition.json", "data.json", "environment.json", "events.jsonl", "ledger.jsonl"),
    *("checkpoint.json", "result.json", "report.html"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


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


def test_what_a_method_does_otherwise_than_by_default_is_said_before_it_begins(capsys: Captured) -> None:
    """Choices, switches and what is 0 by default, whoever set them; not how long, how fast or how hot."""
    own = ["--set", "reuse=true", "--set", "adaptation=none", "--set", "epochs=1", "--set", "steps=2"]
    code, _, err = cli(capsys, "run", *TINY, "--method", "fedisca", "--model", "small", *own)
    assert code == 0
    assert "not by default  fedisca: adaptation none (ema), reuse true (false)\n" in err
    assert "not by default" not in cli(capsys, "run", *TINY)[2]


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
    Path("policy.toml").write_text("max_bytes_per_round = 10\n")
    refuse = [part for site in (1, 2, 3) for part in ("--set", f"policies.site-{site}=policy.toml")]
    code, out, err = cli(capsys, "run", *TINY, "--quiet", *refuse, "--out", "x y")
    assert (code, out) == (1, "")
    assert err.startswith("error: no site answered in round 1 (site-1: policy rule max_bytes_per_round")
    assert err.endswith("; then go on with: wardround resume 'x y'\n")
    assert err.count("\n") == 1


def test_sites_that_all_diverged_send_nobody_back_to_what_they_began_with(capsys: Captured) -> None:
    code, out, err = cli(capsys, "run", *TINY, "--quiet", "--set", "train.lr=1e30", "--epochs", "3", "--out", "x y")
    assert (code, out) == (1, "")
    assert err.startswith("error: no site answered in round 1 (site-1: training diverged")
    assert err.endswith("; change that in a new run: x y keeps the settings that it began with\n")
    assert err.count("\n") == 1


def test_one_whose_settings_made_it_diverge_sends_nobody_back_to_them(capsys: Captured) -> None:
    small = ("epochs=1", "steps=2", "kd_steps=1", "batch=8", "synthesis_lr=1e30")
    own = [part for setting in small for part in ("--set", setting)]
    once = ("--method", "deepinversion", "--rounds", "1", "--quiet", "--out", "x")
    code, _, err = cli(capsys, "run", *TINY, *once, *own)
    assert code == 1
    assert "the synthesis diverged at step" in err
    words = "use a smaller synthesis_lr in a new run: x keeps the settings that it began with, and what it had made"
    assert err.endswith(f"{words} until then\n")
    code, _, err = cli(capsys, "report", "x")
    assert code == 2
    assert err.startswith("error: x has no result.json: the synthesis diverged at step")
    assert err.endswith("use a smaller synthesis_lr in a new run\n")


def test_one_that_had_made_nothing_when_it_diverged_says_no_more(capsys: Captured) -> None:
    code, _, err = cli(capsys, "run", *TINY, "--epochs", "3", "--set", "train.lr=1e30", "--quiet", "--out", "x")
    assert code == 1
    assert err.endswith("change that in a new run: x keeps the settings that it began with\n")


def test_a_number_that_no_step_survives_is_refused_at_once(capsys: Captured) -> None:
    code, _, err = cli(capsys, "run", *TINY, "--method", "fedisca", "--model", "small", "--set", "synthesis_lr=1e38")
    assert code == 2
    assert "fedisca.synthesis_lr = 1e+38 cannot be used: it should be less than or equal to" in err


def test_what_it_had_made_before_it_diverged_is_told_of(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wardround.methods.distilled.Distilled.rate", lambda self, epoch: 1e30 if epoch else 0.01)
    small = ("epochs=2", "steps=2", "kd_steps=1", "batch=8")
    own = [part for setting in small for part in ("--set", setting)]
    once = ("--method", "deepinversion", "--rounds", "1", "--quiet", "--out", "x")
    code, _, err = cli(capsys, "run", *TINY, *once, *own)
    assert code == 1
    words = "use a smaller lr in a new run: x keeps the settings that it began with, and what it had made until then\n"
    assert err.endswith(words)
    assert Path("x", "gallery.safetensors").is_file()


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


@pytest.mark.parametrize(("given", "epochs"), [("2", 2), ("2,1", [2, 1]), ("2, 1", [2, 1])])
def test_epochs_may_differ_by_round(capsys: Captured, given: str, epochs: object) -> None:
    ok(capsys, "run", *TINY, "--rounds", "2", "--epochs", given, "--out", "x")
    assert read("x/settings.json")["train"]["epochs"] == epochs
    fits = [json.loads(line) for line in Path("x/events.jsonl").read_text().splitlines() if '"fit"' in line]
    assert [fit["best_epoch"] for fit in fits] == ([1] * 6 if epochs == 2 else [1] * 3 + [0] * 3)


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
