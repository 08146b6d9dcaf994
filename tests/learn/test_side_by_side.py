"""Many fits at once: neither order, nor workers, nor a neighbour's failure, nor Ctrl-C changes a result."""

import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bare_loop import BN, CPU, PLAIN, a_fit, both_nets, images, same, taught_fit
from wardround.errors import SiteDiverged, SiteFailed
from wardround.learn import captured, nets, side_by_side
from wardround.learn.device import Device
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Fitted, Objective, Step
from wardround.learn.side_by_side import Outcome, count_steps, train_many
from wardround.learn.trainer import Trainer, train_one
from wardround.models import NetSpec, Weights

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mixed_fits() -> list[Fit]:
    """Sites of both networks and several sizes and recipes; two are too small to train."""
    return [
        a_fit(BN, seed=1),
        a_fit(PLAIN, n=33, seed=2, optimiser="adam", lr=0.002),
        a_fit(BN, n=1, seed=3),
        a_fit(BN, n=9, seed=4, schedule="cosine", augment=True),
        taught_fit(augment=True, seed=5),
        taught_fit(augment=False, seed=6),
        replace(a_fit(BN, seed=7, keep="best"), validation=images(6, seed=70)),
        replace(a_fit(BN, seed=8), frozen=frozenset({"stages.conv1.2.running_mean", "head.bias"})),
        a_fit(PLAIN, n=0, seed=9),
        a_fit(PLAIN, n=1, seed=10),
    ]


def weights_of(outcome: Outcome) -> Weights:
    assert isinstance(outcome, Fitted)
    return outcome.weights


def generators() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002


def test_neither_order_nor_workers_change_a_bit() -> None:
    before = generators()
    alone = [train_one(fit, CPU) for fit in mixed_fits()]
    for workers in (1, 2, 3, 20):
        fits = mixed_fits()
        order = torch.randperm(len(fits), generator=torch.Generator().manual_seed(workers)).tolist()
        outcomes = train_many([fits[i] for i in order], Device(CPU, workers))
        for i, outcome in zip(order, outcomes, strict=True):
            assert same(weights_of(outcome), alone[i].weights)
            assert isinstance(outcome, Fitted)
            assert replace(outcome, weights={}, seconds=0.0) == replace(alone[i], weights={}, seconds=0.0)
    assert generators() == before


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_data_and_start_may_be_shared_by_all_and_stay_as_they_are(workers: int) -> None:
    first = a_fit(BN)
    fits = [first, replace(first, seed=12), replace(first, seed=13), first]
    given = [*first.start.values(), first.data.images, first.data.labels]
    copies = [tensor.clone() for tensor in given]
    outcomes = [weights_of(outcome) for outcome in train_many(fits, Device(CPU, workers))]
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))
    assert same(outcomes[0], outcomes[3])
    assert not same(outcomes[0], outcomes[1])
    assert not same(outcomes[1], outcomes[2])
    addresses = [tensor.data_ptr() for weights in outcomes for tensor in weights.values()]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_fit_that_diverges_spoils_no_other(workers: int) -> None:
    fits = [a_fit(BN, seed=1), a_fit(BN, seed=2, lr=1e30), a_fit(BN, seed=3), a_fit(PLAIN, seed=4, lr=1e30)]
    outcomes = train_many(fits, Device(CPU, workers))
    assert [type(outcome) for outcome in outcomes] == [Fitted, SiteDiverged, Fitted, SiteDiverged]
    assert "site-2, round 1" in str(outcomes[1])
    assert "site-4, round 1" in str(outcomes[3])
    for i in (0, 2):
        assert same(weights_of(outcomes[i]), train_one(fits[i], CPU).weights)


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_to_train_gives_nothing(workers: int) -> None:
    assert train_many([], Device(CPU, workers)) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_hears_of_every_step(workers: int) -> None:
    """20 images in batches of 8 are three steps, 33 are five, 9 with batch norm (which leaves out a lone image) one."""
    fits = mixed_fits()
    assert [count_steps(fit) for fit in fits] == [9, 15, 0, 3, 9, 9, 9, 9, 0, 3]
    steps: list[int] = []
    train_many(fits, Device(CPU, workers), lambda: steps.append(1))
    assert len(steps) == 66


# Borrowed networks ----------------------------------------------------------------------------------------------------


def test_networks_are_built_once_and_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nets, "_free", {})
    train_many([a_fit(BN, seed=seed) for seed in range(12)], Device(CPU, 2))
    network_outputs(BN, a_fit(BN).start, images(3).images, CPU)
    assert 1 <= len(nets._free[BN, CPU]) <= 2


def test_a_lent_network_has_a_copy_of_the_weights_and_comes_back_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nets, "_free", {})
    start = a_fit(PLAIN).start
    with nets.borrow(PLAIN, CPU, start) as first, nets.borrow(PLAIN, CPU, start) as second:
        assert first is not second
        assert same(nets.read(first), start)
        assert not {t.data_ptr() for t in start.values()} & {t.data_ptr() for t in first.state_dict().values()}
        first(torch.ones(2, 3, 16, 16)).sum().backward()
        first.head.requires_grad_(False)
    assert len(nets._free[PLAIN, CPU]) == 2
    assert all(p.requires_grad and p.grad is None for p in first.parameters())


# Stopping -------------------------------------------------------------------------------------------------------------


def stop_after(steps: int, stop: Callable[[], None]) -> tuple[Callable[[], None], list[int]]:
    """An `on_step` that stops the work at one step and counts those that still come."""
    seen: list[int] = []

    def on_step() -> None:
        seen.append(1)
        if len(seen) == steps:
            stop()

    return on_step, seen


def assert_quiet(seen: list[int]) -> None:
    """No worker takes another step."""
    steps = len(seen)
    time.sleep(0.05)
    assert len(seen) == steps


def interrupt() -> None:
    raise KeyboardInterrupt


@both_nets
def test_an_interrupt_in_the_main_thread_ends_at_that_step_and_leaves_networks_usable(spec: NetSpec) -> None:
    fit = replace(a_fit(spec, keep="best"), validation=images(4), frozen=frozenset({"head.bias"}))
    before = train_one(a_fit(spec), CPU)
    on_step, seen = stop_after(5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_many([fit, fit], Device(CPU, 1), on_step)
    assert len(seen) == 5
    assert same(train_one(a_fit(spec), CPU).weights, before.weights)


class Fault(Exception):
    """What a fit raises that is nobody's divergence."""


class Faulty(Objective):
    """Fails in the second epoch."""

    def __init__(self) -> None:
        self.steps = 0

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        self.steps += 1
        if self.steps > 3:
            raise Fault


LONG = 1000  # epochs of three steps: a stop that is not heard shows in the number of steps


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_fault_in_one_thread_ends_the_others_now(place: int) -> None:
    fits = [a_fit(BN, seed=seed, epochs=LONG) for seed in range(3)]
    fits[place] = replace(fits[place], objective=Faulty())
    expected = [train_one(a_fit(BN, seed=seed), CPU).weights for seed in range(3)]
    on_step, seen = stop_after(-1, interrupt)
    with pytest.raises(Fault):
        train_many(fits, Device(CPU, 3), on_step)
    assert len(seen) < LONG
    assert_quiet(seen)
    outcomes = train_many([a_fit(BN, seed=seed) for seed in range(3)], Device(CPU, 3))
    assert all(same(weights_of(outcome), alone) for outcome, alone in zip(outcomes, expected, strict=True))


def send_ctrl_c() -> None:
    """What a terminal does: a signal to the main thread, which waits for the workers."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"),
    reason="needs signals to the main thread",
)
def test_ctrl_c_while_threads_train_ends_them_at_their_next_step() -> None:
    fits = [a_fit(BN, seed=seed, epochs=LONG) for seed in range(5)]
    expected = [train_one(a_fit(BN, seed=seed), CPU).weights for seed in range(5)]
    on_step, seen = stop_after(20, send_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        train_many(fits, Device(CPU, 2), on_step)
    assert len(seen) < LONG
    assert_quiet(seen)
    outcomes = train_many([a_fit(BN, seed=seed) for seed in range(5)], Device(CPU, 2))
    assert all(same(weights_of(outcome), alone) for outcome, alone in zip(outcomes, expected, strict=True))


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2, 3, 4, 7])
def test_fits_that_a_gpu_cannot_hold_together_train_by_halves(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves of five and two; every fit is done, in its place, and never more at once than there is room for."""
    together: list[int] = []

    def on_streams(fits: list[Fit], device: torch.device, on_step: Callable[[], None]) -> list[Outcome]:
        if len(fits) > room:
            raise torch.OutOfMemoryError
        together.append(len(fits))
        return [Fitted({}, fit.seed, (), 0, 0.0) for fit in fits]

    monkeypatch.setattr(side_by_side, "_on_streams", on_streams)
    outcomes = train_many([a_fit(BN, n=2, seed=seed) for seed in range(7)], Device(torch.device("cuda", 0), 5))
    assert [outcome.trained_on for outcome in outcomes if isinstance(outcome, Fitted)] == list(range(7))
    assert together == {1: [1] * 7, 2: [2, 1, 2, 2], 3: [2, 3, 2], 4: [2, 3, 2], 7: [5, 2]}[room]
    room = 0
    failures = train_many([a_fit(BN, n=2, seed=seed) for seed in range(3)], Device(torch.device("cuda", 0), 5))
    assert all(isinstance(failure, SiteFailed) for failure in failures)
    assert "the GPU's memory is too small for site-0, round 1" in str(failures[0])


class Wearying(Objective):
    """One that changes while it trains, and draws."""

    def __init__(self) -> None:
        self.draws, self.weight = torch.Generator().manual_seed(3), torch.ones(())

    def loss(self, step: Step) -> Tensor:
        self.weight = self.weight * (0.5 + torch.rand((), generator=self.draws))
        return self.weight * super().loss(step)


def test_a_fit_that_is_begun_anew_begins_with_its_objective_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a GPU may give out in the middle of a fit; how many then train together changes no bit."""

    def on_streams(fits: list[Fit], device: torch.device, on_step: Callable[[], None]) -> list[Outcome]:
        outcomes: list[Outcome] = [train_one(fit, CPU) for fit in fits]
        if len(fits) > 1:
            raise torch.OutOfMemoryError
        return outcomes

    def fits() -> list[Fit]:
        return [replace(a_fit(BN, n=9, seed=seed), objective=Wearying()) for seed in range(3)]

    monkeypatch.setattr(side_by_side, "_on_streams", on_streams)
    found = train_many(fits(), Device(torch.device("cuda", 0), 3))
    for outcome, fit in zip(found, fits(), strict=True):
        assert same(weights_of(outcome), train_one(fit, CPU).weights)


def eager(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> Fitted:
    """The fit alone on the GPU, step by step and never captured."""
    with monkeypatch.context() as patch:
        patch.setattr(captured, "WORTH_CAPTURING", 10**9)
        (outcome,) = train_many([fit], Device(torch.device("cuda", 0), 1))
    assert isinstance(outcome, Fitted)
    return outcome


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes of the graphs that are captured from now on."""
    sizes: list[int] = []

    class Counted(captured._Graph):
        def __init__(self, trainer: Trainer, index: Tensor, draws: Tensor | None) -> None:
            super().__init__(trainer, index, draws)
            sizes.append(len(index))

    monkeypatch.setattr(captured, "_Graph", Counted)
    return sizes


def assert_near(found: Outcome, expected: Fitted, start: Weights) -> None:
    """Near in relation to the way gone from the start; GPU kernels add up in no fixed order."""
    weights = weights_of(found)
    assert isinstance(found, Fitted)
    assert list(found.losses) == pytest.approx(list(expected.losses), rel=1e-2)
    apart = gone = 0.0
    for name, tensor in expected.weights.items():
        if tensor.is_floating_point():
            apart += float((weights[name] - tensor).double().square().sum())
            gone += float((tensor - start[name].to(tensor.device)).double().square().sum())
        else:
            assert torch.equal(weights[name], tensor)
    assert (apart / gone) ** 0.5 < 0.02


@needs_cuda
@both_nets
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"schedule": "step", "gamma": 0.5},
        {"schedule": "cosine"},
        {"optimiser": "adam", "lr": 0.002, "schedule": "cosine"},
        {"augment": True, "clip_norm": 0.5},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_captured_steps_do_what_eager_steps_do(
    spec: NetSpec, recipe: dict[str, Any], graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen epochs of 16 + 16 + 8 images: both sizes recur often enough to be captured."""
    fit = a_fit(spec, n=40, epochs=16, **{"batch": 16, "lr": 0.002, **recipe})
    expected = eager(fit, monkeypatch)
    assert graphs == []
    (found,) = train_many([fit], Device(torch.device("cuda", 0), 1))
    assert sorted(graphs) == [8, 16]
    assert_near(found, expected, fit.start)
    assert expected.losses[-1] != expected.losses[0]


@needs_cuda
@pytest.mark.parametrize("augment", [False, True])
def test_fits_on_streams_do_not_disturb_each_other(augment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site has teachers of its own, evaluated on borrowed networks of one architecture."""
    fits = [taught_fit(augment, seed=seed) for seed in range(1, 7)]
    fits = [replace(fit, recipe=replace(fit.recipe, epochs=8, keep="best"), validation=images(6)) for fit in fits]
    fits[2] = replace(fits[2], recipe=replace(fits[2].recipe, lr=1e30))
    outcomes = train_many(fits, Device(torch.device("cuda", 0), 4))
    for i, (fit, outcome) in enumerate(zip(fits, outcomes, strict=True)):
        if i == 2:
            assert isinstance(outcome, SiteFailed)
        else:
            assert_near(outcome, eager(fit, monkeypatch), fit.start)


@needs_cuda
def test_an_interrupt_on_a_gpu_leaves_networks_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = [a_fit(BN, seed=seed, epochs=40) for seed in range(4)]
    device = Device(torch.device("cuda", 0), 4)
    expected = [eager(fit, monkeypatch) for fit in fits]
    on_step, _ = stop_after(50, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_many(fits, device, on_step)
    for fit, outcome, alone in zip(fits, train_many(fits, device), expected, strict=True):
        assert_near(outcome, alone, fit.start)
