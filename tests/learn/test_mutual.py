"""Mutual distillation: the loss by hand, whole steps of both networks against a plain loop, and its traps."""

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny import CPU, images
from wardround.learn import captured
from wardround.learn.device import Device
from wardround.learn.fit import Fit, Fitted, Outputs, Recipe, Step
from wardround.learn.mutual import MutualDistillation
from wardround.learn.side_by_side import train_many
from wardround.learn.trainer import Trainer, learning_rate, train_one
from wardround.models import NetSpec, StagedNet, Weights, build, fresh

MENTOR, MENTEE = NetSpec("small", 3, 4, 8, width=3), NetSpec("small", 3, 4, 8, width=2)


def start(spec: NetSpec, seed: int) -> Weights:
    return fresh(spec, torch.Generator().manual_seed(seed))


def projection() -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(5)) / 4


def objective(recipe: Recipe) -> MutualDistillation:
    return MutualDistillation(MENTOR, start(MENTOR, 1), projection(), recipe)


def seen(mentee: Tensor, mentor: Tensor) -> tuple[MutualDistillation, Step]:
    """A step whose networks gave these logits, and features of one number: 1 and 3, with W = 1."""
    made = objective(Recipe(epochs=1))
    made.projection = torch.ones(1, 1, requires_grad=True)
    made.seen = Outputs(torch.full((len(mentor), 1), 3.0), mentor)
    labels = torch.zeros(len(mentee), dtype=torch.int64)
    return made, Step(labels, labels, labels, Outputs(torch.ones(len(mentee), 1), mentee), ())


def test_the_loss_by_hand() -> None:
    """CE = ln 2 and ln 4, both divergences, MSE = 4, over CE's sum."""
    mentee, mentor = torch.zeros(2, 2), torch.tensor([[0.0, math.log(3.0)]] * 2)
    made, step = seen(mentee, mentor)
    own = math.log(2) + math.log(4)
    forth = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    back = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert made.loss(step).item() == pytest.approx(own + (forth + back + 4.0) / own, rel=1e-5)


def test_the_denominator_is_detached() -> None:
    """Else a mentee might raise its cross-entropy to make distillation cheap: here the gradient is CE's alone."""
    mentee = torch.zeros(2, 2, requires_grad=True)
    made, step = seen(mentee, torch.zeros(2, 2))  # both alike: no divergence, but an MSE of 4
    (found,) = torch.autograd.grad(made.loss(step), mentee)
    (plain,) = torch.autograd.grad(F.cross_entropy(mentee, step.labels), mentee)
    torch.testing.assert_close(found, plain)


def plain_steps(recipe: Recipe, steps: int) -> tuple[Weights, Weights, Tensor]:
    """Both networks and W by PyTorch's own SGD, each minimising its own loss of the paper in turn."""
    data, w = images(8, seed=4), projection().requires_grad_(True)
    mentor, mentee = build(MENTOR), build(MENTEE)
    mentor.load_state_dict(start(MENTOR, 1))
    mentee.load_state_dict(start(MENTEE, 2))
    stays = torch.optim.SGD([*mentor.parameters(), w], lr=recipe.lr, momentum=recipe.momentum)
    travels = torch.optim.SGD(mentee.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    pixels = data.images.float() / 127.5 - 1

    def outputs(net: StagedNet) -> tuple[Tensor, Tensor]:
        return net.outputs(pixels)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(dim=1).mean()

    for number in range(steps):
        mentor.train(), mentee.train()
        (h_t, z_t), (h_s, z_s) = outputs(mentor), outputs(mentee)
        ce_t, ce_s = F.cross_entropy(z_t, data.labels), F.cross_entropy(z_s, data.labels)
        both = (ce_t + ce_s).detach()
        loss_s = ce_s + kl(z_t.detach(), z_s) / both + F.mse_loss(h_s @ w.detach().T, h_t.detach()) / both
        loss_t = ce_t + kl(z_s.detach(), z_t) / both + F.mse_loss(h_s.detach() @ w.T, h_t) / both
        for optimiser, loss, params in (
            (travels, loss_s, list(mentee.parameters())),
            (stays, loss_t, [*mentor.parameters(), w]),
        ):
            for p, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.grad = gradient
            if recipe.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, recipe.clip_norm)
            optimiser.param_groups[0]["lr"] = learning_rate(recipe, number, 1)
            optimiser.step()
    return dict(mentee.state_dict()), dict(mentor.state_dict()), w.detach()


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_four_steps_against_the_papers_two_losses(schedule: str, clip: float | None) -> None:
    recipe = Recipe(epochs=4, batch=8, lr=0.05, weight_decay=0.0, clip_norm=clip, schedule=schedule)  # type: ignore[arg-type]
    made = objective(recipe)
    fitted = train_one(Fit("x", MENTEE, start(MENTEE, 2), images(8, seed=4), recipe, 0, made), CPU)
    made.finish()
    mentee, mentor, w = plain_steps(recipe, 4)
    for name, tensor in mentee.items():
        torch.testing.assert_close(fitted.weights[name], tensor, rtol=1e-4, atol=1e-5)
    for name, tensor in mentor.items():
        torch.testing.assert_close(made.mentor[name], tensor, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.projection, w, rtol=1e-4, atol=1e-5)


def both(recipe: Recipe, device: Device = Device(CPU, 1)) -> dict[str, Tensor]:  # noqa: B008 - frozen
    """Mentee, mentor and W after a fit of 16 + 16 + 8 images an epoch."""
    made = objective(recipe)
    (fitted,) = train_many([Fit("x", MENTEE, start(MENTEE, 2), images(40, seed=4), recipe, 0, made)], device)
    made.finish()
    assert isinstance(fitted, Fitted)
    return {
        **fitted.weights,
        **{f"mentor.{name}": tensor for name, tensor in made.mentor.items()},
        "W": made.projection,
    }


def test_checkpointing_changes_no_bit() -> None:
    recipe = Recipe(epochs=2, batch=16, lr=0.05)
    plain = both(recipe)
    assert all(torch.equal(t, plain[name]) for name, t in both(replace(recipe, checkpointing=True)).items())


def test_the_mentor_is_trained_as_the_fit_says_and_at_its_very_rate() -> None:
    """One tensor for both optimisers: a rate that is a number in Python would be frozen in a captured step."""
    recipe = Recipe(epochs=2, batch=16, lr=0.05, checkpointing=True)
    made = objective(recipe)
    with ExitStack() as borrowed:
        trainer = Trainer(Fit("x", MENTEE, start(MENTEE, 2), images(8), recipe, 0, made), CPU, borrowed)
        assert made.optimiser.param_groups[0]["lr"] is trainer.rate
        assert made.net.checkpointing
        assert made.net.training


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "how", [{}, {"schedule": "cosine", "clip_norm": 0.3}, {"optimiser": "adam", "precision": "bf16"}], ids=str
)
def test_captured_steps_do_what_eager_steps_do(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen epochs, so that both sizes of batch recur often enough to be captured."""
    recipe, gpu = Recipe(**{"epochs": 16, "batch": 16, "lr": 0.002, **how}), Device(torch.device("cuda", 0), 1)
    graphs: list[int] = []
    replay = captured._Graph.replay
    monkeypatch.setattr(captured._Graph, "replay", lambda self, i, d: (graphs.append(len(i)), replay(self, i, d))[1])
    found = both(recipe, gpu)
    assert set(graphs) == {16, 8}
    monkeypatch.setattr(captured, "WORTH_CAPTURING", 10**9)
    graphs.clear()
    expected = both(recipe, gpu)
    assert graphs == []
    begun = {**start(MENTEE, 2), **{f"mentor.{name}": t for name, t in start(MENTOR, 1).items()}, "W": projection()}
    floats = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    apart = sum(float((found[name] - expected[name]).double().square().sum()) for name in floats)
    gone = sum(float((expected[name].cpu() - begun[name]).double().square().sum()) for name in floats)
    assert apart <= 0.02**2 * gone


def test_the_weights_it_was_given_are_not_the_live_ones() -> None:
    recipe, given, w = Recipe(epochs=1, batch=4, lr=0.1), start(MENTOR, 1), projection()
    made = MutualDistillation(MENTOR, given, w, recipe)
    train_one(Fit("x", MENTEE, start(MENTEE, 2), images(8), recipe, 0, made), CPU)
    made.finish()
    assert all(torch.equal(tensor, start(MENTOR, 1)[name]) for name, tensor in given.items())
    assert torch.equal(w, projection())
    assert not torch.equal(made.mentor["head.weight"], given["head.weight"])


def test_a_fit_that_was_skipped_leaves_the_mentor_as_it_was() -> None:
    recipe = Recipe(epochs=1, batch=4)
    made = objective(recipe)
    assert train_one(Fit("x", MENTEE, start(MENTEE, 2), images(1), recipe, 0, made), CPU).skipped
    made.finish()
    assert torch.equal(made.mentor["head.weight"], start(MENTOR, 1)["head.weight"])
    assert torch.equal(made.projection, projection())
