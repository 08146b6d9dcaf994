"""Elastic Aggregation: sensitivity and step by hand, measured before training on images that are trained on too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import (
    CPU,
    context,
    coordinate,
    deployed,
    drive,
    federation,
    images,
    predictor_bytes,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.errors import BadInput, SiteFailed
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.fit import Fit, Recipe
from wardround.learn.trainer import train_one
from wardround.methods import elastic as module
from wardround.methods.elastic import SENSITIVITY, Elastic, elastic_step, sensitivity
from wardround.methods.fedavg import FedAvg
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, Weights, build, fresh, spec_layout

SPEC = NetSpec("small", 3, 4, 8, width=2)


def elastic(**own: Any) -> Any:
    return make("elastic", own)


def trained() -> Weights:
    """Weights with running statistics that are not those of a new network."""
    start = fresh(SPEC, torch.Generator().manual_seed(1))
    return train_one(Fit("x", SPEC, start, images(12), Recipe(epochs=2, batch=6, lr=0.05), seed=0), CPU).weights


# The sensitivity ------------------------------------------------------------------------------------------------------


def gradient_of(weights: Weights, batch: Tensor) -> dict[str, Tensor]:
    """|∂ mean ‖f(x)‖² / ∂θ| by a plain backward pass."""
    net = build(SPEC)
    net.load_state_dict(weights)
    net.eval()
    output = net(batch.float() / 127.5 - 1)
    loss = sum(row.pow(2).sum() for row in output) / len(batch)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return {name: g.abs() for (name, _), g in zip(net.named_parameters(), gradients, strict=True)}


def test_of_the_head_s_bias_by_hand() -> None:
    """With weights of 0 the output is the bias (1, −2, 0, 0), so ‖f‖² changes with it by 2·|bias| for any image."""
    weights = {name: torch.zeros_like(t) for name, t in build(SPEC).state_dict().items()}
    weights["head.bias"] = torch.tensor([1.0, -2.0, 0.0, 0.0])
    found = sensitivity(SPEC, weights, (images(3).images,), 0.95, CPU)
    assert found["head.bias"].tolist() == pytest.approx([2.0, 4.0, 0.0, 0.0])


def test_one_batch_is_its_gradient() -> None:
    """Without the bias of the start, which would leave a twentieth of it at μ = 0.95."""
    weights, batch = trained(), images(5, seed=4).images
    found, expected = sensitivity(SPEC, weights, (batch,), 0.95, CPU), gradient_of(weights, batch)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_the_moving_average_of_three_batches() -> None:
    """μ = 1/4: (3/64·a + 3/16·b + 3/4·c)/(63/64) = (a + 4b + 16c)/21."""
    weights = trained()
    batches = torch.split(images(9, seed=4).images, 3)
    a, b, c = (gradient_of(weights, batch) for batch in batches)
    found = sensitivity(SPEC, weights, batches, 0.25, CPU)
    for name in a:
        torch.testing.assert_close(found[name], (a[name] + 4 * b[name] + 16 * c[name]) / 21, rtol=1e-4, atol=1e-6)


def test_it_has_an_entry_for_every_parameter_and_none_for_buffers() -> None:
    found = sensitivity(SPEC, trained(), (images(3).images,), 0.95, CPU)
    assert tuple(found) == spec_layout(SPEC).in_group("parameters")


def test_measuring_changes_nothing_and_leaves_nothing_behind() -> None:
    """Gradients that another site left must not add up."""
    weights = trained()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    one, two = (sensitivity(SPEC, weights, (images(5).images,), 0.9, CPU) for _ in range(2))
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_site_measures_the_model_it_received_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Weights, list[int]]] = []
    measure = module.sensitivity

    def watched(spec: NetSpec, weights: Weights, batches: tuple[Tensor, ...], *rest: Any) -> Weights:
        seen.append((weights, [len(batch) for batch in batches]))
        return measure(spec, weights, batches, *rest)

    monkeypatch.setattr(module, "sensitivity", watched)
    data, method = federation((11,)), elastic(share=0.5)
    ctx = context(study(data))
    state = method.begin(ctx)
    answer = drive(ctx, method.answer(ctx, data.sites[0], method.ask(ctx, state)["site-1"], State()))
    ((weights, sizes),) = seen
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.groups["model"].items())
    assert not torch.equal(weights["head.bias"], answer.trained.members[0].weights["head.bias"])
    assert sizes == [4, 2]  # half of 11, rounded up, in batches as in training


def measured_images(round: int, share: float, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    data, method = federation((10,)), elastic(share=share)
    seen: list[Tensor] = []

    def watched(spec: NetSpec, weights: Weights, batches: tuple[Tensor, ...], *rest: Any) -> Weights:
        seen.extend(batches)
        return {}

    monkeypatch.setattr(module, "sensitivity", watched)
    ctx = context(study(data), round)
    drive(ctx, method.answer(ctx, data.sites[0], method.ask(ctx, method.begin(ctx))["site-1"], State()))
    return torch.cat(seen)


def test_a_share_of_the_images_drawn_anew_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    one, again, two = (measured_images(round, 0.3, monkeypatch) for round in (0, 0, 1))
    assert len(one) == len(two) == 3
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert len(measured_images(0, 1.0, monkeypatch)) == 10
    assert len(measured_images(0, 0.01, monkeypatch)) == 1


def test_all_images_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public version takes those that it measures on away from the training."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", elastic(), rounds=1)
    assert [len(fit.data) for fit in fits] == [11, 8, 6]


def test_what_is_not_finite_does_not_leave_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sensitivity", lambda *_: {"head.bias": torch.tensor([float("inf")])})
    method, ctx = elastic(), context(study())
    with pytest.raises(SiteFailed, match="the output of the received model is not finite; use a smaller"):
        drive(ctx, method.answer(ctx, federation().sites[0], method.ask(ctx, method.begin(ctx))["site-1"], State()))


# The step -------------------------------------------------------------------------------------------------------------


def test_the_step_by_hand() -> None:
    """τ = 1/2, the largest Ω is 4: ζ = 3/2 − 4/4 = 1/2, 3/2 − 1/4 = 5/4 and 3/2. From 0 to a mean of 8: 4, 10, 12."""
    model = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([0.0])}
    mean = {"a": torch.tensor([8.0, 8.0]), "b": torch.tensor([8.0])}
    omega = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([0.0])}
    moved = elastic_step(model, mean, omega, 0.5)
    assert {name: tensor.tolist() for name, tensor in moved.items()} == {"a": [4.0, 10.0], "b": [12.0]}


def test_less_sensitive_parameters_move_further() -> None:
    """One port has the sign the other way round."""
    model, mean = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    moved = elastic_step(model, mean, {"w": torch.tensor([0.1, 0.5, 2.0])}, 0.5)["w"]
    assert moved[0] > moved[1] > moved[2] > 0


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0, 100, width=32), min_size=1, max_size=6), st.floats(0, 2), st.floats(0.001, 1000))
def test_the_way_is_between_tau_and_one_more_and_scale_changes_nothing(
    omega: list[float], tau: float, scale: float
) -> None:
    model, mean = {"w": torch.zeros(len(omega))}, {"w": torch.ones(len(omega))}
    zeta = elastic_step(model, mean, {"w": torch.tensor(omega)}, tau)["w"]
    assert bool(((zeta >= tau - 1e-5) & (zeta <= 1 + tau + 1e-5)).all())
    scaled = elastic_step(model, mean, {"w": torch.tensor(omega) * scale}, tau)["w"]
    torch.testing.assert_close(scaled, zeta, rtol=1e-4, atol=1e-4)


def test_where_nothing_is_sensitive_the_step_is_finite() -> None:
    assert elastic_step({"w": torch.zeros(1)}, {"w": torch.ones(1)}, {"w": torch.zeros(1)}, 0.5)["w"].tolist() == [1.5]


def sent(site: str, images: int, w: float, omega: list[float] | None, steps: int) -> Bundle:
    groups = {
        "parameters": {"w": torch.tensor([w, w])},
        "statistics": {"m": torch.tensor([w])},
        "counters": {"c": torch.tensor(steps)},
        "size": {"images": torch.tensor(images)},
    }
    if omega is not None:
        groups[SENSITIVITY] = {"w": torch.tensor(omega)}
    return Bundle(Envelope("answer", "study", "elastic", site, 0), groups)


def test_a_round_by_hand() -> None:
    """Means (1·0 + 3·8)/4 = 6, Ω = (1·[4, 0] + 3·[4, 4])/4 = [4, 3]: ζ = [1/2, 3/4], from 2: 4 and 5.

    The statistic is averaged as it stands, the counter is the largest, and a site without weight has no say.
    """
    start = {"w": torch.tensor([2.0, 2.0]), "m": torch.tensor([2.0]), "c": torch.tensor(0)}
    answers = [sent("a", 1, 0.0, [4.0, 0.0], 5), sent("b", 3, 8.0, [4.0, 4.0], 3), sent("z", 0, 99.0, None, 9)]
    (after,) = elastic().absorb(context(study()), State({"model": start}), {b.envelope.site: b for b in answers})
    model = after.groups["model"]
    assert {name: tensor.tolist() for name, tensor in model.items()} == {"w": [4.0, 5.0], "m": [6.0], "c": 5}
    assert model["c"].dtype == torch.int64


def test_running_variances_stay_above_zero(tmp_path: Path) -> None:
    """They would not, had they taken one and a half steps to a mean near zero."""
    coordinate(tmp_path / "run", elastic(tau=4.0), rounds=3)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert all(bool((t > 0).all()) for name, t in member.weights.items() if name.endswith("running_var"))


def test_a_site_too_small_to_train_sends_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", elastic(), federation((9, 1)), rounds=1)
    answers = {b.envelope.site: b for b in crossed if b.envelope.kind == "answer"}
    assert SENSITIVITY in answers["site-1"].groups
    assert SENSITIVITY not in answers["site-2"].groups


# Limits ---------------------------------------------------------------------------------------------------------------


def test_without_a_share_it_is_fedavg_bit_for_bit_and_sends_what_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "elastic", elastic(share=0))
    assert predictor_bytes(tmp_path / "elastic") == predictor_bytes(tmp_path / "fedavg")
    assert {group for bundle in crossed for group in bundle.groups} == {"parameters", "statistics", "counters", "size"}


def test_the_default_acts_in_the_first_round(tmp_path: Path) -> None:
    own = Elastic().settings
    assert (own.tau, own.mu, own.share) == (0.5, 0.95, 0.3)
    coordinate(tmp_path / "fedavg", FedAvg(), rounds=1)
    coordinate(tmp_path / "elastic", elastic(), rounds=1)
    assert predictor_bytes(tmp_path / "elastic") != predictor_bytes(tmp_path / "fedavg")


@pytest.mark.parametrize(
    ("key", "value"), [("tau", -1.0), ("tau", float("inf")), ("mu", 1.0), ("mu", -0.1), ("share", 1.1), ("share", -1)]
)
def test_refuses_settings_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^elastic\.{key} = "):
        elastic(**{key: value})
