"""What a user may set: layers, assignments, and a complaint of one line that names the key."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from wardround.choices import gather, overruled
from wardround.errors import BadInput
from wardround.methods.registry import make
from wardround.settings import (
    Frozen,
    Settings,
    checked,
    hint,
    keys,
    overlay,
    parse_assignment,
    preset_names,
    put,
    read_preset,
    read_study_file,
    validate,
)


def complaint(tree: dict[str, Any]) -> str:
    with pytest.raises(BadInput) as caught:
        validate(tree)
    text = str(caught.value)
    assert text.isprintable()
    return text


# Layers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.lr=0.1", "train.lr", 0.1),
        ("train.lr=1e-3", "train.lr", 0.001),
        ("rounds=3", "rounds", 3),
        ("rounds = 3", "rounds", 3),
        ("train.augment=true", "train.augment", True),
        ("train.augment=True", "train.augment", "True"),
        ("train.epochs=[30, 60, 60]", "train.epochs", [30, 60, 60]),
        ('model.per_site={"site-1" = "cnn4"}', "model.per_site", {"site-1": "cnn4"}),
        ("data.source=phantoms:96", "data.source", "phantoms:96"),
        ('data.source="96"', "data.source", "96"),
        ("data.source=a=b.npz", "data.source", "a=b.npz"),
        ("data.source=", "data.source", ""),
        ("data.source=2024-05-01", "data.source", "2024-05-01"),
        ("data.source=12:30:00", "data.source", "12:30:00"),
        ("data.source=1\nrounds = 2", "data.source", "1\nrounds = 2"),
        ("rounds=" + "9" * 5000, "rounds", "9" * 5000),
        ("rounds=" + "[" * 5000, "rounds", "[" * 5000),
    ],
)
def test_an_assignment_is_read_as_toml_and_else_as_text(text: str, key: str, value: object) -> None:
    found = parse_assignment(text)
    assert found == (key, value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize("text", ["train.lr", "", "=3", " =3"])
def test_an_assignment_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"is not key=value; write for example --set train.lr=0.01"):
        parse_assignment(text)


def test_put_makes_the_tables_on_the_way() -> None:
    tree: dict[str, Any] = {"train": {"lr": 0.1}}
    put(tree, "train.batch", 8)
    put(tree, "model.per_site.site-1", "cnn4")
    put(tree, "rounds", 2)
    assert tree == {"train": {"lr": 0.1, "batch": 8}, "model": {"per_site": {"site-1": "cnn4"}}, "rounds": 2}


def test_put_replaces_a_table_by_a_value() -> None:
    tree: dict[str, Any] = {"model": {"per_site": {"site-1": "cnn4"}}}
    put(tree, "model.per_site", {})
    assert tree == {"model": {"per_site": {}}}


def test_put_below_a_value_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^rounds\.x cannot be set: rounds is a value, not a table$"):
        put({"rounds": 2}, "rounds.x", 1)


def test_overlay_merges_tables_and_lets_the_top_win() -> None:
    base = {"rounds": 1, "train": {"lr": 0.1, "epochs": [1, 2]}, "seed": 4}
    top = {"rounds": 2, "train": {"epochs": 3}, "data": {"sites": 7}}
    merged = overlay(base, top)
    assert merged == {"rounds": 2, "train": {"lr": 0.1, "epochs": 3}, "seed": 4, "data": {"sites": 7}}
    assert base == {"rounds": 1, "train": {"lr": 0.1, "epochs": [1, 2]}, "seed": 4}
    assert top == {"rounds": 2, "train": {"epochs": 3}, "data": {"sites": 7}}


def test_overlay_keeps_a_slip_in_the_file_visible() -> None:
    with pytest.raises(BadInput, match=r"^data = 5 cannot be used: it should be a table$"):
        overlay({"data": 5}, {"data": {"sites": 3}})


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_study_file_is_toml_or_the_json_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('rounds = 3\n[data]\nsource = "phantoms:96"\n')
    (tmp_path / "settings.json").write_text('{"rounds": 3, "data": {"source": "phantoms:96"}}')
    expected = {"rounds": 3, "data": {"source": "phantoms:96"}}
    assert read_study_file(tmp_path / "study.toml") == expected
    assert read_study_file(tmp_path / "settings.json") == expected


def test_the_mark_that_windows_editors_write_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_bytes(b"\xef\xbb\xbfrounds = 3\r\n")
    assert read_study_file(tmp_path / "study.toml") == {"rounds": 3}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", b"rounds = = 3", "a.toml is not valid TOML: Invalid value (at line 1, column 10)"),
        ("a.json", b"{", "a.json is not valid JSON: "),
        ("a.json", b"[" * 100_000, "a.json is not valid JSON: "),
        ("a.json", b"[1]", "a.json holds no settings"),
        ("a.toml", b"name = '\xff'", "a.toml is not UTF-8 text"),
        ("a.toml", None, "cannot read study file"),
    ],
)
def test_a_study_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_study_file(tmp_path / name)
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_settings_survive_their_own_json() -> None:
    tree = {
        "name": "x",
        "seed": 3,
        "data": {"folder": "images", "files": {"north": "a.npz"}, "size": 28},
        "model": {"per_site": {"north": "cnn4"}, "weights": "w.safetensors"},
        "train": {"epochs": [1, 2], "milestones": [0.25], "clip_norm": 1.0},
        "set": {"mu": 0.5},
    }
    settings = validate(tree)
    assert settings.train.epochs == (1, 2)
    assert validate(json.loads(json.dumps(settings.model_dump(mode="json")))) == settings


def test_a_preset_is_a_name_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("rounds = 7\n")
    assert read_preset(str(tmp_path / "mine.toml")) == {"rounds": 7}
    with pytest.raises(BadInput, match=r"^there is no preset 'mine'; use .*the path of a TOML file$"):
        read_preset("mine")


@pytest.mark.parametrize("name", ["demo", "fast", "paper"])
def test_a_preset_sets_values_and_never_the_method_or_the_data(name: str) -> None:
    assert name in preset_names()
    tree = read_preset(name)
    validate(tree)
    assert not {"method", "data", "seed", "device"} & tree.keys()
    for method, own in tree["set"].items():
        make(method, own)


def test_what_a_preset_changes_of_a_study_file_is_said(tmp_path: Path) -> None:
    file, preset = tmp_path / "study.toml", tmp_path / "preset.toml"
    file.write_text('method = "fedisca"\nrounds = 3\n[train]\nepochs = [5, 4]\nlr = 0.1\n')
    preset.write_text("rounds = 1\n[train]\nepochs = [9]\nlr = 0.1\nbatch = 16\n")

    def said(**chosen: Any) -> str:
        settings, _ = gather(file, str(preset), chosen, ())
        return overruled(file, str(preset), settings)

    words = "rounds = 1 and not 3, train.epochs = [9] and not [5, 4]"
    assert said() == f"the preset wins over the study file: {words}; a flag or --set wins over both"
    assert "rounds" not in said(rounds=3)
    assert said(rounds=3, epochs=5) == ""
    assert overruled(None, str(preset), gather(None, str(preset), {}, ())[0]) == ""


def test_the_fast_preset_says_what_differs_from_the_papers() -> None:
    """Whatever it sets for a method is another value than under `paper`, or the line says that it is ours."""
    fast, paper = read_preset("fast"), read_preset("paper")
    for method, own in fast["set"].items():
        published = make(method, paper["set"].get(method, {})).settings
        assert all(value != getattr(published, key) for key, value in own.items())
    sites = {"epochs": 40, "lr": 1e-2, "schedule": "cosine", "augment": True, "precision": "bf16", "keep": "best"}
    assert overlay(fast, {"set": {}})["train"] == {**paper["train"], **sites}


# Complaints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"rounds": 0}, "rounds = 0 cannot be used: it should be greater than or equal to 1"),
        ({"rounds": 2.5}, "rounds = 2.5 cannot be used: it should be a whole number"),
        ({"rounds": "two"}, "rounds = 'two' cannot be used: it should be a whole number"),
        ({"seed": None}, "seed = None cannot be used: it should be a whole number"),
        ({"seed": -1}, "seed = -1 cannot be used: it should be greater than or equal to 0"),
        ({"seed": 2**63}, "seed = 9223372036854775808 cannot be used: it should be less than 9223372036854775808"),
        (
            {"data": {"partition_seed": -1}},
            "data.partition_seed = -1 cannot be used: it should be greater than or equal to 0",
        ),
        ({"data": {"alpha": 0}}, "data.alpha = 0 cannot be used: it should be greater than 0"),
        ({"data": {"alpha": float("nan")}}, "data.alpha = nan cannot be used: it should be a finite number"),
        ({"data": {"alpha": float("-inf")}}, "data.alpha = -inf cannot be used: it should be a finite number"),
        ({"data": {"val_share": 1}}, "data.val_share = 1 cannot be used: it should be less than 1"),
        (
            {"data": {"partition": "dir"}},
            "data.partition = 'dir' cannot be used: it should be 'dirichlet', 'iid', 'shards' or 'natural'",
        ),
        ({"data": {"files": 3}}, "data.files = 3 cannot be used: it should be a table"),
        ({"data": {"files": {"north": 3}}}, "data.files.north = 3 cannot be used: it should be text"),
        ({"data": {"capped": "maybe"}}, "data.capped = 'maybe' cannot be used: it should be true or false"),
        ({"data": 5}, "data = 5 cannot be used: it should be a table"),
        ({"data": {"folder": 5}}, "data.folder = 5 cannot be used: it should be a path"),
        ({"train": {"lr": {"x": 1}}}, "train.lr = a table cannot be used: it should be a number"),
        ({"train": {"epochs": -1}}, "train.epochs = -1 cannot be used: it should be greater than or equal to 0"),
        ({"train": {"epochs": "x"}}, "train.epochs = 'x' cannot be used: it should be a whole number"),
        ({"train": {"epochs": [1, -1]}}, "train.epochs.1 = -1 cannot be used: it should be greater than or equal to 0"),
        ({"train": {"epochs": []}}, "train.epochs = [] cannot be used: it should be a list of 1 or more"),
        ({"train": {"milestones": 3}}, "train.milestones = 3 cannot be used: it should be a list"),
        (
            {"name": "a/b"},
            "name = 'a/b' cannot be used: it should have letters, digits, '.', '_' and '-' only, at most 64, and begin "
            "with a letter or digit",
        ),
        ({"method": 5}, "method = 5 cannot be used: it should be text"),
        ({"set": 5}, "set = 5 cannot be used: it should be a table"),
        ({"name": "x" * 100}, f"name = '{'x' * 56}... cannot be used: it should have letters, "),
        ({"name": "-a"}, "name = '-a' cannot be used: it should have letters, "),
        ({"name": "a\n"}, "name = 'a\\n' cannot be used: it should have letters, "),
        ({"device": datetime.date(2024, 5, 1)}, "device = datetime.date(2024, 5, 1) cannot be used: it should be text"),
    ],
)
def test_a_complaint_names_the_key_the_value_and_what_is_wanted(tree: dict[str, Any], text: str) -> None:
    assert complaint(tree).startswith(text)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"round": 3}, "there is no setting 'round'; did you mean rounds?"),
        ({"modle": {"name": "cnn4"}}, "there is no setting 'modle'; did you mean model?"),
        ({"lr": 0.1}, "there is no setting 'lr'; did you mean train.lr?"),
        ({"optimizer": "adam"}, "there is no setting 'optimizer'; did you mean train.optimiser?"),
        ({"train": {"lrr": 0.1}}, "there is no setting 'train.lrr'; did you mean train.lr?"),
        ({"data": {"epochs": 1}}, "there is no setting 'data.epochs'; did you mean train.epochs?"),
        ({"data": {"patition": "iid"}}, "there is no setting 'data.patition'; did you mean data.partition?"),
        (
            {"model": {"zzz": 1}},
            "there is no setting 'model.zzz'; known here are name, width, stem, per_site, weights",
        ),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(tree: dict[str, Any], text: str) -> None:
    assert complaint(tree) == text


def test_control_characters_in_a_key_or_value_are_shown_escaped() -> None:
    assert complaint({"\x1b[2J": 1}).startswith("there is no setting '\\x1b[2J'; known here are name, method, ")
    assert complaint({"data": {"shift": "\x07\n"}}).startswith("data.shift = '\\x07\\n' cannot be used")


class Own(Frozen):
    """As a method would declare."""

    mu: float = Field(0.01, ge=0)
    teacher: str


class Empty(Frozen):
    """A method without settings."""


@pytest.mark.parametrize(
    ("record", "tree", "text"),
    [
        (Own, {"mu": -1, "teacher": "a"}, "fedx.mu = -1 cannot be used: it should be greater than or equal to 0"),
        (Own, {"mu": float("nan"), "teacher": "a"}, "fedx.mu = nan cannot be used: it should be a finite number"),
        (Own, {"teacher": "a", "muu": 1}, "there is no setting 'fedx.muu'; did you mean fedx.mu?"),
        (Own, {"teacher": "a", "lr": 1}, "there is no setting 'fedx.lr'; did you mean train.lr?"),
        (Own, {"teacher": "a", "zzz": 1}, "there is no setting 'fedx.zzz'; known here are mu, teacher"),
        (Own, {}, "fedx.teacher is not set and has no default; set it"),
        (Empty, {"zzz": 1}, "there is no setting 'fedx.zzz'; fedx has no settings of its own"),
    ],
)
def test_a_methods_own_settings_are_checked_alike(record: type[Frozen], tree: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput) as caught:
        checked(record, tree, prefix="fedx")
    assert str(caught.value) == text


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().rounds = 3  # type: ignore[misc]


def test_keys_are_dotted_and_complete() -> None:
    found = keys(Settings)
    assert {"rounds", "data", "data.alpha", "model.per_site", "train.epochs", "set"} <= set(found)
    assert len(found) == len(set(found))
    assert keys(Own, "fedx") == ["fedx.mu", "fedx.teacher"]


def test_hint_looks_in_every_table() -> None:
    assert hint("trian.lr", keys(Settings)) == "did you mean train.lr?"
    assert hint("qqqqq", keys(Settings)) == ""
