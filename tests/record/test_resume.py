"""A run that is killed at any moment and resumed ends with exactly the numbers of one that was not."""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tiny import everything, figures, give_tiny_data, images, settings, watch_bundles, watch_fits
from wardround import coordinator, files, run, tensorfile
from wardround.errors import BadInput
from wardround.examine import Examiner
from wardround.exchange.bundle import Bundle
from wardround.exchange.inprocess import InProcess
from wardround.learn.fit import Fit, Fitted
from wardround.learn.store import FitStore
from wardround.methods.base import Context
from wardround.methods.fedavg import FedAvg
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit, average
from wardround.models import Weights, spec_layout
from wardround.progress import Silent
from wardround.record import absorbing, rundir
from wardround.record.rundir import Log, RunDir
from wardround.study import Study

ROUNDS = 3
NOISE = images(6, seed=77)


class Killed(BaseException):
    """What `kill -9` is to a process: nothing here may catch it and go on."""


# Toys -----------------------------------------------------------------------------------------------------------------


class KeepsHead(Averaging):
    """FedAvg of the body; heads stay in the sites' memories, with a count of how often a site was asked."""

    name = "keepshead"
    paper = summary = "a toy"

    def shared(self, study: Study) -> frozenset[str] | None:
        layout = spec_layout(study.common_spec)
        return frozenset(layout.names) - layout.head

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        own = super().remember(visit, fit, fitted)
        return State(own.groups, {"asked": visit.memory.facts.get("asked", 0) + 1})


def mixed(model: Mapping[str, Any], target: Mapping[str, Any]) -> Weights:
    """Half of each; counters are the target's."""
    return {name: (t + target[name]) / 2 if t.is_floating_point() else target[name] for name, t in model.items()}


class Synthesis(Averaging):
    """A coordinator that works long: in five steps it moves towards the average and trains a little in between."""

    name = "synthesis"
    paper = summary = "a toy"
    steps: list[tuple[int, int]] = []  # noqa: RUF012 - what was really done, of all instances
    broken_at: tuple[int, int] | None = None

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        done = state.facts["step"] if state.facts.get("round") == ctx.round else 0
        target = average(answers, self.weigh)
        for step in range(done, 5):
            self.steps.append((ctx.round, step))
            if (ctx.round, step) == self.broken_at:
                raise Killed
            (fitted,) = ctx.train([self._fit(ctx, mixed(state.groups["model"], target), step)])
            state = State({"model": fitted.weights}, {"round": ctx.round, "step": step + 1})
            yield state

    def _fit(self, ctx: Context, start: Weights, step: int) -> Fit:
        return Fit(
            label=f"synthesis {step}",
            spec=ctx.study.common_spec,
            start=start,
            data=NOISE,
            recipe=ctx.study.recipe(ctx.round),
            seed=ctx.streams.number("synthesis", round=ctx.round, index=step),
        )


class Drags(FedAvg):
    """One state a round that depends on the one before: what absorbing a round twice would spoil."""

    name = "drags"

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        yield State({"model": mixed(state.groups["model"], average(answers, self.weigh))})


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiny_data(monkeypatch, KeepsHead, Synthesis, Drags, sizes=(8, 5, 1))
    monkeypatch.setattr(Synthesis, "steps", [])


# Killing --------------------------------------------------------------------------------------------------------------


class Killer:
    """Kills at the k-th call of a function, before it does anything or right after."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.left, self.after = 0, False
        inner = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
            result = inner(*arguments, **named)
            if self.left == 0:
                raise Killed
            return result

        patch.setattr(owner, name, watched)

    def arm(self, k: int, after: bool) -> None:
        self.left, self.after = k, after

    def disarm(self) -> None:
        self.left = 0


def begin(path: Path, method: str) -> run.Job:
    return run.begin_run(settings(method=method, rounds=ROUNDS), path, Silent())


def kill_everywhere(
    killer: Killer, folder: Path, method: str, *, stride: int = 1, after: bool = False, calls: int = 1000
) -> int:
    """Kill a run at every stride-th call in turn, resume each, and compare; how often it was killed."""
    killer.disarm()
    begin(folder / "straight", method).finish()
    expected = everything(folder / "straight")
    kills = 0
    for k in range(1, calls, stride):
        path = folder / f"killed-{k}"
        job = begin(path, method)
        killer.arm(k, after)
        try:
            job.finish()
        except Killed:
            kills += 1
        else:
            assert kills > 0
            return kills
        finally:
            killer.disarm()
        run.reopen(path, Silent()).finish()
        assert everything(path) == expected, f"killed at call {k}"
    return kills


POINTS: dict[str, tuple[Any, str, int]] = {
    "saving a state": (RunDir, "save", 1),
    "committing": (RunDir, "commit", 1),
    "a line of a log": (Log, "append", 9),
    "any file of text": (files, "write_atomically", 1),
    "any file of tensors": (tensorfile, "write", 1),
    "measuring": (Examiner, "shared", 1),
    "measuring at a site": (Examiner, "personal", 1),
    "training": (coordinator, "train_many", 1),
    "exchanging": (InProcess, "exchange", 1),
    "opening a bundle": (InProcess, "_cross", 4),
    "writing the report": (run, "write_report", 1),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_fedavg_killed_anywhere(point: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, stride = POINTS[point]
    killer = Killer(monkeypatch, owner, name)
    if owner is files:  # imported by name elsewhere
        monkeypatch.setattr(rundir, "write_atomically", files.write_atomically)
    assert kill_everywhere(killer, tmp_path, "fedavg", stride=stride, after=after) > 0


@pytest.mark.parametrize("method", ["local", "ensemble", "centralised", "single", "majority"])
def test_methods_that_talk_once_or_never_killed_anywhere(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kill_everywhere(Killer(monkeypatch, Log, "append"), tmp_path, method, stride=5) > 0


def test_a_run_killed_again_and_again_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt gets a little further, however it ends."""
    killer = Killer(monkeypatch, Log, "append")
    begin(tmp_path / "straight", "keepshead").finish()
    begin(tmp_path / "killed", "keepshead")
    kills = 0
    draw = random.Random(5)  # noqa: S311 - moments, no secrets
    while True:
        killer.arm(draw.randint(15, 40), after=draw.random() < 0.5)
        try:
            run.reopen(tmp_path / "killed", Silent()).finish()
            break
        except Killed:
            kills += 1
            assert kills < 50
    killer.disarm()
    assert kills > 1
    assert everything(tmp_path / "killed") == everything(tmp_path / "straight")


def test_a_resumed_run_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = begin(tmp_path / "run", "fedavg").path
    litter = [path / ".checkpoint.json.7.part", path / "checkpoint" / ".state-0.safetensors.7.part"]
    for file in litter:
        file.write_bytes(b"half")
    run.reopen(path, Silent()).finish()
    assert [file for file in path.rglob(".*") if file.name != ".lock"] == []


def test_at_most_one_round_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(monkeypatch, Examiner, "shared")
    job = begin(tmp_path / "run", "fedavg")
    killer.arm(2, after=False)
    with pytest.raises(Killed):
        job.finish()
    killer.disarm()
    fits = watch_fits(monkeypatch)
    run.reopen(tmp_path / "run", Silent()).finish()
    assert [fit.label.partition(", ")[2] for fit in fits] == ["round 2"] * 3 + ["round 3"] * 3


# Site memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "stride"), [(RunDir, "save", 1), (RunDir, "commit", 1), (InProcess, "_cross", 5)]
)
def test_memories_survive(owner: Any, name: str, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(monkeypatch, owner, name)
    assert kill_everywhere(killer, tmp_path, "keepshead", stride=stride) > ROUNDS - 1


def test_private_tensors_are_in_no_bundle_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    killer = Killer(monkeypatch, Examiner, "shared")
    job = begin(tmp_path / "run", "keepshead")
    killer.arm(2, after=True)
    with pytest.raises(Killed):
        job.finish()
    killer.disarm()
    run.reopen(tmp_path / "run", Silent()).finish()
    assert len(crossed) > 3 * 6
    names = {name for bundle in crossed for group in bundle.groups.values() for name in group}
    assert not [name for name in names if name.startswith("head.")]


# Long work at the coordinator -----------------------------------------------------------------------------------------


@pytest.fixture
def commits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)


@pytest.mark.usefixtures("commits_at_once")
def test_a_long_synthesis_goes_on_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "straight", "synthesis").finish()
    assert Synthesis.steps == [(r, step) for r in range(ROUNDS) for step in range(5)]
    Synthesis.steps.clear()

    monkeypatch.setattr(Synthesis, "broken_at", (1, 3))
    with pytest.raises(Killed):
        begin(tmp_path / "killed", "synthesis").finish()
    stored = {file.name for file in (tmp_path / "killed" / "checkpoint").iterdir()}
    assert {f"answer-site-{i}-1.safetensors" for i in (1, 2, 3)} < stored
    monkeypatch.setattr(Synthesis, "broken_at", None)
    Synthesis.steps.clear()
    fits, crossed = watch_fits(monkeypatch), watch_bundles(monkeypatch)

    run.reopen(tmp_path / "killed", Silent()).finish()
    # Step 2 of round 2 was the last to come, so the state before it is the last that another followed.
    assert Synthesis.steps[:3] == [(1, 2), (1, 3), (1, 4)]
    assert fits[0].label == "synthesis 2"
    assert {bundle.envelope.round for bundle in crossed} == {2}  # no site was asked again for round 2
    assert everything(tmp_path / "killed") == everything(tmp_path / "straight")


@pytest.mark.usefixtures("commits_at_once")
@pytest.mark.parametrize(("owner", "name", "stride"), [(RunDir, "save", 4), (RunDir, "commit", 4), (Log, "append", 19)])
def test_a_long_synthesis_killed_anywhere(
    owner: Any, name: str, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kill_everywhere(Killer(monkeypatch, owner, name), tmp_path, "synthesis", stride=stride, after=True) > 3


@pytest.mark.usefixtures("commits_at_once")
def test_a_long_synthesis_killed_twice_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt saves states too, and must not write over the one that it would go on from."""
    begin(tmp_path / "straight", "synthesis").finish()
    for first in range(1, 4):
        path = tmp_path / f"killed-{first}"
        monkeypatch.setattr(Synthesis, "broken_at", (0, first + 1))
        with pytest.raises(Killed):
            begin(path, "synthesis").finish()
        monkeypatch.setattr(Synthesis, "broken_at", None)
        with monkeypatch.context() as patch:
            Killer(patch, RunDir, "commit").arm(1, after=False)  # the state is saved, the commit never comes
            with pytest.raises(Killed):
                run.reopen(path, Silent()).finish()
        run.reopen(path, Silent()).finish()
        assert everything(path) == everything(tmp_path / "straight")


def test_a_short_synthesis_stores_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[str] = []
    commit = RunDir.commit
    monkeypatch.setattr(RunDir, "commit", lambda self, point: commits.append(str(point.answers)) or commit(self, point))  # type: ignore[func-returns-value]
    begin(tmp_path / "run", "synthesis").finish()
    assert commits == ["{}"] * ROUNDS


@pytest.mark.usefixtures("commits_at_once")
@pytest.mark.parametrize(("owner", "name"), [(Examiner, "shared"), (RunDir, "save"), (RunDir, "commit")])
def test_a_round_is_never_absorbed_twice(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it took: the last state of a round is its result, not a place to go on from."""
    kill_everywhere(Killer(monkeypatch, owner, name), tmp_path, "drags")


# What cannot be resumed -----------------------------------------------------------------------------------------------


def half_done(path: Path, patch: pytest.MonkeyPatch) -> None:
    job = begin(path, "keepshead")
    with patch.context() as inner:
        Killer(inner, RunDir, "commit").arm(2, after=True)
        with pytest.raises(Killed):
            job.finish()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "checkpoint.json").write_text("{"), "checkpoint.json is damaged"),
        (lambda run: next((run / "checkpoint").glob("state-*")).unlink(), "checkpoint file state-1"),
        (lambda run: next((run / "checkpoint").glob("memory-*")).unlink(), "checkpoint file memory-site-"),
        (lambda run: next((run / "checkpoint").glob("state-*")).write_bytes(b"x"), "not a wardround tensor file"),
        (lambda run: (run / "events.jsonl").write_text(""), "events.jsonl is damaged"),
        (lambda run: (run / "ledger.jsonl").unlink(), "ledger.jsonl is damaged"),
    ],
)
def test_a_damaged_record_is_said_so(
    damage: Callable[[Path], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(tmp_path / "run", monkeypatch)
    damage(tmp_path / "run")
    with pytest.raises(BadInput, match=words) as caught:
        run.reopen(tmp_path / "run", Silent()).finish()
    assert "\n" not in str(caught.value)


def test_a_damaged_fit_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path / "straight", "local").finish()
    job = begin(tmp_path / "run", "local")
    with monkeypatch.context() as patch:
        Killer(patch, FitStore, "put").arm(2, after=True)
        with pytest.raises(Killed):
            job.finish()
    for file in (tmp_path / "run" / "fits").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    run.reopen(tmp_path / "run", Silent()).finish()
    assert everything(tmp_path / "run") == everything(tmp_path / "straight")


def test_a_comparison_killed_between_and_within_its_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods: list[tuple[str, dict[str, Any]]] = [("local", {}), ("fedavg", {}), ("ensemble", {})]

    def begin_all(path: Path) -> run.Job:
        return run.begin_comparison(settings(rounds=2), methods, path, Silent())

    begin_all(tmp_path / "straight").finish()
    expected = figures(run.read_result(tmp_path / "straight"))
    killer = Killer(monkeypatch, Log, "append")
    for k in (3, 20, 35, 60, 90, 110):
        job = begin_all(tmp_path / str(k))
        killer.arm(k, after=True)
        with pytest.raises(Killed):
            job.finish()
        killer.disarm()
        run.reopen(tmp_path / str(k), Silent()).finish()
        assert figures(run.read_result(tmp_path / str(k))) == expected
