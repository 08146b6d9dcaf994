"""A site's desk: one answer for one request, the policy on both sides of training, and what is taken home."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.parties import KEYS, OPEN, SITES, TIME, Parties, agreement, predictor_hash, tree
from wardround.agreement import COORDINATOR
from wardround.errors import BadInput, SiteFailed
from wardround.exchange.bundle import Bundle
from wardround.exchange.parcel import read_manifest, read_parcel, write_parcel
from wardround.exchange.policy import Policy, Refused
from wardround.learn.predictor import Predictor
from wardround.learn.trainer import Trainer
from wardround.remote.register import Register
from wardround.remote.site import SiteDesk

ONE, TWO, THREE = SITES


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    return Parties(tmp_path, agreement())


def body_hash(parcel: Path, parties: Parties) -> str:
    return read_manifest(parcel, parties.trust().signers(*SITES)).sha256


def replace_rules(**changes: Any) -> Policy:
    return OPEN.model_copy(update=changes)


def steps(patch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every optimiser step from now on."""
    seen: list[int] = []
    step = Trainer.step
    patch.setattr(Trainer, "step", lambda *given: (seen.append(1), step(*given)))
    return seen


# One answer for one request -------------------------------------------------------------------------------------------


def test_a_request_that_comes_twice_gets_the_stored_bytes(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    first = parties.answer(ONE)
    data, before = first.read_bytes(), tree(parties.root)
    trained = steps(monkeypatch)
    parties.time = "2027-01-01T00:00:00+00:00"
    first.unlink()
    said: list[str] = []
    monkeypatch.setattr(SiteDesk, "_note", lambda self, text: said.append(text))
    assert parties.answer(ONE).read_bytes() == data
    (note,) = said
    assert note.startswith("round 1 was answered before: this is the same answer, and nothing was trained now")
    assert tree(parties.root) == before
    assert trained == []


def test_a_corrected_answer_is_made_anew_and_taken_in_the_place_of_the_first(parties: Parties) -> None:
    wrong, right = parties.sites[TWO], parties.sites[ONE]
    first = parties.desk(ONE).train(replace(right, train=wrong.train))
    parties.hub().collect(first)
    assert parties.desk(ONE).train(right).read_bytes() == first.read_bytes()
    second = parties.desk(ONE).train(right, anew=True)
    parties.hub().collect(second, replace=True)
    assert parties.desk(ONE).train(right).read_bytes() == second.read_bytes()
    straight = Parties(parties.root / "straight", agreement())
    assert body_hash(second, parties) == body_hash(straight.answer(ONE), straight)
    third = parties.desk(ONE).train(replace(right, train=wrong.train), anew=True)
    assert body_hash(third, parties) != body_hash(straight.answer(ONE), straight)


def test_an_answer_that_is_made_anew_writes_over_nothing_that_counts(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, before = parties.answer(ONE).read_bytes(), tree(parties.root)
    with monkeypatch.context() as patch:
        patch.setattr(Register, "commit", lambda *given: pytest.fail("killed before the commit"))
        with pytest.raises(pytest.fail.Exception):
            parties.desk(ONE).train(parties.sites[ONE], anew=True)
    assert parties.answer(ONE).read_bytes() == data
    assert tree(parties.root) == before


def test_the_parcel_says_what_it_answers(parties: Parties) -> None:
    signers = parties.trust().signers(COORDINATOR, *SITES)
    first = read_manifest(parties.answer(ONE), signers)
    assert (first.kind, first.round, first.site, first.answers, first.made) == ("answer", 0, ONE, "", TIME)
    assert set(first.metrics) == {"training_loss", "validation_accuracy"}
    parties.collect(*SITES)
    request = read_manifest(parties.step()[ONE], signers)
    assert read_manifest(parties.answer(ONE), signers).answers == request.sha256


def test_an_earlier_answer_leaves_the_outbox(parties: Parties) -> None:
    parties.collect(*SITES)
    parties.step()
    latest = parties.answer(ONE)
    assert list(latest.parent.iterdir()) == [latest]
    assert latest.name == "tiny-site-1-round2-answer.parcel"


def test_metrics_stay_unless_the_policy_lets_them_go(parties: Parties) -> None:
    site = parties.sites[ONE]
    parcel = parties.desk(ONE, policy=Policy()).train(site)
    assert read_manifest(parcel, parties.trust().signers(ONE)).metrics == {}


def test_a_site_that_is_not_asked_and_a_method_that_asks_nobody(parties: Parties) -> None:
    parties.agreed = agreement(rounds=1, participants=0.3)
    asked = set(parties.agreed.study().participants(0))
    (other, *_) = sorted(set(SITES) - asked)
    with pytest.raises(BadInput, match=rf"^not asked: round 1 does not ask {other}"):
        parties.answer(other)
    parties.agreed = agreement("local")
    with pytest.raises(BadInput, match="there is nothing to train: local asks no site"):
        parties.answer(ONE)


def test_a_site_that_diverges_says_so_and_sends_nothing(parties: Parties) -> None:
    parties.agreed = agreement(train={"lr": 1e30})
    with pytest.raises(SiteFailed, match="training diverged"):
        parties.answer(ONE)
    assert not (parties.root / ONE / "outbox").exists()


def test_another_folder_key_or_study_is_told(parties: Parties) -> None:
    parties.answer(ONE)
    (parties.root / ONE).rename(parties.root / TWO)
    with pytest.raises(BadInput, match="was begun by site-1 under study"):
        parties.answer(TWO)


# The policy -----------------------------------------------------------------------------------------------------------


def test_the_plan_is_refused_before_training(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = steps(monkeypatch)
    forbidding: list[tuple[str, dict[str, Any]]] = [
        ("methods", {"methods": ("local",)}),
        ("coordinators", {"coordinators": ("2222-2222-2222-2222-2222-2222",)}),
        ("never_groups", {"never_groups": ("statistics",)}),
        ("max_bytes_per_round", {"max_bytes_per_round": 100}),
    ]
    for rule, rules in forbidding:
        with pytest.raises(Refused, match=f"^policy rule {rule}: "):
            parties.desk(ONE, policy=OPEN.model_copy(update=rules)).train(parties.sites[ONE])
    assert trained == []
    assert not (parties.root / ONE / "outbox").exists()


def test_a_stored_answer_is_held_against_the_rules_of_today(parties: Parties) -> None:
    first = parties.answer(ONE)
    site, signers = parties.sites[ONE], parties.trust().signers(ONE)
    assert read_manifest(first, signers).metrics
    strict = replace_rules(metrics="none")
    with pytest.raises(Refused, match=r"^policy rule metrics: .* wardround site train --replace"):
        parties.desk(ONE, policy=strict).train(site)
    assert not first.exists()  # nobody should carry it out any more
    with pytest.raises(Refused, match=r"^policy rule coordinators: "):
        parties.desk(ONE, policy=replace_rules(coordinators=("ACDE-FHJK-MNPQ-RTVW-XY23-4567",))).train(site)
    again = parties.desk(ONE, policy=strict).train(site, anew=True)
    assert read_manifest(again, signers).metrics == {}
    assert parties.desk(ONE, policy=strict).train(site) == again


def test_what_would_really_leave_is_refused_before_it_is_written(parties: Parties) -> None:
    """A method that declares nothing of what it sends: the plan passes, the bundle does not."""
    desk = parties.desk(ONE, policy=OPEN.model_copy(update={"never_groups": ("statistics",)}))
    honest = desk.payload
    desk.payload = replace(honest, up=tuple(group for group in honest.up if group.name != "statistics"))
    with pytest.raises(Refused, match=r"^policy rule never_groups: 'statistics' never leaves"):
        desk.train(parties.sites[ONE])
    assert [file for file in tree(parties.root) if file.endswith(".parcel")] == []


def test_bytes_of_all_rounds_are_counted(parties: Parties) -> None:
    parties.collect(*SITES)
    record = json.loads((parties.root / ONE / "desk" / "desk.json").read_text())
    sent = record["sent"]["0"]
    assert sent > 1000
    parties.step()
    tight = OPEN.model_copy(update={"max_bytes_per_study": 2 * sent - 1})  # enough for what is declared
    with pytest.raises(Refused, match=r"^policy rule max_bytes_per_study: with this bundle"):
        parties.desk(ONE, policy=tight).train(parties.sites[ONE])


# What comes in --------------------------------------------------------------------------------------------------------


def test_refusals_by_name(parties: Parties, tmp_path: Path) -> None:
    parties.collect(*SITES)
    sent = parties.hub().step()
    mine, other, _ = sent
    desk = parties.desk(ONE)

    def refused(parcel: Path, rule: str) -> None:
        before = tree(desk.folder)
        with pytest.raises(BadInput, match=f"^{rule}: "):
            desk.receive(parcel)
        assert tree(desk.folder) == before

    refused(other, "another site")
    refused(parties.answer(ONE), "wrong way")
    desk.receive(mine)
    signers = parties.trust().signers(COORDINATOR)
    manifest = read_manifest(mine, signers)
    _, bundle = read_parcel(mine, signers, desk.payload, manifest.envelope)

    def forged(key: str = COORDINATOR, **changes: Any) -> Path:
        target = tmp_path / "made.parcel"
        write_parcel(target, Bundle(replace(bundle.envelope, **changes), bundle.groups), KEYS[key], made=TIME)
        return target

    refused(forged(study="f" * 16), "another study")
    refused(forged(TWO), "another signer")
    refused(forged(round=2), "beyond the study")  # it has two rounds, 0 and 1
    parties.answer(ONE)
    refused(forged(round=0), "old parcel")


def test_a_delivery_of_a_round_that_was_done_again_is_not_taken_back(tmp_path: Path) -> None:
    parties = Parties(tmp_path, agreement(rounds=1))
    parties.collect(*SITES)
    (old,) = (path for path in parties.hub().step() if ONE in path.name)
    replayed = tmp_path / "replayed.parcel"
    replayed.write_bytes(old.read_bytes())
    parties.desk(ONE).receive(replayed)
    parties.desk(ONE).receive(replayed)  # twice is no matter
    parties.hub().withdraw(TWO, redo=True)
    parties.time = "2026-03-03T10:00:00+00:00"
    new = parties.step()[ONE]
    before = tree(parties.root)
    with pytest.raises(BadInput, match=r"^old parcel: the delivery of round 1 that is here was made later; "):
        parties.desk(ONE).receive(replayed)
    assert tree(parties.root) == before
    parties.desk(ONE).receive(new)


def test_a_request_that_does_not_fit_is_not_stored(parties: Parties, tmp_path: Path) -> None:
    parties.collect(*SITES)
    mine = parties.hub().step()[0]
    desk = parties.desk(ONE)
    envelope = read_manifest(mine, parties.trust().signers(COORDINATOR)).envelope
    target = tmp_path / "made.parcel"
    write_parcel(target, Bundle(envelope, {}), KEYS[COORDINATOR], made=TIME)
    before = tree(desk.folder)
    with pytest.raises(BadInput, match="lacks"):
        desk.receive(target)
    assert tree(desk.folder) == before


def test_nothing_to_take_home_yet_and_nothing_to_train_any_more(parties: Parties) -> None:
    with pytest.raises(BadInput, match="nothing to take home yet"):
        parties.desk(ONE).take_home(parties.sites[ONE])
    parties.play()
    with pytest.raises(BadInput, match="the study is over here"):
        parties.answer(ONE)


def test_what_is_taken_home_is_measured_on_the_sites_own_test_images(parties: Parties) -> None:
    parties.play()
    site = parties.sites[ONE]
    home = parties.desk(ONE).take_home(site)
    scores = home.predictor.scores(site.test.images.images, parties.desk(ONE).device)
    assert home.images == len(site.test.images)
    assert home.accuracy == pytest.approx(float((scores.argmax(1) == site.test.images.labels).float().mean()))
    assert home.constant == (len(scores.argmax(1).unique()) == 1)


def test_a_model_that_gives_one_answer_to_everything_is_told_at_once_and_on_its_card(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here and in a simulation alike: its accuracy may look like something."""
    parties.play()
    site, desk, said = parties.sites[ONE], parties.desk(ONE), []
    monkeypatch.setattr(Predictor, "scores", lambda self, pixels, *_: torch.eye(self.classes)[[0] * len(pixels)])
    monkeypatch.setattr(desk, "_note", said.append)
    home = desk.take_home(site)
    assert home.constant
    warned = "the model gives the same answer to every test image"
    assert said == [f"{warned} of the site, whatever it shows: it is of no use here"]
    monkeypatch.undo()
    assert f"(beware: {warned})" in (desk.deploy(site, home).folder / "model_card.md").read_text()


# Doing a round again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedper", "ditto"])
def test_a_redone_round_begins_from_the_memory_that_the_site_had_then(method: str, tmp_path: Path) -> None:
    """One site is late in round 1, and the others have answered round 2 before round 1 is done again with it."""
    straight = Parties(tmp_path / "straight", agreement(method, quorum=2, rounds=3))
    redone = Parties(tmp_path / "redone", straight.agreed)
    late = redone.answer(THREE).read_bytes()
    redone.collect(ONE, TWO)
    redone.step(now=True)
    redone.answer(ONE), redone.answer(TWO)
    redone.hub().reopen()
    parcel = tmp_path / "late.parcel"
    parcel.write_bytes(late)
    redone.hub().collect(parcel)
    redone.step()
    for name in (ONE, TWO):
        redone.hub().collect(redone.answer(name, again=True))
    redone.collect(THREE)
    redone.step()
    redone.play()
    straight.play()
    for name, site in straight.sites.items():
        homes = [parties.desk(name).take_home(site).predictor for parties in (straight, redone)]
        assert predictor_hash(homes[0]) == predictor_hash(homes[1])


def test_fits_of_a_work_that_was_stopped_between_them_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ditto trains twice in a round; stopped in the second fit, it does not train the first again."""
    straight = Parties(tmp_path / "straight", agreement("ditto"))
    with monkeypatch.context() as patch:
        all_steps = steps(patch)
        expected = straight.answer(ONE).read_bytes()
    stopped = Parties(tmp_path / "stopped", straight.agreed)
    with monkeypatch.context() as patch:
        step, seen = Trainer.step, []

        def failing(*given: Any) -> None:
            seen.append(1)
            if len(seen) == len(all_steps):
                raise KeyboardInterrupt
            step(*given)

        patch.setattr(Trainer, "step", failing)
        with pytest.raises(KeyboardInterrupt):
            stopped.answer(ONE)
    left = steps(monkeypatch)
    assert stopped.answer(ONE).read_bytes() == expected
    assert len(left) == len(all_steps) // 2
    assert not (stopped.root / ONE / "desk" / "unfinished").exists()
