"""FedNTD: the distillation by hand, what it leaves alone, and studies that it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import CPU, context, coordinate, federation, images, predictor_bytes, study, watch_bundles, watch_fits
from wardround.errors import BadInput
from wardround.learn.fit import Fit, Recipe, Teacher, weights_hash
from wardround.learn.trainer import train_one
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedntd import FedNTD, NotTrue, not_true
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, build, fresh
from wardround.streams import Streams

SPEC = NetSpec("cnn4", 3, 4, 8, width=2)


def fedntd(**own: Any) -> Any:
    return make("fedntd", own)


# The distillation -----------------------------------------------------------------------------------------------------


def test_the_true_class_is_left_out_and_the_order_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    assert not_true(logits, torch.tensor([0, 1, 2])).tolist() == [[2.0, 3.0], [4.0, 6.0], [7.0, 8.0]]


def test_the_divergence_by_hand() -> None:
    """Three classes, the first true. Taught (·, log 3, 0): 3/4 and 1/4; own (·, 0, 0): 1/2 and 1/2.

    KL = 3/4·log(3/2) + 1/4·log(1/2). A second image at which both agree halves it.
    """
    own = torch.tensor([[9.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    taught = torch.tensor([[-4.0, math.log(3), 0.0], [1.0, 0.0, 1.0]])
    expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    found = NotTrue(1.0, 1.0).distillation(own, taught, torch.tensor([0, 1]))
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_the_temperature_divides_logits_and_its_square_multiplies() -> None:
    """τ = 2: the taught log 9 becomes log 3, as above, times 4."""
    own, taught = torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([[0.0, math.log(9), 0.0]])
    expected = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert NotTrue(1.0, 2.0).distillation(own, taught, torch.tensor([0])).item() == pytest.approx(expected, rel=1e-5)


def slow(own: Tensor, taught: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Image by image and class by class."""
    total = torch.zeros(())
    for mine, theirs, label in zip(own, taught, labels.tolist(), strict=True):
        others = [c for c in range(len(mine)) if c != label]
        p, q = (torch.softmax(z[others] / tau, dim=0) for z in (mine, theirs))
        total = total + sum(q[i] * (q[i] / p[i]).log() for i in range(len(others)))
    return tau**2 * total / len(own)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.integers(3, 7), st.floats(0.5, 4), st.integers(0, 1000))
def test_against_a_plain_loop(n: int, classes: int, tau: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    own, taught = torch.randn(n, classes, generator=draw), torch.randn(n, classes, generator=draw)
    labels = torch.randint(0, classes, (n,), generator=draw)
    found = NotTrue(1.0, tau).distillation(own, taught, labels)
    torch.testing.assert_close(found, slow(own, taught, labels, tau), rtol=1e-4, atol=1e-6)
    assert found >= -1e-6


def test_no_opinion_of_the_true_class_is_distilled() -> None:
    own = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    taught = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([2, 0, 3])
    (gradient,) = torch.autograd.grad(NotTrue(1.0, 1.0).distillation(own, taught, labels), own)
    assert gradient.gather(1, labels.unsqueeze(1)).abs().max() == 0
    assert (gradient != 0).sum() == 9


def test_two_steps_against_a_plain_loop() -> None:
    data, beta, tau, rate = images(6, seed=5), 0.7, 2.0, 0.1
    start, received = (fresh(SPEC, torch.Generator().manual_seed(seed)) for seed in (3, 4))
    recipe = Recipe(epochs=2, batch=6, lr=rate, momentum=0.0, weight_decay=0.0)
    fit = Fit("x", SPEC, start, data, recipe, seed=1, objective=NotTrue(beta, tau), teachers=(Teacher(SPEC, received),))
    found = train_one(fit, CPU).weights
    net, teacher = build(SPEC), build(SPEC)
    net.load_state_dict(start)
    teacher.load_state_dict(received)
    pixels = data.images.float() / 127.5 - 1
    for _ in range(2):
        logits = net(pixels)
        taught = teacher(pixels).detach()
        loss = F.cross_entropy(logits, data.labels) + beta * slow(logits, taught, data.labels, tau)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(rate * gradient)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


# The method -----------------------------------------------------------------------------------------------------------


def test_the_teacher_is_what_was_received_in_this_round() -> None:
    method, data = fedntd(), federation()
    for round in (0, 1):
        ctx = context(study(method="fedntd"), round)
        model = fresh(ctx.study.common_spec, Streams(round).torch("other model"))
        requests = method.ask(ctx, State({"model": model}))
        fit = next(method.answer(ctx, data.sites[0], requests["site-1"], State()))
        (teacher,) = fit.teachers
        assert weights_hash(teacher.weights) == weights_hash(model) == weights_hash(fit.start)


def test_nothing_more_travels_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedntd())
    assert {group for bundle in crossed for group in bundle.groups} == {"parameters", "statistics", "counters", "size"}
    assert not list((tmp_path / "run" / "checkpoint").glob("memory*"))


def test_beta_zero_is_fedavg_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "fedntd", fedntd(beta=0))
    assert all(fit.teachers == () for fit in fits)
    coordinate(tmp_path / "fedavg", FedAvg())
    assert predictor_bytes(tmp_path / "fedntd") == predictor_bytes(tmp_path / "fedavg")


def test_the_default_acts(tmp_path: Path) -> None:
    """Public libraries ship β = 0, which is FedAvg."""
    assert (FedNTD().settings.beta, FedNTD().settings.tau) == (1.0, 1.0)
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "fedntd", fedntd())
    assert predictor_bytes(tmp_path / "fedntd") != predictor_bytes(tmp_path / "fedavg")


def test_two_classes_are_refused() -> None:
    two = study(federation(classes=2), method="fedntd")
    with pytest.raises(BadInput, match=r"needs at least 3 classes, not ash and birch alone: .*; use fedprox") as caught:
        fedntd().check(two)
    assert "\n" not in str(caught.value)
    fedntd(beta=0).check(two)
    fedntd().check(study(federation(classes=3), method="fedntd"))


def test_sites_with_different_networks_are_refused() -> None:
    with pytest.raises(BadInput, match="needs the same model at every site"):
        fedntd().check(study(method="fedntd", model={"per_site": {"site-1": "cnn4"}}))


@pytest.mark.parametrize(("key", "value"), [("beta", -1.0), ("beta", float("nan")), ("tau", 0.0), ("tau", "warm")])
def test_refuses_settings_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^fedntd\.{key} = "):
        fedntd(**{key: value})
