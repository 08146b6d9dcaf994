"""Teachers that answer as a panel: the predictor's scores, and a class asked of those who have seen it."""

import math
from dataclasses import replace

import pytest
import torch

from tiny import CPU
from wardround.learn.device import Device
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member, Predictor
from wardround.methods.consult import ConsultSettings, panel_of
from wardround.models import NetSpec, fresh
from wardround.synthesis.deal import Deal, deal
from wardround.synthesis.panel import PanelTeachers

SPECS = NetSpec("small", 3, 3, 8, width=2), NetSpec("small", 3, 3, 8, width=3)
COUNTS = torch.tensor([[30, 10, 0], [0, 10, 5]])


def panel(**how: float) -> Predictor:
    members = tuple(Member(spec, fresh(spec, torch.Generator().manual_seed(i))) for i, spec in enumerate(SPECS))
    return panel_of(members, COUNTS, ConsultSettings(**how))


def teachers(**how: float) -> PanelTeachers:
    return PanelTeachers(panel(**how), CPU)


def test_they_say_what_the_predictor_says() -> None:
    pixels = torch.randint(0, 256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = panel(sharpness=2.0).scores(pixels, Device(CPU, 1))
    found = teachers(sharpness=2.0).logits(normalise(pixels.float()))
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


def shown(of: PanelTeachers, batch: int = 6) -> tuple[torch.Tensor, Deal]:
    """A batch of images as the teachers are dealt it."""
    dealt = deal(COUNTS, of.shares, batch, CPU)
    draw = torch.Generator().manual_seed(1)
    return torch.randn(len(dealt.labels), 3, 8, 8, generator=draw, requires_grad=True), dealt


def test_a_class_is_asked_of_those_who_have_seen_it() -> None:
    """The mean over classes of Σ_k W_kc·(mean over k's images of c of −log softmax(z_k − log π_k)_c), loop by loop.

    W: class 0 (1, 0); class 1 (1/2, 1/2); class 2 (0, 1); no count is out of bounds. π of teacher 1 is
    (30.5, 10.5, 0.5)/41.5, of teacher 2 (0.5, 10.5, 5.5)/16.5.
    """
    of = teachers()
    images, dealt = shown(of)
    priors = [[30.5 / 41.5, 10.5 / 41.5, 0.5 / 41.5], [0.5 / 16.5, 10.5 / 16.5, 5.5 / 16.5]]
    trusted = [[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]
    expected = 0.0
    for k, teacher in enumerate(of.teachers):
        logits = teacher.logits(images[dealt.rows[k]]).detach()
        labels = dealt.labels[dealt.rows[k]].tolist()
        for c in range(3):
            mine = [math.e**z / priors[k][d] for row in logits[[i for i, y in enumerate(labels) if y == c]].tolist()
                    for d, z in enumerate(row)]  # fmt: skip
            losses = [-math.log(mine[i + c] / sum(mine[i : i + 3])) for i in range(0, len(mine), 3)]
            expected += trusted[k][c] * (sum(losses) / len(losses) if losses else 0.0) / 3
    wrong, _ = of.opinion(images, dealt)
    assert float(wrong.detach()) == pytest.approx(expected, rel=1e-5)


def test_statistics_are_of_what_each_teacher_is_shown() -> None:
    of = teachers()
    images, dealt = shown(of)
    _, gap = of.opinion(images, dealt)
    alone = [float(t.view(images[rows])[1].detach()) for t, rows in zip(of.teachers, dealt.rows, strict=True)]
    assert float(gap.detach()) == pytest.approx(sum(alone) / 2, rel=1e-6)


def test_an_image_that_a_teacher_is_not_shown_moves_nothing_by_it() -> None:
    """Images of class 0 are the first teacher's alone; both have a gradient by what they are shown."""
    of = teachers()
    images, dealt = shown(of)
    assert set(dealt.labels[dealt.rows[1]].tolist()) == {1, 2}
    (gradient,) = torch.autograd.grad(sum(of.opinion(images, dealt)), images)
    assert bool((gradient.flatten(1).abs().sum(dim=1) > 0).all())
    without = replace(dealt, rows=dealt.rows[1:], weights=dealt.weights[1:])
    of.teachers, of.log_prior = of.teachers[1:], of.log_prior[1:]
    (gradient,) = torch.autograd.grad(sum(of.opinion(images, without)), images)
    assert not gradient[dealt.labels == 0].any()


@pytest.mark.parametrize("name", ["trust", "member_log_prior", "votes", "sharpness"])
def test_any_other_predictor_is_a_mistake_of_the_program(name: str) -> None:
    with pytest.raises(ValueError, match="a panel that votes on pairs has trust, priors, votes and sharpness"):
        PanelTeachers(replace(panel(), **{name: None}), CPU)
