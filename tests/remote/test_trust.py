"""Whose signature counts: agreed keys, revoked ones, and versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote.parties import KEYS, SITES, agreement
from wardround import __version__
from wardround.agreement import COORDINATOR
from wardround.errors import BadInput
from wardround.exchange.keys import PrivateKey
from wardround.remote.rules import RULES, refusal
from wardround.remote.trust import Trust, refuse_other_version, revocations_file

ONE, TWO, _ = SITES
NEW, NEWER = PrivateKey(b"n" * 32).public, PrivateKey(b"m" * 32).public
TODAY = "2026-03-02"


def test_the_agreed_keys_count() -> None:
    trust = Trust(agreement())
    for name in (*SITES, COORDINATOR):
        assert trust.key_of(name) == KEYS[name].public
        trust.check_sender(name, KEYS[name].public.fingerprint)
    assert trust.site_of(KEYS[TWO].public) == TWO
    assert set(trust.signers(ONE, COORDINATOR)) == {KEYS[n].public.fingerprint for n in (ONE, COORDINATOR)}
    with pytest.raises(BadInput, match="no site of study tiny has the key"):
        trust.site_of(KEYS[COORDINATOR].public)
    with pytest.raises(BadInput, match="there is no 'site-9' in study tiny"):
        trust.key_of("site-9")


def test_a_new_key_takes_the_place_of_the_old_one() -> None:
    trust = Trust(agreement()).replace(ONE, NEW.text(), TODAY)
    old = KEYS[ONE].public
    assert trust.key_of(ONE) == NEW
    assert trust.site_of(NEW) == ONE
    assert set(trust.signers(ONE)) == {old.fingerprint, NEW.fingerprint}
    assert set(trust.now(ONE)) == {NEW.fingerprint}
    with pytest.raises(BadInput, match=f"^revoked key: the key {old.fingerprint} of {ONE} was revoked"):
        trust.check_sender(ONE, old.fingerprint)
    assert trust.replace(ONE, NEWER.text(), TODAY).key_of(ONE) == NEWER
    for before in (old, NEW):
        with pytest.raises(BadInput, match="is one that it had before"):
            trust.replace(ONE, before.text(), TODAY)


def test_a_new_key_is_nobody_elses() -> None:
    """Not one that another party has now, nor one that it had."""
    trust = Trust(agreement()).replace(TWO, NEW.text(), TODAY)
    for key, owner in ((KEYS[COORDINATOR].public, COORDINATOR), (KEYS[TWO].public, TWO), (NEW, TWO)):
        with pytest.raises(BadInput, match=f"this is the key of {owner} already; {ONE} needs one of its own"):
            trust.replace(ONE, key.text(), TODAY)
        with pytest.raises(BadInput, match=f"this is the key of {TWO} already; {COORDINATOR} needs one of its own"):
            trust.replace(COORDINATOR, NEW.text(), TODAY)
    assert trust.replace(ONE, NEWER.text(), TODAY).key_of(ONE) == NEWER


def test_a_key_without_another_in_its_place() -> None:
    trust = Trust(agreement()).replace(ONE, "", TODAY)
    with pytest.raises(BadInput, match=r"^revoked key: the key of site-1 was revoked and none replaces it"):
        trust.key_of(ONE)
    with pytest.raises(BadInput, match=r"^revoked key: "):
        trust.check_sender(ONE, KEYS[ONE].public.fingerprint)
    assert trust.replace(ONE, NEW.text(), TODAY).key_of(ONE) == NEW


def test_revocations_lie_beside_the_study_file(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    assert Trust.beside(study, agreement()) == Trust(agreement())
    trust = Trust(agreement()).replace(ONE, NEW.text(), TODAY).replace(COORDINATOR, "", TODAY)
    assert trust.save(study) == tmp_path / "study.revoked.json"
    assert Trust.beside(study, agreement()) == trust
    assert trust.agreement.id == agreement().id
    for text in ("{", '{"a": 1}', '[{"who": 1}]'):
        revocations_file(study).write_text(text)
        with pytest.raises(BadInput, match="cannot be read"):
            Trust.beside(study, agreement())
    revocations_file(study).unlink()
    revocations_file(study).symlink_to("nowhere.json")
    with pytest.raises(BadInput, match="cannot be read"):
        Trust.beside(study, agreement())


def test_versions() -> None:
    major, minor, patch = __version__.split(".")
    assert refuse_other_version(__version__, ONE) == ""
    assert "they work together" in refuse_other_version(f"{major}.{minor}.{patch}9", ONE)
    for other in (f"{major}.{int(minor) + 1}.0", f"{int(major) + 1}.{minor}.{patch}", "nonsense"):
        with pytest.raises(BadInput, match=r"^other version: site-1 runs wardround .* install versions"):
            refuse_other_version(other, ONE)


def test_a_rule_that_is_not_listed_is_a_fault_of_ours() -> None:
    assert str(refusal("quorum", "why")) == "quorum: why"
    assert "bad luck" not in RULES
    with pytest.raises(KeyError):
        refusal("bad luck", "why")
