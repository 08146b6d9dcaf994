"""Distillation by hand, its direction, and its temperature."""

import math

import pytest
import torch

from wardround.learn.distillation import distillation


def test_distillation_of_two_classes_by_hand() -> None:
    """T = 2: teacher (2 ln 3, 0) is (3/4, 1/4), student (0, 0) is (1/2, 1/2). KL = 3/4 ln 3/2 + 1/4 ln 1/2, times 4.

    Gradient: T·(q − p) = 2·(1/2 − 3/4) = −1/2 for the class the teacher prefers, +1/2 for the other.
    """
    teacher = torch.tensor([[2 * math.log(3), 0.0]])
    own = torch.zeros(1, 2, requires_grad=True)
    loss = distillation(teacher, own, 2.0)
    assert loss.item() == pytest.approx(4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    assert own.grad.flatten().tolist() == pytest.approx([-0.5, 0.5])


def test_distillation_is_the_mean_over_the_batch() -> None:
    teacher = torch.tensor([[2 * math.log(3), 0.0], [1.0, 1.0]])
    one = distillation(teacher[:1], torch.zeros(1, 2), 2.0)
    assert distillation(teacher, torch.zeros(2, 2), 2.0).item() == pytest.approx(one.item() / 2)


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_equal_logits_have_nothing_to_learn(temperature: float) -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert distillation(logits, logits, temperature).item() == pytest.approx(0.0, abs=1e-5)
    shifted = logits + 3.0  # softmax does not see a constant
    assert distillation(logits, shifted, temperature).item() == pytest.approx(0.0, abs=1e-4)


def test_the_direction_is_from_teacher_to_student() -> None:
    """KL is not symmetric: a student that rules out what the teacher holds possible pays more than the reverse."""
    sure, open_ = torch.tensor([[8.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert distillation(open_, sure, 1.0) > 2 * distillation(sure, open_, 1.0)


def test_the_gradient_hardly_depends_on_a_high_temperature() -> None:
    """The factor T²: for large T the loss is ‖Δ‖² / 2C of centred logits: (3² + 3²) / 4 = 4.5."""
    teacher, own = torch.tensor([[6.0, 0.0]]), torch.zeros(1, 2)
    assert distillation(teacher, own, 1000.0).item() == pytest.approx(18 / 4, rel=1e-2)
