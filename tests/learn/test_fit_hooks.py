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
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Objective
from wardround.learn.trainer import Trainer, train_one
from wardround.models import Weights, spec_layout

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


def epochs_one_by_one(fit: Fit, epochs: int) -> list[Weights]:
    """The weights after each epoch; with a constant rate a shorter fit is the beginning of a longer one."""
    return [train_one(replace(fit, recipe=replace(fit.recipe, epochs=k)), CPU).weights for k in range(1, epochs + 1)]


def answers(weights: Weights, asked: ImageSet) -> Tensor:
    return network_outputs(BN, weights, asked.images, CPU).logits.argmax(1)


def test_the_best_epoch_on_validation_images_is_kept() -> None:
    """Validation labels are what the third of five epochs answers, so that it alone is right everywhere."""
    fit, asked = a_fit(BN, epochs=5, lr=0.1, keep="best"), images(200, seed=5)
    after = epochs_one_by_one(replace(fit, recipe=replace(fit.recipe, keep="last")), 5)
    validation = replace(asked, labels=answers(after[2], asked))
    assert sum(bool((answers(weights, asked) == validation.labels).all()) for weights in after) == 1
    best = train_one(replace(fit, validation=validation), CPU)
    assert best.best_epoch == 2
    assert same(best.weights, after[2])
    assert len(best.losses) == 5
    last = train_one(replace(fit, validation=validation, recipe=replace(fit.recipe, keep="last")), CPU)
    assert last.best_epoch == 4
    assert same(last.weights, after[4])


def test_of_equally_good_epochs_the_first_is_kept() -> None:
    fit, asked = a_fit(BN, epochs=3, keep="best"), images(1, seed=5)
    after = epochs_one_by_one(fit, 3)
    never = min(set(range(4)) - {int(answers(weights, asked)) for weights in after})
    best = train_one(replace(fit, validation=replace(asked, labels=torch.tensor([never]))), CPU)
    assert best.best_epoch == 0
    assert same(best.weights, after[0])


@pytest.mark.parametrize("validation", [None, images(0)], ids=["none", "empty"])
def test_without_validation_images_the_last_epoch_is_kept(validation: ImageSet | None) -> None:
    fit = a_fit(BN)
    best = train_one(replace(fit, validation=validation, recipe=replace(fit.recipe, keep="best")), CPU)
    assert best.best_epoch == 2
    assert same(best.weights, train_one(fit, CPU).weights)
