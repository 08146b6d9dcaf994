"""DP-SGD against a slow plain loop: each image's gradient, the clipping, the noise, the step, the account."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny import CPU, images
from wardround.errors import BadInput
from wardround.learn.fit import Fit, Objective, Recipe, Step, Teacher
from wardround.learn.pixels import normalise
from wardround.models import NetSpec, Weights, build, fresh
from wardround.privacy import per_image
from wardround.privacy.account import ORDERS, Account, Spent, least_epsilon, noise_for, rate_and_steps
from wardround.privacy.dpsgd import Mechanism, cost, identity, train_private
from wardround.privacy.secret import Secret
from wardround.streams import Streams

SPEC = NetSpec("cnn4", 3, 4, 8, width=2)
NORMED = NetSpec("small-gn", 3, 4, 8, width=2)  # in float64: groups of two numbers amplify float32's rounding
SECRET = Secret(bytes(range(32)))
RECIPE = Recipe(epochs=2, batch=4, lr=0.1, momentum=0.9, weight_decay=0.01)


def fit(recipe: Recipe = RECIPE, objective: Objective | None = None, **changes: Any) -> Fit:
    start = fresh(SPEC, Streams(0).torch("start"))
    return Fit("site-1, test", SPEC, start, images(11), recipe, 7, objective or Objective(), **changes)


class Halved(Objective):
    """A loss of its own, so that images go one by one."""

    def loss(self, step: Step) -> Tensor:
        return 0.5 * F.cross_entropy(step.outputs.logits, step.labels)


def loaded(weights: Weights) -> Any:
    net = build(SPEC)
    net.load_state_dict(weights)
    return net.train()


def step_of(n: int = 5) -> Step:
    data = images(n)
    return Step(torch.arange(n), normalise(data.images), data.labels, None, ())  # type: ignore[arg-type]


# One image's gradient -------------------------------------------------------------------------------------------------


def test_each_images_gradient_is_that_of_a_batch_of_one() -> None:
    net = build(NORMED).double()
    net.load_state_dict(fresh(NORMED, Streams(0).torch("start")))
    step = step_of()
    step = step._replace(images=step.images.double())
    trained = dict(net.named_parameters())
    fast, total = per_image.gradients(net, Objective(), step, trained)
    sum_of_losses = 0.0
    for i in range(5):
        loss = F.cross_entropy(net(step.images[i : i + 1]), step.labels[i : i + 1])
        sum_of_losses += loss.item()
        for (name, _), wanted in zip(trained.items(), torch.autograd.grad(loss, list(trained.values())), strict=True):
            torch.testing.assert_close(fast[name][i], wanted, rtol=1e-9, atol=1e-12)
    assert total.item() == pytest.approx(sum_of_losses, rel=1e-5)
    slow, _ = per_image.one_by_one(net, Objective(), step, trained)
    for name in trained:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-9, atol=1e-12)


def test_each_images_gradient_is_what_opacus_finds() -> None:
    from opacus import GradSampleModule

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
    step = step_of()
    found, _ = per_image._at_once(net, step, dict(net.named_parameters()))  # type: ignore[arg-type]
    wrapped = GradSampleModule(net, loss_reduction="sum")
    step = step._replace(images=step.images.contiguous())
    F.cross_entropy(wrapped(step.images), step.labels, reduction="sum").backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad_sample, rtol=1e-4, atol=1e-6)


def test_another_objective_and_frozen_layers_go_image_by_image() -> None:
    net, step = loaded(fit().start), step_of()
    trained = {"head.weight": net.head.weight}
    found, _ = per_image.gradients(net, Halved(), step, trained)
    whole, _ = per_image.gradients(net, Objective(), step, dict(net.named_parameters()))
    torch.testing.assert_close(found["head.weight"], whole["head.weight"] / 2, rtol=1e-4, atol=1e-6)


# A whole fit ----------------------------------------------------------------------------------------------------------


def plain_dpsgd(asked: Fit, clip: float, noise: float, half: bool = False) -> Weights:
    """Abadi et al.'s Algorithm 1, image by image, with momentum and weight decay as SGD has them."""
    purpose = f"dp-sgd|{identity(asked, Mechanism(clip, noise))}"
    net, recipe, n = loaded(asked.start), asked.recipe, len(asked.data)
    parameters = [p for name, p in net.named_parameters() if name not in asked.frozen]
    velocity = [torch.zeros_like(p) for p in parameters]
    rate, pixels = min(1.0, recipe.batch / n), normalise(asked.data.images)
    draws = [SECRET.numpy(purpose, index=epoch) for epoch in range(recipe.epochs)]
    for draw in [draw for draw in draws for _ in range(math.ceil(n / recipe.batch))]:
        total = [torch.zeros_like(p) for p in parameters]
        for i in np.flatnonzero(draw.random(n) < rate):
            loss = F.cross_entropy(net(pixels[i : i + 1]), asked.data.labels[i : i + 1]) / (2 if half else 1)
            found = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in found))
            for t, g in zip(total, found, strict=True):
                t += g * min(1.0, clip / (norm + 1e-6))
        with torch.no_grad():
            for p, t, v in zip(parameters, total, velocity, strict=True):
                noised = t + noise * clip * torch.from_numpy(draw.standard_normal(tuple(p.shape), dtype=np.float32))
                v.mul_(recipe.momentum).add_(noised / min(recipe.batch, n) + recipe.weight_decay * p)
                p -= recipe.lr * v
    return dict(net.state_dict())


@pytest.mark.parametrize(("clip", "noise"), [(0.05, 0.7), (100.0, 0.3)])
def test_a_fit_is_the_plain_algorithm(clip: float, noise: float) -> None:
    found = train_private(fit(), Mechanism(clip, noise), SECRET, CPU)
    for name, wanted in plain_dpsgd(fit(), clip, noise).items():
        torch.testing.assert_close(found.weights[name], wanted, rtol=1e-4, atol=1e-6)
    assert found.trained_on == 11
    assert len(found.losses) == 2


def test_pieces_of_a_batch_and_slow_objectives_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train_private(fit(), Mechanism(0.1, 0.5), SECRET, CPU).weights
    with monkeypatch.context() as patch:
        patch.setattr("wardround.privacy.dpsgd.images_at_once", lambda trained: 2)
        pieces = train_private(fit(), Mechanism(0.1, 0.5), SECRET, CPU).weights
    slow = train_private(fit(objective=Halved()), Mechanism(0.1, 0.5), SECRET, CPU).weights
    halved = plain_dpsgd(fit(objective=Halved()), 0.1, 0.5, half=True)
    for name in wanted:
        torch.testing.assert_close(pieces[name], wanted[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(slow[name], halved[name], rtol=1e-4, atol=1e-6)


def test_the_noise_has_the_stated_deviation() -> None:
    """With a clip so small that gradients vanish beside it, a step is noise·clip/batch·lr and nothing else."""
    wide = NetSpec("cnn4", 3, 4, 8, width=8)
    start = fresh(wide, Streams(0).torch("start"))
    recipe = Recipe(epochs=1, batch=11, lr=1.0, momentum=0.0, weight_decay=0.0)
    asked = Fit("site-1, noise", wide, start, images(11), recipe, 7)
    found = train_private(asked, Mechanism(1.0, 50.0), SECRET, CPU).weights
    moved = torch.cat([(found[name] - start[name]).flatten() for name in start])
    assert moved.std().item() == pytest.approx(50.0 / 11, rel=0.02)
    assert abs(moved.mean().item()) < 0.1


def test_the_same_secret_repeats_and_another_does_not() -> None:
    first, again = (train_private(fit(), Mechanism(1.0, 1.0), SECRET, CPU).weights for _ in range(2))
    other = train_private(fit(), Mechanism(1.0, 1.0), Secret(bytes(32)), CPU).weights
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_studys_seed_does_not_reach_the_noise() -> None:
    """Two fits that differ in the seed alone take different noise, but no part of it can be derived from the seed."""
    asked = fit()
    generators = [Streams(asked.seed).numpy(purpose) for purpose in ("dp-sgd", "shuffle", "fit")]
    noise = SECRET.numpy(f"dp-sgd|{identity(asked, Mechanism(1.0, 1.0))}").random(4)
    assert not any(np.array_equal(generator.random(4), noise) for generator in generators)


def test_fits_that_differ_in_anything_share_no_noise() -> None:
    """A teacher may change while the weights that came do not; equal noise would leave the difference bare."""
    teachers = [(Teacher(SPEC, fresh(SPEC, Streams(n).torch("teacher"))),) for n in (1, 2)]
    strong = Halved()
    strong.strength = 2.0  # type: ignore[attr-defined]
    other = Mechanism(1.0, 2.0)
    fits = [fit(), fit(objective=Halved()), fit(objective=strong), *(fit(teachers=t) for t in teachers)]
    names = [*(identity(asked, Mechanism(1.0, 1.0)) for asked in fits), identity(fit(), other)]
    assert len(set(names)) == len(names)
    assert identity(fit(), other) == names[-1]


def test_a_site_smaller_than_a_batch_divides_by_its_own_size() -> None:
    large = Recipe(epochs=2, batch=64, lr=0.1)
    found = train_private(fit(large), Mechanism(0.5, 0.3), SECRET, CPU).weights
    for name, wanted in plain_dpsgd(fit(large), 0.5, 0.3).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-6)


# After a stop ---------------------------------------------------------------------------------------------------------


def stopped_after(steps: int, file: Path, asked: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with every epoch saved, and stop in the midst of a later one."""
    taken = 0

    def on_step() -> None:
        nonlocal taken
        taken += 1
        if taken == steps:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("wardround.learn.resumable._Progress.due", lambda self, every: True)
        with pytest.raises(KeyboardInterrupt):
            train_private(asked, Mechanism(0.5, 0.4), SECRET, CPU, on_step, file)


def test_a_fit_that_was_stopped_goes_on_and_ends_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, four = tmp_path / "fit.safetensors", Recipe(epochs=4, batch=4, lr=0.1, augment=True)
    whole = train_private(fit(four), Mechanism(0.5, 0.4), SECRET, CPU)
    stopped_after(8, file, fit(four), monkeypatch)  # three steps an epoch: two epochs are saved
    steps: list[int] = []
    rest = train_private(fit(four), Mechanism(0.5, 0.4), SECRET, CPU, lambda: steps.append(1), file)
    assert len(steps) == 6
    assert rest.losses == whole.losses
    assert all(torch.equal(rest.weights[name], tensor) for name, tensor in whole.weights.items())
    again = train_private(fit(four), Mechanism(0.5, 0.4), SECRET, CPU, lambda: steps.append(1), file)
    assert len(steps) == 6  # finished, and the file says so
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in whole.weights.items())


@pytest.mark.parametrize(
    ("mechanism", "secret"), [(Mechanism(0.5, 0.8), SECRET), (Mechanism(0.5, 0.4), Secret(bytes(32)))]
)
def test_nothing_goes_on_from_another_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: Mechanism, secret: Secret
) -> None:
    file = tmp_path / "fit.safetensors"
    stopped_after(5, file, fit(), monkeypatch)
    found, wanted = (train_private(fit(), mechanism, secret, CPU, progress_file=f) for f in (file, None))
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in wanted.weights.items())


def test_frozen_tensors_stay_and_corrections_apply() -> None:
    class Stopped(Objective):
        def correct(self, trained: Any) -> None:
            for tensor in trained.values():
                tensor.grad.zero_()

    frozen = frozenset({"head.weight"})
    found = train_private(fit(frozen=frozen), Mechanism(1.0, 1.0), SECRET, CPU).weights
    assert torch.equal(found["head.weight"], fit().start["head.weight"])
    assert not torch.equal(found["head.bias"], fit().start["head.bias"])
    still = Recipe(epochs=1, batch=4, lr=0.1, weight_decay=0.0)
    found = train_private(fit(still, Stopped()), Mechanism(1.0, 1.0), SECRET, CPU).weights
    assert all(torch.equal(found[name], tensor) for name, tensor in fit().start.items())


def test_teachers_and_augmentation_go_through() -> None:
    class Taught(Objective):
        def loss(self, step: Step) -> Tensor:
            (teacher,) = step.teachers
            assert len(teacher.logits) == len(step.images) == 1
            return F.mse_loss(step.outputs.logits, teacher.logits)

    teachers = (Teacher(SPEC, fresh(SPEC, Streams(1).torch("teacher"))),)
    for augment in (False, True):
        recipe = Recipe(epochs=1, batch=4, lr=0.1, augment=augment)
        found = train_private(fit(recipe, Taught(), teachers=teachers), Mechanism(1.0, 0.1), SECRET, CPU)
        assert math.isfinite(found.losses[0])


def test_a_site_without_images_is_skipped_at_no_cost() -> None:
    asked = Fit("site-1, test", SPEC, fit().start, images(0), RECIPE, 7)
    assert train_private(asked, Mechanism(1.0, 1.0), SECRET, CPU).skipped == "no training images"
    assert cost(asked, Mechanism(1.0, 1.0)) == ()
    assert cost(fit(), Mechanism(1.0, 2.0)) == (Spent(2.0, 4 / 11, 6),)


# The account ----------------------------------------------------------------------------------------------------------


def test_the_account_of_full_batches_is_the_gaussian_mechanisms() -> None:
    """At rate 1 a step's Rényi divergence of order α is α/(2σ²); the conversion is Balle et al.'s (2020)."""
    noise, steps, delta = 3.0, 7, 1e-5
    wanted = min(
        steps * a / (2 * noise**2) - (math.log(delta) + math.log(a)) / (a - 1) + math.log((a - 1) / a) for a in ORDERS
    )
    account = Account(delta, (Spent(noise, 1.0, 4),)).after(Spent(noise, 1.0, 3))
    assert account.epsilon() == pytest.approx(wanted, rel=1e-9)
    assert Account(delta).epsilon() == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 4.0, 20.0])
def test_the_noise_for_an_epsilon_keeps_within_it(epsilon: float) -> None:
    rate, steps = rate_and_steps(500, 50, 10)
    assert (rate, steps) == (0.1, 100)
    noise = noise_for(epsilon, 1e-5, rate, steps)
    assert epsilon - 0.011 <= Account(1e-5, (Spent(noise, rate, steps),)).epsilon() <= epsilon


def test_batches_larger_than_the_site_take_every_image() -> None:
    assert rate_and_steps(7, 64, 3) == (1.0, 3)


@pytest.mark.parametrize("delta", [1e-7, 1e-5, 0.1])
def test_endless_noise_costs_the_least_epsilon(delta: float) -> None:
    endless = Account(delta, (Spent(1e9, 0.01, 1),)).epsilon()
    assert least_epsilon(delta) == pytest.approx(max(0.0, endless), abs=1e-9)


def test_an_epsilon_out_of_reach_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be reached"):
        noise_for(1e-9, 1e-5, 1.0, 10**6)
