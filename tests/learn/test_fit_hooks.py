"""What a method may change about a fit: the loss, the gradient, what is frozen, which epoch is kept."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bare_loop import (
    BN,
    CPU,
    PLAIN,
    RATE,
    Distillation,
    a_fit,
    assert_follows,
    images,
    plain_network,
    plain_pixels,
    same,
    taught_fit,
)
from wardround.data.imageset import ImageSet
from wardround.learn.fit import Fit, Objective
from wardround.learn.trainer import Trainer, train_one
from wardround.models import spec_layout

# Hooks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [False, True])
def test_teachers_teach_as_in_a_bare_loop(augment: bool) -> None:
    fit = taught_fit(augment)
    assert_follows(fit, [RATE] * 9, train_one(fit, CPU))


def test_cached_teachers_say_what_they_would_say_now() -> None:
    fit = taught_fit(augment=False)
    train_one(fit, CPU)
    assert isinstance(fit.objective, Distillation)
    teacher = plain_network(fit.teachers[1].spec, fit.teachers[1].weights).eval()
    assert len(fit.objective.shown) == 9
    for step in fit.objective.shown:
        with torch.no_grad():
            features, logits = teacher.outputs(torch.stack([plain_pixels(fit.data.images[i]) for i in step.positions]))
        assert torch.allclose(step.teachers[1].logits, logits, rtol=1e-5, atol=1e-6)
        assert torch.allclose(step.teachers[1].features, features, rtol=1e-5, atol=1e-6)
        assert torch.equal(step.labels, fit.data.labels[step.positions])


def test_teachers_are_asked_once_per_image_unless_images_change() -> None:
    with ExitStack() as borrowed:
        still, moving = Trainer(taught_fit(False), CPU, borrowed), Trainer(taught_fit(True), CPU, borrowed)
        assert [len(outputs.logits) for outputs in still.cached_teachers] == [20, 20]
        assert not still.teacher_nets
        assert not moving.cached_teachers
        assert len(moving.teacher_nets) == 2


class ConstantGradient(Objective):
    """Every gradient is 2, whatever the loss says."""

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        for parameter in trained.values():
            assert parameter.grad is not None
            parameter.grad.fill_(2.0)


def test_the_gradient_hook_has_the_last_word_before_clipping() -> None:
    """Nine steps of 0.01 · 2; clipped to norm 1, a gradient of 2 in each of p places becomes 1/√p."""
    fit = replace(a_fit(PLAIN, momentum=0.0, weight_decay=0.0), objective=ConstantGradient())
    found = train_one(fit, CPU).weights
    clipped = train_one(replace(fit, recipe=replace(fit.recipe, clip_norm=1.0)), CPU).weights
    length = math.sqrt(spec_layout(PLAIN).parameter_count)
    for name, start in fit.start.items():
        assert torch.allclose(found[name], start - 0.18, atol=1e-6)
        assert torch.allclose(clipped[name], start - 0.09 / length, atol=1e-6)


def test_a_subclass_of_the_objective_is_never_taken_for_cross_entropy() -> None:
    class Named(ConstantGradient):
        key = "two"

    class Heir(Named):
        pass

    assert Objective().key == "cross-entropy"
    assert [made.key for made in (ConstantGradient(), Named(), Heir())] == [None, "two", None]


# Frozen tensors -------------------------------------------------------------------------------------------------------


def test_frozen_parameters_and_statistics_keep_every_bit() -> None:
    layer = "stages.conv1.2"
    frozen = {"stages.conv1.0.weight", "head.bias", f"{layer}.running_mean", f"{layer}.running_var", f"{layer}.weight"}
    fit = replace(a_fit(BN), frozen=frozenset(frozen))
    fitted = train_one(fit, CPU)
    unchanged = {name for name in fit.start if torch.equal(fitted.weights[name], fit.start[name])}
    assert unchanged == frozen | {f"{layer}.num_batches_tracked"}
    assert_follows(fit, [RATE] * 9, fitted)


@pytest.mark.parametrize("kind", ["running_mean", "running_var"])
def test_one_frozen_statistic_freezes_its_layer(kind: str) -> None:
    name = f"stages.conv2.2.{kind}"
    fit = replace(a_fit(BN), frozen=frozenset({name}))
    assert torch.equal(train_one(fit, CPU).weights[name], fit.start[name])


def test_a_network_that_was_frozen_is_lent_unfrozen() -> None:
    fit = a_fit(BN)
    before = train_one(fit, CPU)
    train_one(replace(fit, frozen=frozenset(spec_layout(BN).batch_norm)), CPU)
    assert same(train_one(fit, CPU).weights, before.weights)


# Which epoch ----------------------------------------------------------------------------------------------------------


class RaceOfBiases(Objective):
    """Only the head's bias moves: per step of rate 0.1, class 1 gains 0.1 and class 2 gains 0.2."""

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        for name, parameter in trained.items():
            parameter.grad = torch.zeros_like(parameter)
            if name == "head.bias":
                parameter.grad.copy_(torch.tensor([0.0, -1.0, -2.0, 0.0]))


def race() -> Fit:
    """Five epochs of one step. The bias alone decides, and for all images alike.

    After epoch  1              2              3              4              5
    class 0       0 (leads)      0              0              0              0
    class 1      -0.05           0.05 (leads)   0.15 (leads)   0.25           0.35
    class 2      -0.30          -0.10           0.10           0.30 (leads)   0.50 (leads)
    Three of four validation images are of class 1, one is of class 0: accuracy 1/4, 3/4, 3/4, 0, 0.
    """
    fit = a_fit(BN, epochs=5, batch=20, lr=0.1, momentum=0.0, weight_decay=0.0)
    start = {**fit.start, "head.weight": torch.zeros(4, 8), "head.bias": torch.tensor([0.0, -0.15, -0.5, -9.0])}
    validation = replace(images(4), labels=torch.tensor([1, 1, 0, 1]))
    return replace(fit, start=start, objective=RaceOfBiases(), validation=validation)


def test_the_last_of_the_best_epochs_on_validation_images_is_kept() -> None:
    """A site of one class is right about all of its images from the first epoch on, and should send what it learned."""
    fit = race()
    best = train_one(replace(fit, recipe=replace(fit.recipe, keep="best")), CPU)
    assert best.best_epoch == 2
    assert best.weights["head.bias"].tolist() == pytest.approx([0.0, 0.15, 0.1, -9.0], abs=1e-6)
    assert best.weights["stages.conv1.2.num_batches_tracked"] == 3
    assert len(best.losses) == 5
    third = train_one(replace(fit, recipe=replace(fit.recipe, epochs=3)), CPU)
    assert same(best.weights, third.weights)


def test_the_first_of_the_best_epochs_is_kept_where_asked_for() -> None:
    """As FedISCA's public code does, which takes an epoch only if it is better than all before."""
    fit = race()
    best = train_one(replace(fit, recipe=replace(fit.recipe, keep="first-best")), CPU)
    assert best.best_epoch == 1
    assert best.weights["head.bias"].tolist() == pytest.approx([0.0, 0.05, -0.1, -9.0], abs=1e-6)
    second = train_one(replace(fit, recipe=replace(fit.recipe, epochs=2)), CPU)
    assert same(best.weights, second.weights)


def test_the_last_epoch_is_kept_unless_asked_otherwise() -> None:
    last = train_one(race(), CPU)
    assert last.best_epoch == 4
    assert last.weights["head.bias"].tolist() == pytest.approx([0.0, 0.35, 0.5, -9.0], abs=1e-6)


@pytest.mark.parametrize("validation", [None, images(0)], ids=["none", "empty"])
def test_without_validation_images_the_last_epoch_is_kept(validation: ImageSet | None) -> None:
    fit = a_fit(BN)
    best = train_one(replace(fit, validation=validation, recipe=replace(fit.recipe, keep="best")), CPU)
    assert best.best_epoch == 2
    assert same(best.weights, train_one(fit, CPU).weights)
