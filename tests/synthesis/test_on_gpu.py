"""What only a GPU can show: our kernels against plain PyTorch, and captured steps against the same steps one by one."""

from pathlib import Path

import pytest
import torch

from tiny import QUICK
from wardround.api import simulate
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay
from wardround.models import NetSpec, fresh
from wardround.synthesis import kernels
from wardround.synthesis.fused_norm import FusedNorm, TrainedNorm
from wardround.synthesis.inversion import Inversion, Synthesis, balanced_labels
from wardround.synthesis.teachers import Teachers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SPEC = NetSpec("resnet18", 3, 4, 16, width=8)


def layer(channels: int, draw: torch.Generator, rectified: bool = False) -> FusedNorm:
    plain = torch.nn.BatchNorm2d(channels)
    for tensor in (plain.weight.data, plain.bias.data, plain.running_mean):
        assert tensor is not None
        tensor.copy_(torch.randn(channels, generator=draw))
    assert plain.running_var is not None
    plain.running_var.copy_(torch.rand(channels, generator=draw) + 0.5)
    return FusedNorm(plain.eval(), rectified).cuda().requires_grad_(False)


def near(ours: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> None:
    """In bf16 a ReLU may cut on either side of a value that rounding has moved: a few slopes may differ."""
    if dtype is torch.float32:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    else:
        close = torch.isclose(ours.float(), plain.float(), rtol=3e-2, atol=3e-2)
        assert float(close.float().mean()) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7, 7), (256, 64, 28, 28), (8, 130, 4, 4)])
@pytest.mark.parametrize("kind", ["norm", "rectified", "shortcut"])
def test_the_kernels_are_the_plain_function(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=draw).cuda().to(dtype, memory_format=torch.channels_last)

    maps, shortcut, weigh = normal(), normal(), normal()
    norm = layer(shape[1], draw, rectified=kind == "rectified")
    norm.measuring = True
    found = []
    for fused in (True, False):
        monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
        x, y = maps.clone().requires_grad_(), shortcut.clone().requires_grad_()
        normed = norm.activate(x, y) if kind == "shortcut" else norm(x)
        first, second = norm.moments
        loss = (normed.float() * weigh).sum() + 50 * first.norm() + 30 * second.norm()
        slopes = torch.autograd.grad(loss, [x, y] if kind == "shortcut" else [x])
        found.append((normed, first, second, *slopes))
    for ours, plain in zip(*found, strict=True):
        near(ours, plain, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_follow_as_batch_norms_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fused in (True, False):
        monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
        draw = torch.Generator().manual_seed(0)
        norm = layer(6, draw).train()
        maps = torch.randn((16, 6, 5, 5), generator=draw).cuda().to(dtype, memory_format=torch.channels_last)
        with torch.no_grad():
            found.append((norm(maps), norm(maps * 2), norm.running_mean, norm.running_var))
    for ours, plain in zip(*found, strict=True):
        assert ours is not None and plain is not None  # noqa: PT018
        near(ours, plain, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7, 7), (256, 64, 28, 28), (8, 130, 4, 4)])
@pytest.mark.parametrize("kind", ["norm", "rectified", "shortcut"])
def test_a_norm_in_training_is_the_plain_function(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output, the slopes by maps, shortcut and parameters, and what it remembers of two batches."""
    found = []
    for fused in (True, False):
        monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
        draw = torch.Generator().manual_seed(0)
        norm = TrainedNorm(layer(shape[1], draw), kind == "rectified").cuda().train().requires_grad_(True)
        maps, shortcut, weigh = (
            torch.randn(shape, generator=draw).cuda().to(dtype, memory_format=torch.channels_last) for _ in range(3)
        )
        x, y = maps.requires_grad_(), shortcut.requires_grad_()
        inputs = [x, norm.weight, norm.bias, *([y] if kind == "shortcut" else [])]
        for _ in range(2):
            normed = norm.activate(x, y) if kind == "shortcut" else norm(x)
        slopes = torch.autograd.grad((normed.float() * weigh).sum() / len(maps), inputs)
        found.append((normed, *slopes, norm.running_mean, norm.running_var, norm.num_batches_tracked))
    for ours, plain in zip(*found, strict=True):
        assert ours is not None and plain is not None  # noqa: PT018
        away = (ours.float() - plain.float()).norm() / plain.float().norm()
        assert float(away) < (2e-3 if dtype is torch.float32 else 5e-2)  # rounding moves a few values across the ReLU


def test_captured_steps_are_the_steps_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Member(SPEC, fresh(SPEC, torch.Generator().manual_seed(i))) for i in (1, 2)]
    labels = balanced_labels(8, 4).cuda()
    found = []
    for warm_up in (3, 10**6):
        monkeypatch.setattr("wardround.learn.replay.WARM_UP_CALLS", warm_up)
        synthesis = Synthesis(Teachers(members, labels.device), labels, (3, 16, 16), Inversion(steps=12, batch=8))
        for _ in range(2):  # a captured step serves a second trajectory
            *_, last = synthesis.trajectory(torch.Generator().manual_seed(0))
        found.append(last)
    torch.testing.assert_close(found[0].images, found[1].images, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found[0].loss, found[1].loss, rtol=1e-3, atol=1e-3)


def test_a_replay_sees_its_inputs_change_and_changes_state_once_a_call() -> None:
    total = torch.zeros((), device="cuda")

    def add(value: torch.Tensor) -> torch.Tensor:
        total.add_(value)
        return total * 2

    replay = Replay(add, total.device)
    given = [torch.full((), float(i), device="cuda") for i in range(8)]
    assert [float(replay(value)) for value in given] == [0.0, 2.0, 6.0, 12.0, 20.0, 30.0, 42.0, 56.0]
    assert float(total) == 28.0


@pytest.mark.parametrize("method", sorted(QUICK))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_method_that_makes_images_runs_with_captured_steps(method: str, precision: str, tmp_path: Path) -> None:
    """More steps of each kind than run as they are; a captured one that touches the CPU's memory is an error."""
    steps = {name: 6 for name in ("steps", "generator_steps", "kd_steps", "turns") if name in QUICK[method]}
    own = {f"{method}.{name}": value for name, value in {**QUICK[method], **steps}.items()}
    settings = {**own, "train.precision": precision, "model.width": 8}
    result = simulate(
        method, model="resnet18", epochs=1, device="cuda", settings=settings, out=tmp_path / "run", progress=False
    )
    assert result.headlines[method]["global_accuracy"] is not None


CUBLAS_WORKSPACE = 32 * 2**20  # bytes, of each stream that multiplies matrices; kept as long as the process


def test_what_a_run_captured_is_given_back(tmp_path: Path) -> None:
    def held_after(name: str) -> int:
        simulate("fedbicross", preset="demo", device="cuda", out=tmp_path / name, progress=False)
        return torch.cuda.memory_reserved()

    held_after("first")  # what the process keeps for good, such as the libraries' workspaces, is made here
    grown = -held_after("second") + held_after("third")
    assert grown <= 4 * CUBLAS_WORKSPACE  # a stream that no run used before brings one, and there are 32 streams
