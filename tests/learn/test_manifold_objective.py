"""FedMP's objective: Eq. 1's weights by hand, both terms against a plain loop, and the sign that had to be mended."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny import CPU, images
from wardround.learn.embeddings import Embeddings
from wardround.learn.fit import Fit, Objective, Recipe
from wardround.learn.manifold import Manifold, Scaling, Weighting
from wardround.learn.prototypes import Prototypes, alignment
from wardround.learn.stages import stage_features, stage_name, stage_width
from wardround.learn.trainer import train_one
from wardround.models import NetSpec, Weights, build, fresh

SMALL, CNN = NetSpec("small", 3, 4, 8, width=2), NetSpec("cnn4", 3, 4, 8, width=2)
RATE = 0.05


def start(spec: NetSpec) -> Weights:
    return fresh(spec, torch.Generator().manual_seed(3))


def came(spec: NetSpec, stage: str) -> tuple[Embeddings, Prototypes]:
    """What a coordinator might send: six embeddings of others, and prototypes of all classes but the last."""
    draw, width = torch.Generator().manual_seed(8), stage_width(spec, stage)
    external = Embeddings(torch.rand(6, width, generator=draw), torch.arange(6) % 4)
    known = torch.tensor([True, True, True, False])
    return external, Prototypes(torch.rand(4, width, generator=draw) * known.unsqueeze(1), known)


# Eq. 1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "term", "expected"),
    [("mended", -0.5, 4.0), ("literal", -0.5, -4.0), ("mended", 4.0, 0.5), ("literal", 4.0, 0.5), ("fixed", 4.0, 1.0)],
)
def test_the_weight_by_hand(scaling: Scaling, term: float, expected: float) -> None:
    """A local loss of 2 over a term of −0.5: as printed −4, which turns the term's gradient round."""
    assert float(Weighting(scaling).scale(torch.tensor(term), torch.tensor(2.0))) == expected


@pytest.mark.parametrize("scaling", ["mended", "literal"])
def test_a_term_of_nothing_stays_finite(scaling: Scaling) -> None:
    weight = Weighting(scaling).scale(torch.tensor(0.0), torch.tensor(2.0))
    assert float(weight) == pytest.approx(2e6)


def test_the_weight_has_no_gradient() -> None:
    local, term = torch.tensor(2.0, requires_grad=True), torch.tensor(-0.5, requires_grad=True)
    assert not Weighting().scale(term, local).requires_grad


def cosine_after_training(scaling: Scaling, factor: float = 1.0) -> float:
    """How near a site's features are to their prototypes after some steps with cPGMA alone."""
    data, stage = images(8, seed=4), stage_name(CNN, None)
    _, anchors = came(CNN, stage)
    recipe = Recipe(epochs=5, batch=8, lr=0.02, momentum=0.0, weight_decay=0.0)
    objective = Manifold(CNN, stage, None, anchors, Weighting(scaling, cpgma=factor))
    weights = train_one(Fit("x", CNN, start(CNN), data, recipe, 0, objective), CPU).weights
    features = stage_features(CNN, weights, data.images, stage, CPU)
    return -float(alignment(features, data.labels, anchors))


def test_the_literal_sign_pushes_embeddings_away_and_the_mended_one_pulls() -> None:
    """FedMP's Eq. 1 as printed lowers the very cosine that Eq. 8 is to raise."""
    without = cosine_after_training("mended", factor=0.0)
    assert cosine_after_training("literal") < without < cosine_after_training("mended")


# Whole steps against a plain loop -------------------------------------------------------------------------------------


def eval_logits(net: Any, stage: str, features: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rest of a network on others' features, with a copy of its batch norms that does not learn."""
    net.eval()
    _, logits = net.after(stage, features.reshape(-1, *shape))
    net.train()
    return logits


def plain_steps(spec: NetSpec, stage: str, weighting: Weighting, steps: int) -> Weights:
    """Eq. 1, 5 and 8 as they are written, in plain SGD on one batch."""
    external, anchors = came(spec, stage)
    data = images(8, seed=4)
    net = build(spec)
    net.load_state_dict(start(spec))
    pixels = data.images.float() / 127.5 - 1
    for _ in range(steps):
        net.train()
        features = net.upto(stage, pixels)
        local = F.cross_entropy(net.after(stage, features)[1], data.labels)
        logits = eval_logits(net, stage, external.features, tuple(features.shape[1:]))
        completion = sum(F.cross_entropy(logits[j : j + 1], external.labels[j : j + 1]) for j in range(6)) / 6
        pull = torch.zeros(())
        for c in (0, 1, 2):
            mine = features[data.labels == c].flatten(1)
            pull = pull - F.cosine_similarity(mine, anchors.means[c].unsqueeze(0)).mean()
        loss = local
        for term, factor in ((completion, weighting.sfmc), (pull, weighting.cpgma)):
            assert isinstance(term, Tensor)
            ratio = 1.0 if weighting.scaling == "fixed" else float(local.detach() / term.detach().abs())
            loss = loss + factor * ratio * term
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(RATE * gradient)
    return dict(net.state_dict())


@pytest.mark.parametrize("weighting", [Weighting(), Weighting("fixed", 0.7, 0.3)], ids=["mended", "fixed"])
@pytest.mark.parametrize("number", [1, 3, None])
@pytest.mark.parametrize("spec", [SMALL, CNN], ids=["small", "cnn4"])
def test_three_steps_against_the_equations(spec: NetSpec, number: int | None, weighting: Weighting) -> None:
    stage = stage_name(spec, number)
    recipe = Recipe(epochs=3, batch=8, lr=RATE, momentum=0.0, weight_decay=0.0)
    objective = Manifold(spec, stage, *came(spec, stage), weighting)
    found = train_one(Fit("x", spec, start(spec), images(8, seed=4), recipe, 0, objective), CPU).weights
    expected = plain_steps(spec, stage, weighting, steps=3)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    plain = train_one(Fit("x", spec, start(spec), images(8, seed=4), recipe, 0), CPU).weights
    assert not torch.allclose(plain["head.weight"], found["head.weight"], atol=1e-4)


def train(objective: Objective) -> Weights:
    recipe = Recipe(epochs=2, batch=4, lr=RATE)
    return train_one(Fit("x", SMALL, start(SMALL), images(8, seed=4), recipe, 0, objective), CPU).weights


def test_factors_of_zero_are_cross_entropy() -> None:
    stage = stage_name(SMALL, 2)
    found = train(Manifold(SMALL, stage, *came(SMALL, stage), Weighting("fixed", 0.0, 0.0)))
    plain = train(Objective())
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_completion_trains_only_what_comes_after_the_stage() -> None:
    """The embeddings of others are constants; at the last stage only the head hears of them."""
    stage = stage_name(SMALL, None)
    external, _ = came(SMALL, stage)
    recipe = Recipe(epochs=1, batch=8, lr=RATE, momentum=0.0, weight_decay=0.0)
    objective = Manifold(SMALL, stage, external, None)
    fits = [Fit("x", SMALL, start(SMALL), images(8, seed=4), recipe, 0, o) for o in (objective, Objective())]
    found, plain = (train_one(fit, CPU).weights for fit in fits)
    assert {name for name, t in plain.items() if not torch.equal(found[name], t)} == {"head.weight", "head.bias"}


def test_running_statistics_do_not_absorb_others_features() -> None:
    """With a factor of 0 for its gradients, completion leaves no trace at all: not in the statistics either."""
    stage = stage_name(SMALL, 1)
    external, _ = came(SMALL, stage)
    found = train(Manifold(SMALL, stage, external, None, Weighting("mended", sfmc=0.0)))
    plain = train(Objective())
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items() if "running" in name)


@pytest.mark.parametrize("number", [1, 3, None])
@pytest.mark.parametrize("spec", [SMALL, CNN], ids=["small", "cnn4"])
def test_checkpointing_changes_no_bit(spec: NetSpec, number: int | None) -> None:
    """Stages made a second time for the gradient must not meet others' features with batch norms that learn."""
    stage = stage_name(spec, number)
    recipe = Recipe(epochs=2, batch=4, lr=RATE)
    found, plain = (
        train_one(
            Fit("x", spec, start(spec), images(8, seed=4), chosen, 0, Manifold(spec, stage, *came(spec, stage))), CPU
        )
        for chosen in (replace(recipe, checkpointing=True), recipe)
    )
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in plain.weights.items())


def test_nothing_of_a_fit_stays_behind() -> None:
    """Neither the borrowed network nor a batch's graph."""
    stage = stage_name(SMALL, None)
    objective = Manifold(SMALL, stage, *came(SMALL, stage))
    train(objective)
    assert not hasattr(objective, "seen")


def test_it_is_never_taken_for_cross_entropy() -> None:
    assert Manifold.key is None
