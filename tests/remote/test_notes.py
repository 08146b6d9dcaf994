"""What is noted at a site stays there: in desk.json with what it belongs to, and in the card of the model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.parties import OPEN, SITES, Parties, agreement, tree
from tiny import QUICK, images
from wardround.data.federation import Site
from wardround.deploy.about import LONGEST, MOST_NOTES
from wardround.deploy.export import CARD, CARD_IN_WORDS
from wardround.learn.predictor import Predictor
from wardround.remote.deskrecord import Arrived, DeskRecord, Noted
from wardround.remote.register import Register

ONE = SITES[0]
STRICT = OPEN.model_copy(update={"min_images_per_class": 5})  # the tiny sites have fewer of every class
STAYS = f"label_counts does not leave {ONE}, and the study goes on without it: policy rule min_images_per_class: "


def desk_json(parties: Parties) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((parties.root / ONE / "desk" / "desk.json").read_text())
    return found


# Of answers -----------------------------------------------------------------------------------------------------------


def test_why_something_did_not_leave_is_kept_with_the_answer_and_once(tmp_path: Path) -> None:
    parties = Parties(tmp_path, agreement("consult"), policy=STRICT)
    parties.answer(ONE)
    (note,) = desk_json(parties)["answer_notes"]
    assert note["round"] == 0
    assert note["text"].startswith(STAYS)
    before = tree(parties.root)
    parties.answer(ONE)
    assert tree(parties.root) == before


def test_an_answer_that_is_made_anew_takes_the_notes_of_the_first_with_it(tmp_path: Path) -> None:
    parties = Parties(tmp_path, agreement("consult"), policy=STRICT)
    desk, site = parties.desk(ONE), parties.sites[ONE]
    desk.train(site)
    desk.train(site, anew=True)
    assert len(desk_json(parties)["answer_notes"]) == 1
    parties.desk(ONE, policy=OPEN).train(site, anew=True)
    assert desk_json(parties)["answer_notes"] == []


def test_notes_of_work_that_stored_nothing_are_not_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties = Parties(tmp_path, agreement("consult"), policy=STRICT)
    desk, site = parties.desk(ONE), parties.sites[ONE]
    with monkeypatch.context() as patch:
        patch.setattr(Register, "commit", lambda *given: pytest.fail("killed before the commit"))
        with pytest.raises(pytest.fail.Exception):
            desk.train(site)
    assert len(desk.notes) == 1
    assert not (parties.root / ONE / "desk" / "desk.json").exists()
    desk.policy = OPEN
    desk.train(site)
    assert desk_json(parties)["answer_notes"] == []


def test_a_note_of_every_round_is_kept_with_the_first_and_goes_when_that_is_done_again() -> None:
    record = DeskRecord(study="s", site="a").noting(0, ["always"]).noting(1, ["always", "now", "now"])
    assert record.answer_notes == (Noted(round=0, text="always"), Noted(round=1, text="now"))
    assert record.noting(1, ["always"]).answer_notes == (Noted(round=0, text="always"),)
    assert record.noting(0, ["otherwise"]).answer_notes == (Noted(round=0, text="otherwise"),)


def test_a_record_does_not_grow_without_end() -> None:
    record = DeskRecord(study="s", site="a")
    for round in range(MOST_NOTES + 20):
        record = record.noting(round, [f"{round} " + "x" * 2 * LONGEST])
    assert [note.round for note in record.answer_notes] == list(range(20, MOST_NOTES + 20))
    assert {len(note.text) for note in record.answer_notes} == {LONGEST}


def test_a_record_of_a_desk_from_before_there_were_notes(tmp_path: Path) -> None:
    parties = Parties(tmp_path, agreement())
    parties.answer(ONE)
    old = {name: value for name, value in desk_json(parties).items() if not name.endswith("_notes")}
    (parties.root / ONE / "desk" / "desk.json").write_text(json.dumps(old))
    record = parties.desk(ONE).register.read()
    assert record is not None
    assert (record.answer_notes, record.delivery_notes) == ((), ())


# Of what is taken home ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Parties, Path]:
    """A study of `consult-distilled` to its end, each site with a model of its own that has learned; the delivery."""
    own = {**QUICK["consult-distilled"], "with_own": False}  # else the two would be heard together
    agreed = agreement("consult-distilled", train={"epochs": 20}, set=own)
    parties = Parties(tmp_path_factory.mktemp("played"), agreed, policy=STRICT)
    return parties, parties.play()[ONE]


def judging(parties: Parties) -> Site:
    """The site with enough validation images to see that its own model is better than a student of two steps."""
    return replace(parties.sites[ONE], val=images(40, seed=7))


def receive(parties: Parties, delivery: Path, patch: pytest.MonkeyPatch) -> Path:
    """As `site receive` and a Flower node do it; the folder of the model."""
    patch.setitem(sys.modules, "onnx", None)  # tests/deploy has ONNX; making it takes seconds
    desk, site = parties.desk(ONE), judging(parties)
    desk.receive(delivery)
    return desk.deploy(site, desk.take_home(site)).folder


def test_the_card_of_a_site_that_keeps_its_own_model_says_so(
    played: tuple[Parties, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, delivery = played
    model = receive(parties, delivery, monkeypatch)
    (note,) = json.loads((model / CARD).read_text())["about"]["notes"]
    assert note.startswith(f"{ONE} keeps its own model: ")
    assert "calibration error" in note
    assert desk_json(parties)["delivery_notes"] == [note]
    words = (model / CARD_IN_WORDS).read_text()
    assert "By the method" not in words
    assert "The study's method is consult-distilled (" in words
    assert (
        f"## What was chosen here, and why\n\nWhat the program noted when it made this model:\n\n- Note: {ONE} "
        in words
    )


def test_why_something_did_not_leave_is_no_part_of_a_card_that_may_be_passed_on(
    played: tuple[Parties, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, delivery = played
    model = receive(parties, delivery, monkeypatch)
    assert desk_json(parties)["answer_notes"][0]["text"].startswith(STAYS)
    for card in (CARD, CARD_IN_WORDS):
        assert "min_images_per_class" not in (model / card).read_text().replace("\\", "")


def test_a_delivery_that_is_received_twice_is_noted_once(
    played: tuple[Parties, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, delivery = played
    receive(parties, delivery, monkeypatch)
    before = tree(parties.root / ONE)
    parties.desk(ONE).receive(delivery)
    assert tree(parties.root / ONE) == before, "the model is still there, and so are its notes"
    receive(parties, delivery, monkeypatch)
    assert tree(parties.root / ONE) == before


def test_what_is_noted_of_a_delivery_goes_with_it() -> None:
    first, second = (Arrived(round=0, sha256=letter * 64, file=f"{letter}.parcel") for letter in "ab")
    record = DeskRecord(study="s", site="a", delivery=first, delivery_notes=("chosen",))
    assert record.with_delivery(first) == record
    assert record.with_delivery(second).delivery_notes == ()
    assert record.with_request(second).delivery_notes == ()
    assert record.with_request(second).delivery is None


def test_a_model_of_no_use_is_noted_where_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parties = Parties(tmp_path, agreement(rounds=1))
    parties.play()
    desk, site = parties.desk(ONE), parties.sites[ONE]
    desk._note("of a parcel that came in, and of no model")
    monkeypatch.setattr(Predictor, "scores", lambda self, pixels, *_: torch.eye(self.classes)[[0] * len(pixels)])
    (said,) = desk.take_home(site).notes
    assert said.startswith("the model gives the same answer to every test image of the site")
    assert desk_json(parties)["delivery_notes"] == [said]
