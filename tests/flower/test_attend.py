"""What a site's node does with a call, and how little it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower.deployment import write_images
from remote.parties import KEYS, SITES, Parties, agreement
from wardround.agreement import write_agreement
from wardround.errors import BadInput, SiteFailed
from wardround.exchange.policy import Refused
from wardround.remote import site
from wardround.remote.flower.attend import attend, in_few_words
from wardround.remote.flower.letters import ANSWER, HELLO, NONCE_BYTES, TAKE_HOME, Call
from wardround.remote.rules import refusal
from wardround.sitedata import read_site

ONE, TWO, THREE = SITES
AGREED = agreement("fedavg", rounds=2)


def call(do: str, parcel: bytes = b"", study: str = AGREED.id) -> Call:
    return Call(do, study, b"n" * NONCE_BYTES, parcel)


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    (tmp_path / ONE).mkdir()
    study = tmp_path / ONE / "study.toml"
    write_agreement(study, AGREED)
    KEYS[ONE].save(tmp_path / ONE / "site.key")
    write_images(tmp_path / "images.npz", 0)
    return {"study": str(study), "data": str(tmp_path / "images.npz"), "device": "cpu"}


def test_a_greeting_needs_no_images(node: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "images.npz").unlink()
    reply = attend(call(HELLO), 7, node)
    assert reply.sender(call(HELLO), 7) == KEYS[ONE].public
    assert (reply.parcel, reply.words) == (b"", "")


@pytest.mark.parametrize("do", [HELLO, ANSWER, TAKE_HOME])
def test_no_reply_proves_anything_to_another_studys_hub(do: str, node: dict[str, str]) -> None:
    """A hostile hub could pass on a call of another consortium's, where the site has the same key, and its reply."""
    theirs = call(do, study="f" * 16)
    reply = attend(theirs, 7, node)
    assert reply.parcel == b""
    with pytest.raises(BadInput, match="not signed for this study by the key that it names"):
        reply.sender(theirs, 7)


def test_an_answer_comes_twice_as_the_same_bytes(node: dict[str, str], tmp_path: Path) -> None:
    first, again = attend(call(ANSWER), 7, node), attend(call(ANSWER), 7, node)
    assert first.parcel == again.parcel == (tmp_path / ONE / "outbox" / "tiny-site-1-round1-answer.parcel").read_bytes()
    assert first.words == ""


def test_the_policy_is_the_sites_own(node: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ONE / "policy.toml").write_text('methods = ["fedprox"]\n')
    reply = attend(call(ANSWER), 7, node)
    assert reply.parcel == b""
    assert reply.words == "refused by policy rule methods"
    other = tmp_path / "other.toml"
    other.write_text("")
    assert attend(call(ANSWER), 7, {**node, "policy": str(other)}).parcel != b""


def test_an_answer_is_not_sent_again_once_the_site_has_forbidden_it(node: dict[str, str], tmp_path: Path) -> None:
    assert attend(call(ANSWER), 7, node).parcel != b""
    (tmp_path / ONE / "policy.toml").write_text('never_groups = ["statistics"]\n')
    reply = attend(call(ANSWER), 7, node)
    assert (reply.parcel, reply.words) == (b"", "refused by policy rule never_groups")


def test_names_of_files_do_not_leave(
    node: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {**node, "data": str(tmp_path / "patient-417.npz")}
    assert attend(call(ANSWER), 7, missing).words == "it cannot; its log says why"
    assert "patient-417" in capsys.readouterr().out

    def broken(*_: object) -> None:
        raise RuntimeError("patient-417")

    monkeypatch.setattr(site.SiteDesk, "train", broken)
    assert attend(call(ANSWER), 7, node).words == "a fault of the program; its log has the details"


def test_what_the_coordinator_learns() -> None:
    assert in_few_words(refusal("old parcel", "in /home/x")) == "refused by old parcel"
    assert in_few_words(Refused("policy rule groups: in /home/x")) == "refused by policy rule groups"
    assert in_few_words(SiteFailed("of /home/x")) == "training failed; its log says why"
    assert in_few_words(BadInput("/home/x: no")) == "it cannot; its log says why"


def test_another_study_and_parcels_that_do_not_fit(node: dict[str, str], tmp_path: Path) -> None:
    assert attend(call(ANSWER, study="f" * 16), 7, node).words == "refused by another study"
    assert attend(call(ANSWER, b"no parcel"), 7, node).words == "it cannot; its log says why"
    parties = Parties(tmp_path / "others", AGREED)
    for number, name in enumerate(SITES):
        images = tmp_path / f"{name}.npz"
        write_images(images, number)
        parties.hub().collect(parties.desk(name).train(read_site(AGREED, name, str(images))))
    requests = {path.name: path.read_bytes() for path in parties.hub().step()}
    own, other = (requests[f"tiny-{name}-round2-request.parcel"] for name in (ONE, TWO))
    assert attend(call(ANSWER, other), 7, node).words == "refused by another site"
    assert attend(call(TAKE_HOME, own), 7, node).words == "it cannot; its log says why"
    assert attend(call(ANSWER, own), 7, node).parcel != b""
    assert not (tmp_path / ONE / "incoming.parcel").exists()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"data": "x"}, "study is not set"),
        ({"study": "x", "data": "x", "colour": "red"}, "there is no setting 'colour'"),
        ({"study": "nowhere/study.toml", "data": "x"}, "site.key"),
    ],
)
def test_a_node_that_is_started_wrongly(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        attend(call(HELLO), 7, given)
