"""The commands of a study between sites: what they print, what they leave, and how they refuse."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Captured, cli, empty_place, figures, images, ok, read, save_npz
from remote.parties import predictor_hash
from tiny import deployed
from wardround.agreement import read_agreement
from wardround.coordinator import Coordinator
from wardround.deploy.model_file import read_model
from wardround.remote.cli import say

NEW = (
    *("--classes", "ash,birch,cedar,durmast", "--size", "8", "--method", "fedavg", "--rounds", "1", "--epochs", "1"),
    *("--sites", "north,south", "--set", "model.width=2", "--set", "train.batch=4"),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hospitals and a coordinator who hold one agreement; nobody has trained yet."""
    root = tmp_path_factory.mktemp("begun")
    pixels, _ = images()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        from wardround.cli import main

        assert main(["study", "new", "hub/study.toml", *NEW]) == 0
        for number, name in enumerate(("north", "south")):
            (root / name).mkdir()
            save_npz(root / f"{name}.npz", train_images=pixels[::-1].copy() if number else pixels)
            assert main(["key", "new", f"{name}/site.key"]) == 0
            assert main(["study", "add-site", "hub/study.toml", name, f"{name}/site.pub"]) == 0
        for name in ("north", "south"):
            shutil.copy(root / "hub" / "study.toml", root / name)
    return root


@pytest.fixture
def three(begun: Path, place: Path) -> Path:
    shutil.copytree(begun, place, dirs_exist_ok=True)
    return place


def refused(capsys: Captured, *arguments: str) -> str:
    """The one line of a refusal, with exit code 2."""
    code, _, err = cli(capsys, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def train(capsys: Captured, site: str) -> str:
    return ok(capsys, "site", "train", f"{site}/study.toml", "--data", f"{site}.npz", "--device", "cpu")


def hub(capsys: Captured, *arguments: str) -> str:
    return ok(capsys, "hub", *arguments, "--study", "hub/study.toml")


# A whole study --------------------------------------------------------------------------------------------------------


def test_models_at_home_are_those_of_the_rehearsal(three: Path, capsys: Captured) -> None:
    for name in ("north", "south"):
        assert "parameters" in train(capsys, name)
    assert "2 of 2 answers" in hub(capsys, "collect", "north/outbox", "south/outbox")
    assert "round 1: 2 of 2 answers" in hub(capsys, "status")
    assert "over" in hub(capsys, "step", "--device", "cpu")
    said = ok(capsys, "study", "rehearse", "hub/study.toml", "--data", "north=north.npz", "--data", "south=south.npz")
    assert "fedavg" in said
    for name in ("north", "south"):
        delivery = f"hub/outbox/study-{name}-round1-delivery.parcel"
        study = ("--study", f"{name}/study.toml")
        said = ok(capsys, "site", "receive", delivery, *study, "--data", f"{name}.npz", "--device", "cpu")
        assert "on its own 40 test images" in said
        model = three / name / "models" / "study" / "model.safetensors"
        _, predictor = read_model(model.read_bytes(), "model")
        assert predictor_hash(predictor) == predictor_hash(deployed(three / "hub" / "study-rehearsal", name))
        card = json.loads((model.parent / "model_card.json").read_text())
        assert card["about"]["origin"]["site"] == name


REHEARSE = (
    *("study", "rehearse", "hub/study.toml", "--data", "south=south.npz", "--data", "north=north.npz"),
    *("--device", "cpu", "--out", "rehearsal"),
)


def test_a_rehearsal_records_the_images_it_ran_on_and_is_repeated_on_them(three: Path, capsys: Captured) -> None:
    ok(capsys, *REHEARSE)
    data = read("rehearsal/settings.json")["data"]
    assert data["files"] == {"north": "north.npz", "south": "south.npz"}
    assert (data["sites"], data["size"]) == (2, 8)
    again = read("rehearsal/result.json")["command"]
    assert again == (
        "wardround study rehearse rehearsal/study.toml --data north=north.npz --data south=south.npz "
        "--out rehearsal-again --device cpu"
    )
    ok(capsys, *shlex.split(again)[1:])
    assert figures("rehearsal-again") == figures("rehearsal")
    assert read("rehearsal-again/data.json") == read("rehearsal/data.json")


def test_a_rehearsal_that_was_stopped_goes_on(three: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: Coordinator) -> None:
        raise KeyboardInterrupt

    ok(capsys, *REHEARSE[:-1], "straight")
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "work", stopped)
        assert cli(capsys, *REHEARSE)[0] == 130
    assert "go on with: wardround resume rehearsal" in refused(capsys, *REHEARSE)
    ok(capsys, "resume", "rehearsal", "--quiet")
    assert figures("rehearsal") == figures("straight")


def test_a_rehearsal_on_other_images_does_not_go_on(three: Path, capsys: Captured) -> None:
    ok(capsys, *REHEARSE)
    shutil.copy("north.npz", "south.npz")
    assert "have changed since rehearsal was begun" in refused(capsys, "resume", "rehearsal")


def test_a_rehearsal_is_audited_on_its_images(three: Path, capsys: Captured) -> None:
    pixels, _ = images()
    for name in ("north", "south"):
        save_npz(three / f"{name}.npz", test_images=255 - pixels)
    ok(capsys, *REHEARSE)
    ok(capsys, "audit", "rehearsal", "--site", "north", "--attacks", "loss-threshold", "--device", "cpu")
    (audit,) = read("rehearsal/audit/audit.json")["sites"]
    assert (audit["site"], audit["study"]) == ("north", read_agreement(three / "hub" / "study.toml").id)


def test_requests_are_received_and_answered(three: Path, capsys: Captured) -> None:
    for name in ("north", "south"):
        text = (three / name / "study.toml").read_text().replace("rounds = 1", "rounds = 2")
        (three / name / "study.toml").write_text(text)
        (three / "hub" / "study.toml").write_text(text)
    for name in ("north", "south"):
        train(capsys, name)
    hub(capsys, "collect", "north/outbox", "south/outbox")
    assert "for a site: hub/outbox/study-north-round2-request.parcel" in hub(capsys, "step", "--device", "cpu")
    request = "hub/outbox/study-north-round2-request.parcel"
    said = ok(capsys, "site", "receive", request, "--study", "north/study.toml")
    assert "request of round 2, stored" in said
    assert "round 2" in train(capsys, "north")


# Keys and studies -----------------------------------------------------------------------------------------------------


def test_keys(place: Path, capsys: Captured) -> None:
    said = ok(capsys, "key", "new", "mine.key")
    text = (place / "mine.pub").read_text().strip()
    (fingerprint,) = (line.split()[1] for line in said.splitlines() if line.startswith("fingerprint"))
    for given in ("mine.key", "mine.pub", text):
        assert ok(capsys, "key", "show", given) == f"{text}\nfingerprint: {fingerprint}\n"
    assert "exists" in refused(capsys, "key", "new", "mine.key")
    assert "cannot read the public key" in refused(capsys, "key", "show", "none.pub")
    assert "not a public key" in refused(capsys, "key", "show", "wardround-key-1 short")


def test_a_public_key_that_an_editor_of_windows_has_saved(place: Path, capsys: Captured) -> None:
    ok(capsys, "key", "new", "site.key")
    text = (place / "site.pub").read_text()
    (place / "SITE2.PUB").write_bytes(b"\xef\xbb\xbf" + text.strip().encode() + b"\r\n")
    assert ok(capsys, "key", "show", "SITE2.PUB") == ok(capsys, "key", "show", "site.key")


def test_a_new_key_takes_nothing_of_another_away(place: Path, capsys: Captured) -> None:
    assert "would be the name of both halves" in refused(capsys, "key", "new", "site.pub")
    assert not (place / "site.pub").exists()
    ok(capsys, "key", "new", "site.key")
    before = (place / "site.pub").read_bytes()
    assert "site.pub exists, and may be the half of another key" in refused(capsys, "key", "new", "site.pem")
    assert (place / "site.pub").read_bytes() == before
    assert not (place / "site.pem").exists()


def test_a_new_study(place: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wardround.remote.register.utc_now", lambda: "2027-03-31T23:59:00+00:00")
    late = refused(capsys, "study", "new", *NEW, "--deadline", "2027-03-30")
    assert "--deadline 2027-03-30 has passed, as it is 2027-03-31 (UTC)" in late
    assert list(place.iterdir()) == []
    said = ok(capsys, "study", "new", *NEW, "--name", "leaves", "--quorum", "1", "--deadline", "2027-03-31")
    assert "coordinator.key" in said
    text = (place / "study.toml").read_text()
    assert 'name = "leaves"' in text
    assert "deadline = 2027-03-31" in text
    assert "exists already" in refused(capsys, "study", "new", *NEW)
    key = (place / "coordinator.key").read_bytes()
    ok(capsys, "study", "new", "second.toml", *NEW)
    assert (place / "coordinator.key").read_bytes() == key


def test_settings_come_from_a_file_a_preset_and_flags(place: Path, capsys: Captured) -> None:
    (place / "mine.toml").write_text('method = "fedprox"\nseed = 3\n[train]\nlr = 0.2\n[set.fedprox]\nmu = 0.7\n')
    said = ok(capsys, "study", "new", "--classes", "a,b", "--sites", "x,y", "--settings", "mine.toml", "--seed", "4")
    assert "left out" not in said
    text = (place / "study.toml").read_text()
    for line in ('method = "fedprox"', "seed = 4", "lr = 0.2", "mu = 0.7"):
        assert line in text
    ok(capsys, "study", "new", "b.toml", "--classes", "a,b", "--method", "fedbicross", "--preset", "demo")
    assert "trajectories = 3" in (place / "b.toml").read_text()
    ok(capsys, "study", "new", "c.toml", "--classes", "a,b", "--method", "fedprox", "--set", "mu=0.3")
    assert "mu = 0.3" in (place / "c.toml").read_text()


def test_settings_that_are_not_agreed_on_are_named(place: Path, capsys: Captured) -> None:
    (place / "mine.toml").write_text(
        'name = "blood"\ndevice = "cpu"\nevaluate_every = 5\nworkers = 1\nseed = 3\n[data]\nsource = "phantoms:96"\n'
        "sites = 5\nval_share = 0.2\nby_patient = true\n"
    )
    said = ok(capsys, "study", "new", "--classes", "a,b", "--settings", "mine.toml")
    assert "Not agreed on, so left out: data.source, device, evaluate_every, workers. Each side" in said
    agreed = read_agreement(place / "study.toml")
    assert (agreed.name, agreed.settings.seed, agreed.task.val_share, agreed.task.by_patient) == ("blood", 3, 0.2, True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--classes is missing; name the classes in order"),
        (["--classes", " , "], "--classes is missing; name the classes in order"),
        (["--classes", "a"], "task.classes = ['a'] cannot be used: it should be a list of 2 or more"),
        (
            ["--classes", "a,b", "--name", "my study"],
            "'my study' cannot be used: it should have letters, digits, ",
        ),
        (["--classes", "a,b", "--sites", "no/rth"], "is no name for a site"),
        (["--classes", "a,b", "--sites", "x,y,x"], "--sites names x twice"),
        (["--classes", "a,b", "--deadline", "0"], "a number of days from 1 to 3650"),
        (["--classes", "a,b", "--method", "nothing"], "there is no method 'nothing'"),
        (["--classes", "a,b", "--deadline", "soon"], "neither a number of days nor a date"),
        (["--classes", "a,b", "--sites", "x", "--quorum", "2"], "the quorum of 2 is more than the 1 sites"),
        (["--classes", "a,b", "--set", "train.lr=-1"], "train.lr = -1"),
        (["--classes", "a,b", "--method", "fedprox", "--set", "muu=1"], "fedprox.muu"),
    ],
)
def test_a_study_that_cannot_be_made_leaves_nothing(
    arguments: list[str], complaint: str, place: Path, capsys: Captured
) -> None:
    assert complaint in refused(capsys, "study", "new", *arguments)
    assert list(place.iterdir()) == []


def test_show_and_its_page(three: Path, capsys: Captured) -> None:
    said = ok(capsys, "study", "show", "hub/study.toml")
    for heading in ("WHAT LEAVES A HOSPITAL", "WHAT AN ATTACKER COULD TRY WITH IT", "WHAT COMES BACK", "KEYS"):
        assert heading in said
    assert ok(capsys, "study", "show", "hub/study.toml", "--markdown").startswith("# Study study")
    assert "there is no nowhere.toml here" in refused(capsys, "study", "show", "nowhere.toml")


def test_add_site_and_revoke_key(three: Path, capsys: Captured) -> None:
    ok(capsys, "key", "new", "new.key")
    study = "hub/study.toml"
    assert "has a key in this study already" in refused(capsys, "study", "add-site", study, "north", "new.pub")
    shutil.copy(study, "other.toml")
    said = ok(capsys, "study", "add-site", "other.toml", "nort", "new.pub")
    assert "nort is new in the study, which now has: nort, north, south." in said
    before = (three / "hub" / "study.toml").read_bytes()
    said = ok(capsys, "study", "revoke-key", study, "north", "new.pub")
    assert "Compare this fingerprint" in said
    assert "north: " in ok(capsys, "study", "show", study)
    assert "(a new key)" in ok(capsys, "study", "show", study)
    assert "Nothing of south is taken" in ok(capsys, "study", "revoke-key", study, "south")
    assert "south: revoked, none in its place" in ok(capsys, "study", "show", study)
    assert (three / "hub" / "study.toml").read_bytes() == before
    train(capsys, "south")
    code, out, _ = cli(capsys, "hub", "collect", "south/outbox", "--study", study)
    assert code == 2
    assert "refused: revoked key: " in out
    assert "there is no 'west'" in refused(capsys, "study", "revoke-key", study, "west")
    coordinator = ok(capsys, "key", "show", "hub/coordinator.key").splitlines()[0]
    for key, owner in (("south/site.pub", "south"), ("new.pub", "north"), (coordinator, "coordinator")):
        assert f"this is the key of {owner} already" in refused(capsys, "study", "add-site", study, "east", key)
    assert (three / "hub" / "study.toml").read_bytes() == before


# At a site ------------------------------------------------------------------------------------------------------------


def test_inspect_shows_and_verifies(three: Path, capsys: Captured) -> None:
    train(capsys, "north")
    parcel = three / "north" / "outbox" / "study-north-round1-answer.parcel"
    study = ("--study", "north/study.toml")
    said = ok(capsys, "site", "inspect", str(parcel), *study, "--tensors")
    for word in ("verified", "parameters", "statistics", "counters", "size/images  one number  int64", "no figures"):
        assert word in said
    data = bytearray(parcel.read_bytes())
    data[-1] ^= 1
    parcel.write_bytes(data)
    assert "is not the one that was signed" in refused(capsys, "site", "inspect", str(parcel), *study)
    parcel.write_bytes(b"hello")
    assert "is not a parcel" in refused(capsys, "site", "inspect", str(parcel), *study)


def test_policy_is_written_then_checked_and_then_holds(three: Path, capsys: Captured) -> None:
    study = ("--study", "north/study.toml")
    ok(capsys, "site", "policy", *study)
    assert "lets study study pass" in ok(capsys, "site", "policy", *study)
    path = three / "north" / "policy.toml"
    path.write_text('methods = ["local"]\n')
    assert "policy rule methods" in refused(capsys, "site", "policy", *study)
    arguments = ("site", "train", "north/study.toml", "--data", "north.npz")
    assert "policy rule methods" in refused(capsys, *arguments)
    assert not (three / "north" / "outbox").exists()
    path.write_text("metods = 1\n")
    assert "there is no rule 'metods'" in refused(capsys, *arguments)


@pytest.mark.skipif(os.name != "posix", reason="links need rights on Windows")
@pytest.mark.parametrize("target", ["elsewhere.toml", "policy.toml"], ids=["nowhere", "itself"])
def test_rules_that_are_out_of_reach_are_not_the_default_rules(three: Path, capsys: Captured, target: str) -> None:
    (three / "north" / "policy.toml").symlink_to(target)
    arguments = ("site", "train", "north/study.toml", "--data", "north.npz")
    assert "cannot read the policy north/policy.toml" in refused(capsys, *arguments)
    assert "cannot read the policy" in refused(capsys, "site", "policy", "--study", "north/study.toml")
    assert (three / "north" / "policy.toml").is_symlink()
    assert not (three / "north" / "outbox").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["site", "train", "north/study.toml"], "name them with --data"),
        (["site", "train", "north/study.toml", "--data", "nowhere.npz"], "does not exist"),
        (
            ["site", "train", "north/study.toml", "--data", "north.npz", "--key", "none.key"],
            "cannot read none.key",
        ),
        (
            ["site", "train", "north/study.toml", "--data", "north.npz", "--key", "hub/coordinator.key"],
            "no site of study",
        ),
        (["site", "train"], "there is no study.toml here"),
        (["site", "receive", "none.parcel", "--study", "north/study.toml"], "cannot read none.parcel"),
        (["hub", "collect", "hub", "--study", "hub/study.toml"], "there is no answer in what was named"),
        (["hub", "step", "--study", "hub/study.toml"], "quorum: round 1 has 0 of the 2 answers"),
        (["hub", "withdraw", "west", "--study", "hub/study.toml"], "there is no site 'west'"),
        (["hub", "reopen", "--study", "hub/study.toml"], "no closed round: "),
        (["study", "rehearse", "hub/study.toml", "--data", "west=north.npz"], "is not SITE=PATH"),
        (["study", "rehearse", "hub/study.toml", "--data", "north=north.npz"], "needs the images of every site"),
    ],
)
def test_bad_input(arguments: list[str], complaint: str, three: Path, capsys: Captured) -> None:
    assert complaint in refused(capsys, *arguments)


# At the hub -----------------------------------------------------------------------------------------------------------


def test_one_bad_parcel_does_not_keep_the_others_out(three: Path, capsys: Captured) -> None:
    train(capsys, "north")
    (three / "bad-answer.parcel").write_bytes(b"\x1b[2J" * 10)
    parcels = ("bad-answer.parcel", "north/outbox/study-north-round1-answer.parcel")
    code, out, err = cli(capsys, "hub", "collect", *parcels, "--study", "hub/study.toml")
    assert code == 2
    assert "refused: bad-answer.parcel is not a parcel" in out
    assert re.search(r"stored: north, round 1, says [1-9][0-9,]* images, ", out)
    assert "1 of 2 parcels refused; the others are stored" in err
    said = refused(capsys, "hub", "collect", parcels[0], "--study", "hub/study.toml")
    assert "1 of 1 parcels refused, and nothing is stored" in said
    assert "already here: north" in hub(capsys, "collect", "north/outbox")


def test_a_copy_that_a_file_manager_has_renamed_is_found_in_its_folder(three: Path, capsys: Captured) -> None:
    train(capsys, "north")
    (made,) = (three / "north" / "outbox").iterdir()
    made.rename(made.with_name("study-north-round1-answer (1).parcel"))
    assert "stored: north, round 1" in hub(capsys, "collect", "north/outbox")


def test_a_refusal_names_the_file_that_was_given(three: Path, capsys: Captured) -> None:
    train(capsys, "north")
    (three / "north" / "study.toml").rename(three / "north" / "old.toml")
    other = (three / "north" / "old.toml").read_text().replace("seed = 0", "seed = 1")
    (three / "hub" / "study.toml").write_text(other)
    code, out, _ = cli(capsys, "hub", "collect", "north/outbox", "--study", "hub/study.toml")
    assert code == 2
    assert "refused: another study: " in out
    assert "(north/outbox/study-north-round1-answer.parcel)" in out


def test_only_a_site_that_took_part_in_the_last_round_is_said_to_be_in_it(three: Path, capsys: Captured) -> None:
    (three / "hub" / "study.toml").unlink()
    ok(capsys, "study", "new", "hub/study.toml", *NEW, "--quorum", "1", "--rounds", "2")
    for name in ("north", "south"):
        ok(capsys, "study", "add-site", "hub/study.toml", name, f"{name}/site.pub")
    shutil.copy(three / "hub" / "study.toml", three / "north")
    train(capsys, "north")
    hub(capsys, "collect", "north/outbox")
    assert "round 1: 1 of 2 answers, 1 needed" in hub(capsys, "status")
    hub(capsys, "step", "--now", "--device", "cpu")
    assert "was made with it" not in hub(capsys, "withdraw", "south")
    assert "was made with it" in hub(capsys, "withdraw", "north")


def test_withdraw_and_reopen(three: Path, capsys: Captured) -> None:
    for name in ("north", "south"):
        train(capsys, name)
    hub(capsys, "collect", "north/outbox", "south/outbox")
    hub(capsys, "step", "--device", "cpu")
    said = hub(capsys, "withdraw", "south", "--redo")
    assert "south has withdrawn" in said
    assert "Next: wardround hub step" in said
    hub(capsys, "step", "--device", "cpu")
    assert [file.name for file in (three / "hub" / "outbox").iterdir()] == ["study-north-round1-delivery.parcel"]
    assert "1 of 1 answers" in hub(capsys, "reopen")


@pytest.mark.parametrize("name", ["my hospital", "it's here"])
def test_a_command_that_is_printed_can_be_copied(three: Path, capsys: Captured, name: str) -> None:
    (three / "north").rename(three / name)
    said = ok(capsys, "site", "train", f"{name}/study.toml", "--data", "north.npz", "--device", "cpu")
    (line,) = (line for line in said.splitlines() if line.startswith("Look closer with: "))
    program, *arguments = shlex.split(line.removeprefix("Look closer with: "))
    assert program == "wardround"
    assert "verified" in ok(capsys, *arguments)


def test_what_is_printed_cannot_steer_the_terminal(capsys: Captured) -> None:
    say("  figure \x1b[31mred\x07 = 1\nsecond")
    out = capsys.readouterr().out
    assert out == "  figure \\x1b[31mred\\x07 = 1 second\n"


def test_a_group_without_a_command_shows_its_help(capsys: Captured) -> None:
    for name in ("key", "study", "site", "hub"):
        assert f"wardround {name} [OPTIONS] [COMMAND]" in ok(capsys, name)
