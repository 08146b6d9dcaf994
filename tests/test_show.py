"""What the commands print: lists, help, and nothing that could steer a terminal."""

from __future__ import annotations

import functools
import io
import json
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import TINY, Captured, cli, empty_place, ok, save_npz
from wardround import __version__, show
from wardround.cli import main
from wardround.data import download


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


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
        ("audit", "shadow models of LiRA  [default: 4; x>=1]"),
        ("study new", "1 for grey images, 3 for colour  [default: 3]"),
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


def test_the_coordinators_work_is_a_line_for_each_method() -> None:
    found: dict[str, Any] = {
        "methods": ["fedisca", "local"],
        "headlines": [{"method": name, "key": "local_accuracy", "value": 0.5} for name in ("fedisca", "local")],
        "ledger": {"totals": []},
        "seconds": {},
        "notes": [],
        "data": {"local_protocol": "one", "global_protocol": "all"},
        "work": [
            {"method": "fedisca", "part": "synthesis", "steps": 50_000, "seconds": 410.0, "ms_per_step": 8.2},
            {"method": "fedisca", "part": "adaptation", "steps": 0, "seconds": 0.0, "ms_per_step": None},
        ],
    }

    def lines(found: dict[str, Any], brief: bool = False) -> list[str]:
        screen = io.StringIO()
        show.result(Console(file=screen, width=120), found, Path("x"), brief=brief)
        return [line for line in screen.getvalue().splitlines() if line.startswith("coordinator")]

    assert lines(found) == ["coordinator (fedisca): synthesis 50,000 steps, 8.2 ms each; adaptation 0 steps"]
    assert lines(found, brief=True) == []
    del found["work"]  # a result of an earlier version
    assert lines(found) == []


def test_what_privacy_was_spent_is_a_line_for_each_method() -> None:
    found: dict[str, Any] = {
        "methods": ["fedavg", "local"],
        "headlines": [{"method": name, "key": "local_accuracy", "value": 0.5} for name in ("fedavg", "local")],
        "ledger": {"totals": []},
        "seconds": {},
        "notes": [],
        "data": {"local_protocol": "one", "global_protocol": "all"},
        "privacy": [
            {"method": "fedavg", "site": "a", "epsilon": 7.5, "delta": 1e-5},
            {"method": "fedavg", "site": "b", "epsilon": 7.996, "delta": 1e-5},
            {"method": "local", "site": "a", "epsilon": None, "delta": None},  # noised counts alone promise nothing
        ],
    }
    screen = io.StringIO()
    show.result(Console(file=screen, width=120), found, Path("x"))
    assert [line for line in screen.getvalue().splitlines() if line.startswith("privacy")] == [
        "privacy (fedavg): no site spent more than epsilon 8 at delta 1e-05, for one image"
    ]


def test_compared_features_are_a_line_for_each_method() -> None:
    found: dict[str, Any] = {
        "methods": ["fedmp", "local"],
        "headlines": [{"method": name, "key": "local_accuracy", "value": 0.5} for name in ("fedmp", "local")],
        "ledger": {"totals": []},
        "seconds": {},
        "notes": [],
        "data": {"local_protocol": "one", "global_protocol": "all"},
        "features": [
            {"method": "fedmp", "site": "a", "relative": 0.5},
            {"method": "fedmp", "site": "b", "relative": 1.0},
            {"method": "fedmp", "site": "c", "relative": None},
        ],
    }
    screen = io.StringIO()
    show.result(Console(file=screen, width=120), found, Path("x"))
    assert [line for line in screen.getvalue().splitlines() if line.startswith("features")] == [
        "features (fedmp): a site's lie 0.75 times their spread from all sites' (mean over sites); furthest b, 1.00"
    ]


def test_figures_over_rounds_are_a_table_of_their_own() -> None:
    keys = {key: 0.5 + i / 100 for i, key in enumerate(show.ROUND_COLUMNS)}
    keys["backward_transfer"] = -0.25
    headlines = [{"method": "fedkper", "key": key, "value": value} for key, value in keys.items()]
    headlines += [{"method": "local", "key": "local_accuracy", "value": 0.5}]
    found: dict[str, Any] = {
        "methods": ["fedkper", "local"],
        "headlines": headlines,
        "ledger": {"totals": []},
        "seconds": {},
        "notes": [],
        "data": {"local_protocol": "one", "global_protocol": "all"},
    }

    def shown(brief: bool) -> str:
        screen = io.StringIO()
        show.result(Console(file=screen, width=120), found, Path("x"), brief=brief)
        return screen.getvalue()

    for brief in (False, True):
        after = shown(brief).split("over all rounds")[1].splitlines()
        assert after[1].split() == ["fedkper", "50.0", "-25.0", "52.0", "53.0", "54.0", "55.0", "56.0"]
        assert after[2].split() == ["local", *["–"] * 7]
    assert "transfer, all rounds" in shown(False)
    assert "transfer, all rounds" not in shown(True)
    headlines[:] = [headline for headline in headlines if headline["key"] != "mean_trained_local_accuracy"]
    assert "over all rounds" not in shown(False)


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
