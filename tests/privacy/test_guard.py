"""Privacy on every transport: fits, what else leaves, the account, the policy, the record, going on after a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from commands import Captured, cli, empty_place
from remote.parties import OPEN, Parties, agreement
from wardround.coordinator import Coordinator
from wardround.errors import BadInput, RunFailed, SiteFailed
from wardround.exchange.bundle import Bundle, Envelope
from wardround.exchange.parcel import read_manifest
from wardround.exchange.policy import Policy, Privacy, Refused
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.privacy.account import Account, Spent
from wardround.privacy.features import clipped, protected
from wardround.privacy.guard import Guard, guard_for
from wardround.privacy.secret import Secret
from wardround.record.rundir import Log

SECRET = Secret(bytes(range(32)))
PRIVATE: dict[str, Any] = {"model": {"name": "cnn4", "width": 2}, "privacy": {"epsilon": 3.0, "delta": 1e-3}}


def guard(method: str = "fedavg", **changes: Any) -> Guard:
    data = tiny.federation()
    study = tiny.study(data, method=method, **{**PRIVATE, **changes})
    found = guard_for(study, make(method, {}), data.sites[0], SECRET)
    assert found is not None
    return found


# What leaves ----------------------------------------------------------------------------------------------------------


def test_features_are_cut_and_noised_by_the_stated_deviation() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(clipped(rows, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    wide = torch.zeros(400, 50)
    noise = protected(wide, 2.0, 0.25, np.random.default_rng(0))
    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
    assert torch.equal(protected(rows, 1.0, 0.0, np.random.default_rng(0)), clipped(rows, 1.0))
    with pytest.raises(BadInput, match="numbers above 0"):
        protected(rows, 0.0, 1.0, np.random.default_rng(0))


def bundle(groups: dict[str, dict[str, torch.Tensor]]) -> Bundle:
    return Bundle(Envelope("answer", "study", "fedmp", "site-1", 0), groups)


def test_only_what_the_settings_name_is_changed() -> None:
    sent = bundle(
        {
            "embeddings": {"features": torch.full((3, 4), 5.0), "labels": torch.arange(3)},
            "prototypes": {"means": torch.full((4, 4), 5.0), "known": torch.ones(4, dtype=torch.bool)},
            "label_counts": {"counts": torch.tensor([100, 0, 7, 200])},
            "size": {"images": torch.tensor(11)},
        }
    )
    out = guard("fedmp", privacy={"feature_clip": 1.0, "counts_epsilon": 2.0}).outgoing(sent)
    assert out.groups["embeddings"]["features"].norm(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert out.groups["prototypes"]["means"].norm(dim=1).tolist() == pytest.approx([1.0] * 4)
    assert torch.equal(out.groups["embeddings"]["labels"], torch.arange(3))
    counts = out.groups["label_counts"]["counts"]
    assert counts.dtype == torch.int64
    assert set(counts.tolist()) <= {0, 5, 10, 20, 50, 100, 200}
    assert int(out.groups["size"]["images"]) == 11
    assert sent.groups["embeddings"]["features"][0, 0] == 5.0  # what the site itself has stays as it was


def test_the_same_answer_gets_the_same_noise_and_another_one_other_noise() -> None:
    protect = guard("fedmp", privacy={"feature_clip": 1.0, "feature_noise": 1.0})
    first, second = (bundle({"embeddings": {"features": torch.full((3, 4), v)}}) for v in (1.0, 2.0))
    out = [protect.outgoing(b).groups["embeddings"]["features"] for b in (first, first, second)]
    assert torch.equal(out[0], out[1])
    assert not torch.equal(
        out[0] - clipped(torch.full((3, 4), 1.0), 1.0), out[2] - clipped(torch.full((3, 4), 2.0), 1.0)
    )


def test_features_under_another_name_do_not_leave_uncut() -> None:
    protect = guard("fedmp", privacy={"feature_clip": 1.0})
    with pytest.raises(SiteFailed, match="embeddings would leave as it is: it has no tensor 'features'"):
        protect.outgoing(bundle({"embeddings": {"vectors": torch.full((3, 4), 5.0)}}))


# A run ----------------------------------------------------------------------------------------------------------------


def spent(path: Path) -> list[dict[str, Any]]:
    return [row["spent"] for row in Log(path / "events.jsonl").rows() if row["kind"] == "privacy"]


def test_a_run_stays_within_epsilon_and_says_what_it_spent(tmp_path: Path) -> None:
    result = tiny.coordinate(tmp_path / "run", make("fedavg", {}), **PRIVATE)
    rows = spent(tmp_path / "run")
    assert [(row["site"], row["steps"]) for row in rows] == [
        (site, steps) for _ in range(2) for site, steps in (("site-1", 3), ("site-2", 2), ("site-3", 2))
    ]
    first, last = rows[0], rows[3]
    assert 0 < first["epsilon"] < last["epsilon"] <= 3.0
    assert last["epsilon"] > 2.9
    assert [row["site"] for row in result["privacy"]] == ["site-1", "site-2", "site-3"]
    assert result["privacy"][0] == {"method": "fedavg", "site": "site-1", "epsilon": last["epsilon"], "delta": 1e-3}
    assert (tmp_path / "run" / "privacy.secret").stat().st_mode & 0o077 == 0


def test_a_run_that_was_stopped_ends_as_it_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for path in (whole, stopped):
        path.mkdir()
        (path / "checkpoint").mkdir()
        (path / "privacy.secret").write_bytes(bytes(range(32)))
    wanted = tiny.coordinate(whole, make("fedavg", {}), **PRIVATE)
    second: Any = Coordinator._round

    def stop_in_the_second(self: Coordinator, ctx: Any, *rest: Any) -> Any:
        if ctx.round == 1:
            raise KeyboardInterrupt
        return second(self, ctx, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_round", stop_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            tiny.coordinate(stopped, make("fedavg", {}), **PRIVATE)
    found = tiny.coordinate(stopped, make("fedavg", {}), **PRIVATE)
    assert tiny.figures(found) == tiny.figures(wanted)
    assert spent(stopped) == spent(whole)
    assert tiny.predictor_bytes(stopped) == tiny.predictor_bytes(whole)


def test_another_secret_gives_another_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tiny.coordinate(tmp_path / name, make("fedavg", {}), **PRIVATE)
    assert tiny.predictor_bytes(tmp_path / "a") != tiny.predictor_bytes(tmp_path / "b")


def test_a_budget_that_is_spent_ends_the_sites_work(tmp_path: Path) -> None:
    too_loud = {"epsilon": 1.0, "noise": 0.5}
    with pytest.raises(RunFailed, match=r"the privacy budget is spent: .* privacy.epsilon is 1"):
        tiny.coordinate(tmp_path / "run", make("fedavg", {}), **{**PRIVATE, "privacy": too_loud})


def test_noise_without_a_limit_is_counted_only(tmp_path: Path) -> None:
    result = tiny.coordinate(tmp_path / "run", make("fedavg", {}), **{**PRIVATE, "privacy": {"noise": 0.5}})
    assert all(row["epsilon"] > 5 and math.isfinite(row["epsilon"]) for row in result["privacy"])


def test_counts_are_paid_for(tmp_path: Path) -> None:
    privacy = {"epsilon": 3.0, "counts_epsilon": 0.5}
    result = tiny.coordinate(tmp_path / "run", make("class-ensemble", {}), **{**PRIVATE, "privacy": privacy})
    rows = [row for row in spent(tmp_path / "run") if row["site"] == "site-1"]
    assert [row["mechanism"] for row in rows] == ["dp-sgd", "counts"]
    assert rows[1]["epsilon"] == pytest.approx(rows[0]["epsilon"] + 0.5)
    assert 2.9 < result["privacy"][0]["epsilon"] <= 3.0


def test_no_table_of_counts_leaves_beyond_those_that_are_paid_for() -> None:
    protect = guard("class-ensemble", privacy={"epsilon": 3.0, "delta": 1e-3, "counts_epsilon": 0.5})
    first, second = (bundle({"label_counts": {"counts": torch.tensor([9, 0, 7, n])}}) for n in (20, 21))
    protect.outgoing(first)
    with pytest.raises(SiteFailed, match="1 tables of label counts have left"):
        protect.outgoing(second)


def test_noise_without_a_limit_promises_what_the_whole_study_costs() -> None:
    """So that a policy refuses it before anything is trained, and not in the last round."""
    loud = guard(privacy={"noise": 0.7, "delta": 1e-3})
    assert loud.spent()["epsilon"] == 0
    promised = loud.promised()["epsilon"]
    assert promised == pytest.approx(Account(1e-3, (Spent(0.7, 4 / 11, 6),)).epsilon())


def test_a_guard_goes_on_with_the_fit_it_was_stopped_in(tmp_path: Path) -> None:
    data = tiny.federation()
    study = tiny.study(data, method="local", **PRIVATE)
    ctx, method, site = tiny.context(study), make("local", {}), data.sites[0]
    steps = []

    def trained(folder: Path | None) -> Any:
        protect = guard_for(study, method, site, SECRET, unfinished=folder, on_fit=lambda *_: steps.append(1))
        assert protect is not None
        work = protect.doing(method.personal(ctx, site, ctx.bundle("delivery", site.name, {}), State()), tiny.CPU)
        return tiny.drive(ctx, work).members[0].weights

    plain, first = trained(None), trained(tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    second = trained(tmp_path)
    assert file.stat().st_mtime_ns == before  # taken up where it ended: no epoch was trained or saved
    assert all(torch.equal(plain[name], first[name]) and torch.equal(plain[name], second[name]) for name in plain)


# Policies and parcels -------------------------------------------------------------------------------------------------

STRICT = Policy(**{**OPEN.model_dump(), "privacy": Privacy(max_epsilon=3.0, max_delta=1e-3)})


def test_a_parcel_says_what_was_spent_and_the_policy_holds_it(tmp_path: Path) -> None:
    parties = Parties(tmp_path, agreement(**PRIVATE), policy=STRICT)
    own = {parties.desk("site-1").key.public.fingerprint: parties.desk("site-1").key.public}
    first = read_manifest(parties.answer("site-1"), own)
    assert first.privacy.keys() == {"epsilon", "delta"}
    assert 0 < first.privacy["epsilon"] < 3.0
    assert first.metrics == {}
    assert (tmp_path / "site-1" / "privacy.secret").stat().st_mode & 0o077 == 0
    parties.hub().collect(parties.answer("site-1"))
    parties.collect("site-2", "site-3")
    parties.step()
    second = read_manifest(parties.answer("site-1"), own)
    assert first.privacy["epsilon"] < second.privacy["epsilon"] <= 3.0
    again = read_manifest(parties.answer("site-1"), own)
    assert again == second


def test_the_policy_refuses_a_weaker_promise_and_none(tmp_path: Path) -> None:
    loose = {**PRIVATE, "privacy": {"epsilon": 8.0, "delta": 1e-3}}
    with pytest.raises(Refused, match=r"privacy\.max_epsilon: epsilon is 8"):
        Parties(tmp_path / "a", agreement(**loose), policy=STRICT).answer("site-1")
    with pytest.raises(Refused, match=r"privacy\.max_epsilon: no epsilon is promised"):
        Parties(tmp_path / "b", agreement(), policy=STRICT).answer("site-1")


def test_the_policy_holds_in_a_simulation(tmp_path: Path) -> None:
    rules = tmp_path / "policy.toml"
    rules.write_text("min_images_per_class = 0\n[privacy]\nmax_epsilon = 2.0\nmax_delta = 1e-3\n")
    policies = {f"site-{n}": str(rules) for n in (1, 2, 3)}
    with pytest.raises(RunFailed, match=r"privacy\.max_epsilon: epsilon is 3"):
        tiny.coordinate(tmp_path / "run", make("fedavg", {}), **PRIVATE, policies=policies)
    rules.write_text("min_images_per_class = 0\n[privacy]\nmax_epsilon = 3.0\nmax_delta = 1e-3\n")
    tiny.coordinate(tmp_path / "again", make("fedavg", {}), **PRIVATE, policies=policies)


def test_without_opacus_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for _ in empty_place(tmp_path, monkeypatch):
        for name in ("opacus", "opacus.accountants", "opacus.accountants.analysis", "opacus.optimizers"):
            monkeypatch.setitem(__import__("sys").modules, name, None)
        flags = ("--data", "phantoms:96", "--sites", "2", "--rounds", "1", "--epochs", "1", "--device", "cpu")
        code, _, err = cli(capsys, "run", *flags, "--model", "cnn4", "--set", "privacy.epsilon=4", "--quiet")
        assert code == 2
        assert "pip install 'wardround[privacy]'" in err


def test_the_secret_is_in_no_other_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tiny.coordinate(run, make("fedavg", {}), **PRIVATE)
    key = (run / "privacy.secret").read_bytes()
    for file in run.rglob("*"):
        if file.is_file() and file.name != "privacy.secret":
            content = file.read_bytes()
            assert key not in content
            assert key.hex().encode() not in content
    assert json.loads((run / "checkpoint.json").read_text())["round"] == 2
