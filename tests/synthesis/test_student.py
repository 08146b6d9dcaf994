"""The student: SGD written out, and a state that continues exactly."""

import math

import pytest
import torch
from torch import Tensor

from wardround.learn.distillation import distillation
from wardround.methods.state import State
from wardround.models import NetSpec, fresh
from wardround.synthesis.student import EXPLODED, Student, exploded, largest

CPU = torch.device("cpu")
SPEC = NetSpec("small", 3, 4, 8, width=2)


def student(momentum: float = 0.9, decay: float = 5e-4, spec: NetSpec = SPEC) -> Student:
    return Student(spec, fresh(spec, torch.Generator().manual_seed(0)), CPU, momentum, decay)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(5, 3, 8, 8, generator=draw), torch.randn(5, 4, generator=draw)


def step(of: Student, seed: int, rate: float = 0.05) -> None:
    pixels, target = batch(seed)
    of.set_rate(rate)
    of.step(distillation(target, of.logits(pixels), 2.0))


# What has diverged ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "diverged"),
    [
        ("weight", -EXPLODED, True),
        ("weight", 0.9 * EXPLODED, False),
        ("running_var", 1e16, False),  # its root counts
        ("running_var", 1.1 * EXPLODED**2, True),
        ("running_mean", math.nan, True),
        ("running_mean", -math.inf, True),
        ("running_var", math.nan, True),
    ],
)
def test_a_student_has_diverged_when_a_number_is_none_or_beyond_all_measure(
    name: str, value: float, diverged: bool
) -> None:
    weights = {f"a.{key}": torch.ones(3) for key in ("weight", "running_mean", "running_var")}
    weights["a.num_batches_tracked"] = torch.tensor(10**12)  # a counter is no size
    assert largest(weights) == 1.0
    weights[f"a.{name}"][1] = value
    assert exploded(weights) == diverged


# Learning -------------------------------------------------------------------------------------------------------------


def test_three_steps_of_sgd_written_out() -> None:
    """v ← m·v + g + d·w, w ← w − r·v, with a rate of its own for each step."""
    of, plain = student(0.8, 0.01), student(0.0, 0.0)
    velocity = {name: torch.zeros_like(p) for name, p in plain.net.named_parameters()}
    for seed, rate in enumerate((0.1, 0.05, 0.2)):
        step(of, seed, rate)
        pixels, target = batch(seed)
        parameters = dict(plain.net.named_parameters())
        gradients = torch.autograd.grad(distillation(target, plain.logits(pixels), 2.0), list(parameters.values()))
        with torch.no_grad():
            for (name, p), gradient in zip(parameters.items(), gradients, strict=True):
                velocity[name] = 0.8 * velocity[name] + gradient + 0.01 * p
                p -= rate * velocity[name]
    for name, tensor in plain.weights().items():
        torch.testing.assert_close(of.weights()[name], tensor, rtol=1e-4, atol=1e-5)
    for name, tensor in velocity.items():
        torch.testing.assert_close(of.momentum()[name], tensor, rtol=1e-4, atol=1e-4)


def test_a_student_learns_its_teacher() -> None:
    of = student()
    pixels, target = batch(0)
    first = distillation(target, of.logits(pixels), 2.0)
    of.set_rate(0.02)
    for _ in range(40):
        of.step(distillation(target, of.logits(pixels), 2.0))
    assert distillation(target, of.logits(pixels), 2.0) < 0.3 * first


def test_it_trains_in_training_mode_and_counts_its_batches() -> None:
    of = student()
    step(of, 0)
    assert of.weights()["stages.conv1.2.num_batches_tracked"].item() == 1


def test_what_is_given_out_is_a_copy() -> None:
    of = student()
    assert not any(bool(buffer.any()) for buffer in of.momentum().values())
    step(of, 0)
    weights, momentum = of.weights(), of.momentum()
    kept = {name: t.clone() for name, t in weights.items()}, {name: t.clone() for name, t in momentum.items()}
    assert set(momentum) == {name for name, _ in of.net.named_parameters()}
    step(of, 1)
    assert all(torch.equal(weights[name], t) for name, t in kept[0].items())
    assert all(torch.equal(momentum[name], t) for name, t in kept[1].items())
    assert not torch.equal(of.momentum()["head.weight"], momentum["head.weight"])


@pytest.mark.parametrize("spec", [SPEC, NetSpec("wrn16-2", 3, 4, 8, width=2), NetSpec("cnn4", 3, 4, 8, width=2)])
@pytest.mark.parametrize("filed", [False, True], ids=["in memory", "from a file"])
def test_a_restored_student_continues_exactly(spec: NetSpec, filed: bool) -> None:
    """A file keeps no memory layout, and the optimiser's fused step must still pair each weight with its own buffer."""
    of = student(spec=spec)
    for seed in range(3):
        step(of, seed)
    state = State({"weights": of.weights(), "momentum": of.momentum()})
    if filed:
        state = State.from_bytes(state.to_bytes())
    kept = {name: tensor.clone() for name, tensor in state.groups["momentum"].items()}
    other = Student(spec, dict(state.groups["weights"]), CPU, 0.9, 5e-4)
    other.restore_momentum(state.groups["momentum"])
    for seed in range(3, 6):
        step(of, seed)
        step(other, seed)
    assert all(torch.equal(other.weights()[name], tensor) for name, tensor in of.weights().items())
    assert all(torch.equal(other.momentum()[name], tensor) for name, tensor in of.momentum().items())
    assert all(torch.equal(state.groups["momentum"][name], tensor) for name, tensor in kept.items())
