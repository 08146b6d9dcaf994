"""FedBiCross's Stage 2 in double precision: its equations against plain autograd."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

from wardround.learn.distillation import distillation
from wardround.models import NetSpec, fresh
from wardround.synthesis.bilevel import Lesson, bilevel_update, inner_update, sampled_steps
from wardround.synthesis.student import Student

SPEC = NetSpec("small", 3, 4, 8, width=2)
CPU = torch.device("cpu")
RATE = 0.05


def lessons(count: int, images: int = 5, noise: float = 0.3) -> list[Lesson]:
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    left = torch.tensor(noise, dtype=torch.float64)
    return [Lesson(normal(images, 3, 8, 8), normal(images, 4), normal(images, 4), left) for _ in range(count)]


def double_student(momentum: float = 0.9, decay: float = 5e-4) -> Student:
    student = Student(SPEC, fresh(SPEC, torch.Generator().manual_seed(1)), CPU, momentum, decay)
    student.net.double()
    for kept in student.optimiser.state.values():
        kept["momentum_buffer"] = kept["momentum_buffer"].double()
    student.set_rate(RATE)
    return student


def test_the_loss_mixes_both_teachers_by_the_noise_left() -> None:
    (lesson,), student = lessons(1, noise=0.25), double_student()
    logits = student.logits(lesson.images)
    adapted, original = (distillation(t, logits, 4.0) for t in (lesson.adapted, lesson.original))
    torch.testing.assert_close(lesson.loss(student, 4.0), 0.25 * adapted + 0.75 * original)


def test_the_weights_gradient_is_autograd_through_the_step() -> None:
    """With momentum, weight decay and batch norm in training mode: all that a real step has."""
    *training, validation = lessons(4)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    student = double_student()
    inner_update(student, training, torch.ones(3, dtype=torch.float64), 4.0)  # so that there is momentum
    start = {name: p.detach().clone().requires_grad_() for name, p in student.net.named_parameters()}
    momentum = student.momentum()

    def loss(parameters: dict[str, Tensor], lesson: Lesson) -> Tensor:
        logits = functional_call(student.net, parameters, (lesson.images,))
        far, near = (distillation(t, logits, 4.0) for t in (lesson.adapted, lesson.original))
        return lesson.noise * far + (1 - lesson.noise) * near

    free = weights.clone().requires_grad_()
    inner = sum(w * loss(start, lesson) for w, lesson in zip(free, training, strict=True))
    slopes = torch.autograd.grad(inner, list(start.values()), create_graph=True)
    after = {
        name: p - RATE * (0.9 * momentum[name] + slope + 5e-4 * p)
        for (name, p), slope in zip(start.items(), slopes, strict=True)
    }
    (expected,) = torch.autograd.grad(loss(after, validation), free)

    found = bilevel_update(student, training, validation, weights, 4.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert float(expected.abs().min()) > 1e-6
    for name, parameter in student.net.named_parameters():
        torch.testing.assert_close(parameter, after[name], rtol=1e-6, atol=1e-9)


def test_both_ways_to_take_the_inner_step_are_one() -> None:
    *training, validation = lessons(4)
    weights = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    one, other = double_student(), double_student()
    for _ in range(3):
        inner_update(one, training, weights, 4.0)
        bilevel_update(other, training, validation, weights, 4.0)
    for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_validation_leaves_the_running_statistics_alone() -> None:
    *training, validation = lessons(3)
    one, other = double_student(), double_student()
    bilevel_update(one, training, validation, torch.tensor([0.5, 0.5]), 4.0)
    bilevel_update(other, training, validation._replace(images=validation.images * 9), torch.tensor([0.5, 0.5]), 4.0)
    for (name, a), b in zip(one.net.named_buffers(), other.net.buffers(), strict=True):
        assert torch.equal(a, b)
        assert int(a) == 2 if name.endswith("tracked") else bool(a.any())


@given(st.integers(1, 60), st.data())
@settings(deadline=None, max_examples=25)
def test_one_step_of_each_interval(steps: int, data: Any) -> None:
    samples = data.draw(st.integers(1, steps))
    found = sorted(sampled_steps(steps, samples, torch.Generator().manual_seed(data.draw(st.integers(0, 9)))))
    assert len(found) == samples
    for s, t in enumerate(found, 1):
        assert math.floor((s - 1) * steps / samples) + 1 <= t <= math.floor(s * steps / samples)


def test_every_step_of_an_interval_can_be_drawn() -> None:
    drawn = [sampled_steps(10, 3, torch.Generator().manual_seed(seed)) for seed in range(60)]
    assert set().union(*drawn) == set(range(1, 11))
    assert sampled_steps(6, 6, torch.Generator()) == {1, 2, 3, 4, 5, 6}
