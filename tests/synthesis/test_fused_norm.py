"""Stand-ins for batch norm: every network says and measures what it does with plain layers and hooks."""

import copy
from collections import OrderedDict
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from wardround.learn.predictor import Member
from wardround.models import NetSpec, StagedNet, build, fresh, spec_layout
from wardround.models.registry import names
from wardround.synthesis.fused_norm import FusedNorm, TrainedNorm, plain_moments, replace_norms
from wardround.synthesis.teachers import AdaptedTeachers, Precision, Teachers

CPU = torch.device("cpu")
SPECS = {name: NetSpec(name, 3, 4, 16, width=4) for name in names() if spec_layout(NetSpec(name, 3, 4, 16)).batch_norm}
SPECS["resnet18, imagenet stem"] = NetSpec("resnet18", 3, 4, 16, width=4, stem="imagenet")
EVERY = pytest.mark.parametrize("name", SPECS)


@cache
def member(name: str) -> Member:
    """A network with norms of its own, as if it had been trained."""
    spec, draw = SPECS[name], torch.Generator().manual_seed(1)
    weights = fresh(spec, draw)
    layout = spec_layout(spec)
    for key in layout.names:
        if key in layout.batch_norm and layout.groups[key] != "counters":
            middle = 1.0 if key.endswith(("weight", "var")) else 0.0
            weights[key] = middle + 0.5 * (torch.rand(weights[key].shape, generator=draw) - 0.5)
    return Member(spec, weights)


def pixels(seed: int = 0) -> Tensor:
    found = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return found.to(memory_format=torch.channels_last)


def plain(name: str, precision: Precision = "fp32") -> StagedNet:
    """The same network with nn.BatchNorm2d; in bf16 all but its norms is in bf16."""
    net = build(SPECS[name])
    net.load_state_dict(member(name).weights)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if precision == "bf16":
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(torch.bfloat16)
    return net.requires_grad_(False).eval()


def hooked(net: StagedNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and Eq. 6's sum, through hooks."""
    gaps: list[Tensor] = []

    def measure(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.BatchNorm2d)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        maps = inputs[0].float()
        mean = maps.mean(dim=(0, 2, 3))
        variance = (maps - mean.reshape(1, -1, 1, 1)).square().mean(dim=(0, 2, 3))
        gaps.append((mean - layer.running_mean).norm() + (variance - layer.running_var).norm())

    hooks = [m.register_forward_pre_hook(measure) for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    logits = net(x).float()
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(gaps).sum()


@EVERY
def test_a_network_says_and_measures_what_it_does_with_plain_layers(name: str) -> None:
    ours, theirs = (pixels().requires_grad_(True) for _ in range(2))
    view = Teachers([member(name)], CPU).view(ours)
    logits, gap = hooked(plain(name), theirs)
    torch.testing.assert_close(view.logits[0], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(view.gaps[0], gap, rtol=1e-4, atol=1e-4)
    weigh = torch.arange(24.0).reshape(6, 4)
    slopes = [
        torch.autograd.grad((said * weigh).sum() + 10 * away, x)[0]
        for said, away, x in ((view.logits[0], view.gaps[0], ours), (logits, gap, theirs))
    ]
    scale = float(slopes[1].abs().max())
    torch.testing.assert_close(slopes[0] / scale, slopes[1] / scale, rtol=1e-3, atol=1e-4)


@EVERY
def test_in_bf16_it_is_near_both_plain_layers_in_bf16_and_float32(name: str) -> None:
    view = Teachers([member(name)], CPU, "bf16").view(pixels())
    assert (view.logits[0].dtype, view.gaps[0].dtype) == (torch.float32, torch.float32)
    logits, gap = hooked(plain(name, "bf16"), pixels().bfloat16())
    torch.testing.assert_close(view.logits[0], logits, rtol=2e-2, atol=2e-2 * float(logits.abs().max()))
    torch.testing.assert_close(view.gaps[0], gap, rtol=1e-2, atol=1e-3)
    exact, far = hooked(plain(name), pixels())
    torch.testing.assert_close(view.logits[0], exact, rtol=5e-2, atol=5e-2 * float(exact.abs().max()))
    torch.testing.assert_close(view.gaps[0], far, rtol=2e-2, atol=1e-3)


@EVERY
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_statistics_follow_as_batch_norms_do(name: str, precision: Precision, momentum: float) -> None:
    adapted = AdaptedTeachers([member(name)], CPU, "ema", momentum, precision)
    net = plain(name, precision)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1 - momentum
    for seed in (1, 2):
        adapted.follow(pixels(seed))
        with torch.no_grad():
            net.train()(pixels(seed).bfloat16() if precision == "bf16" else pixels(seed))
    tolerance = 1e-4 if precision == "fp32" else 3e-2
    found = adapted.statistics()
    for key, buffer in net.named_buffers():
        if buffer.is_floating_point():
            assert not torch.equal(buffer, member(name).weights[key])
            torch.testing.assert_close(found[f"000.{key}"], buffer, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        said = net.eval()(pixels(3).bfloat16() if precision == "bf16" else pixels(3)).float()
    size = float(said.abs().max())
    torch.testing.assert_close(adapted.logits(pixels(3)) / size, said / size, rtol=10 * tolerance, atol=tolerance)


@EVERY
def test_a_network_in_training_learns_as_with_plain_layers(name: str) -> None:
    """The slopes of all parameters, in the optimiser's order, and what is remembered of two batches."""
    ours, theirs = (plain(name).requires_grad_(True).train() for _ in range(2))
    replace_norms(ours, TrainedNorm)
    weigh, found = torch.arange(24.0).reshape(6, 4), []
    for net in (ours, theirs):
        net(pixels(1))
        (net(pixels(2)) * weigh).sum().backward()  # type: ignore[no-untyped-call]
        found.append({key: p.grad for key, p in net.named_parameters()} | dict(net.named_buffers()))
    assert list(found[0]) == list(found[1])
    for key, expected in found[1].items():
        torch.testing.assert_close(found[0][key], expected, rtol=1e-5, atol=1e-5)


@EVERY
def test_every_layer_is_replaced_in_order_and_shares_its_tensors(name: str) -> None:
    net = plain(name)
    layers = {key: m for key, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    before = list(net.state_dict())
    found = replace_norms(net)
    stand_ins = {key: m for key, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert list(stand_ins) == list(layers)
    assert [id(norm) for norm in stand_ins.values()] == [id(norm) for norm in found]
    assert list(net.state_dict()) == before
    for norm, layer in zip(found, layers.values(), strict=True):
        assert isinstance(norm, FusedNorm)
        assert (norm.eps, norm.momentum, norm.training) == (layer.eps, layer.momentum, False)
        for key, tensor in layer.state_dict(keep_vars=True).items():
            assert norm.state_dict(keep_vars=True)[key] is tensor


def test_a_relu_becomes_part_of_the_norm_only_where_it_follows_in_a_sequence() -> None:
    norms = [nn.BatchNorm2d(2) for _ in range(4)]
    net = nn.Sequential(
        OrderedDict(
            followed=norms[0], relu=nn.ReLU(), apart=norms[1], conv=nn.Conv2d(2, 2, 1), late=nn.ReLU(), last=norms[2]
        )
    )
    holder = nn.ModuleDict({"norm": norms[3], "relu": nn.ReLU()})  # no sequence: who knows what follows
    assert [norm.rectified for norm in replace_norms(net)] == [True, False, False]
    assert [norm.rectified for norm in replace_norms(holder)] == [False]
    kinds = [type(module) for module in net.children()]
    assert kinds == [FusedNorm, nn.Identity, FusedNorm, nn.Conv2d, nn.ReLU, FusedNorm]
    assert type(holder["relu"]) is nn.ReLU


# One layer ------------------------------------------------------------------------------------------------------------


def layer() -> nn.BatchNorm2d:
    found, draw = nn.BatchNorm2d(3, momentum=0.3), torch.Generator().manual_seed(0)
    for tensor in (found.weight.data, found.bias.data, found.running_mean, found.running_var):
        assert tensor is not None
        tensor.copy_(torch.rand(3, generator=draw) + 0.5)
    return found.requires_grad_(False)


MAPS = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1)) * 2 + 1
SHORTCUT = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("training", [False, True])
def test_norm_shortcut_and_relu(training: bool) -> None:
    plain_layer = layer().train(training)
    normed = copy.deepcopy(plain_layer)(MAPS)
    for rectified, expected in ((False, normed), (True, normed.relu())):
        torch.testing.assert_close(FusedNorm(copy.deepcopy(plain_layer), rectified)(MAPS), expected)
    ours = FusedNorm(copy.deepcopy(plain_layer), rectified=False)
    torch.testing.assert_close(ours.activate(MAPS), normed.relu())
    ours = FusedNorm(copy.deepcopy(plain_layer), rectified=False)
    given = SHORTCUT.clone()
    torch.testing.assert_close(ours.activate(MAPS, given), (normed + SHORTCUT).relu())
    assert torch.equal(given, SHORTCUT)


def test_running_statistics_move_only_where_they_are_tracked() -> None:
    theirs = layer().train()
    ours = FusedNorm(layer(), rectified=False).train()
    still = FusedNorm(layer(), rectified=False).train()
    still.track_running_stats = False
    expected = theirs(MAPS)
    for norm in (ours, still):
        torch.testing.assert_close(norm(MAPS), expected)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer)
        assert torch.equal(dict(still.named_buffers())[name], dict(layer().named_buffers())[name])
        assert not torch.equal(buffer, dict(layer().named_buffers())[name])


def test_moments_by_hand() -> None:
    """One channel of 1, 3, 5 and 7: mean 4, variance 5. The other is constant."""
    maps = torch.tensor([[[[1.0, 3.0]], [[2.0, 2.0]]], [[[5.0, 7.0]], [[2.0, 2.0]]]])
    gap, spread = plain_moments(maps, torch.tensor([1.0, 2.5]))
    assert (gap.tolist(), spread.tolist()) == ([3.0, -0.5], [5.0, 0.0])
    gap, spread = plain_moments(maps.bfloat16(), torch.zeros(2))
    assert (gap.dtype, gap.tolist(), spread.tolist()) == (torch.float32, [4.0, 2.0], [5.0, 0.0])


def test_a_layer_measures_what_comes_in_and_only_when_asked() -> None:
    norm = FusedNorm(layer().eval(), rectified=True)
    norm(MAPS)
    assert not hasattr(norm, "moments")
    norm.measuring = True
    norm(MAPS)
    assert norm.running_mean is not None
    variance, mean = torch.var_mean(MAPS, dim=(0, 2, 3), unbiased=False)
    torch.testing.assert_close(norm.moments[0], mean - norm.running_mean)
    torch.testing.assert_close(norm.moments[1], variance)


def test_a_layer_without_running_statistics_cannot_stand_in() -> None:
    norm = FusedNorm(nn.BatchNorm2d(3, track_running_stats=False), rectified=False)
    with pytest.raises(ValueError, match="without running statistics cannot be a teacher's"):
        norm(MAPS)
