"""`wardround audit` on runs and parcels: what is attacked, what is written, how it goes on, how it refuses."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import Captured, cli, empty_place, images, ok, read, save_npz
from wardround.audit import work
from wardround.audit.attacks import Attacker
from wardround.audit.from_run import open_run, targets
from wardround.audit.report import AuditRecord
from wardround.cli import main
from wardround.coordinator import Coordinator
from wardround.exchange.bundle import Bundle
from wardround.learn.device import Device
from wardround.progress import NO_PROGRESS

CPU = Device(torch.device("cpu"), 1)
STUDY = (
    *("--data", "phantoms:160", "--sites", "2", "--partition", "iid", "--epochs", "1", "--device", "cpu", "--quiet"),
    *("--set", "model.width=2", "--set", "train.batch=16"),
)
FAST = ("--shadows", "1", "--decoder-epochs", "1", "--inversion-steps", "2", "--most", "40", "--device", "cpu")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Bundle]]]:
    """Runs of three methods, and the answers that really left."""
    root, sent = tmp_path_factory.mktemp("runs"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("wardround.run.write_report", lambda result, path: None)
        count = Coordinator._count
        for method, rounds in (("fedmp", "1"), ("fedavg", "2"), ("local", "1")):
            bundles: list[Bundle] = []

            def watched(self: Coordinator, bundle: Bundle, bundles: list[Bundle] = bundles) -> None:
                bundles.append(bundle)
                count(self, bundle)

            patch.setattr(Coordinator, "_count", watched)
            assert main(["run", *STUDY, "--rounds", rounds, "--set", f"method={method}", "--out", method]) == 0
            sent[method] = [bundle for bundle in bundles if bundle.envelope.kind == "answer"]
    return root, sent


@pytest.fixture
def here(runs: tuple[Path, Any], place: Path) -> Path:
    shutil.copytree(runs[0], place, dirs_exist_ok=True)
    return place


def refused(capsys: Captured, *arguments: str) -> str:
    code, _, err = cli(capsys, "audit", *arguments)
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_one_round_gives_the_very_bundle_that_left(here: Path, runs: tuple[Path, dict[str, list[Bundle]]]) -> None:
    found = open_run(here / "fedmp", None, None, NO_PROGRESS)
    again = [target.bundle.sha256() for target in targets(found, found.study.sites, CPU, NO_PROGRESS)]
    assert again == [bundle.sha256() for bundle in runs[1]["fedmp"]]


def test_everything_that_left_is_attacked(here: Path, capsys: Captured) -> None:
    out = ok(capsys, "audit", "fedmp", *FAST)
    assert "stays at the site" in out
    record = AuditRecord.from_json((here / "fedmp/audit/audit.json").read_bytes())
    assert [audit.site for audit in record.sites] == ["site-1", "site-2"]
    attacks = {group.group: [attack.name for attack in group.attacks] for group in record.sites[0].groups}
    assert attacks == {
        "parameters": ["loss-threshold", "lira-offline", "model-inversion"],
        "embeddings": ["decoder"],
        "prototypes": ["prototypes", "decoded-prototypes"],
        "size": ["stated"],
    }
    (means,) = (attack for group in record.averaged for attack in group.attacks if attack.name == "stated")
    assert means.figures[0].value == np.mean(
        [len(s.train) for s in open_run(here / "fedmp", None, None, NO_PROGRESS).federation.sites]
    )
    page = (here / "fedmp/audit/audit.html").read_text()
    assert page.count("This page shows patients") == 1
    assert page.count("data:image/png;base64,") == 2 * (3 * 8 + 2 * 8 + 2 * 8)  # decoder, inversion, decoded prototypes
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page
    assert stat.S_IMODE((here / "fedmp/audit/audit.html").stat().st_mode) == 0o600
    assert not (here / "fedmp/audit/parts").exists()


def test_several_rounds_are_asked_once_more_and_say_so(here: Path, capsys: Captured) -> None:
    ok(capsys, "audit", "fedavg", "--site", "site-2", "--attacks", "loss-threshold,stated", *FAST)
    record = AuditRecord.from_json((here / "fedavg/audit/audit.json").read_bytes())
    assert [audit.site for audit in record.sites] == ["site-2"]
    assert [g.group for g in record.sites[0].groups] == ["parameters", "size"]
    assert "round 2 came once more" in record.notes["site-2"][0]


def test_a_method_that_sends_nothing_has_its_kept_model_attacked(here: Path, capsys: Captured) -> None:
    out = ok(capsys, "audit", "local", "--out", "elsewhere", "--attacks", "loss-threshold", *FAST)
    record = AuditRecord.from_json((here / "elsewhere/audit.json").read_bytes())
    assert [g.group for g in record.sites[0].groups] == ["predictor (stays at the site)"]
    assert "local sends nothing" in out


def test_an_audit_that_was_stopped_goes_on(here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    ok(capsys, "audit", "fedmp", "--out", "whole", *FAST)
    ran: list[str] = []

    def stop_at_the_decoder(self: Attacker) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Attacker, "_decoder", stop_at_the_decoder)
        assert cli(capsys, "audit", "fedmp", *FAST)[0] == 130
    assert not (here / "fedmp/audit/audit.json").exists()
    for name in ("_loss", "_lira", "_inversion", "_decoder"):
        first: Any = getattr(Attacker, name)
        monkeypatch.setattr(Attacker, name, lambda self, first=first, name=name: (ran.append(name), first(self))[1])
    ok(capsys, "audit", "fedmp", *FAST)
    assert ran == ["_decoder", "_loss", "_lira", "_inversion", "_decoder"]  # the first site's three were stored
    assert read(here / "fedmp/audit/audit.json") == read(here / "whole/audit.json")
    assert (here / "fedmp/audit/audit.html").read_bytes() == (here / "whole/audit.html").read_bytes()


def test_a_damaged_part_is_done_again(here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("audit", "local", "--attacks", "loss-threshold", *FAST)
    with monkeypatch.context() as patch:
        patch.setattr(work, "write_page", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli(capsys, *arguments)[0] == 130
    for part in (here / "local/audit/parts").iterdir():
        part.write_bytes(part.read_bytes()[:40])
    ok(capsys, *arguments)
    assert len(AuditRecord.from_json((here / "local/audit/audit.json").read_bytes()).sites) == 2


def test_refusals_of_a_run(here: Path, capsys: Captured) -> None:
    assert "there is no nowhere" in refused(capsys, "nowhere")
    assert "no attack 'decodr'; did you mean decoder?" in refused(capsys, "local", "--attacks", "decodr")
    assert "no attack 'x'; known are loss-threshold" in refused(capsys, "local", "--attacks", "x")
    assert "no site 'site-9'" in refused(capsys, "local", "--site", "site-9", *FAST)
    assert "hashes differ" in refused(capsys, "local", "--data", "phantoms:168", *FAST)
    (here / "local/result.json").unlink()
    assert "go on with: wardround resume" in refused(capsys, "local", *FAST)
    assert not (here / "local/audit/audit.json").exists()
    ok(capsys, "audit", "fedavg", "--attacks", "stated", *FAST)
    assert "holds an audit already" in refused(capsys, "fedavg", *FAST)


def test_a_comparison_is_audited_method_by_method(here: Path, capsys: Captured) -> None:
    for method in ("fedavg", "local"):
        (here / "both" / method).mkdir(parents=True)
        (here / "both" / method / "settings.json").touch()
    (here / "both/comparison.json").touch()
    assert "audit one of them: both/fedavg, both/local" in refused(capsys, "both", *FAST)


# Parcels --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def outbox(place: Path, capsys: Captured) -> Path:
    """A site's folder with its answer in the outbox, and another study beside it."""
    new = (
        *(
            "--classes",
            "ash,birch,cedar,durmast",
            "--size",
            "8",
            "--method",
            "fedavg",
            "--rounds",
            "1",
            "--epochs",
            "1",
        ),
        *("--set", "model.width=2", "--set", "train.batch=4"),
    )
    pixels, labels = images()
    tests = np.random.default_rng(5).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    save_npz(place / "images.npz", test_images=tests, test_labels=np.arange(24) % 4)
    save_npz(
        place / "fewer.npz",
        train_images=pixels[:20],
        train_labels=labels[:20],
        test_images=tests,
        test_labels=np.arange(24) % 4,
    )
    ok(capsys, "key", "new", "site.key")
    for name, seed in (("study", 0), ("other", 1)):
        ok(capsys, "study", "new", f"{name}.toml", *new, "--sites", "north", "--set", f"seed={seed}")
        ok(capsys, "study", "add-site", f"{name}.toml", "north", "site.pub")
    ok(capsys, "site", "train", "study.toml", "--data", "images.npz")
    (parcel,) = (place / "outbox").iterdir()
    return parcel


def test_a_parcel_is_audited_before_it_leaves(outbox: Path, capsys: Captured) -> None:
    ok(capsys, "audit", str(outbox), "--data", "images.npz", *FAST)
    assert list(outbox.parent.iterdir()) == [outbox]  # what lies in the outbox is carried out
    record = AuditRecord.from_json((Path(f"{outbox.stem}-audit") / "audit.json").read_bytes())
    (audit,) = record.sites
    assert (audit.site, audit.method) == ("north", "fedavg")
    assert {group.group for group in audit.groups} == {"parameters", "size"}
    assert record.source == outbox.name


def test_refusals_of_a_parcel(outbox: Path, capsys: Captured) -> None:
    parcel = str(outbox)
    assert "name them with --data" in refused(capsys, parcel)
    assert "there is no missing.toml" in refused(capsys, parcel, "--data", "images.npz", "--study", "missing.toml")
    assert "another study" in refused(capsys, parcel, "--data", "images.npz", "--study", "other.toml")
    assert "is of north, not of south" in refused(capsys, parcel, "--data", "images.npz", "--site", "south")
    assert "was trained on 36 images, and 18" in refused(capsys, parcel, "--data", "fewer.npz")
    outbox.write_bytes(outbox.read_bytes()[:-1])
    assert "cut off" in refused(capsys, parcel, "--data", "images.npz")
