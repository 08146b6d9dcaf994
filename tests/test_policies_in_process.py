"""The sites' policies in a simulation: what they refuse does not leave, and the others go on."""

from pathlib import Path

import pytest

from tiny import coordinate, study, watch_bundles, watch_fits
from wardround.coordinator import Coordinator
from wardround.errors import BadInput, RunFailed
from wardround.exchange.policy import bundle_bytes
from wardround.methods.fedavg import FedAvg


def policy(tmp_path: Path, text: str) -> str:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    return str(file)


def test_a_site_that_refuses_the_plan_does_not_train_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, crossed = watch_fits(monkeypatch), watch_bundles(monkeypatch)
    rules = policy(tmp_path, 'methods = ["fedprox"]')
    result = coordinate(tmp_path / "run", FedAvg(), policies={"site-2": rules})
    assert {fit.label.partition(",")[0] for fit in fits} == {"site-1", "site-3"}
    assert {b.envelope.site for b in crossed if b.envelope.kind == "answer"} == {"site-1", "site-3"}
    texts = [note["text"] for note in result["notes"]]
    assert any("site-2 did not answer in round 1: policy rule methods" in text for text in texts)


def test_what_left_in_earlier_rounds_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared are two rounds of tensors; names and shapes come on top, and show only once a bundle is there."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "free", FedAvg())
    one = bundle_bytes(next(b for b in crossed if b.envelope.kind == "answer"))
    rules = policy(tmp_path, f"max_bytes_per_study = {2 * one - 1}")
    result = coordinate(tmp_path / "run", FedAvg(), policies={"site-1": rules})
    texts = [note["text"] for note in result["notes"]]
    assert any("site-1 did not answer in round 2: policy rule max_bytes_per_study" in text for text in texts)
    assert not any("in round 1" in text for text in texts)


def test_what_left_before_a_stop_counts_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "free", FedAvg())
    one = bundle_bytes(next(b for b in crossed if b.envelope.kind == "answer"))
    rules = {"site-1": policy(tmp_path, f"max_bytes_per_study = {2 * one - 1}")}
    turn, rounds = Coordinator._round, []

    def stopping(self: Coordinator, ctx: object, *rest: object) -> object:
        rounds.append(ctx)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return turn(self, ctx, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Coordinator, "_round", stopping)
    with pytest.raises(KeyboardInterrupt):
        coordinate(tmp_path / "run", FedAvg(), policies=rules)
    result = coordinate(tmp_path / "run", FedAvg(), policies=rules)
    assert any("policy rule max_bytes_per_study" in note["text"] for note in result["notes"])


def test_where_all_refuse_the_run_ends_and_says_why(tmp_path: Path) -> None:
    rules = policy(tmp_path, "max_bytes_per_round = 10")
    with pytest.raises(RunFailed, match=r"no site answered in round 1 \(site-1: policy rule max_bytes_per_round"):
        coordinate(tmp_path / "run", FedAvg(), policies=dict.fromkeys(("site-1", "site-2", "site-3"), rules))


def test_a_policy_of_no_site_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="policies names 'site-9', which is no site"):
        study(policies={"site-9": policy(tmp_path, "")})


def test_a_policy_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read the policy"):
        coordinate(tmp_path / "run", FedAvg(), policies={"site-1": str(tmp_path / "none.toml")})


def test_a_policy_that_allows_changes_no_study(tmp_path: Path) -> None:
    assert study(policies={"site-1": policy(tmp_path, "")}).id == study().id
