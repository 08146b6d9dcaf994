"""The hub: what it takes and refuses by name, when it goes on, and what can be taken back."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remote.parties import KEYS, SITES, TIME, Parties, agreement, copy, tree
from wardround.agreement import COORDINATOR
from wardround.errors import BadInput
from wardround.exchange import parcel as parcels
from wardround.exchange.bundle import Bundle
from wardround.exchange.keys import PrivateKey
from wardround.exchange.parcel import read_manifest, read_parcel, write_parcel
from wardround.progress import Lines
from wardround.record import absorbing
from wardround.remote.hub import Hub
from wardround.remote.trust import Trust
from wardround.remote.workplace import Workplace

ONE, TWO, THREE = SITES
NEW = PrivateKey(b"n" * 32)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders in which every site has answered round 1 of fedavg, and the hub has nothing yet."""
    parties = Parties(tmp_path_factory.mktemp("answered"), agreement())
    for name in SITES:
        parties.answer(name)
    return parties.root


@pytest.fixture
def parties(answered: Path, tmp_path: Path) -> Parties:
    return Parties(copy(answered, tmp_path / "all"), agreement())


def upload(parties: Parties, site: str) -> Path:
    (found,) = (parties.root / site / "outbox").iterdir()
    return found


def copy_of(parcel: Path) -> Path:
    """On a stick: the site's outbox holds its latest answer alone."""
    return Path(shutil.copy(parcel, parcel.parents[2] / parcel.name))


def forged(
    parties: Parties,
    of: str,
    target: Path,
    key: PrivateKey | None = None,
    change: Callable[[Bundle], Bundle] = lambda bundle: bundle,
    **changes: Any,
) -> Path:
    """The upload of a site with something about its envelope, its signer or its tensors changed."""
    own = {key.public.fingerprint: key.public for key in KEYS.values()}
    manifest = read_manifest(upload(parties, of), own)
    payload = parties.hub().method.payload(parties.hub().study, of)
    _, bundle = read_parcel(upload(parties, of), own, payload, manifest.envelope)
    changed = change(Bundle(replace(bundle.envelope, **changes), bundle.groups))
    write_parcel(target, changed, key or KEYS[of], made=TIME)
    return target


def refused(hub: Hub, parcel: Path, rule: str, **how: Any) -> None:
    """Refused by the rule's name, and nothing at the hub has changed."""
    hub.standing()
    before = tree(hub.folder)
    with pytest.raises(BadInput, match=f"^{rule}: "):
        hub.collect(parcel, **how)
    assert tree(hub.folder) == before


# What comes in --------------------------------------------------------------------------------------------------------


def test_an_upload_is_stored_once(parties: Parties) -> None:
    hub = parties.hub()
    receipt, is_new = hub.collect(upload(parties, ONE))
    assert (receipt.site, receipt.round, is_new) == (ONE, 0, True)
    after = tree(hub.folder)
    assert hub.collect(upload(parties, ONE)) == (receipt, False)
    assert parties.hub().collect(upload(parties, ONE)) == (receipt, False)
    assert tree(hub.folder) == after
    stored = hub.register.path(receipt.file)
    assert stored.read_bytes() == upload(parties, ONE).read_bytes()


def test_a_damaged_copy_of_what_is_here_is_not_told_to_be_here(parties: Parties) -> None:
    hub = parties.hub()
    hub.collect(upload(parties, ONE))
    damaged = copy_of(upload(parties, ONE))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    before = tree(hub.folder)
    with pytest.raises(BadInput, match=r"the body of .* is not the one that was signed"):
        hub.collect(damaged)
    assert tree(hub.folder) == before


def test_an_upload_under_a_key_that_was_revoked_since_is_not_told_to_be_here(parties: Parties) -> None:
    parties.hub().collect(upload(parties, ONE))
    trust = parties.trust().replace(ONE, NEW.public.text(), "2026-03-02")
    refused(parties.hub(trust), upload(parties, ONE), "revoked key")


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [("size", "images", -9), ("counters", "num_batches_tracked", -1), ("statistics", "running_var", -0.5)],
)
def test_numbers_that_nothing_can_have_are_refused_and_leave_the_average_alone(
    parties: Parties, tmp_path: Path, group: str, name: str, value: float
) -> None:
    hub, made = parties.hub(), tmp_path / "made.parcel"

    def spoiled(bundle: Bundle) -> Bundle:
        (path, *_) = (path for path in bundle.groups[group] if path.endswith(name))
        tensors = {**bundle.groups[group], path: torch.full_like(bundle.groups[group][path], value)}
        return replace(bundle, groups={**bundle.groups, group: tensors})

    with pytest.MonkeyPatch.context() as patch:  # whoever forges one does not look at it
        patch.setattr(parcels, "refuse_impossible", lambda bundle: None)
        forged(parties, TWO, made, change=spoiled)
    hub.standing()
    before = tree(hub.folder)
    with pytest.raises(BadInput, match=f"^{made}: .* {group}/.*{name} holds numbers below 0, which it cannot have"):
        hub.collect(made)
    assert tree(hub.folder) == before


def test_refusals_by_name(parties: Parties, tmp_path: Path) -> None:
    hub = parties.hub()
    hub.collect(upload(parties, ONE))
    made = tmp_path / "made.parcel"
    refused(hub, forged(parties, TWO, made, study="f" * 16), "another study")
    refused(hub, forged(parties, TWO, made, round=1), "early parcel")
    refused(hub, forged(parties, TWO, made, kind="request"), "wrong way")
    refused(hub, forged(parties, TWO, made, KEYS[COORDINATOR], kind="request"), "wrong way")
    refused(hub, forged(parties, TWO, made, KEYS[ONE]), "another signer")
    refused(hub, forged(parties, TWO, made, site="site-9"), "another study")
    refused(hub, forged(parties, ONE, made), "second answer")
    with pytest.raises(BadInput, match="not expected here"):
        hub.collect(forged(parties, TWO, made, NEW))
    with pytest.raises(BadInput, match="belongs to fedprox"):
        hub.collect(forged(parties, TWO, made, method="fedprox"))


def test_an_answer_that_does_not_hold_what_was_declared_is_not_stored(parties: Parties, tmp_path: Path) -> None:
    hub = parties.hub()
    envelope = read_manifest(upload(parties, TWO), parties.trust().signers(TWO)).envelope
    made = tmp_path / "made.parcel"
    write_parcel(made, Bundle(envelope, {"images": {"x": torch.zeros(3)}}), KEYS[TWO], made=TIME)
    hub.standing()
    before = tree(hub.folder)
    with pytest.raises(BadInput, match=f"^{made}: .* did not declare"):
        hub.collect(made)
    assert tree(hub.folder) == before


def test_another_version_of_the_program(
    parties: Parties, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made.parcel"
    monkeypatch.setattr(parcels, "__version__", "0.2.0")
    refused(parties.hub(), forged(parties, TWO, made), "other version")
    monkeypatch.setattr(parcels, "__version__", "0.1.7")
    hub = parties.hub()
    hub.progress = Lines()
    assert hub.collect(forged(parties, TWO, made))[1]
    assert "note: site-2 runs wardround 0.1.7, this machine" in capsys.readouterr().err


def test_a_corrected_answer_replaces_the_first(parties: Parties, tmp_path: Path) -> None:
    hub = parties.hub()
    first, _ = hub.collect(upload(parties, ONE))
    second, is_new = hub.collect(forged(parties, ONE, tmp_path / "made.parcel"), replace=True)
    assert is_new
    assert second.id != first.id
    assert not hub.register.path(first.file).exists()
    assert hub.standing().answers == 1


def test_a_changed_study_file_is_told(parties: Parties) -> None:
    parties.hub().standing()
    parties.agreed = agreement(seed=1)
    with pytest.raises(BadInput, match="was begun under study"):
        parties.hub().standing()


def test_a_key_that_is_not_the_coordinators(parties: Parties) -> None:
    from remote.parties import DEVICE

    with pytest.raises(BadInput, match="is not the coordinator's"):
        Hub(parties.root / "hub", parties.trust(), KEYS[ONE], DEVICE)


def test_a_damaged_record_is_told(parties: Parties) -> None:
    hub = parties.hub()
    hub.standing()
    for text in ("{", "[]", json.dumps({"study": 3})):
        hub.register.file.write_text(text)
        with pytest.raises(BadInput, match=r"hub\.json is damaged"):
            hub.standing()


# When it goes on ------------------------------------------------------------------------------------------------------


def test_quorum_and_deadline(parties: Parties) -> None:
    parties.agreed = agreement(quorum=2, deadline=14)
    for name in SITES:
        (parties.root / name / "desk" / "desk.json").unlink()
    with pytest.raises(BadInput, match=r"^quorum: round 1 has 0 of the 2 answers it needs; wait for site-1, site-2"):
        parties.hub().step()
    parties.collect(ONE, TWO)
    standing = parties.hub().standing()
    assert standing.sites[THREE] == "missing"
    assert (standing.answers, standing.needed, standing.last_day) == (2, 2, datetime.date(2026, 3, 16))
    parties.time = "2026-03-16T23:59:59+00:00"
    with pytest.raises(BadInput, match=r"^deadline: site-3 may still answer; wait until 2026-03-16"):
        parties.hub().step()
    parties.time = "2026-03-17T00:00:00+00:00"
    assert parties.hub().standing().is_late
    assert len(parties.hub().step()) == 3


def test_without_a_deadline_it_waits_for_all_unless_told_otherwise(parties: Parties) -> None:
    parties.agreed = agreement(quorum=1)
    for name in SITES:
        (parties.root / name / "desk" / "desk.json").unlink()
    parties.collect(ONE)
    with pytest.raises(BadInput, match=r"^deadline: site-2, site-3 may still answer; wait for them"):
        parties.hub().step()
    assert len(parties.hub().step(now=True)) == 3
    assert parties.hub().standing().round == 1


def test_one_date_for_all_rounds(parties: Parties) -> None:
    parties.agreed = agreement(deadline=datetime.date(2026, 3, 1))
    standing = parties.hub().standing()
    assert standing.last_day == datetime.date(2026, 3, 1)
    assert standing.is_late


def test_a_step_that_has_nothing_to_do_hands_out_the_same_parcels(parties: Parties) -> None:
    parties.collect(*SITES)
    written = parties.hub().step()
    after = tree(parties.root / "hub")
    written[0].unlink()
    assert parties.hub().step() == written
    assert tree(parties.root / "hub") == after


# What is taken back ---------------------------------------------------------------------------------------------------


def final(root: Path) -> dict[str, str]:
    """The hashes of what each site takes home."""
    signers = Trust(agreement()).signers(COORDINATOR)
    found = [read_manifest(file, signers) for file in (root / "hub" / "outbox").glob("*delivery*")]
    return {manifest.site: manifest.sha256 for manifest in found}


def one_round(parties: Parties, tmp_path: Path) -> Parties:
    """The same folders in a study of one round, so that a step is the last one."""
    made = Parties(tmp_path / "one", agreement(rounds=1, quorum=2))
    for name in SITES:
        made.answer(name)
    return made


def test_withdrawing_before_the_step_is_as_if_it_had_never_answered(parties: Parties, tmp_path: Path) -> None:
    with_it = one_round(parties, tmp_path)
    without = Parties(copy(with_it.root, tmp_path / "without"), with_it.agreed)
    with_it.collect(*SITES)
    record = with_it.hub().withdraw(TWO)
    assert set(record.withdrawn) == {TWO}
    assert not [name for name in tree(with_it.root / "hub") if TWO in name]
    with_it.hub().step()
    without.collect(ONE, THREE)
    without.hub().step(now=True)
    expected = final(without.root)
    assert final(with_it.root) == {ONE: expected[ONE], THREE: expected[THREE]}
    refused(with_it.hub(), upload(with_it, TWO), "withdrawn")


def test_withdrawing_after_the_step_and_redoing_it(parties: Parties, tmp_path: Path) -> None:
    with_it = one_round(parties, tmp_path)
    without = Parties(copy(with_it.root, tmp_path / "without"), with_it.agreed)
    with_it.collect(*SITES)
    with_it.hub().step()
    with_all = final(with_it.root)
    record = with_it.hub().withdraw(TWO)
    assert record.current is None
    assert record.previous is not None
    assert set(final(with_it.root)) == {ONE, THREE}
    assert [receipt.metrics for receipt in record.history if receipt.site == TWO] == [{}]
    assert final(with_it.root)[ONE] == with_all[ONE]
    with_it.hub().reopen()
    assert final(with_it.root) == {}
    with_it.hub().step()
    without.collect(ONE, THREE)
    without.hub().step(now=True)
    expected = final(without.root)
    assert final(with_it.root) == {ONE: expected[ONE], THREE: expected[THREE]}
    assert final(with_it.root)[ONE] != with_all[ONE]


def test_a_late_parcel_is_taken_when_the_round_is_opened_again(parties: Parties, tmp_path: Path) -> None:
    late = one_round(parties, tmp_path)
    in_time = Parties(copy(late.root, tmp_path / "in-time"), late.agreed)
    late.collect(ONE, TWO)
    late.hub().step(now=True)
    refused(late.hub(), upload(late, THREE), "late parcel")
    assert late.hub().collect(upload(late, ONE))[1] is False
    late.hub().reopen()
    late.collect(THREE)
    late.hub().step()
    in_time.collect(*SITES)
    in_time.hub().step()
    assert final(late.root) == final(in_time.root)


def test_answers_to_a_replaced_request_are_stale(parties: Parties) -> None:
    parties.agreed = agreement(quorum=2)
    for name in SITES:
        (parties.root / name / "desk" / "desk.json").unlink()
    parties.collect(ONE, TWO)
    late = copy_of(parties.answer(THREE))
    parties.step(now=True)
    stale = parties.answer(ONE)
    parties.hub().reopen()
    assert not list((parties.root / "hub" / "outbox").iterdir())
    parties.hub().collect(late)
    parties.step()
    refused(parties.hub(), stale, "stale answer")
    with pytest.raises(BadInput, match=r"^second request: round 2 was answered before"):
        parties.answer(ONE)
    assert parties.hub().collect(parties.answer(ONE, again=True))[1]


def test_only_a_closed_round_can_be_opened(parties: Parties) -> None:
    with pytest.raises(BadInput, match=r"^no closed round: "):
        parties.hub().reopen()
    with pytest.raises(BadInput, match="there is no site 'site-9'"):
        parties.hub().withdraw("site-9")


def test_when_all_have_withdrawn_there_is_no_quorum(parties: Parties) -> None:
    for name in SITES:
        parties.hub().withdraw(name)
    with pytest.raises(BadInput, match=r"^quorum: no site is left in round 1"):
        parties.hub().step()


# Lost keys ------------------------------------------------------------------------------------------------------------


def test_a_site_with_a_new_key_signs_its_answer_again(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    old = upload(parties, ONE)
    parties.collect(*SITES)
    trust = parties.trust().replace(ONE, NEW.public.text(), "2026-03-02")
    with pytest.raises(BadInput, match=r"^revoked key: the key .* of site-1 was revoked"):
        parties.hub(trust).step()
    body = read_manifest(old, parties.trust().signers(ONE)).sha256
    monkeypatch.setitem(KEYS, ONE, NEW)
    monkeypatch.setattr(Workplace, "do", lambda *given: pytest.fail("it trained"))
    again = parties.desk(ONE, trust).train(parties.sites[ONE])
    assert read_manifest(again, {NEW.public.fingerprint: NEW.public}).sha256 == body
    assert parties.hub(trust).collect(again, replace=True)[1]
    assert len(parties.hub(trust).step()) == 3


def test_a_coordinator_with_a_new_key_signs_its_parcels_again(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties.collect(*SITES)
    old = parties.step()[ONE]
    before = read_manifest(old, parties.trust().signers(COORDINATOR))
    trust = parties.trust().replace(COORDINATOR, NEW.public.text(), "2026-03-02")
    with pytest.raises(BadInput, match=r"^revoked key: "):
        parties.desk(ONE, trust).train(parties.sites[ONE])
    with pytest.raises(BadInput, match=r"^revoked key: "):
        parties.desk(ONE, trust).receive(old)
    monkeypatch.setitem(KEYS, COORDINATOR, NEW)
    (new,) = (path for path in parties.hub(trust).step() if ONE in path.name)
    after = parties.desk(ONE, trust).receive(new)
    assert after == replace(before, sender=NEW.public.fingerprint)
    assert parties.hub(trust).collect(parties.desk(ONE, trust).train(parties.sites[ONE]))[1]


def test_what_a_revoked_key_signs_is_refused_by_name(parties: Parties, tmp_path: Path) -> None:
    trust = parties.trust().replace(TWO, "", "2026-03-02")
    refused(parties.hub(trust), upload(parties, TWO), "revoked key")
    with pytest.raises(BadInput, match=r"^revoked key: the key .* of site-2 was revoked here on 2026-03-02; .* --key"):
        parties.desk(TWO, trust)


# A step that was stopped ----------------------------------------------------------------------------------------------


def stop_in_the_middle(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    """Take a step that is stopped when a few states on the way are saved."""
    absorb = hub.method.absorb

    def stopped(*given: Any) -> Any:
        for number, state in enumerate(absorb(*given)):
            if number == 3:
                raise KeyboardInterrupt
            yield state

    patch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)
    patch.setattr(hub.method, "absorb", stopped)
    with pytest.raises(KeyboardInterrupt):
        hub.step(now=True)
    assert hub.register.read().absorbing  # type: ignore[union-attr]


def test_what_comes_while_a_step_lies_stopped_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = Parties(tmp_path / "straight", agreement("fedbicross", quorum=2))
    for name in SITES:
        straight.answer(name)
    stopped = Parties(copy(straight.root, tmp_path / "stopped"), straight.agreed)
    straight.collect(*SITES)
    straight.hub().step()
    stopped.collect(ONE, TWO)
    with monkeypatch.context() as patch:
        stop_in_the_middle(stopped.hub(), patch)
    stopped.collect(THREE)
    stopped.hub().step()
    assert final(stopped.root) == final(straight.root)


def test_notes_of_the_method_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parties = Parties(tmp_path, agreement())
    parties.collect(*SITES)
    hub = parties.hub()
    absorb = hub.method.absorb

    def noting(ctx: Any, *given: Any) -> Any:
        ctx.note("mind this")
        ctx.note("mind this")
        yield from absorb(ctx, *given)

    monkeypatch.setattr(hub.method, "absorb", noting)
    hub.step()
    assert hub.standing().notes == ("mind this",)
