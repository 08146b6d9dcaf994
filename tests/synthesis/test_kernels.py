"""Our Triton kernels against plain PyTorch: on a GPU where there is one, else interpreted on the CPU (conftest.py)."""

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from wardround.learn.distillation import distillation
from wardround.learn.predictor import Member
from wardround.models import NetSpec, build, fresh
from wardround.models.net import twin
from wardround.synthesis import kernels, stem
from wardround.synthesis.fused_norm import FusedNorm, TrainedNorm, replace_norms
from wardround.synthesis.stem import FusedStem, replace_stems
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Teachers

pytestmark = pytest.mark.skipif(kernels.triton is None, reason="needs Triton, which is for Linux only")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(3, 5, 7, 7), (8, 130, 4, 4), (256, 64, 28, 28) if GPU else (10, 64, 9, 9)]
DTYPES = [torch.float32, torch.bfloat16]
BOTH_WAYS = (True, False)  # by the kernels, and plainly


def normal(shape: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=draw).to(DEVICE, dtype, memory_format=torch.channels_last)


def batch_norm(channels: int, draw: torch.Generator) -> nn.BatchNorm2d:
    plain = nn.BatchNorm2d(channels)
    for tensor in (plain.weight.data, plain.bias.data, plain.running_mean):
        assert tensor is not None
        tensor.copy_(torch.randn(channels, generator=draw))
    assert plain.running_var is not None
    plain.running_var.copy_(torch.rand(channels, generator=draw) + 0.5)
    return plain.eval().to(DEVICE)


def near(ours: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """In bf16 a ReLU may cut on either side of a value that rounding has moved: a few slopes may differ."""
    if dtype is torch.float32:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    else:
        close = torch.isclose(ours.float(), plain.float(), rtol=3e-2, atol=3e-2)
        assert float(close.float().mean()) > 0.99


def away(ours: Tensor, plain: Tensor) -> float:
    return float((ours.detach().float() - plain.detach().float()).norm() / plain.detach().float().norm())


def in_two_uses(out: Tensor, weigh: Tensor, two: bool) -> Tensor:
    """A loss that reads what came out once, or a second time as its twin."""
    once = (out.float() * weigh).sum()
    return once + (twin(out).float() * weigh.square()).sum() if two else once


@pytest.fixture(params=BOTH_WAYS)
def two(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_kernels_fit_into_a_small_gpu(tmp_path: Path) -> None:
    """Shared memory of a block: 99 KiB on the smallest that computes in bf16; asked for more, a launch fails."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compiled.py"))]
    done = subprocess.run(
        command, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert {row["gpu"] for row in found} == {86, 90}
    assert len({row["kernel"] for row in found}) == 7
    assert max(row["shared"] for row in found) <= 64 * 1024


# Norms ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["norm", "rectified", "shortcut"])
def test_a_frozen_norm_is_the_plain_function(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out, the moments of what came in, and the slopes by maps and shortcut."""
    found = []
    for fused in BOTH_WAYS:
        monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
        draw = torch.Generator().manual_seed(0)
        x, y = (normal(shape, draw, dtype).requires_grad_() for _ in range(2))
        norm = FusedNorm(batch_norm(shape[1], draw), kind == "rectified").requires_grad_(False)
        norm.measuring = True
        out = norm.activate(x, y) if kind == "shortcut" else norm(x)
        assert (twin(out) is not out) == fused  # with kernels, slopes of two uses come back apart
        first, second = norm.moments
        loss = in_two_uses(out, normal(shape, draw), two) + 50 * first.norm() + 30 * second.norm()
        found.append((out, first, second, *torch.autograd.grad(loss, [x, y] if kind == "shortcut" else [x])))
    for ours, plain in zip(*found, strict=True):
        near(ours, plain, dtype)


@pytest.mark.parametrize("part", ["out", "mean", "variance"])
def test_what_is_not_asked_for_has_no_slope(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fused in BOTH_WAYS:
        monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
        draw = torch.Generator().manual_seed(0)
        x = normal((4, 6, 5, 5), draw).requires_grad_()
        norm = FusedNorm(batch_norm(6, draw), True).requires_grad_(False)
        norm.measuring = True
        out = norm(x)
        loss = {"out": out, "mean": norm.moments[0], "variance": norm.moments[1]}[part].square().sum()
        found.append(torch.autograd.grad(loss, x)[0])
    near(*found, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_running_statistics_follow_as_batch_norms_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fused in BOTH_WAYS:
        monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
        draw = torch.Generator().manual_seed(0)
        norm = FusedNorm(batch_norm(6, draw), False).requires_grad_(False).train()
        maps = normal((16, 6, 5, 5), draw, dtype)
        with torch.no_grad():
            found.append((norm(maps), norm(maps * 2), norm.running_mean, norm.running_var))
    for ours, plain in zip(*found, strict=True):
        assert ours is not None and plain is not None  # noqa: PT018
        near(ours, plain, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["norm", "rectified", "shortcut"])
def test_a_norm_in_training_is_the_plain_function(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output, the slopes by maps, shortcut and parameters, and what it remembers of two batches."""
    found = []
    for fused in BOTH_WAYS:
        monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
        draw = torch.Generator().manual_seed(0)
        norm = TrainedNorm(batch_norm(shape[1], draw), kind == "rectified").train()
        x, y = (normal(shape, draw, dtype).requires_grad_() for _ in range(2))
        inputs = [x, norm.weight, norm.bias, *([y] if kind == "shortcut" else [])]
        for _ in range(2):
            out = norm.activate(x, y) if kind == "shortcut" else norm(x)
        slopes = torch.autograd.grad(in_two_uses(out, normal(shape, draw), two) / len(x), inputs)
        found.append((out, *slopes, norm.running_mean, norm.running_var, norm.num_batches_tracked))
    for ours, plain in zip(*found, strict=True):
        assert ours is not None and plain is not None  # noqa: PT018
        assert away(ours, plain) < (2e-3 if dtype is torch.float32 else 5e-2)  # rounding moves a few across the ReLU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [FusedNorm, TrainedNorm])
def test_a_batch_far_from_the_running_mean_loses_no_digits(
    kind: type[FusedNorm], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one batch is normed by is nothing that earlier ones left behind, however far off that is."""
    draw = torch.Generator().manual_seed(0)
    maps = normal((16, 6, 5, 5), draw, dtype) + 1  # a few of the digits of bf16 are left for its spread
    for behind in (-4e3, 1e30):
        found = []
        for fused in BOTH_WAYS:
            monkeypatch.setattr(kernels, "can_run", lambda *_, fused=fused: fused)
            norm = kind(batch_norm(6, draw), False).requires_grad_(False).train()
            assert norm.running_mean is not None
            assert norm.running_var is not None
            torch.nn.init.ones_(norm.weight)
            torch.nn.init.zeros_(norm.bias)
            norm.running_mean.fill_(behind)
            norm.running_var.fill_(1.0)
            found.append((norm(maps), norm.running_mean, norm.running_var))
        for ours, plain in zip(*found, strict=True):
            near(ours, plain, dtype)


def test_a_spread_that_rounding_would_make_negative_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "can_run", lambda *_: True)
    draw = torch.Generator().manual_seed(0)
    alike = torch.rand((1, 64, 1, 1), generator=draw).to(DEVICE) * 1e4 + 1
    maps = alike.expand(64, 64, 5, 5).contiguous(memory_format=torch.channels_last)
    norm = TrainedNorm(batch_norm(64, draw), False).train()
    assert norm.bias is not None
    torch.testing.assert_close(norm(maps), norm.bias[:, None, None].expand_as(maps))


def test_what_is_not_a_number_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that diverged must be seen to have."""
    monkeypatch.setattr(kernels, "can_run", lambda *_: True)
    draw = torch.Generator().manual_seed(0)
    for norm in (FusedNorm(batch_norm(6, draw), True), TrainedNorm(batch_norm(6, draw), True).train()):
        maps = normal((4, 6, 5, 5), draw)
        maps[0, 2, 0, 0] = torch.nan
        assert bool(norm(maps)[0, 2, 0, 0].isnan())


# Stems ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact() -> Iterator[None]:
    """A GPU multiplies in bf16, Triton's interpreter cannot: the kernels are the same."""
    was = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = was


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("measuring", BOTH_WAYS)
@pytest.mark.parametrize(
    ("colours", "channels", "size"), [(3, 64, 28) if GPU else (3, 64, 8), (1, 10, 6), (2, 8, 4), (3, 70, 5)]
)
def test_a_stem_is_its_layers(
    colours: int, channels: int, size: int, measuring: bool, two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out, the moments that its norm leaves, and the slope by the images, at the edges, too."""
    dtype = torch.bfloat16 if GPU else torch.float32
    draw = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(colours, channels, 3, padding=1, bias=False)
    conv.weight.data.normal_(generator=draw)
    layers = nn.Sequential(OrderedDict(conv=conv, norm=batch_norm(channels, draw), relu=nn.ReLU()))
    net = nn.Sequential(layers).requires_grad_(False)
    conv.to(DEVICE, dtype, memory_format=torch.channels_last)
    (norm,) = replace_norms(net)
    replace_stems(net)
    assert isinstance(net[0], FusedStem)
    norm.measuring = measuring
    images, weigh = normal((7, colours, size, size), draw, dtype), normal((7, channels, size, size), draw)
    found = []
    for fused in BOTH_WAYS:
        monkeypatch.setattr(stem, "_can_run", lambda *_, fused=fused: fused)
        monkeypatch.setattr(kernels, "can_run", lambda *_: False)
        x = images.clone().requires_grad_()
        out = net(x)
        loss = in_two_uses(out, weigh, two)
        if measuring:
            loss = loss + 50 * norm.moments[0].norm() + 30 * norm.moments[1].norm()
        found.append((out, *(norm.moments if measuring else ()), *torch.autograd.grad(loss, x)))
    for ours, plain in zip(*found, strict=True):
        assert away(ours, plain) < (3e-2 if GPU else 1e-5)


def test_a_stem_changes_no_name_and_suits_small_stems_alone() -> None:
    for stem_of, fused in (("small", True), ("imagenet", False)):
        spec = NetSpec("resnet18", 3, 4, 32, width=8, stem=stem_of)
        plain, net = build(spec), build(spec)
        net.load_state_dict(fresh(spec, torch.Generator().manual_seed(0)))
        replace_norms(net)
        replace_stems(net)
        assert list(net.state_dict()) == list(plain.state_dict())
        assert isinstance(net.stages["stem"], FusedStem) == fused
        assert sum(isinstance(module, FusedStem) for module in net.modules()) == fused


# Whole networks -------------------------------------------------------------------------------------------------------


def forced(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Kernels wherever the layout allows it, or nowhere."""
    monkeypatch.setattr(kernels, "can_run", lambda *maps: fused and all(m is None or in_order(m) for m in maps))
    exactly = fused and not GPU  # a GPU would multiply float32 images as TF32
    monkeypatch.setattr(stem, "_can_run", lambda images, weight: exactly and in_order(images) and in_order(weight))


def in_order(maps: Tensor) -> bool:
    return maps.is_contiguous(memory_format=torch.channels_last)


NETS = [NetSpec("resnet18", 3, 4, 8, width=4), NetSpec("wrn16-2", 1, 4, 8, width=4)]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("spec", NETS, ids=lambda spec: spec.name)
def test_a_teachers_view_with_kernels_is_its_view_without(spec: NetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, distances and the slope by the pixels, through every shortcut."""
    draw = torch.Generator().manual_seed(0)
    member, pixels = Member(spec, fresh(spec, draw)), normal((6, spec.channels, 8, 8), draw)
    found = []
    for fused in BOTH_WAYS:
        forced(monkeypatch, fused)
        x = pixels.clone().requires_grad_()
        view = Teachers([member], x.device).view(x)
        loss = view.mean.square().sum() + view.gaps[0]
        found.append((view.mean, view.gaps[0], *torch.autograd.grad(loss, x)))
    for ours, plain in zip(*found, strict=True):
        assert away(ours, plain) < 1e-3


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("spec", NETS, ids=lambda spec: spec.name)
def test_a_students_steps_with_kernels_are_its_steps_without(spec: NetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    weights, pixels = fresh(spec, draw), normal((6, spec.channels, 8, 8), draw)
    wanted = torch.randn((6, 4), generator=draw).to(DEVICE)
    found = []
    for fused in BOTH_WAYS:
        forced(monkeypatch, fused)
        student = Student(spec, weights, pixels.device, momentum=0.9, decay=5e-4)
        student.set_rate(0.01)
        for _ in range(2):
            student.step(distillation(wanted, student.logits(pixels), 4.0))
        found.append(student.weights())
    assert all(away(found[0][name], found[1][name]) < 1e-3 for name in weights if weights[name].is_floating_point())
