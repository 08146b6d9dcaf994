"""Long work in parts: steps, progress, time, and that a stop after any step changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import CPU, context, coordinate, drive, federation, predictor_bytes, study, watch_bundles
from wardround.exchange.bundle import Bundle
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled
from wardround.methods.parts import Parts
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.progress import Advance, Silent
from wardround.record import absorbing
from wardround.synthesis.inversion import Iterate, Synthesis
from wardround.synthesis.stopwatch import Stopwatch
from wardround.synthesis.student import Student

BOTH = ["deepinversion", "fedisca"]
OWN: dict[str, dict[str, Any]] = {
    "deepinversion": {"epochs": 3, "steps": 3, "batch": 6, "kd_steps": 2, "lr": 0.05, "shots": 1},
    "fedisca": {"epochs": 3, "steps": 3, "batch": 6, "lr": 0.05, "shots": 1},
}


class Shown(Silent):
    """Writes down the tasks that it is given, and how far each came."""

    def __init__(self) -> None:
        self.tasks: list[list[Any]] = []

    @contextmanager
    def task(self, label: str, total: int, done: int = 0) -> Iterator[Advance]:
        row: list[Any] = [label, total, done, "open"]
        self.tasks.append(row)

        def advance() -> None:
            row[2] += 1

        try:
            yield advance
        finally:
            row[3] = "closed"


def after(number: int) -> Callable[[], bool]:
    """True once, when it is asked for the `number`th time."""
    asked = []

    def due() -> bool:
        asked.append(1)
        return len(asked) == number

    return due


def parts(due: Callable[[], bool] = lambda: False, done: dict[str, int] | None = None) -> tuple[Parts, Shown]:
    shown = Shown()
    ctx = replace(context(study()), due=due, progress=shown)
    return Parts(ctx, Stopwatch(CPU), done), shown


# Parts ----------------------------------------------------------------------------------------------------------------


def test_every_step_is_taken_once_and_in_order() -> None:
    of, shown = parts()
    steps: list[int] = []
    assert list(of.run("synthesis", steps.append, 4)) == []
    assert list(of.run("distillation", steps.append, 2)) == []
    assert steps == [0, 1, 2, 3, 0, 1]
    assert of.done == {"synthesis": 4, "distillation": 2}
    assert shown.tasks == [["synthesis", 4, 4, "closed"], ["distillation", 2, 2, "closed"]]
    assert {part: work["steps"] for part, work in of.watch.record().items()} == {"synthesis": 4, "distillation": 2}


def test_it_yields_after_the_step_at_which_a_checkpoint_is_due_and_goes_on() -> None:
    of, shown = parts(after(2))
    steps: list[int] = []
    run = of.run("synthesis", steps.append, 4)
    next(run)
    assert steps == [0, 1]
    assert of.done == {"synthesis": 2}
    assert of.watch.record()["synthesis"]["steps"] == 2  # in time for the state that is yielded now
    assert shown.tasks == [["synthesis", 4, 2, "open"]]
    assert list(run) == []
    assert steps == [0, 1, 2, 3]
    assert of.watch.record()["synthesis"]["steps"] == 4
    assert shown.tasks == [["synthesis", 4, 4, "closed"]]


def test_it_yields_after_every_step_where_one_is_always_due() -> None:
    of, _ = parts(lambda: True)
    steps: list[int] = []
    seen = [(list(steps), dict(of.done)) for _ in of.run("synthesis", steps.append, 3)]
    assert seen == [([0], {"synthesis": 1}), ([0, 1], {"synthesis": 2}), ([0, 1, 2], {"synthesis": 3})]


def test_only_what_is_left_is_done() -> None:
    kept = {"synthesis": 4, "distillation": 1}
    of, shown = parts(done=kept)
    steps: list[int] = []
    assert list(of.run("synthesis", steps.append, 4)) == []
    assert list(of.run("distillation", steps.append, 3)) == []
    assert steps == [1, 2]
    assert shown.tasks == [["distillation", 3, 3, "closed"]]
    assert kept == {"synthesis": 4, "distillation": 1}  # what a state holds is not changed
    assert set(of.watch.record()) == {"distillation"}


def test_a_part_without_steps_leaves_no_trace_but_that_it_is_done() -> None:
    of, shown = parts(lambda: True)
    assert list(of.run("adaptation", lambda _: pytest.fail("there is no step"), 0)) == []
    assert of.done == {"adaptation": 0}
    assert shown.tasks == []
    assert of.watch.record() == {}


def test_a_step_that_fails_is_not_counted() -> None:
    of, shown = parts()

    def fail(number: int) -> None:
        if number == 2:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(of.run("synthesis", fail, 4))
    assert of.done == {"synthesis": 2}
    assert shown.tasks == [["synthesis", 4, 2, "closed"]]


# Any state of a method ------------------------------------------------------------------------------------------------


def method(name: str, **changes: Any) -> Distilled:
    found = make(name, {**OWN[name], **changes})
    assert isinstance(found, Distilled)
    return found


def timeless(state: State) -> bytes:
    """All of a state but how long it took."""
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


def steps(state: State) -> dict[str, float]:
    return {part: found["steps"] for part, found in state.facts["work"].items()}


Sent = dict[str, tuple[Context, dict[str, Bundle]]]


@pytest.fixture(scope="module")
def sent() -> Sent:
    """What two sites send each method."""
    data, found = federation((9, 6)), {}
    for name in BOTH:
        ctx, of = context(study(data, method=name)), method(name)
        requests = of.ask(ctx, State())
        assert requests is not None
        works = {site.name: of.answer(ctx, site, requests[site.name], State()) for site in data.sites}
        found[name] = ctx, {site: drive(ctx, work).bundle for site, work in works.items()}
    return found


@pytest.mark.parametrize("name", BOTH)
def test_any_epochs_state_but_the_last_can_be_continued_from(name: str, sent: Sent) -> None:
    """Through a file, which keeps neither memory layout nor identity."""
    ctx, answers = sent[name]
    whole = list(method(name).absorb(ctx, State(), answers))
    assert len({timeless(state) for state in whole}) == 3
    assert not any("midway" in state.facts for state in whole)
    for done in (0, 1):
        rest = method(name).absorb(ctx, State.from_bytes(whole[done].to_bytes()), answers)
        for again, expected in zip(rest, whole[done + 1 :], strict=True):
            assert timeless(again) == timeless(expected)
            assert steps(again) == steps(expected)


@pytest.mark.parametrize("name", BOTH)
def test_a_stop_after_any_step_changes_nothing(name: str, sent: Sent) -> None:
    """From every state to the end without another stop."""
    ctx, answers = sent[name]
    *_, expected = method(name, epochs=2).absorb(ctx, State(), answers)
    states = list(method(name, epochs=2).absorb(replace(ctx, due=lambda: True), State(), answers))
    assert len(states) == 2 * ({"fedisca": 3 + 3 + 3, "deepinversion": 3 + 2}[name] + 1)
    assert timeless(states[-1]) == timeless(expected)
    for state in states[:-1]:
        *_, last = method(name, epochs=2).absorb(ctx, State.from_bytes(state.to_bytes()), answers)
        assert timeless(last) == timeless(expected)
        assert steps(last) == steps(expected)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("adaptation", "learn_from"),
    [*product(["ema", "batch", "none"], ["trajectory", "noise"]), ("none", "images")],
)
def test_a_stop_after_every_step_changes_nothing(adaptation: str, learn_from: str, reuse: bool, sent: Sent) -> None:
    """From every state to the next alone, of every way in which fedisca can be done."""
    own = {"adaptation": adaptation, "learn_from": learn_from, "reuse": reuse, "epochs": 2, "steps": 2}
    ctx, answers = sent["fedisca"]
    *_, expected = method("fedisca", **own).absorb(ctx, State(), answers)
    often = replace(ctx, due=lambda: True)
    states = list(method("fedisca", **own).absorb(often, State(), answers))
    assert len(states) == 2 * (7 if adaptation == "ema" else 5)
    assert timeless(states[-1]) == timeless(expected)
    state = State()
    for following in states:
        state = next(method("fedisca", **own).absorb(often, State.from_bytes(state.to_bytes()), answers))
        assert timeless(state) == timeless(following)
        assert steps(state) == steps(following)


@pytest.mark.parametrize(("keep", "kept"), [("lowest", 1), ("last", 4)])
def test_an_epoch_that_was_stopped_keeps_the_iterate_it_would_have_kept(
    keep: str, kept: int, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses before each of five steps, of the noise and of iterates 0 to 3: that of iterate 1 is the lowest."""

    def wait(self: Synthesis) -> Iterate:
        step, self.done = self.done, self.done + 1
        with torch.no_grad():
            self.images.fill_(step)
        images = self.images.detach().clone()
        return Iterate(step, images, torch.tensor([9.0, 5.0, 2.0, 4.0, 3.0][step]), images, torch.zeros(6, 4))

    monkeypatch.setattr(Synthesis, "start", lambda self: None)
    monkeypatch.setattr(Synthesis, "wait", wait)
    ctx, answers = sent["deepinversion"]
    often, own = replace(ctx, due=lambda: True), {"keep": keep, "steps": 5, "epochs": 1}
    state, stops = State(), 0
    while state.facts.get("epoch") != 1:
        state = next(method("deepinversion", **own).absorb(often, State.from_bytes(state.to_bytes()), answers))
        stops += 1
    assert stops == 5 + 2 + 1
    assert set(state.groups["pool"]["000000"].flatten().tolist()) == {float(kept)}


# Runs -----------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What `kill -9` is to a process."""


def delivered(crossed: list[Bundle]) -> dict[str, bytes]:
    return {b.envelope.site: b.to_bytes() for b in crossed if b.envelope.kind == "delivery"}


@pytest.mark.parametrize("name", BOTH)
def test_a_run_killed_between_epochs_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)
    crossed = watch_bundles(monkeypatch)
    changes: dict[str, Any] = {"epochs": 4}
    coordinate(tmp_path / "straight", method(name, **changes))
    straight = delivered(crossed)
    assert sorted(straight) == ["site-1", "site-2", "site-3"]

    begun: list[int] = []
    fatal = [3]
    rate = Distilled.rate

    def watched(self: Distilled, epoch: int) -> float:
        if epoch in fatal:
            raise Killed
        begun.append(epoch)
        return rate(self, epoch)

    monkeypatch.setattr(Distilled, "rate", watched)
    with pytest.raises(Killed):
        coordinate(tmp_path / "killed", method(name, **changes))
    assert begun == [0, 1, 2]
    begun.clear()
    fatal.clear()
    crossed.clear()
    coordinate(tmp_path / "killed", method(name, **changes))
    assert begun == [2, 3]  # the last state that another followed is in epoch 2
    assert delivered(crossed) == straight
    assert predictor_bytes(tmp_path / "killed") == predictor_bytes(tmp_path / "straight")


@pytest.mark.parametrize("name", BOTH)
def test_a_run_killed_within_an_epoch_goes_on_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the student's last step of the second epoch of three; the step before it is done again, no other."""
    monkeypatch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)
    coordinate(tmp_path / "straight", method(name))
    each = {"deepinversion": 2, "fedisca": 3}[name]
    step, taken, fatal = Student.step, [], [2 * each]

    def watched(self: Student, loss: Any) -> None:
        taken.append(1)
        if len(taken) in fatal:
            raise Killed
        step(self, loss)

    monkeypatch.setattr(Student, "step", watched)
    with pytest.raises(Killed):
        coordinate(tmp_path / "killed", method(name))
    taken.clear()
    fatal.clear()
    result = coordinate(tmp_path / "killed", method(name))
    assert len(taken) == 2 + each
    assert predictor_bytes(tmp_path / "killed") == predictor_bytes(tmp_path / "straight")
    assert {work["part"]: work["steps"] for work in result["work"]}["distillation"] == 3 * each
