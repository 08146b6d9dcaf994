"""Teachers that answer as a panel: the predictor's scores, and a class asked of those who have seen it."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch

from tiny import CPU
from wardround.learn.device import Device
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member, Predictor
from wardround.methods.consult import ConsultSettings, panel_of
from wardround.models import NetSpec, fresh
from wardround.synthesis.inversion import Inversion, inversion_loss
from wardround.synthesis.panel import PanelTeachers
from wardround.synthesis.teachers import View

SPECS = NetSpec("small", 3, 3, 8, width=2), NetSpec("small", 3, 3, 8, width=3)
COUNTS = torch.tensor([[30, 10, 0], [0, 10, 5]])


def panel(**how: float) -> Predictor:
    members = tuple(Member(spec, fresh(spec, torch.Generator().manual_seed(i))) for i, spec in enumerate(SPECS))
    return panel_of(members, COUNTS, ConsultSettings(**how))


def teachers(ask: Literal["experts", "panel"] = "experts", **how: float) -> PanelTeachers:
    return PanelTeachers(panel(**how), CPU, ask=ask)


def view(*probabilities: list[list[float]]) -> View:
    logits = tuple(torch.tensor(rows).log() for rows in probabilities)
    return View(logits, tuple(torch.zeros(()) for _ in logits))


def test_they_say_what_the_predictor_says() -> None:
    pixels = torch.randint(0, 256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = panel(sharpness=2.0).scores(pixels, Device(CPU, 1))
    found = teachers(sharpness=2.0).logits(normalise(pixels.float()))
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


def test_a_class_is_asked_of_those_who_have_seen_it() -> None:
    """Images of classes 0, 1 and 2. W: class 0 (1, 0); class 1 (1/2, 1/2); class 2 (0, 1); no count is out of bounds.

    π of teacher 1 is (30.5, 10.5, 0.5)/41.5, of teacher 2 (0.5, 10.5, 5.5)/16.5. Losses are −log softmax(z − log π) of
    the label: p_y/π_y over Σ_c p_c/π_c.
    """
    said = [[[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]], [[0.1, 0.1, 0.8], [0.6, 0.2, 0.2], [0.2, 0.2, 0.6]]]
    priors = [[30.5 / 41.5, 10.5 / 41.5, 0.5 / 41.5], [0.5 / 16.5, 10.5 / 16.5, 5.5 / 16.5]]

    def loss(teacher: int, image: int) -> float:
        odds = [p / q for p, q in zip(said[teacher][image], priors[teacher], strict=True)]
        return -math.log(odds[image] / sum(odds))

    expected = (loss(0, 0) + (loss(0, 1) + loss(1, 1)) / 2 + loss(1, 2)) / 3
    found = teachers().label_loss(view(*said), torch.tensor([0, 1, 2]), Inversion())
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_what_a_teacher_says_of_a_class_that_it_has_not_seen_moves_nothing() -> None:
    sure, unsure = [[0.98, 0.01, 0.01]], [[0.3, 0.3, 0.4]]
    labels = torch.tensor([0])
    of = teachers()
    same = [float(of.label_loss(view(unsure, other), labels, Inversion())) for other in (sure, unsure)]
    assert same[0] == same[1]
    apart = [float(of.label_loss(view(other, sure), labels, Inversion())) for other in (sure, unsure)]
    assert apart[0] < apart[1]


def test_or_of_the_panel_as_a_whole() -> None:
    """Cross-entropy of the panel's own scores."""
    seen = view([[0.5, 0.3, 0.2]], [[0.1, 0.1, 0.8]])
    of = teachers("panel")
    scores = of.scores(seen.logits)
    expected = -math.log(float(scores.softmax(dim=1)[0, 1]))
    assert float(of.label_loss(seen, torch.tensor([1]), Inversion())) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(scores[0], panel(federation=0.0).combined(list(seen.logits), 1)[0])


def test_a_synthesis_takes_it_for_the_label_loss() -> None:
    """Without batch norm and variation all of the loss; and it has a gradient."""
    of = teachers()
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels, how = torch.tensor([0, 1, 2]), Inversion(bn_weight=0.0, tv_weight=0.0)
    seen = of.view(images)
    loss = inversion_loss(seen, images, labels, how, of.label_loss)
    assert float(loss.detach()) == float(of.label_loss(seen, labels, how).detach())
    (gradient,) = torch.autograd.grad(loss, images)
    assert float(gradient.abs().sum()) > 0


@pytest.mark.parametrize("name", ["trust", "member_log_prior", "votes", "sharpness"])
def test_any_other_predictor_is_a_mistake_of_the_program(name: str) -> None:
    with pytest.raises(ValueError, match="a panel that votes on pairs has trust, priors, votes and sharpness"):
        PanelTeachers(replace(panel(), **{name: None}), CPU)
