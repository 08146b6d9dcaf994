"""Steps that recur: on a CPU a replay is the step itself; and that workers change no value.

What only a GPU can show is in `tests/synthesis/test_on_gpu.py`.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import CPU, context, drive, federation, study
from wardround.exchange.bundle import Bundle
from wardround.learn.device import Device
from wardround.learn.replay import WARM_UP_CALLS, Replay, each, together
from wardround.methods.base import Context
from wardround.methods.fedbicross import FedBiCross
from wardround.methods.state import State
from wardround.models import NetSpec, fresh
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import AdaptedTeachers


def test_on_a_cpu_a_replay_is_the_step() -> None:
    total = torch.zeros(())

    def add(value: Tensor) -> Tensor:
        total.add_(value)
        return total * 2

    replay = Replay(add, CPU)
    given = [torch.tensor(float(i)) for i in range(2 * WARM_UP_CALLS)]
    assert [float(replay(value)) for value in given] == [0.0, 2.0, 6.0, 12.0, 20.0, 30.0]
    assert float(total) == 15.0
    assert replay.graph is None


def test_steps_that_were_begun_are_waited_for_apart() -> None:
    order: list[str] = []

    def step(name: str, value: Tensor) -> Tensor:
        order.append(name)
        return value + 1

    one, two = (Replay(partial(step, name), CPU) for name in ("one", "two"))
    one.start(torch.tensor(1.0))
    two.start(torch.tensor(10.0))
    assert (float(two.wait()), float(one.wait())) == (11.0, 2.0)
    assert float(one.wait()) == 2.0  # the result stays until the next step
    assert order == ["one", "two"]


def test_a_step_of_several_tensors_may_give_nothing() -> None:
    seen: list[tuple[Tensor, ...]] = []

    def step(*tensors: Tensor) -> None:
        seen.append(tensors)

    given = (torch.ones(2), torch.zeros(3))
    Replay(step, CPU)(*given)
    assert [id(tensor) for tensor in seen[0]] == [id(tensor) for tensor in given]
    Replay(step, CPU)()
    assert seen[1] == ()


def test_a_step_that_fails_says_so_and_the_next_may_succeed() -> None:
    replay = Replay(lambda x: x.reshape(2), CPU)
    with pytest.raises(RuntimeError):
        replay(torch.ones(3))
    assert replay(torch.ones(2)).tolist() == [1.0, 1.0]


def test_each_gives_results_in_order() -> None:
    order: list[int] = []

    def piece(number: int) -> int:
        order.append(number)
        return 10 * number

    assert each([partial(piece, number) for number in (3, 1, 2)]) == [30, 10, 20]
    assert order == [3, 1, 2]
    assert each([]) == []


# Workers --------------------------------------------------------------------------------------------------------------


def threads(starts: int, workers: int) -> list[str]:
    """By which thread each of so many pieces was done."""
    found = [""] * starts
    gate = threading.Barrier(min(starts, workers))

    def start(number: int) -> None:
        gate.wait(timeout=30)  # passed only by as many pieces at once
        found[number] = threading.current_thread().name

    together([partial(start, number) for number in range(starts)], Device(CPU, workers))
    return found


def test_one_worker_or_one_piece_of_work_needs_no_other_thread() -> None:
    here = threading.current_thread().name
    assert threads(3, 1) == [here] * 3
    assert threads(1, 2) == [here]
    together([], Device(CPU, 2))


def test_two_workers_do_two_pieces_at_once_with_one_thread_each() -> None:
    found = threads(4, 2)
    assert len(set(found)) == 2
    assert all(name.startswith("wardround") for name in found)
    counts: list[int] = []
    together([lambda: counts.append(torch.get_num_threads())] * 4, Device(CPU, 2))
    assert counts == [1] * 4


@pytest.mark.parametrize("workers", [1, 2])
def test_a_piece_that_fails_fails_the_whole(workers: int) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        together([lambda: None, fail, lambda: None], Device(CPU, workers))


def trained(workers: int) -> list[bytes]:
    """Three students after four steps each, begun side by side."""
    spec = NetSpec("small", 3, 4, 16, width=8)
    students = [
        Student(spec, fresh(spec, torch.Generator().manual_seed(k)), CPU, momentum=0.9, decay=5e-4) for k in range(3)
    ]

    def step(student: Student, pixels: Tensor) -> Tensor:
        loss = student.logits(pixels).logsumexp(dim=1).square().mean()
        student.step(loss)
        return loss.detach()

    replays = [Replay(partial(step, student), CPU) for student in students]
    for student in students:
        student.set_rate(0.1)
    losses = []
    for number in range(4):
        batch = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(number))
        together([partial(replay.start, batch) for replay in replays], Device(CPU, workers))
        losses.append(torch.stack([replay.wait() for replay in replays]))
    kept = [State({"w": student.weights(), "m": student.momentum()}).to_bytes() for student in students]
    return [*kept, State({"losses": {"all": torch.stack(losses)}}).to_bytes()]


def test_workers_change_no_byte() -> None:
    one = trained(1)
    assert one == trained(2) == trained(3)
    assert len(set(one)) == 4


# FedBiCross -----------------------------------------------------------------------------------------------------------


def method(**own: Any) -> FedBiCross:
    short = {"trajectories": 2, "steps": 6, "samples": 3, "batch": 8, "synthesis_lr": 0.1}
    return FedBiCross(FedBiCross.Settings(**{**short, **own}))


@pytest.fixture(scope="module")
def three() -> tuple[Context, dict[str, Bundle]]:
    """Three sites that have sent what they send."""
    ctx, of = context(study(method="fedbicross")), method()
    requests = of.ask(ctx, State()) or {}
    works = {site.name: of.answer(ctx, site, requests[site.name], State()) for site in federation().sites}
    return ctx, {site: drive(ctx, work).bundle for site, work in works.items()}


def timeless(state: State) -> bytes:
    """All of a state but how long it took."""
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


@pytest.mark.parametrize("own", [{}, {"inner": "all", "rehearsal": 2}, {"cross": "uniform"}])
def test_fedbicross_is_the_same_with_any_number_of_workers(
    own: dict[str, Any], three: tuple[Context, dict[str, Bundle]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clusters of one site each, and two workers who are really asked."""
    ctx, answers = three
    shares = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    facts = {"trajectory": 0, "clusters": [["site-1"], ["site-2"], ["site-3"]], "silhouettes": {}}
    follow: Callable[..., None] = AdaptedTeachers.follow
    used: set[str] = set()

    def watched(*everything: Any) -> None:
        used.add(threading.current_thread().name)
        follow(*everything)

    monkeypatch.setattr(AdaptedTeachers, "follow", watched)
    found = []
    for workers in (1, 2):
        on, state = replace(ctx, device=Device(CPU, workers)), State({"cross": {"weights": shares}}, facts)
        found.append([timeless(one) for one in method(**own).absorb(on, state, answers)])
        assert any(name.startswith("wardround") for name in used) == (workers == 2)
    assert found[0] == found[1]
