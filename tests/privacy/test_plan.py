"""What privacy settings a study is refused for before anything is trained, and what is said of those it may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from commands import TINY, Captured, cli, empty_place, read
from remote.parties import agreement
from wardround.errors import BadInput
from wardround.methods.registry import known, make
from wardround.privacy import plan
from wardround.privacy.account import delta_notes
from wardround.privacy.guard import guard_for
from wardround.privacy.secret import Secret
from wardround.progress import Silent

SECRET = Secret(bytes(range(32)))
PRIVATE: dict[str, Any] = {"model": {"name": "cnn4", "width": 2}, "privacy": {"epsilon": 3.0, "delta": 1e-3}}


# Before training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedavg", {"model": {"name": "small"}}, "DP-SGD cannot train small: batch norm .* small-gn or cnn4"),
        ("fedisca", {"model": {"name": "small"}}, "fedisca makes images from batch-norm statistics"),
        ("fedbn", {"model": {"name": "small"}}, "use another method than fedbn"),
        ("fedmp", {}, "no .* can be promised for fedmp"),
        ("fedavg", {"train": {"keep": "best"}}, 'train.keep = "best"'),
        ("fedavg", {"train": {"keep": "first-best"}}, 'train.keep = "first-best"'),
        ("fedavg", {"train": {"clip_norm": 1.0}}, "train.clip_norm"),
        ("fedavg", {"train": {"precision": "bf16"}}, "train.precision"),
        ("fedavg", {"train": {"checkpointing": True}}, "train.checkpointing"),
        ("class-ensemble", {}, "class-ensemble sends label_counts, .* set privacy.counts_epsilon"),
        ("class-ensemble", {"privacy": {"epsilon": 3.0, "counts_epsilon": 3.0}}, "noised counts alone cost"),
        ("fedavg", {"privacy": {"epsilon": 0.001}}, "privacy.epsilon = 0.001 cannot be reached with any noise"),
        ("fedavg", {"privacy": {"feature_noise": 1.0}}, "privacy.feature_clip, which is not set"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(method: str, changes: dict[str, Any], message: str) -> None:
    study = tiny.study(method=method, **{**PRIVATE, **changes})
    with pytest.raises(BadInput, match=message) as caught:
        plan.check(study, tiny.quick(method))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("privacy", [{"counts_epsilon": 1.0}, {"epsilon": 3.0, "counts_epsilon": 1.0}])
def test_counts_that_are_rounded_before_the_noise_are_refused(privacy: dict[str, float]) -> None:
    """From 99 images to 100 a rounded count goes from 50 to 100, and noise for a step of one would show it."""
    study = tiny.study(method="consult", **{**PRIVATE, "privacy": privacy})
    with pytest.raises(BadInput, match=r'consult.counts = "binned" rounds before the noise'):
        plan.check(study, make("consult", {"counts": "binned"}))
    plan.check(study, make("consult", {"counts": "exact"}))


@pytest.mark.parametrize("method", plan.COVERED)
def test_covered_methods_pass_and_are_known(method: str) -> None:
    counted = {"counts_epsilon": 0.5} if method in ("class-ensemble", "consult") else {}
    plan.check(tiny.study(method=method, **{**PRIVATE, "privacy": {"epsilon": 3.0, **counted}}), make(method, {}))
    assert method in known()


# Settings that would change nothing of what a method sends ------------------------------------------------------------

FEATURES, COUNTS = {"feature_clip": 1.0}, {"counts_epsilon": 1.0}
SENDERS = {  # with their usual settings; `nothing` is what nobody needs to protect
    "features": {"fedmp", "fedmp-fewshot", "fedmr"},
    "counts": {"class-ensemble", "consult", "consult-distilled", "fedmr"},
    "nothing": {"local", "majority"},
}


def refused(method: str, privacy: dict[str, float], own: dict[str, Any] | None = None) -> str:
    made = make(method, {**tiny.QUICK.get(method, {}), **(own or {})})
    try:
        plan.check(tiny.study(method=method, privacy=privacy), made)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", sorted(known()))
def test_only_methods_that_send_it_take_a_setting_for_it(method: str) -> None:
    """By what each built-in method declares; the line names the setting, the method and all that it sends."""
    up = [group.name for group in tiny.quick(method).payload(tiny.study(method=method), "site-1").up]
    for kind, privacy in (("features", FEATURES), ("counts", COUNTS)):
        said = refused(method, privacy)
        if method in SENDERS[kind] | SENDERS["nothing"]:
            assert said == ""
        else:
            assert said.startswith(f"privacy.{next(iter(privacy))} would protect nothing with {method}: ")
            assert f"{method} sends {', '.join(up)}; " in said
            assert "\n" not in said


def test_both_settings_of_features_are_named_where_both_are_set() -> None:
    said = refused("fedavg", {**FEATURES, "feature_noise": 0.5})
    assert said == (
        "privacy.feature_clip and privacy.feature_noise would protect nothing with fedavg: it changes embeddings and "
        "prototypes, and fedavg sends parameters, statistics, counters, size; leave it out, or use another method"
    )


def test_a_methods_own_settings_decide_what_it_sends() -> None:
    off = {"sfmc": False, "cpgma": False}
    assert "fedmp sends parameters, statistics, counters, size;" in refused("fedmp", FEATURES, off)
    assert "consult sends parameters, statistics, counters, size;" in refused("consult", COUNTS, {"counts": "none"})
    assert refused("fedmp", COUNTS, {"sfmc": False, "class_counts": True}) == ""


def test_noise_on_counts_that_labels_give_away_is_refused() -> None:
    said = refused("fedmp", COUNTS, {"class_counts": True})
    assert said.startswith("privacy.counts_epsilon would hide nothing with fedmp, which also sends embeddings with the")


@pytest.mark.parametrize("setting", [{"clip": 0.5}, {"delta": 1e-7}])
def test_settings_of_private_training_without_it_are_refused(setting: dict[str, float]) -> None:
    said = refused("fedavg", setting)
    assert said.startswith(f"privacy.{next(iter(setting))} belongs to DP-SGD, which is off, so nothing would be")
    assert refused("fedmp", {**FEATURES, **setting}) == said
    plan.check(tiny.study(method="fedavg", **{**PRIVATE, "privacy": {"noise": 1.0, **setting}}), make("fedavg", {}))


def test_a_study_between_sites_is_refused_alike() -> None:
    """The agreement is checked on every machine of the air gap and of Flower before anything is done."""
    with pytest.raises(BadInput, match=r"privacy\.counts_epsilon would protect nothing with fedavg: .* parameters"):
        agreement(privacy=COUNTS).study()


def test_a_comparison_says_which_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for place in empty_place(tmp_path, monkeypatch):
        flags = (*TINY, "--set", "privacy.counts_epsilon=1", "--quiet")
        code, _, err = cli(capsys, "compare", "local", "consult", "fedprox", *flags)
        assert code == 2
        assert err.startswith("error: privacy.counts_epsilon would protect nothing with fedprox: ")
        assert err.count("\n") == 1
        assert list(place.iterdir()) == []
        code, _, err = cli(capsys, "run", "--method", "fedavg", *flags)
        assert code == 2
        assert "with fedavg: it changes label_counts, and fedavg sends parameters, statistics, counters, size;" in err


# A δ that promises nothing --------------------------------------------------------------------------------------------


def test_delta_is_weak_from_one_over_n_on() -> None:
    assert delta_notes(1e-3, {"a": 999, "b": 0}) == []
    assert delta_notes(1 / 49, {"a": 49}) != []
    assert delta_notes(1e-3, {"a": 1000, "b": 999, "c": 12_000}) == [
        "privacy.delta = 0.001 is not below 1/n at a (1,000 training images), c (12,000 training images): whatever ε "
        "is, to publish one image, drawn by lot, would keep such a promise; set privacy.delta far below 1/n"
    ]


def test_a_run_says_that_its_delta_is_weak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    private = ("--model", "cnn4", "--set", "privacy.noise=1", "--set", "privacy.delta=0.05")
    said: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda self, text: said.append(text))
    for place in empty_place(tmp_path, monkeypatch):
        code, out, err = cli(capsys, "run", *TINY, *private, "--out", "run")
        assert code == 0, err
        (note,) = (note for note in read(place / "run" / "result.json")["notes"] if note["method"] == "privacy")
        assert note["text"].startswith("privacy.delta = 0.05 is not below 1/n at site-1 (")
        assert "note (privacy): privacy.delta = 0.05 is not below 1/n" in out
        assert said[0] == f"note: {note['text']}"  # before the work, too
        code, out, err = cli(capsys, "run", *TINY, *private[:-1], "privacy.delta=0.005", "--out", "strong")
        assert code == 0, err
        assert "1/n" not in out
        assert not any("1/n" in text for text in said[1:])


def test_without_privacy_nothing_is_checked_and_nobody_stands_guard() -> None:
    data = tiny.federation()
    study = tiny.study(data)
    plan.check(study, make("fedmp", {}))
    assert guard_for(study, make("fedavg", {}), data.sites[0], SECRET) is None
