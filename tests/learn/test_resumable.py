"""A fit that is stopped, anywhere and any number of times, is the fit that was not."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from bare_loop import BN, CPU, PLAIN, Distillation, a_fit, same, taught_fit
from learn.stopping import STEPS, assert_same, finished, stopped, the_best
from wardround import tensorfile
from wardround.learn.fit import Fit, Fitted, Objective, Recipe, Step
from wardround.learn.mutual import MutualDistillation
from wardround.learn.prototypes import Prototypes
from wardround.learn.representation import Augmented, Strengths, two_layers
from wardround.learn.resumable import progress_key
from wardround.learn.trainer import train_one
from wardround.methods.fedprox import Proximal
from wardround.models import NetSpec, fresh

Make = Callable[[], Fit]

# Fits of every kind ---------------------------------------------------------------------------------------------------


class Taught(Objective):
    """The divergence from the mean of all teachers; keeps nothing."""

    def loss(self, step: Step) -> Tensor:
        wanted = torch.stack([teacher.logits for teacher in step.teachers]).mean(0).softmax(1)
        return F.kl_div(step.outputs.logits.log_softmax(1), wanted, reduction="batchmean")


def pulled() -> Fit:
    fit = a_fit(BN)
    return replace(fit, objective=Proximal(0.1, {name: tensor.clone() for name, tensor in fit.start.items()}))


def partly_frozen() -> Fit:
    layer = "stages.conv1.2"
    frozen = {"stages.conv1.0.weight", "head.bias", f"{layer}.running_mean", f"{layer}.running_var"}
    return replace(a_fit(BN, optimiser="adam"), frozen=frozenset(frozen))


KINDS: dict[str, Make] = {
    "sgd": lambda: a_fit(BN),
    "sgd without momentum": lambda: a_fit(BN, momentum=0.0),
    "adam": lambda: a_fit(BN, optimiser="adam", lr=0.002),
    "adam, no batch norm": lambda: a_fit(PLAIN, optimiser="adam", lr=0.002),
    "cosine": lambda: a_fit(PLAIN, schedule="cosine"),
    "steps": lambda: a_fit(BN, epochs=4, schedule="step", optimiser="adam", lr=0.002),
    "augmented": lambda: a_fit(BN, augment=True),
    "clipped": lambda: a_fit(BN, clip_norm=0.5),
    "bf16": lambda: a_fit(BN, precision="bf16"),
    "the best epoch": the_best,
    "the best of adam": lambda: the_best(optimiser="adam"),
    "frozen": partly_frozen,
    "teachers": lambda: replace(taught_fit(augment=False), objective=Taught()),
    "teachers, augmented": lambda: replace(taught_fit(augment=True), objective=Taught()),
    "an anchor": pulled,
    "1×1 convolutions": lambda: a_fit(NetSpec("resnet18", 3, 4, 16, width=2)),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_stopped_after_any_epoch_the_result_is_the_same(make: Make, tmp_path: Path) -> None:
    expected, epochs = train_one(make(), CPU), make().recipe.epochs
    for done in range(1, epochs):
        file = tmp_path / f"{done}.safetensors"
        stopped(make(), file, STEPS * done + 1)
        found, steps = finished(make(), file)
        assert steps == STEPS * (epochs - done)
        assert_same(found, expected)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_stopped_after_every_epoch_the_result_is_the_same(make: Make, tmp_path: Path) -> None:
    for _ in range(make().recipe.epochs - 1):
        stopped(make(), tmp_path / "progress", STEPS + 1)
    found, steps = finished(make(), tmp_path / "progress")
    assert steps == STEPS
    assert_same(found, train_one(make(), CPU))


def test_the_best_epoch_of_these_tests_is_in_the_middle() -> None:
    assert 0 < train_one(the_best(), CPU).best_epoch < 5


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(st.integers(1, 3 * STEPS), max_size=5))
def test_stops_in_the_middle_of_epochs(stops: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any stops, in any call: what an unfinished epoch did is done again."""
    file, left = tmp_path_factory.mktemp("stops") / "progress", 3 * STEPS
    for stop in stops:
        if stop <= left:
            stopped(a_fit(BN, optimiser="adam"), file, stop)
            left -= (stop - 1) // STEPS * STEPS
    found, steps = finished(a_fit(BN, optimiser="adam"), file)
    assert steps == left
    assert_same(found, train_one(a_fit(BN, optimiser="adam"), CPU))


def test_uninterrupted_it_is_plain_training_and_leaves_nothing(tmp_path: Path) -> None:
    found, steps = finished(a_fit(BN), tmp_path / "new folder" / "progress")
    assert steps == 3 * STEPS
    assert_same(found, train_one(a_fit(BN), CPU))
    assert not list((tmp_path / "new folder").iterdir())


def test_a_fit_that_is_skipped_writes_nothing(tmp_path: Path) -> None:
    found, steps = finished(a_fit(BN, n=1), tmp_path / "progress", keep_finished=True)
    assert (found.skipped, steps) == ("one image is too few for batch norm", 0)
    assert not list(tmp_path.iterdir())


def test_what_a_stopped_fit_held_is_not_in_the_next_one(tmp_path: Path) -> None:
    """The network was lent: the next fit on it starts from its own weights."""
    stopped(a_fit(BN), tmp_path / "progress", STEPS + 1)
    assert_same(train_one(a_fit(BN, seed=12), CPU), train_one(a_fit(BN, seed=12), CPU))
    assert_same(finished(a_fit(BN), tmp_path / "progress")[0], train_one(a_fit(BN), CPU))


# Objectives with something of their own -------------------------------------------------------------------------------

MENTOR, MENTEE, HEADS = (NetSpec("small", 3, 4, 8, width=3), NetSpec("small", 3, 4, 8, width=2), 4)


def mentored(**recipe: Any) -> Fit:
    chosen = Recipe(**{"epochs": 3, "batch": 4, "lr": 0.05, "schedule": "cosine", **recipe})
    start, mentor = (fresh(spec, torch.Generator().manual_seed(2)) for spec in (MENTEE, MENTOR))
    projection = torch.randn(12, 8, generator=torch.Generator().manual_seed(5)) / 4
    objective = MutualDistillation(MENTOR, mentor, projection, chosen)
    return Fit("x", MENTEE, start, tiny.images(12), chosen, 0, objective)


@pytest.mark.parametrize("recipe", [{}, {"optimiser": "adam", "clip_norm": 0.3}], ids=["sgd", "adam"])
def test_fedkds_mentor_goes_on_too(recipe: dict[str, Any], tmp_path: Path) -> None:
    def trained(fit: Fit, fitted: Fitted) -> dict[str, Tensor]:
        assert isinstance(fit.objective, MutualDistillation)
        fit.objective.finish()
        return {
            **fitted.weights,
            "W": fit.objective.projection,
            **{f"m.{n}": t for n, t in fit.objective.mentor.items()},
        }

    straight = mentored(**recipe)
    expected = trained(straight, train_one(straight, CPU))
    for done in (1, 2, 3):
        file = tmp_path / str(done)
        if done < 3:
            stopped(mentored(**recipe), file, STEPS * done + 1)
        else:
            finished(mentored(**recipe), file, keep_finished=True)
        fit = mentored(**recipe)
        found, steps = finished(fit, file)
        assert steps == STEPS * (3 - done)
        assert same(trained(fit, found), expected)


def augmented() -> Fit:
    spec, draw = NetSpec("cnn4", 3, 4, 8, width=1), torch.Generator().manual_seed(6)
    objective = Augmented(
        two_layers(5 + HEADS, 16, 16, draw),
        two_layers(16 + HEADS, 8, 16, draw),
        Prototypes.none(HEADS, 16),
        torch.arange(HEADS),
        Strengths(0.4, 0.7, 0.3, 0.05, 0.02, 0.5, 0.3),
        torch.Generator().manual_seed(9),
    )
    start = fresh(spec, torch.Generator().manual_seed(3))
    return Fit("x", spec, start, tiny.images(12), Recipe(epochs=3, batch=4, lr=0.05), 0, objective)


def test_fraugs_networks_means_and_draws_go_on_too(tmp_path: Path) -> None:
    def trained(fit: Fit, fitted: Fitted) -> dict[str, Tensor]:
        made = fit.objective
        assert isinstance(made, Augmented)
        made.finish()
        own = {"generator": made.generator, "transform": made.transform, "means": made.means.tensors()}
        return {**fitted.weights, **tensorfile.flatten(own), "draws": made.draws.get_state()}

    straight = augmented()
    expected = trained(straight, train_one(straight, CPU))
    for done in (1, 2):
        stopped(augmented(), tmp_path / "progress", STEPS * done + 1)
        fit = augmented()
        found, steps = finished(fit, tmp_path / "progress")
        assert steps == STEPS * (3 - done)
        assert same(trained(fit, found), expected)


class Tiring(Objective):
    """The loss falls with every step, whatever the network does."""

    def __init__(self) -> None:
        self.weight = torch.ones(())

    def loss(self, step: Step) -> Tensor:
        self.weight = self.weight * 0.9
        return super().loss(step) * self.weight


class TiringAndSaysSo(Tiring):
    """With the two hooks."""

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.weight = state["weight"]


class Opaque(Objective):
    """Holds something that nobody can look into."""

    def __init__(self) -> None:
        self.scale = lambda loss: 2 * loss

    def loss(self, step: Step) -> Tensor:
        return self.scale(super().loss(step))


@pytest.mark.parametrize(
    ("objective", "steps_left"),
    [(TiringAndSaysSo, STEPS), (Tiring, 3 * STEPS), (Opaque, 3 * STEPS), (Distillation, 3 * STEPS)],
)
def test_without_hooks_an_objective_that_changes_or_may_change_starts_over(
    objective: type[Objective], steps_left: int, tmp_path: Path
) -> None:
    def make() -> Fit:
        return replace(taught_fit(augment=False), objective=objective())

    stopped(make(), tmp_path / "progress", 2 * STEPS + 1)
    assert (tmp_path / "progress").exists() == (steps_left == STEPS)
    found, steps = finished(make(), tmp_path / "progress", keep_finished=True)
    assert steps == steps_left
    assert_same(found, train_one(make(), CPU))


def test_objectives_with_networks_of_their_own_are_known_again() -> None:
    assert progress_key(mentored()) == progress_key(mentored()) != progress_key(mentored(lr=0.04))
    assert progress_key(augmented()) == progress_key(augmented())


# kill -9 --------------------------------------------------------------------------------------------------------------

WORKER = """
import sys, time, torch
from pathlib import Path
from bare_loop import CPU, a_fit
from wardround.learn.resumable import train_resumable
torch.set_num_threads(1)
fit = a_fit(epochs=40, optimiser="adam", lr=0.002, augment=True)
train_resumable(fit, CPU, Path(sys.argv[1]), lambda: time.sleep(0.002), every_seconds=0.0)
"""


def kill_after(file: Path, epochs: int, delay: float) -> None:
    """Train in a process of its own, and kill it a moment after that many epochs are saved (unless it was faster)."""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, "-c", WORKER, str(file)], env=environment) as process:
        while process.poll() is None and epochs_in(file) < epochs:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    assert process.returncode in (-signal.SIGKILL, 0)


def epochs_in(file: Path) -> int:
    if not file.exists():
        return 0
    groups, _ = tensorfile.from_bytes(file.read_bytes())
    return len(groups["losses"]["epochs"])


def kill_and_compare(folder: Path, moments: list[tuple[int, float]]) -> int:
    """How many of the stops came while there was something to go on from."""
    fit = a_fit(epochs=40, optimiser="adam", lr=0.002, augment=True)
    expected, went_on = train_one(fit, CPU), 0
    for number, (epochs, delay) in enumerate(moments):
        file = folder / str(number)
        kill_after(file, epochs, delay)
        there = epochs_in(file)
        found, steps = finished(fit, file)
        assert steps == STEPS * (40 - there), f"killed {delay} s after epoch {epochs}"
        assert_same(found, expected)
        went_on += there > 0
    assert not list(folder.iterdir())
    return went_on


def test_kill_minus_nine(tmp_path: Path) -> None:
    assert kill_and_compare(tmp_path, [(5, 0.01)]) == 1


@pytest.mark.soak
def test_kill_minus_nine_at_many_moments(tmp_path: Path) -> None:
    draw = random.Random(20)  # noqa: S311 - moments, no secrets
    assert kill_and_compare(tmp_path, [(draw.randrange(1, 38), draw.uniform(0, 0.05)) for _ in range(20)]) >= 15
