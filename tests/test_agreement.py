"""The agreement: what is in it, its hash, and what it refuses."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote.parties import KEYS, SITES, TASK, agreement
from wardround.agreement import Agreement, agree_on, read_agreement, write_agreement
from wardround.errors import BadInput
from wardround.methods.registry import known
from wardround.settings import checked, validate
from wardround.tomltext import to_toml


def changed(**changes: Any) -> Agreement:
    return checked(Agreement, {**agreement().model_dump(exclude_none=True), **changes})


@pytest.mark.parametrize("method", known())
def test_every_method_survives_the_file(method: str, tmp_path: Path) -> None:
    agreed = agreement(method, quorum=2, deadline=datetime.date(2027, 3, 31))
    path = tmp_path / "study.toml"
    write_agreement(path, agreed)
    assert read_agreement(path) == agreed
    assert read_agreement(path).id == agreed.id
    assert read_agreement(path).method().settings == agreed.method().settings


def test_the_study_is_what_a_method_would_see_in_a_run() -> None:
    agreed = agreement("fedprox", set={"mu": 0.5})
    study = agreed.study()
    assert study.id == agreed.id
    assert study.sites == SITES
    assert (study.classes, study.channels, study.size) == (tuple(TASK["classes"]), 3, 8)
    assert study.settings.set["mu"] == 0.5
    assert study.with_method("fedavg", {}).id == agreed.id


def test_every_default_is_written_out() -> None:
    assert agreement("fedprox").settings.set == {"mu": 0.01}
    assert set(agreement().model_dump()["settings"]["train"]) >= {"lr", "batch", "epochs", "round_decay"}


def test_the_hash_is_over_everything_and_nothing_else() -> None:
    same = agreement()
    others = [
        agreement(seed=1),
        agreement("fedprox"),
        agreement(quorum=2),
        agreement(deadline=14),
        agreement(train={"lr": 0.1}),
        changed(name="other"),
        changed(coordinator=KEYS["site-1"].public.text()),
        changed(task={**TASK, "classes": ["birch", "ash", "cedar", "durmast"]}),
        changed(sites={name: {"key": "k"} for name in SITES}),
    ]
    assert len({same.id, *(other.id for other in others)}) == len(others) + 1
    assert agreement().id == same.id
    assert len(same.id) == 16


def test_the_order_of_keys_in_the_file_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    write_agreement(path, agreement())
    tree = tomllib.loads(path.read_text())
    tree["sites"] = dict(reversed(tree["sites"].items()))
    path.write_text("\ufeff" + to_toml(tree), encoding="utf-8")
    assert read_agreement(path).id == agreement().id


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"task": {**TASK, "classes": ["a", "a"]}}, "different names"),
        ({"task": {**TASK, "classes": ["a", "b\x1b[2J"]}}, "different names that can be printed"),
        ({"task": {**TASK, "classes": ["a"]}}, "task.classes = ['a'] cannot be used: it should be a list of 2 or more"),
        ({"task": {**TASK, "channels": 2}}, "task.channels"),
        ({"task": {**TASK, "normalisation": "none"}}, "task.normalisation"),
        ({"task": {**TASK, "folder": "/data"}}, "there is no setting 'task.folder'"),
        ({"name": "../up"}, "name = '../up' cannot be used: it should have letters, digits, "),
        ({"sites": {"../up": {}}}, "is no name for a site"),
        ({"sites": {"shared": {}}}, "is no name for a site"),
        ({"sites": {"Coordinator": {}}}, "is no name for a site"),
        ({"sites": {"north": {}, "North": {}}}, "differ in capitals only"),
        ({"format": 2}, "format = 2"),
        ({"quorum": 0}, "quorum = 0"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": 0}, "a number of days from 1 to 3650"),
        ({"deadline": 99_999_999}, "a number of days from 1 to 3650"),
        ({"deadline": True}, "a number of days from 1 to 3650"),
        ({"settings": {"method": "mine.py"}}, "needs a built-in method"),
        ({"settings": {"method": "fedavg", "model": {"weights": "w.safetensors"}}}, "model.weights"),
        ({"settings": {"method": "fedavg", "data": {"source": "x"}}}, "there is no setting 'settings.data'"),
    ],
)
def test_what_cannot_be_agreed_is_refused_in_one_line(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        changed(**changes)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_what_cannot_be_studied_is_refused() -> None:
    with pytest.raises(BadInput, match="has no sites yet"):
        changed(sites={}).study()
    with pytest.raises(BadInput, match="the quorum of 4 is more than the 3 sites"):
        changed(quorum=4).study()
    with pytest.raises(BadInput, match="there is no method 'fedagv'; did you mean fedavg"):
        changed(settings={"method": "fedagv"}).study()
    with pytest.raises(BadInput, match=r"model\.per_site names 'nowhere'"):
        changed(settings={"method": "local", "model": {"per_site": {"nowhere": "cnn4"}}}).study()
    with pytest.raises(BadInput, match="needs the same model at every site"):
        changed(settings={"method": "fedavg", "model": {"per_site": {"site-1": "cnn4"}}}).study()


def test_sites_get_their_keys_one_by_one() -> None:
    plain = agree_on(validate({"method": "fedavg"}), name="x", task=TASK, coordinator="c", sites=("north", "south"))
    with pytest.raises(BadInput, match=r"^north, south has no key"):
        plain.complete()
    both = plain.with_site("south", "s").with_site("north", "n")
    both.complete()
    assert list(both.sites) == ["north", "south"]
    assert list(both.with_site("east", "e").sites) == ["east", "north", "south"]
    with pytest.raises(BadInput, match="north has a key in this study already"):
        both.with_site("north", "other")


def test_nobody_has_the_key_of_another() -> None:
    two = changed(coordinator="c", sites={"north": {}, "south": {"key": "s"}})
    with pytest.raises(BadInput, match="this is the key of south already; north needs one of its own"):
        two.with_site("north", "s")
    with pytest.raises(BadInput, match="this is the key of coordinator already; north needs one of its own"):
        two.with_site("north", "c")
    with pytest.raises(BadInput, match=r"^south and north have the same key in study tiny; "):
        changed(sites={"north": {"key": "s"}, "south": {"key": "s"}}).complete()
    with pytest.raises(BadInput, match=r"^coordinator and south have the same key in study tiny; "):
        changed(coordinator="s", sites={"north": {"key": "n"}, "south": {"key": "s"}}).complete()


@pytest.mark.parametrize("text", ["", "name = 'x'", "[task]\nsize = 8"])
def test_another_toml_file_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match="is not a study between sites"):
        read_agreement(path)


# TOML -----------------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.one_of(
        TEXT,
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.dates(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_toml_is_read_back_as_it_was_written(tree: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


def test_what_toml_cannot_say_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be written as TOML"):
        to_toml({"a": [None]})
    assert to_toml({"a": None, "b": 1}) == "b = 1\n"
