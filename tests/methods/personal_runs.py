"""What the tests of methods with something personal share: odd sites, runs that are killed, and what crossed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import everything, federation, give_tiny_data, images, settings
from wardround import run
from wardround.data.federation import Federation, LocalTest
from wardround.exchange.bundle import Bundle
from wardround.progress import Silent
from wardround.record.rundir import RunDir

# With one of three sites asked a round, four rounds ask site-1 and site-2 more than once and site-3 never.
FEW: dict[str, Any] = {"participants": 0.34, "rounds": 4}


def odd_sites() -> Federation:
    """Two classes; a plain site, one with a single image, one with a single class."""
    data = federation((9, 1, 5), classes=2)
    plain, lonely, uniform = data.sites
    only = torch.tensor([1.0, 0.0], dtype=torch.float64)
    train = images(5, seed=7, labels=[0] * 5, classes=2)
    uniform = replace(uniform, train=train, test=LocalTest(uniform.test.images, only))
    return replace(data, sites=(plain, lonely, uniform))


def names_in(bundles: Iterable[Bundle], *kinds: str) -> set[str]:
    """The tensors in bundles of some kinds, or of all."""
    chosen = [bundle for bundle in bundles if not kinds or bundle.envelope.kind in kinds]
    assert chosen
    return {name for bundle in chosen for group in bundle.groups.values() for name in group}


class Killed(BaseException):
    """The end of a process."""


def straight_and_killed(
    patch: pytest.MonkeyPatch, folder: Path, method: str, own: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that a run of three rounds leaves, and what one leaves that is killed and resumed after each round."""
    give_tiny_data(patch)
    study = settings(method=method, set=own, rounds=3, participants=0.67)
    run.begin_run(study, folder / "straight", Silent()).finish()
    commit = RunDir.commit

    def commit_and_die(self: RunDir, point: Any) -> None:
        commit(self, point)
        raise Killed

    job = run.begin_run(study, folder / "killed", Silent())
    for _ in range(2):
        with patch.context() as inner:
            inner.setattr(RunDir, "commit", commit_and_die)
            with pytest.raises(Killed):
                job.finish()
        job = run.reopen(folder / "killed", Silent())
    job.finish()
    return everything(folder / "straight"), everything(folder / "killed")
