"""A run that fails says so in its log; a resume takes the word back and ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from wardround.board.index import Index
from wardround.coordinator import Coordinator
from wardround.errors import RunFailed
from wardround.progress import Silent
from wardround.record.rundir import Log
from wardround.run import begin_comparison, begin_run, reopen


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RunFailed("no site answered in round 2"), "no site answered in round 2"),
        (ZeroDivisionError("of somebody's"), "a fault of wardround (ZeroDivisionError)"),
    ],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_told_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, failing: int
) -> None:
    tiny.give_tiny_data(monkeypatch)
    begin_run(tiny.settings(), tmp_path / "whole", Silent()).finish()
    real = Coordinator._round

    def fails(self: Coordinator, ctx: Any, *rest: Any) -> Any:
        if ctx.round == failing:
            raise error
        return real(self, ctx, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_round", fails)
        with pytest.raises(type(error)):
            begin_run(tiny.settings(), tmp_path / "failed", Silent()).finish()
    *_, last = Log(tmp_path / "failed/events.jsonl").rows()
    assert last == {"kind": "failed", "text": reason, "diverged": False}
    found = Index(tmp_path).run("failed")
    assert found is not None
    assert (found.state, found.reason) == ("failed", reason)
    reopen(tmp_path / "failed", Silent()).finish()
    assert tiny.everything(tmp_path / "failed") == tiny.everything(tmp_path / "whole")


def test_a_comparison_of_which_one_method_fails_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.give_tiny_data(monkeypatch)
    real = Coordinator.work

    def fails(self: Coordinator) -> None:
        if self.method.name == "local":
            raise RunFailed("the disk is full")
        real(self)

    monkeypatch.setattr(Coordinator, "work", fails)
    with pytest.raises(RunFailed):
        begin_comparison(tiny.settings(), [("fedavg", {}), ("local", {})], tmp_path / "both", Silent()).finish()
    found = Index(tmp_path).run("both")
    assert found is not None
    assert (found.state, found.reason) == ("failed", "the disk is full")
