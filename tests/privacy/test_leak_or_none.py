"""The audit can tell a leak from none: a `local` model over-trained on 500 phantoms, and the same under ε = 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from wardround.audit.attacks import ATTACKS, Effort
from wardround.audit.from_run import FinishedRun, targets
from wardround.audit.report import Attack
from wardround.audit.work import work
from wardround.data.federation import Federation, LocalTest, Site
from wardround.data.phantoms import phantoms
from wardround.errors import BadInput
from wardround.learn.device import Device
from wardround.methods.fedavg import FedAvg
from wardround.methods.local import Local
from wardround.privacy import secret as secrets
from wardround.progress import NO_PROGRESS

CPU = Device(torch.device("cpu"), 1)
OVER_TRAINED: dict[str, Any] = {
    "method": "local",
    "rounds": 1,
    "model": {"name": "small-gn", "width": 8},
    "train": {"epochs": 40, "batch": 25, "lr": 0.05, "weight_decay": 0.0},
}


@pytest.fixture(scope="module")
def data() -> Federation:
    drawn = phantoms(n_train=500, n_test=1000)
    none = drawn.test.take(torch.arange(0))
    site = Site("ward", drawn.train, none, LocalTest(drawn.test, None))
    words = ("by hand", "hash", "plain accuracy", "plain accuracy", "phantoms")
    return Federation((site,), drawn.test, drawn.test.classes, *words)


def audited(path: Path, data: Federation, **changes: Any) -> Attack:
    """The loss threshold against a `local` model."""
    study = tiny.study(data, **OVER_TRAINED, **changes)
    tiny.coordinate(path, Local(), data, **OVER_TRAINED, **changes)
    found = FinishedRun(path, study, data, Local())
    record = work(
        "run", targets(found, ["ward"], CPU, NO_PROGRESS), ATTACKS[:1], Effort(), 0, path / "audit", CPU, NO_PROGRESS
    )
    ((group,),) = (audit.groups for audit in record.sites)
    (attack,) = group.attacks
    assert record.privacy["ward"].keys() == ({"epsilon", "delta"} if changes else set())
    weak = changes.get("privacy", {}).get("delta", 0.0) >= 1 / 500
    assert any("is not below 1/n at ward (500 training images)" in note for note in record.notes["ward"]) == weak
    return attack


def test_over_training_leaks_and_privacy_stops_it(
    tmp_path: Path, data: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak = audited(tmp_path / "open", data)
    assert leak.figure("auc").value is not None
    assert leak.figure("auc").value >= 0.7  # type: ignore[operator]
    monkeypatch.setattr(secrets, "keep_secret", lambda path: secrets.Secret(bytes(range(32))))
    none = audited(tmp_path / "private", data, privacy={"epsilon": 4.0, "delta": 2e-3})
    assert none.figure("auc").value <= 0.55  # type: ignore[operator]


def test_without_its_secret_a_private_run_cannot_be_asked_again(tmp_path: Path, data: Federation) -> None:
    """A fresh secret would draw other noise, and the audit would be of bytes that never left."""
    method = FedAvg()
    study = tiny.study(data, model={"name": "small-gn", "width": 2}, privacy={"noise": 1.0})
    (tmp_path / "checkpoint").mkdir()
    found = FinishedRun(tmp_path, study, data, method)
    with pytest.raises(BadInput, match=r"there is no .*privacy\.secret, so what this site sent cannot be made again"):
        list(targets(found, ["ward"], CPU, NO_PROGRESS))
    assert not (tmp_path / "privacy.secret").exists()
