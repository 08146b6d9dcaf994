"""FRAug's objective: its pieces by hand, and whole steps of all three networks against a plain loop."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny import CPU, images
from wardround.learn.fit import Fit, Objective, Outputs, Recipe, Step
from wardround.learn.prototypes import Prototypes, class_means
from wardround.learn.representation import Augmented, Strengths, mmd, run_layers, two_layers
from wardround.learn.trainer import train_one
from wardround.models import NetSpec, Weights, build, fresh
from wardround.streams import Streams

SPEC = NetSpec("cnn4", 3, 4, 8, width=1)
WIDTH, NOISE, CLASSES = 16, 5, 4
STRENGTHS = Strengths(0.4, 0.7, 0.3, 0.05, 0.02, 0.5, 0.3)


def start() -> Weights:
    return fresh(SPEC, torch.Generator().manual_seed(3))


def nets() -> tuple[Weights, Weights]:
    draw = torch.Generator().manual_seed(6)
    return two_layers(NOISE + CLASSES, WIDTH, WIDTH, draw), two_layers(WIDTH + CLASSES, 8, WIDTH, draw)


def objective(strengths: Strengths = STRENGTHS, present: tuple[int, ...] = (0, 1, 2, 3)) -> Augmented:
    means = Prototypes.none(CLASSES, WIDTH)
    return Augmented(*nets(), means, torch.tensor(present), strengths, torch.Generator().manual_seed(9))


def fitted(made: Objective, epochs: int = 3, n: int = 8) -> Weights:
    recipe = Recipe(epochs=epochs, batch=8, lr=0.05, momentum=0.0, weight_decay=0.0)
    return train_one(Fit("x", SPEC, start(), images(n, seed=4), recipe, 0, made), CPU).weights


def test_two_layers_are_pytorchs() -> None:
    tensors = two_layers(3, 4, 2, torch.Generator().manual_seed(1))
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert isinstance(plain[0], nn.Linear)
    assert isinstance(plain[2], nn.Linear)
    plain[0].load_state_dict({"weight": tensors["hidden.weight"], "bias": tensors["hidden.bias"]})
    plain[2].load_state_dict({"weight": tensors["out.weight"], "bias": tensors["out.bias"]})
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(run_layers(tensors, x[:, :1], x[:, 1:]), plain(x))
    assert tensors["hidden.weight"].abs().max() <= 1 / math.sqrt(3)
    assert tensors["out.bias"].abs().max() <= 1 / math.sqrt(4)


def test_mmd_by_hand() -> None:
    """0 and 2 against each other: squares 0 and 4, their mean 2, so kernels e^(−4/(2s)) for the five scales s."""
    kernel = sum(math.exp(-2 / scale) for scale in (0.25, 0.5, 1, 2, 4))
    assert float(mmd(torch.tensor([[0.0]]), torch.tensor([[2.0]]))) == pytest.approx(5 + 5 - 2 * kernel)


def test_the_unit_of_the_mmd_has_no_gradient() -> None:
    """0 and s: squares s², whose mean ½ at s = 1 stands still. d/ds of −2·Σ e^(−2s²/k) is 8·Σ e^(−2/k)/k.

    Were the unit to move along, the discrepancy would not depend on s at all.
    """
    s = torch.ones(1, 1, requires_grad=True)
    (found,) = torch.autograd.grad(mmd(torch.zeros(1, 1), s), s)
    assert float(found) == pytest.approx(8 * sum(math.exp(-2 / k) / k for k in (0.25, 0.5, 1, 2, 4)), rel=1e-5)


def test_mmd_of_the_same_cloud_is_nothing_and_never_above_ten() -> None:
    cloud = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    assert float(mmd(cloud, cloud)) == pytest.approx(0.0, abs=1e-5)
    assert 0 < float(mmd(cloud, cloud + 1)) < float(mmd(cloud, cloud + 1e6)) <= 10.0
    assert float(mmd(torch.zeros(2, 3), torch.zeros(2, 3))) == 0.0


def plain_steps(steps: int) -> tuple[Weights, Weights, Weights, Prototypes]:
    """All three losses as the docstring writes them, each differentiated on its own."""
    net = build(SPEC)
    net.load_state_dict(start())
    data, draws = images(8, seed=4), torch.Generator().manual_seed(9)
    pixels, y = data.images.float() / 127.5 - 1, data.labels
    generator, transform = ({n: t.clone().requires_grad_(True) for n, t in tensors.items()} for tensors in nets())
    moves_g = torch.optim.SGD(generator.values(), 0.05, 0.5)
    moves_r = torch.optim.SGD(transform.values(), 0.02, 0.5)
    means = Prototypes.none(CLASSES, WIDTH)

    def made(labels: Tensor) -> Tensor:
        noise = torch.rand(len(labels), NOISE, generator=draws)
        return F.relu(run_layers(generator, torch.cat([noise, F.one_hot(labels, CLASSES).float()], dim=1)))

    def residual(labels: Tensor) -> Tensor:
        inputs = torch.cat([made(labels).detach(), F.one_hot(labels, CLASSES).float()], dim=1)
        return run_layers(transform, inputs)

    def descend(optimiser: torch.optim.Optimizer, tensors: Weights, loss: Tensor) -> None:
        for tensor, gradient in zip(tensors.values(), torch.autograd.grad(loss, list(tensors.values())), strict=True):
            tensor.grad = gradient
        optimiser.step()

    for number in range(steps):
        order = torch.randperm(8, generator=Streams(0).torch("shuffle", index=number))
        labels = y[order]
        features, logits = net.outputs(pixels[order])
        f = features.detach()
        means = means.moved(class_means(f, labels, CLASSES), 0.3)
        drawn = torch.randint(CLASSES, (8,), generator=draws)
        bases, targets = torch.cat([f, means.means[drawn]]), torch.cat([labels, drawn])
        synthetic = F.cross_entropy(net.head(bases + residual(targets).detach()), targets)
        loss = 0.6 * F.cross_entropy(logits, labels) + 0.4 * synthetic
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        weight, bias = net.head.weight.detach().clone(), net.head.bias.detach().clone()
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(0.05 * gradient)
        g = made(labels)
        descend(moves_g, generator, F.cross_entropy(F.linear(g, weight, bias), labels) - 0.7 * mmd(g, f))
        whole = bases + residual(targets)
        p = F.linear(whole, weight, bias).softmax(1)
        entropy = -(p * p.log()).sum(dim=1).mean()
        descend(moves_r, transform, -entropy + 0.3 * F.mse_loss(whole, bases))
    return dict(net.state_dict()), generator, transform, means


def test_three_steps_of_three_networks_against_their_losses() -> None:
    made = objective()
    weights = fitted(made)
    made.finish()
    net, generator, transform, means = plain_steps(3)
    for found, expected in ((weights, net), (made.generator, generator), (made.transform, transform)):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.means.means, means.means, rtol=1e-4, atol=1e-5)
    assert not torch.equal(made.generator["out.bias"], nets()[0]["out.bias"])
    assert not torch.equal(made.transform["out.bias"], nets()[1]["out.bias"])


def test_no_share_is_cross_entropy() -> None:
    plain = fitted(Objective())
    found = fitted(objective(replace(STRENGTHS, share=0.0)))
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor)


def test_what_is_made_trains_only_the_head() -> None:
    """With nothing but made embeddings the body stays where it was."""
    found = fitted(objective(replace(STRENGTHS, share=1.0)), epochs=1)
    assert {name for name, t in start().items() if not torch.equal(found[name], t)} == {"head.weight", "head.bias"}


def test_what_was_received_is_not_trained_in_place() -> None:
    generator, transform = nets()
    before = {name: t.clone() for name, t in {**generator, **{f"r.{n}": t for n, t in transform.items()}}.items()}
    means, draws = Prototypes.none(CLASSES, WIDTH), torch.Generator().manual_seed(9)
    fitted(Augmented(generator, transform, means, torch.arange(4), STRENGTHS, draws))
    after = {**generator, **{f"r.{n}": t for n, t in transform.items()}}
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert not means.known.any()


def test_one_class_and_one_image_have_finite_losses() -> None:
    made = objective(present=(1,))
    recipe = Recipe(epochs=2, batch=1, lr=0.05)
    for labels in ([1], [1, 1, 1]):
        data = images(len(labels), labels=labels)
        found = train_one(Fit("x", SPEC, start(), data, recipe, 0, made), CPU)
        made.finish()
        assert all(bool(t.isfinite().all()) for t in (*found.weights.values(), *made.generator.values()))
    assert made.means.known.tolist() == [False, True, False, False]


def test_a_class_that_has_no_mean_yet_does_not_count() -> None:
    """In the very first step only the batch's classes have one; zeros must not pass for embeddings of the others.

    All images have one embedding, and R adds nothing: what is made is that embedding again, and so is its loss.
    """
    made = objective(present=(0, 1, 2, 3))
    made.transform = {name: torch.zeros_like(tensor) for name, tensor in made.transform.items()}
    made.to("cpu")
    made.head = nn.Linear(WIDTH, CLASSES)
    made.head.load_state_dict({name: start()[f"head.{name}"] for name in ("weight", "bias")})
    features = torch.linspace(0, 2, WIDTH).requires_grad_().expand(6, WIDTH)
    labels = torch.zeros(6, dtype=torch.int64)
    outputs = Outputs(features, made.head(features))
    found = made.loss(Step(labels, labels, labels, outputs, ()))
    torch.testing.assert_close(found, F.cross_entropy(outputs.logits, labels))
    assert len(set(made.seen[3].tolist())) > 1, "no other class was drawn"
    assert not made.means.means.requires_grad


def test_nothing_of_a_fit_stays_behind() -> None:
    made = objective()
    fitted(made)
    assert not {"seen", "head"} & set(vars(made))
