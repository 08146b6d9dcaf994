"""A study with differential privacy between real sites, by its commands: what is said of it, and the site's rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Captured, cli, empty_place, ok, save_npz

NEW = (
    *("--classes", "ash,birch,cedar,durmast", "--size", "8", "--method", "fedavg", "--rounds", "1", "--epochs", "1"),
    *("--sites", "north", "--model", "cnn4", "--set", "model.width=2", "--set", "train.batch=4"),
)
STUDY = ("--study", "north/study.toml")
RULE = "[privacy]\nmax_epsilon = {}\nmax_delta = 0.05\n"
WEAK = "note: privacy.delta = 0.05 is not below 1/n at north (36 training images): whatever ε is"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


def make_study(capsys: Captured, *privacy: str) -> None:
    """One hospital, in one folder with the coordinator."""
    flags = [flag for setting in privacy for flag in ("--set", f"privacy.{setting}")]
    ok(capsys, "study", "new", "north/study.toml", *NEW, *flags)
    ok(capsys, "key", "new", "north/site.key")
    ok(capsys, "study", "add-site", "north/study.toml", "north", "north/site.pub")
    save_npz(Path("north.npz"))


def test_a_delta_that_promises_nothing_is_told_where_epsilon_is(place: Path, capsys: Captured) -> None:
    make_study(capsys, "epsilon=8", "delta=0.05")
    code, out, err = cli(capsys, "site", "train", "north/study.toml", "--data", "north.npz", "--device", "cpu")
    assert code == 0, err
    assert "privacy spent so far: delta = 0.05" in out
    assert WEAK in err
    said = ok(capsys, "site", "inspect", "north/outbox/study-north-round1-answer.parcel", *STUDY)
    assert f"  {WEAK}" in said


def test_a_delta_below_one_over_n_is_not_remarked_upon(place: Path, capsys: Captured) -> None:
    make_study(capsys, "epsilon=8", "delta=0.02")
    code, out, err = cli(capsys, "site", "train", "north/study.toml", "--data", "north.npz", "--device", "cpu")
    assert code == 0, err
    assert "1/n" not in out + err
    assert "1/n" not in ok(capsys, "site", "inspect", "north/outbox/study-north-round1-answer.parcel", *STUDY)


@pytest.mark.parametrize(
    ("privacy", "most", "passes"),
    [
        (("epsilon=8", "delta=0.05"), 8.0, True),
        (("epsilon=8", "delta=0.05"), 7.9, False),
        (("noise=1", "delta=0.05"), 0.1, True),  # what that costs depends on the site's images: `site train` sees to it
        ((), 8.0, False),
    ],
)
def test_the_rules_are_held_against_what_the_study_promises(
    privacy: tuple[str, ...], most: float, passes: bool, place: Path, capsys: Captured
) -> None:
    make_study(capsys, *privacy)
    Path("north/policy.toml").write_text(RULE.format(most))
    code, out, err = cli(capsys, "site", "policy", *STUDY)
    assert (code == 0) == passes
    assert ("lets study study pass" if passes else "policy rule privacy.max_epsilon: ") in out + err
