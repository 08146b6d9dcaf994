"""What holds for every multi-round method, whoever wrote it: each test takes all of them from the registry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import (
    CPU,
    context,
    coordinate,
    drive,
    federation,
    figures,
    predictor_bytes,
    quick,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.data.federation import Site
from wardround.errors import SiteFailed
from wardround.exchange.bundle import COUNTERS, PARAMETERS, STATISTICS, Bundle
from wardround.exchange.inprocess import InProcess, step_together
from wardround.learn.fit import Fit
from wardround.learn.side_by_side import Outcome
from wardround.learn.trainer import Trainer, skip_reason, train_one
from wardround.methods.base import Answer
from wardround.methods.registry import known
from wardround.methods.state import State
from wardround.record.rundir import RunDir
from wardround.study import Study
from wardround.tensorfile import to_bytes

METHODS = [name for name, method in known().items() if method.family == "multi-round"]
ROUNDS = 3
PARTLY: dict[str, Any] = {"rounds": ROUNDS, "participants": 0.67, "evaluate_trained": True}  # two sites of three
each_method = pytest.mark.parametrize("name", METHODS)


def agreed(name: str) -> Study:
    return study(method=name, **PARTLY)


# One run of every method, looked at from several sides ----------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A finished run with some of the sites in each round, what crossed, and whose images were touched when."""

    path: Path
    result: dict[str, Any]
    bundles: list[Bundle]
    touched: list[set[str]]


def watch_sites(patch: pytest.MonkeyPatch) -> list[set[str]]:
    """Whose own images anyone so much as looks at in each round, from the exchange to the next one or the end."""
    rounds: list[set[str]] = []
    done = False
    exchange, personalise, read = InProcess.exchange, InProcess.personalise, Site.__getattribute__

    def exchanging(*arguments: Any, **named: Any) -> Any:
        rounds.append(set())
        return exchange(*arguments, **named)

    def personalising(*arguments: Any, **named: Any) -> Any:
        nonlocal done
        done = True
        return personalise(*arguments, **named)

    def reading(site: Site, attribute: str) -> Any:
        if attribute in ("train", "val") and rounds and not done:
            rounds[-1].add(read(site, "name"))
        return read(site, attribute)

    patch.setattr(InProcess, "exchange", exchanging)
    patch.setattr(InProcess, "personalise", personalising)
    patch.setattr(Site, "__getattribute__", reading)
    return rounds


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    """The run of a method; one that fails does so in every test that asks for it."""

    @cache
    def run(name: str) -> Seen:
        path = tmp_path_factory.mktemp("contracts") / "run"
        with pytest.MonkeyPatch.context() as patch:
            bundles, touched = watch_bundles(patch), watch_sites(patch)
            return Seen(path, coordinate(path, quick(name), **PARTLY), bundles, touched)

    return run


@each_method
def test_a_run_with_some_sites_in_each_round_ends_with_a_predictor_for_all(
    name: str, straight: Callable[[str], Seen]
) -> None:
    rows = straight(name).result["rows"]
    assert {row["round"] for row in rows if row["model"] == "trained"} == set(range(ROUNDS))
    assert {row["site"] for row in rows if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}
    assert all(0 <= row["value"] <= 1 for row in rows if row["value"] is not None)
    assert not [note for note in straight(name).result["notes"] if "did not answer" in note["text"]]


@each_method
def test_a_run_with_all_sites(name: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", quick(name), rounds=2)
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}


@each_method
def test_nothing_is_done_for_a_site_that_is_not_asked(name: str, straight: Callable[[str], Seen]) -> None:
    """No fit, no measuring, not a look at its images: until all take the result home."""
    seen = straight(name)
    asked = [set(agreed(name).participants(round)) for round in range(ROUNDS)]
    assert all(len(sites) == 2 for sites in asked)
    assert len({frozenset(sites) for sites in asked}) > 1
    assert seen.touched == asked
    measured: list[set[str]] = [set() for _ in range(ROUNDS)]
    for row in seen.result["rows"]:
        if row["model"] == "trained":
            measured[row["round"]].add(row["site"])
    assert measured == asked


@each_method
def test_every_bundle_is_what_was_declared_and_survives_the_wire(name: str, straight: Callable[[str], Seen]) -> None:
    seen, method, agreement = straight(name), quick(name), agreed(name)
    assert len(seen.bundles) >= ROUNDS * 2 * 2 + 3
    for bundle in seen.bundles:
        arrived = Bundle.from_bytes(bundle.to_bytes())
        method.payload(agreement, bundle.envelope.site).check(arrived)
        assert arrived.sha256() == bundle.sha256()


@each_method
def test_counters_are_whole_numbers_and_never_averaged(name: str, straight: Callable[[str], Seen]) -> None:
    """The asked sites take 3 and 2 steps of an epoch, so the largest counter is no mean of theirs."""
    requests: list[dict[str, int]] = [{} for _ in range(ROUNDS)]
    largest: list[dict[str, int]] = [{} for _ in range(ROUNDS)]
    apart = False
    for bundle in straight(name).bundles:
        for group in (PARAMETERS, STATISTICS):
            assert all(tensor.is_floating_point() for tensor in bundle.group(group).values())
        for counter, tensor in bundle.group(COUNTERS).items():
            assert tensor.dtype == torch.int64
            kind, round = bundle.envelope.kind, bundle.envelope.round
            if kind == "request":
                requests[round][counter] = int(tensor)
            elif kind == "answer":
                before = largest[round].get(counter)
                apart = apart or before not in (None, int(tensor))
                largest[round][counter] = max(before or 0, int(tensor))
    if not any(requests):
        return  # a method whose batch norm stays at home
    assert apart
    for sent, came in zip(largest, requests[1:], strict=False):
        assert came == {counter: sent[counter] for counter in came}


# The same run in other ways -------------------------------------------------------------------------------------------


@each_method
def test_the_number_of_workers_changes_nothing(name: str, straight: Callable[[str], Seen], tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", quick(name), workers=3, **PARTLY)
    assert figures(result) == figures(straight(name).result)
    assert predictor_bytes(tmp_path / "run") == predictor_bytes(straight(name).path)


class Killed(BaseException):
    """What `kill -9` is to a process."""


@each_method
def test_a_run_that_is_stopped_after_each_round_ends_the_same(
    name: str, straight: Callable[[str], Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = RunDir.commit

    def commit_and_die(self: RunDir, point: Any) -> None:
        commit(self, point)
        raise Killed

    for _ in range(ROUNDS):
        with monkeypatch.context() as patch:
            patch.setattr(RunDir, "commit", commit_and_die)
            with pytest.raises(Killed):
                coordinate(tmp_path / "run", quick(name), **PARTLY)
    result = coordinate(tmp_path / "run", quick(name), **PARTLY)
    assert figures(result) == figures(straight(name).result)
    assert predictor_bytes(tmp_path / "run") == predictor_bytes(straight(name).path)


@each_method
def test_few_shots_with_a_list_of_epochs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last number of the list holds for the rounds after it."""
    fits = watch_fits(monkeypatch)
    result = coordinate(tmp_path / "run", quick(name), rounds=3, train={"epochs": [2, 1]})
    by_round = [{fit.recipe.epochs for fit in fits if f"round {round}" in fit.label} for round in (1, 2, 3)]
    assert [epochs in found for epochs, found in zip((2, 1, 1), by_round, strict=True)] == [True] * 3, by_round
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}


# Sites together and apart ---------------------------------------------------------------------------------------------


def train_in_turns(fits: list[Fit]) -> list[Outcome]:
    """One step of every fit in turn, as a GPU does: whatever two of them shared would be mixed up."""
    outcomes: dict[int, Outcome] = {i: train_one(fit, CPU) for i, fit in enumerate(fits) if skip_reason(fit)}
    with ExitStack() as borrowed:
        trainers = {i: Trainer(fit, CPU, borrowed) for i, fit in enumerate(fits) if i not in outcomes}
        active = {i: trainer.steps() for i, trainer in trainers.items()}
        while active:
            for i in list(active):
                if next(active[i], "end") == "end":
                    del active[i]
        outcomes |= {i: trainer.result(0.0) for i, trainer in trainers.items()}
    return [outcomes[i] for i in range(len(fits))]


def everything_of(answer: Answer | SiteFailed) -> tuple[bytes, bytes, bytes]:
    """What a site sends, what it keeps and what it would predict with."""
    assert isinstance(answer, Answer)
    assert answer.trained is not None
    return answer.bundle.to_bytes(), answer.memory.to_bytes(), to_bytes(*answer.trained.parts())


@each_method
def test_sites_in_step_do_what_each_does_alone(name: str) -> None:
    """Alone: with a method of its own, and in another order. Two rounds, so that memories count too."""
    method, data = quick(name), federation()
    ctx = context(study(method=name, rounds=3))
    state, memories = method.begin(ctx), {site.name: State() for site in data.sites}
    for round in range(2):
        ctx = context(ctx.study, round)
        requests = method.ask(ctx, state)
        assert requests is not None
        works = {s.name: method.answer(ctx, s, requests[s.name], memories[s.name]) for s in data.sites}
        together = step_together(works, train_in_turns)
        for site in reversed(data.sites):
            alone = drive(ctx, quick(name).answer(ctx, site, requests[site.name], memories[site.name]))
            assert everything_of(together[site.name]) == everything_of(alone)
        answers = {site: answer for site, answer in together.items() if isinstance(answer, Answer)}
        memories = {site: answer.memory for site, answer in answers.items()}
        *_, state = method.absorb(ctx, state, {site: answer.bundle for site, answer in answers.items()})
