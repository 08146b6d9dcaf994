"""FedProx: the proximal gradient by hand and by autograd, its limits, and an anchor that stays where it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny import CPU, context, coordinate, deployed, federation, images, predictor_bytes, study
from wardround.errors import BadInput
from wardround.learn.fit import Fit, Objective, Recipe, weights_hash
from wardround.learn.trainer import train_one
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedprox import FedProx, Proximal
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, Weights, build, fresh
from wardround.streams import Streams

SPEC = NetSpec("cnn4", 3, 4, 8, width=2)


def fedprox(mu: float) -> Any:
    return make("fedprox", {"mu": mu})


def start() -> Weights:
    return fresh(SPEC, torch.Generator().manual_seed(3))


def parameter(value: list[float], grad: list[float] | None) -> Tensor:
    made = torch.tensor(value, requires_grad=True)
    made.grad = None if grad is None else torch.tensor(grad)
    return made


def test_the_gradient_by_hand() -> None:
    """g + μ(v − w): 1 + 0.5·(3 − 1) = 2 and −2 + 0.5·(0 − 4) = −4."""
    live = parameter([3.0, 0.0], [1.0, -2.0])
    Proximal(0.5, {"w": torch.tensor([1.0, 4.0])}).correct({"w": live})
    assert live.grad is not None
    assert live.grad.tolist() == [2.0, -4.0]
    assert live.tolist() == [3.0, 0.0]


def test_at_the_anchor_there_is_no_pull() -> None:
    live = parameter([3.0], [1.0])
    Proximal(0.5, {"w": torch.tensor([3.0])}).correct({"w": live})
    assert live.grad is not None
    assert live.grad.tolist() == [1.0]


def test_what_has_no_gradient_is_not_pulled() -> None:
    still, live = parameter([3.0], None), parameter([2.0], [0.0])
    Proximal(1.0, {"still": torch.tensor([0.0]), "live": torch.tensor([0.0])}).correct({"still": still, "live": live})
    assert still.grad is None
    assert live.grad is not None
    assert live.grad.tolist() == [2.0]


def test_three_steps_against_autograd_of_equation_2() -> None:
    """The whole loss F(v) + (μ/2)‖v − w‖² differentiated by PyTorch, in plain steps of SGD."""
    mu, rate, data, anchor = 0.7, 0.1, images(6, seed=5), start()
    recipe = Recipe(epochs=3, batch=6, lr=rate, momentum=0.0, weight_decay=0.0)
    fit = Fit("proximal", SPEC, anchor, data, recipe, seed=1, objective=Proximal(mu, anchor))
    found = train_one(fit, CPU).weights

    net = build(SPEC)
    net.load_state_dict(anchor)
    pixels = data.images.float() / 127.5 - 1
    for _ in range(3):
        pull = sum(((p - anchor[name]) ** 2).sum() for name, p in net.named_parameters())
        loss = F.cross_entropy(net(pixels), data.labels) + mu / 2 * pull
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(rate * gradient)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    plain = train_one(Fit("plain", SPEC, anchor, data, recipe, seed=1), CPU).weights
    assert not torch.allclose(plain["head.weight"], found["head.weight"], atol=1e-4)


def distance(a: Weights, b: Weights) -> float:
    return float(sum(((a[name].double() - b[name].double()) ** 2).sum() for name in a) ** 0.5)


def test_the_anchor_is_what_was_received_and_never_the_live_weights() -> None:
    """Aliased to the live weights the term would be 0 throughout, as it was in two well-known frameworks."""
    received = start()
    before = weights_hash(received)
    objective = Proximal(1.0, received)
    fit = Fit("x", SPEC, received, images(8), Recipe(epochs=2, batch=4, lr=0.1), seed=0, objective=objective)
    found = train_one(fit, CPU).weights
    assert weights_hash(received) == before
    assert weights_hash(objective.anchor) == before
    assert distance(found, received) > 0.01


def test_a_strong_pull_keeps_sites_near_what_they_received() -> None:
    """The pull is a spring: at μ = 9 and a rate of 0.1, nearly all of a step is undone by the next."""

    def moved(mu: float) -> float:
        recipe = Recipe(epochs=4, batch=4, lr=0.1, momentum=0.0)
        objective = Proximal(mu, start()) if mu else Objective()
        return distance(train_one(Fit("x", SPEC, start(), images(12), recipe, 0, objective), CPU).weights, start())

    assert moved(9.0) < 0.5 * moved(1.0) < 0.5 * moved(0.0)


def test_mu_zero_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "fedprox", fedprox(0.0))
    assert predictor_bytes(tmp_path / "fedprox") == predictor_bytes(tmp_path / "fedavg")


def test_mu_matters(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "fedprox", fedprox(1.0))
    assert predictor_bytes(tmp_path / "fedprox") != predictor_bytes(tmp_path / "fedavg")


def test_a_fit_with_a_pull_is_never_taken_for_one_without(tmp_path: Path) -> None:
    """One folder of trained models for both, and still two results."""
    fits = tmp_path / "fits"
    coordinate(tmp_path / "single", FedAvg(), fits=fits, rounds=1)
    coordinate(tmp_path / "pulled", fedprox(1.0), fits=fits, rounds=1)
    coordinate(tmp_path / "alone", fedprox(1.0), rounds=1)
    assert predictor_bytes(tmp_path / "pulled") == predictor_bytes(tmp_path / "alone")
    assert predictor_bytes(tmp_path / "pulled") != predictor_bytes(tmp_path / "single")


def test_each_round_has_its_own_anchor() -> None:
    """What a site is pulled to is the model of this round, not of the first."""
    method, data = fedprox(1.0), federation()
    for round in (0, 1):
        ctx = context(study(method="fedprox"), round)
        model = fresh(ctx.study.common_spec, Streams(round).torch("other model"))
        requests = method.ask(ctx, State({"model": model}))
        fit = next(method.answer(ctx, data.sites[0], requests["site-1"], State()))
        assert fit.objective.mu == 1.0
        assert weights_hash(fit.objective.anchor) == weights_hash(model) == weights_hash(fit.start)


def test_batch_norm_statistics_are_not_pulled(tmp_path: Path) -> None:
    """At any μ they follow the images: they are no parameters and have no gradient."""
    coordinate(tmp_path / "run", fedprox(100.0), rounds=1, train={"lr": 0.001})
    (member,) = deployed(tmp_path / "run", "site-1").members
    before = study().initial()
    statistics = [name for name in before if name.endswith("running_mean")]
    assert all(not torch.equal(member.weights[name], before[name]) for name in statistics)


def test_the_default_is_a_hundredth() -> None:
    assert FedProx().settings.mu == 0.01


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf"), "strong"])
def test_refuses_a_pull_that_is_none(mu: Any) -> None:
    with pytest.raises(BadInput, match=r"^fedprox\.mu = "):
        fedprox(mu)


def test_refuses_an_unknown_setting_with_a_hint() -> None:
    with pytest.raises(BadInput, match=r"there is no setting 'fedprox.muu'; did you mean .*mu\?"):
        make("fedprox", {"muu": 1.0})
