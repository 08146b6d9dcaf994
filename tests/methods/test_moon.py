"""MOON: the contrast by hand, and a previous model that really is the site's own of the last time."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import CPU, context, coordinate, drive, federation, images, predictor_bytes, study, watch_bundles, watch_fits
from wardround.errors import BadInput
from wardround.learn.fit import Fit, Objective, Outputs, Recipe, Step, Teacher, weights_hash
from wardround.learn.trainer import train_one
from wardround.methods.fedavg import FedAvg
from wardround.methods.moon import PREVIOUS, Contrast, Moon
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, build, fresh
from wardround.record.rundir import RunDir

SPEC = NetSpec("cnn4", 3, 4, 8, width=2)


def moon(**own: Any) -> Any:
    return make("moon", own)


# The contrast ---------------------------------------------------------------------------------------------------------


def test_the_contrast_by_hand() -> None:
    """z = (1, 0), received (0, 2), previous (3, 0): cosines 0 and 1, so with τ = 1/2 it is log(1 + e²).

    z = (0, 1) with the same models: cosines 1 and 0, log(1 + e⁻²). The mean of both.
    """
    own = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    received, previous = torch.tensor([[0.0, 2.0]] * 2), torch.tensor([[3.0, 0.0]] * 2)
    expected = (math.log(1 + math.exp(2)) + math.log(1 + math.exp(-2))) / 2
    assert Contrast(1.0, 0.5).contrast(own, received, previous).item() == pytest.approx(expected)


def test_the_loss_is_cross_entropy_and_mu_times_the_contrast() -> None:
    draw = torch.Generator().manual_seed(0)
    features, logits = torch.randn(5, 3, generator=draw), torch.randn(5, 4, generator=draw)
    near, far = (torch.randn(5, 3, generator=draw) for _ in range(2))
    labels = torch.tensor([0, 1, 2, 3, 0])
    teachers = Outputs(near, torch.zeros(5, 4)), Outputs(far, torch.zeros(5, 4))
    step = Step(torch.arange(5), torch.zeros(5), labels, Outputs(features, logits), teachers)
    objective = Contrast(3.0, 0.7)
    expected = F.cross_entropy(logits, labels) + 3 * slow_contrast(features, near, far, 0.7)
    torch.testing.assert_close(objective.loss(step), expected)


def slow_contrast(own: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """Eq. 3 as it is printed, image by image."""
    total = torch.zeros(())
    for z, near, far in zip(own, received, previous, strict=True):
        plus = torch.exp((z @ near) / (z.norm() * near.norm()) / tau)
        minus = torch.exp((z @ far) / (z.norm() * far.norm()) / tau)
        total = total - torch.log(plus / (plus + minus))
    return total / len(own)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.integers(2, 5), st.floats(0.1, 5), st.integers(0, 1000))
def test_it_is_equation_3(n: int, width: int, tau: float, seed: int) -> None:
    """A batch of one image included, at which a squeezed feature loses its row in the public code."""
    draw = torch.Generator().manual_seed(seed)
    own, received, previous = (torch.rand(n, width, generator=draw) + 0.01 for _ in range(3))
    found = Contrast(1.0, tau).contrast(own, received, previous)
    torch.testing.assert_close(found, slow_contrast(own, received, previous, tau), rtol=1e-4, atol=1e-5)


def test_equal_teachers_pull_nowhere() -> None:
    """Why a site without a previous model trains on cross-entropy alone."""
    own = torch.rand(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    same = torch.rand(4, 3, generator=torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad(Contrast(1.0, 0.5).contrast(own, same, same), own)
    assert gradient.abs().max() < 1e-7


def test_a_small_temperature_does_not_overflow() -> None:
    own, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert Contrast(1.0, 1e-3).contrast(own, other, own).item() == pytest.approx(1000.0)


def test_two_steps_against_a_plain_loop() -> None:
    data, tau, mu, rate = images(6, seed=5), 0.5, 2.0, 0.1
    start, received, previous = (fresh(SPEC, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    recipe = Recipe(epochs=2, batch=6, lr=rate, momentum=0.0, weight_decay=0.0)
    teachers = (Teacher(SPEC, received), Teacher(SPEC, previous))
    fit = Fit("x", SPEC, start, data, recipe, seed=1, objective=Contrast(mu, tau), teachers=teachers)
    found = train_one(fit, CPU).weights
    nets = [build(SPEC) for _ in range(3)]
    for net, weights in zip(nets, (start, received, previous), strict=True):
        net.load_state_dict(weights)
    pixels = data.images.float() / 127.5 - 1
    for _ in range(2):
        features, logits = nets[0].outputs(pixels)
        with torch.no_grad():
            near, far = (net.features(pixels) for net in nets[1:])
        loss = F.cross_entropy(logits, data.labels) + mu * slow_contrast(features, near, far, tau)
        gradients = torch.autograd.grad(loss, list(nets[0].parameters()))
        with torch.no_grad():
            for p, gradient in zip(nets[0].parameters(), gradients, strict=True):
                p.sub_(rate * gradient)
    for name, tensor in nets[0].state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


# The previous model ---------------------------------------------------------------------------------------------------


def test_the_previous_model_is_what_the_last_training_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other teacher is what was received. In the public slip both are the same, and nothing happens."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", moon(), rounds=3)
    rounds = fits[:3], fits[3:6], fits[6:]
    assert all(fit.teachers == () for fit in rounds[0])
    for before, after in zip(rounds[0] + rounds[1], rounds[1] + rounds[2], strict=True):
        received, previous = after.teachers
        assert weights_hash(received.weights) == weights_hash(after.start)
        assert weights_hash(previous.weights) == weights_hash(train_one(before, CPU).weights)
        assert weights_hash(previous.weights) != weights_hash(received.weights)


def test_the_first_time_is_cross_entropy_whenever_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", moon(), rounds=6, participants=0.34)
    asked = [fit.label.partition(",")[0] for fit in fits]
    assert 1 < len(set(asked)) < len(asked)
    for place, fit in enumerate(fits):
        first = asked[place] not in asked[:place]
        assert type(fit.objective) is (Objective if first else Contrast)
        assert len(fit.teachers) == (0 if first else 2)
        if not first:
            last = max(k for k in range(place) if asked[k] == asked[place])
            assert weights_hash(fit.teachers[1].weights) == weights_hash(train_one(fits[last], CPU).weights)


def test_it_never_leaves_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", moon(), rounds=2)
    assert {group for bundle in crossed for group in bundle.groups} == {"parameters", "statistics", "counters", "size"}
    kept = RunDir(tmp_path / "run").load("memory-site-1-1.safetensors")
    assert set(kept.groups) == {PREVIOUS}


def test_a_site_that_could_not_train_keeps_the_previous_model_it_has() -> None:
    """A round without epochs trains nobody; what came then was no training of the site's own."""
    data = federation((9,))
    agreed = study(data, rounds=3, train={"epochs": [1, 0, 1]})
    method, memory = moon(), State()
    hashes = []
    for round in range(3):
        ctx = context(agreed, round)
        requests = method.ask(ctx, method.begin(ctx))
        memory = drive(ctx, method.answer(ctx, data.sites[0], requests["site-1"], memory)).memory
        hashes.append(weights_hash(dict(memory.groups[PREVIOUS])))
    assert hashes[0] == hashes[1] != hashes[2]


def test_one_image_is_never_remembered(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", moon(), federation((9, 1)), rounds=2)
    files = [file.name for file in (tmp_path / "run" / "checkpoint").iterdir()]
    assert [name for name in files if name.startswith("memory")] == ["memory-site-1-1.safetensors"]


# Limits ---------------------------------------------------------------------------------------------------------------


def test_mu_zero_is_fedavg_bit_for_bit_and_keeps_nothing(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg(), rounds=3)
    coordinate(tmp_path / "moon", moon(mu=0), rounds=3)
    assert predictor_bytes(tmp_path / "moon") == predictor_bytes(tmp_path / "fedavg")
    assert not list((tmp_path / "moon" / "checkpoint").glob("memory*"))


def test_the_default_acts(tmp_path: Path) -> None:
    assert (Moon().settings.mu, Moon().settings.tau) == (1.0, 0.5)
    for rounds, same in ((1, True), (2, False)):
        coordinate(tmp_path / f"fedavg-{rounds}", FedAvg(), rounds=rounds)
        coordinate(tmp_path / f"moon-{rounds}", moon(), rounds=rounds)
        found, plain = (predictor_bytes(tmp_path / f"{name}-{rounds}") for name in ("moon", "fedavg"))
        assert (found == plain) == same


@pytest.mark.parametrize(("key", "value"), [("mu", -1.0), ("mu", float("inf")), ("tau", 0.0), ("tau", "warm")])
def test_refuses_settings_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^moon\.{key} = "):
        moon(**{key: value})
