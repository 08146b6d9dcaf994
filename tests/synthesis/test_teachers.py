"""Frozen teachers: Eq. 3, 6 and 7 of FedISCA against plain arithmetic, and that nothing but the images ever moves."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.learn.predictor import Member
from wardround.models import NetSpec, StagedNet, Weights, fresh, spec_layout
from wardround.synthesis import teachers as module
from wardround.synthesis.teachers import AdaptedTeachers, Teachers, View, felt

CPU = torch.device("cpu")
SPEC = NetSpec("small", 3, 4, 8, width=2)


def member(seed: int, spec: NetSpec = SPEC) -> Member:
    """A network with statistics of its own, as if it had been trained."""
    draw = torch.Generator().manual_seed(seed)
    weights = fresh(spec, draw)
    for name, tensor in weights.items():
        if spec_layout(spec).groups[name] == "statistics":
            middle = 0.0 if name.endswith("mean") else 0.6
            weights[name] = torch.rand(tensor.shape, generator=draw) * 0.4 + middle - 0.2
    return Member(spec, weights)


def pixels(n: int = 5, seed: int = 0, channels: int = 3) -> Tensor:
    return torch.randn(n, channels, 8, 8, generator=torch.Generator().manual_seed(seed))


def contents(teachers: Teachers) -> list[Weights]:
    return [{name: t.clone() for name, t in net.state_dict().items()} for net in teachers.nets]


def assert_same(found: list[Weights], expected: list[Weights]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


class Mean(nn.Module):
    """Maps to features, without a parameter."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.mean(dim=(2, 3))


def norm_net(mean: list[float], variance: list[float]) -> StagedNet:
    """One batch-norm layer, the mean over pixels, and a head that passes it on: all of it can be worked out by hand."""
    layer = nn.BatchNorm2d(len(mean))
    layer.running_mean.copy_(torch.tensor(mean))  # type: ignore[union-attr]
    layer.running_var.copy_(torch.tensor(variance))  # type: ignore[union-attr]
    net = StagedNet({"norm": layer, "pool": Mean()}, len(mean), len(mean))
    with torch.no_grad():
        net.head.weight.copy_(torch.eye(len(mean)))
        net.head.bias.zero_()
    return net


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teachers out of networks as they are, not out of members."""
    monkeypatch.setattr(
        module, "_frozen", lambda net, device, _: copy.deepcopy(net).to(device).requires_grad_(False).eval()
    )


def by_hand(weights: Weights, x: Tensor) -> tuple[Tensor, float]:
    """Logits and Eq. 6's inner sum of the `small` network, with explicit activations and one channel at a time."""
    gap = 0.0
    for stage, halve in (("conv1", True), ("conv2", True), ("conv3", False), ("conv4", True)):
        x = F.conv2d(x, weights[f"stages.{stage}.0.weight"], padding=1)
        if halve:
            x = F.max_pool2d(x, 2, ceil_mode=True)
        norm = {
            key: weights[f"stages.{stage}.{2 if halve else 1}.{key}"].tolist()
            for key in ("running_mean", "running_var", "weight", "bias")
        }
        means, variances, out = 0.0, 0.0, []
        for c in range(x.shape[1]):
            values = x[:, c].double().flatten().tolist()
            mean = sum(values) / len(values)
            means += (mean - norm["running_mean"][c]) ** 2
            variances += (sum((v - mean) ** 2 for v in values) / len(values) - norm["running_var"][c]) ** 2
            scaled = (x[:, c] - norm["running_mean"][c]) / math.sqrt(norm["running_var"][c] + 1e-5)
            out.append(scaled * norm["weight"][c] + norm["bias"][c])
        gap += math.sqrt(means) + math.sqrt(variances)
        x = torch.stack(out, dim=1).clamp_min(0)
    return x.mean(dim=(2, 3)) @ weights["head.weight"].T + weights["head.bias"], gap


# Eq. 3 and 6 ----------------------------------------------------------------------------------------------------------


def test_a_view_is_what_explicit_activations_give() -> None:
    members = [member(1), member(2)]
    view = Teachers(members, CPU).view(pixels())
    for one, logits, gap in zip(members, view.logits, view.gaps, strict=True):
        expected, distance = by_hand(one.weights, pixels())
        torch.testing.assert_close(logits, expected)
        assert gap.item() == pytest.approx(distance, rel=1e-5)
    assert view.gaps[0].item() != pytest.approx(view.gaps[1].item(), rel=1e-3)


@pytest.mark.usefixtures("plain")
def test_the_statistics_gap_by_hand() -> None:
    """Channel 0: mean 1, variance 1 (biased; 4/3 unbiased). Channel 1: mean 3, variance 0.

    Stored means (4, 7): the distances 3 and 4 have norm 5. Stored variances (1, 2): 0 and 2 have norm 2.
    """
    x = torch.tensor([[[[0.0, 2.0], [0.0, 2.0]], [[3.0, 3.0], [3.0, 3.0]]]])
    (gap,) = Teachers([norm_net([4.0, 7.0], [1.0, 2.0])], CPU).view(x).gaps  # type: ignore[list-item]
    assert gap.item() == pytest.approx(7.0, abs=1e-6)


@pytest.mark.usefixtures("plain")
def test_real_statistics_have_no_gap() -> None:
    x = torch.tensor([[[[0.0, 2.0], [0.0, 2.0]]]])
    (gap,) = Teachers([norm_net([1.0], [1.0])], CPU).view(x).gaps  # type: ignore[list-item]
    assert gap.item() == pytest.approx(0, abs=1e-12)


def test_the_mean_of_the_logits() -> None:
    one, other = torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, -1.0]])
    assert View((one, other), ()).mean.tolist() == [[2.0, 2.0]]
    teachers = Teachers([member(1), member(2)], CPU)
    torch.testing.assert_close(teachers.logits(pixels()), teachers.view(pixels()).mean)
    assert not teachers.logits(pixels().requires_grad_()).requires_grad


def test_the_mean_of_the_probabilities() -> None:
    """(3/4, 1/4) and (1/4, 3/4) are undecided together; one that is sure outvotes one that doubts."""
    one, other = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[5.0, 5.0 + math.log(3)]])
    assert View((one, other), (), "probabilities").mean.exp().tolist() == [[pytest.approx(0.5), pytest.approx(0.5)]]
    sure, unsure = torch.tensor([[0.0, 20.0, -20.0]]), torch.tensor([[100.0, 99.0, 0.0]])
    found = View((sure, unsure), (), "probabilities").mean.softmax(dim=1)
    assert found[0].tolist() == pytest.approx([0.5 / (1 + math.e**-1), 0.5 + 0.5 / (1 + math.e), 0], abs=1e-6)
    for kind in (Teachers([member(1), member(2)], CPU, mean="probabilities"), adapted_by_probability()):
        alone = torch.stack([teacher.logits(pixels()).softmax(dim=1) for teacher in kind.teachers])
        torch.testing.assert_close(kind.logits(pixels()).exp(), alone.mean(dim=0))
        torch.testing.assert_close(kind.view(pixels()).mean, kind.logits(pixels()))


def adapted_by_probability() -> AdaptedTeachers:
    return AdaptedTeachers([member(1), member(2)], CPU, mean="probabilities")


def test_teachers_of_different_architectures_answer_together() -> None:
    wide = member(3, NetSpec("wrn16-2", 3, 4, 8, width=2))
    view = Teachers([member(1), wide], CPU).view(pixels())
    alone = Teachers([wide], CPU).view(pixels())
    torch.testing.assert_close(view.logits[1], alone.logits[0])
    torch.testing.assert_close(view.gaps[1], alone.gaps[0])


# What moves -----------------------------------------------------------------------------------------------------------


def test_gradients_reach_the_images_and_nothing_else() -> None:
    teachers, x = Teachers([member(1), member(2)], CPU), pixels().requires_grad_()
    before = contents(teachers)
    view = teachers.view(x)
    (view.mean.sum() + torch.stack(view.gaps).sum()).backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any(dim=(1, 2, 3)).all())
    assert all(p.grad is None and not p.requires_grad for net in teachers.nets for p in net.parameters())
    teachers.logits(pixels())
    assert_same(contents(teachers), before)


def test_the_gradient_is_that_of_finite_differences() -> None:
    teachers = Teachers([member(1)], CPU)
    teachers.nets[0].double()
    x = pixels(2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: teachers.view(x).gaps[0], (x,), fast_mode=True)


def test_members_are_copied() -> None:
    one = member(1)
    teachers = AdaptedTeachers([one], CPU)
    before = {name: tensor.clone() for name, tensor in one.weights.items()}
    teachers.follow(pixels())
    assert_same([one.weights], [before])


# Eq. 7 ----------------------------------------------------------------------------------------------------------------

FIRST = torch.tensor([[[[0.0, 2.0], [0.0, 2.0]]]])
SECOND = torch.tensor([[[[4.0, 4.0], [4.0, 8.0]]]])


@pytest.mark.usefixtures("plain")
def test_running_statistics_follow_two_batches_by_hand() -> None:
    """Momentum 0.9 from mean 0, variance 1; PyTorch's running variance takes the unbiased variance, n − 1 = 3.

    First batch: mean 1, variance 4/3: 0.1 and 0.9 + 0.4/3. Second: mean 5, variance 12/3 = 4: 0.09 + 0.5 = 0.59 and
    0.81 + 0.36/3 + 0.4 = 1.33.
    """
    teachers = AdaptedTeachers([norm_net([0.0], [1.0])], CPU, "ema", 0.9)  # type: ignore[list-item]
    teachers.follow(FIRST)
    found = teachers.statistics()
    assert found["000.stages.norm.running_mean"].item() == pytest.approx(0.1)
    assert found["000.stages.norm.running_var"].item() == pytest.approx(0.9 + 0.4 / 3)
    teachers.follow(SECOND)
    found = teachers.statistics()
    assert found["000.stages.norm.running_mean"].item() == pytest.approx(0.59)
    assert found["000.stages.norm.running_var"].item() == pytest.approx(1.33)
    expected = (5 - 0.59) / math.sqrt(1.33 + 1e-5)
    assert teachers.logits(SECOND).item() == pytest.approx(expected)
    assert teachers.logits(SECOND).item() == pytest.approx(expected)  # asking does not adapt


@pytest.mark.usefixtures("plain")
def test_batch_adaptation_uses_the_batch_it_is_asked_about() -> None:
    """The pixels of one channel with their own mean and biased variance have mean 0; image by image they do not.

    Images 0 and 4: mean 2, variance 4, so the two logits are ∓2/√4 = ∓1, whatever was followed.
    """
    x = torch.tensor([0.0, 4.0]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)
    teachers = AdaptedTeachers([norm_net([7.0], [5.0])], CPU, "batch")  # type: ignore[list-item]
    assert teachers.logits(x).flatten().tolist() == pytest.approx([-1.0, 1.0], abs=1e-5)
    teachers.follow(SECOND)
    assert teachers.logits(x).flatten().tolist() == pytest.approx([-1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_batch_adaptation_moves_nothing(momentum: float) -> None:
    """Neither running statistics nor the counters of batches."""
    teachers = AdaptedTeachers([member(1), member(2)], CPU, "batch", momentum)
    before = contents(teachers)
    answer = teachers.logits(pixels())
    teachers.follow(pixels())
    assert_same(contents(teachers), before)
    trained = copy.deepcopy(teachers.nets)
    with torch.no_grad():
        torch.testing.assert_close(answer, torch.stack([net.train()(pixels()) for net in trained]).mean(dim=0))
    assert not torch.allclose(answer, Teachers([member(1), member(2)], CPU).logits(pixels()), atol=1e-3)


@pytest.mark.parametrize("adaptation", ["ema", "batch"])
def test_an_exception_leaves_the_adapted_teachers_as_they_were(adaptation: module.Adaptation) -> None:
    teachers = AdaptedTeachers([member(1)], CPU, adaptation)
    expected = teachers.logits(pixels())
    for ask in [teachers.logits] if adaptation == "batch" else [teachers.logits, teachers.follow]:
        with pytest.raises(RuntimeError):
            ask(pixels(channels=2))
    assert not any(m.training for net in teachers.nets for m in net.modules())
    assert torch.equal(teachers.logits(pixels()), expected)


def test_following_changes_statistics_only() -> None:
    teachers = AdaptedTeachers([member(1)], CPU)
    (before,) = contents(teachers)
    teachers.follow(pixels())
    (after,) = contents(teachers)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    layout = spec_layout(SPEC)
    assert moved == {name for name in layout.names if layout.groups[name] in ("statistics", "counters")}


def test_statistics_go_round() -> None:
    members = [member(1), member(2)]
    teachers = AdaptedTeachers(members, CPU)
    teachers.follow(pixels())
    kept = teachers.statistics()
    copied = {name: tensor.clone() for name, tensor in kept.items()}
    expected = teachers.logits(pixels(seed=3))
    teachers.follow(pixels(seed=1))
    assert all(torch.equal(kept[name], copied[name]) for name in kept)  # what was given out is a copy
    after = teachers.logits(pixels(seed=3))
    assert not torch.equal(after, expected)

    other = AdaptedTeachers(members, CPU)
    other.restore(kept)
    assert torch.equal(other.logits(pixels(seed=3)), expected)
    other.follow(pixels(seed=1))
    assert torch.equal(other.logits(pixels(seed=3)), after)
    assert all(torch.equal(kept[name], copied[name]) for name in kept)  # nor does restoring lend them


def test_batches_that_are_felt_no_more() -> None:
    """0.9¹⁵⁷ is above 2⁻²⁴, 0.9¹⁵⁸ below; 0.9¹⁰⁵ is above 2⁻¹⁶, 0.9¹⁰⁶ below."""
    assert [felt(share, "fp32") for share in (0.9, 0.5, 0.0)] == [158, 24, 1]
    assert [felt(share, "bf16") for share in (0.9, 0.5, 0.0)] == [106, 16, 1]
