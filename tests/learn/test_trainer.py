"""The training loop against a bare one, on sites of every size."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bare_loop import (
    BN,
    CPU,
    PLAIN,
    RATE,
    a_fit,
    assert_follows,
    bare_loop,
    both_nets,
    images,
    same,
    taught_fit,
)
from wardround.errors import SiteFailed
from wardround.learn.fit import Recipe
from wardround.learn.trainer import batch_bounds, learning_rate, skip_reason, train_one
from wardround.models import NetSpec

# Against the bare loop ------------------------------------------------------------------------------------------------


@both_nets
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"momentum": 0.0, "weight_decay": 0.0},
        {"optimiser": "adam", "lr": 0.002},
        {"optimiser": "adam", "lr": 0.002, "weight_decay": 0.5},
        {"clip_norm": 0.5},
        {"augment": True},
        {"augment": True, "clip_norm": 0.5, "batch": 6},
        {"batch": 32},
        {"batch": 10},
        {"batch": 19},
    ],
    ids=str,
)
def test_the_loop_does_what_a_bare_loop_does(spec: NetSpec, recipe: dict[str, Any]) -> None:
    fit = a_fit(spec, **recipe)
    steps = 3 * len(batch_bounds(20, fit.recipe.batch, spec is BN))
    assert_follows(fit, [fit.recipe.lr] * steps, train_one(fit, CPU))


@both_nets
@pytest.mark.parametrize("recipe", [{}, {"optimiser": "adam", "lr": 0.002}], ids=["sgd", "adam"])
def test_with_the_same_kernels_every_bit_is_that_of_the_bare_loop(spec: NetSpec, recipe: dict[str, Any]) -> None:
    fit = a_fit(spec, **recipe)
    rate = float(torch.tensor(fit.recipe.lr))  # as a tensor on the device the rate has 32 bits
    assert same(train_one(fit, CPU).weights, bare_loop(fit, [rate] * 9, same_kernels=True)[0])


@both_nets
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_rate_falls_in_steps(spec: NetSpec, optimiser: str) -> None:
    """Half of four epochs, then three quarters of them; three batches an epoch."""
    fit = a_fit(spec, epochs=4, schedule="step", gamma=0.5, optimiser=optimiser, lr=0.002)
    assert_follows(fit, [0.002] * 6 + [0.001] * 3 + [0.0005] * 3, train_one(fit, CPU))


@both_nets
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_rate_falls_along_a_cosine(spec: NetSpec, optimiser: str) -> None:
    """Two epochs of two batches: (1 + cos 0)/2, (1 + cos 45°)/2, (1 + cos 90°)/2, (1 + cos 135°)/2."""
    fit = a_fit(spec, epochs=2, batch=10, schedule="cosine", optimiser=optimiser, lr=0.002)
    assert_follows(fit, [0.002, 0.0017071068, 0.001, 0.0002928932], train_one(fit, CPU))


def test_the_rates_of_the_schedules_by_hand() -> None:
    def rates(recipe: Recipe, steps_per_epoch: int) -> list[float]:
        return [learning_rate(recipe, step, steps_per_epoch) for step in range(recipe.epochs * steps_per_epoch)]

    assert rates(Recipe(2, lr=0.3), 2) == [0.3] * 4
    assert rates(Recipe(4, lr=1.0, schedule="step"), 2) == pytest.approx([1.0] * 4 + [0.1] * 2 + [0.01] * 2)
    assert rates(Recipe(3, lr=1.0, schedule="step", milestones=(0.0, 0.5)), 1) == pytest.approx([0.1, 0.1, 0.01])
    assert rates(Recipe(2, lr=1.0, schedule="cosine"), 2) == pytest.approx([1, 0.8535534, 0.5, 0.1464466])


def test_a_milestone_that_is_a_whole_epoch_comes_at_that_epoch() -> None:
    """0.55 · 100 is 55.00000000000001 in floating point, which no epoch of 100 but the 56th has passed."""
    for percent in range(1, 100):
        recipe = Recipe(100, lr=1.0, schedule="step", milestones=(percent / 100,), gamma=0.5)
        assert learning_rate(recipe, 2 * percent - 1, 2) == 1.0
        assert learning_rate(recipe, 2 * percent, 2) == 0.5


def test_batches_by_hand() -> None:
    assert batch_bounds(10, 4, True) == batch_bounds(10, 4, False) == [(0, 4), (4, 8), (8, 10)]
    assert batch_bounds(9, 4, False) == [(0, 4), (4, 8), (8, 9)]
    assert batch_bounds(9, 4, True) == [(0, 4), (4, 8)]
    assert batch_bounds(3, 8, True) == [(0, 3)]
    assert batch_bounds(3, 1, True) == []
    assert batch_bounds(0, 4, True) == []


# Small sites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "n", "recipe", "reason"),
    [
        (BN, 0, {}, "no training images"),
        (PLAIN, 0, {}, "no training images"),
        (PLAIN, 5, {"epochs": 0}, "no epochs"),
        (BN, 1, {}, "one image is too few for batch norm"),
        (BN, 5, {"batch": 1}, "batches of one image are too small for batch norm"),
    ],
)
def test_what_cannot_train_is_skipped_by_rule(spec: NetSpec, n: int, recipe: dict[str, Any], reason: str) -> None:
    fit = a_fit(spec, n=n, **recipe)
    assert skip_reason(fit) == reason
    fitted = train_one(fit, CPU)
    assert (fitted.skipped, fitted.trained_on, fitted.losses) == (reason, 0, ())
    assert same(fitted.weights, fit.start)


@pytest.mark.parametrize(
    ("spec", "n", "batch"), [(PLAIN, 1, 4), (PLAIN, 3, 1), (PLAIN, 5, 4), (BN, 2, 64), (BN, 9, 4), (BN, 3, 2)]
)
@pytest.mark.parametrize("label", [None, 2])
def test_small_sites_train_like_the_bare_loop(spec: NetSpec, n: int, batch: int, label: int | None) -> None:
    """Fewer images than a batch, a lone last image (left out under batch norm), one class."""
    fit = replace(a_fit(spec, batch=batch), data=images(n, seed=3, label=label))
    fitted = train_one(fit, CPU)
    assert fitted.trained_on == n
    assert all(math.isfinite(loss) for loss in fitted.losses)
    assert_follows(fit, [RATE] * 3 * len(batch_bounds(n, batch, spec is BN)), fitted)


@both_nets
@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_fit_that_diverges_says_which(spec: NetSpec, keep: str) -> None:
    fit = replace(a_fit(spec, lr=1e30, keep=keep), validation=images(4))
    with pytest.raises(SiteFailed, match=r"site-11, round 1.*smaller learning rate than 1e\+30"):
        train_one(fit, CPU)


# What a fit must leave alone ------------------------------------------------------------------------------------------


@both_nets
def test_a_fit_twice_is_the_same_and_changes_nothing_around_it(spec: NetSpec) -> None:
    def generators() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002

    fit = replace(taught_fit(augment=True) if spec is BN else a_fit(spec, augment=True), validation=images(5, seed=9))
    fit = replace(fit, recipe=replace(fit.recipe, keep="best"))
    given = [*fit.start.values(), fit.data.images, fit.data.labels]
    given += [tensor for teacher in fit.teachers for tensor in teacher.weights.values()]
    copies, drawn = [tensor.clone() for tensor in given], generators()
    first = train_one(fit, CPU)
    kept = {name: tensor.clone() for name, tensor in first.weights.items()}
    second = train_one(fit, CPU)
    assert generators() == drawn
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))
    assert same(first.weights, kept)
    assert same(first.weights, second.weights)
    assert first.losses == second.losses
    addresses = {tensor.data_ptr() for tensor in given} | {tensor.data_ptr() for tensor in second.weights.values()}
    assert not addresses & {tensor.data_ptr() for tensor in first.weights.values()}
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in first.weights.values())


def test_another_seed_shuffles_otherwise() -> None:
    fit = a_fit(BN)
    assert not same(train_one(fit, CPU).weights, train_one(replace(fit, seed=fit.seed + 1), CPU).weights)


@both_nets
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_bf16_trains_on_a_cpu_and_stays_near_fp32(spec: NetSpec, optimiser: str) -> None:
    fit = a_fit(spec, n=24, epochs=2, optimiser=optimiser, weight_decay=0.0)
    exact = train_one(fit, CPU)
    rounded = train_one(replace(fit, recipe=replace(fit.recipe, precision="bf16")), CPU)
    assert not same(exact.weights, rounded.weights)
    assert list(rounded.losses) == pytest.approx(list(exact.losses), rel=0.05)
    for name, tensor in exact.weights.items():
        found = rounded.weights[name]
        assert found.dtype == tensor.dtype
        assert bool(torch.isfinite(found).all())
        assert torch.allclose(found.double(), tensor.double(), atol=0.1), name
