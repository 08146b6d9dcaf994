"""Cutting a network after any stage, and telling its tensors apart."""

import pytest
import torch
from torch import Tensor, nn

from wardround.errors import BadInput
from wardround.models import NetSpec, StagedNet, batch_norm_names, build, fresh, groups, head_names, names

EVERY = [NetSpec(name, 3, 4, 28, width=4) for name in names()]


def started(spec: NetSpec) -> StagedNet:
    net = build(spec)
    net.load_state_dict(fresh(spec, torch.Generator().manual_seed(1)))
    return net


def images(count: int, size: int = 28) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(2))


class Oddly(nn.Module):
    """Batch norm whose name does not say so, and a linear layer whose name says that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(2)
        self.bn = nn.Linear(2, 2)
        self.plain = nn.BatchNorm1d(2, affine=False)


@pytest.mark.parametrize("spec", EVERY, ids=names())
def test_any_cut_gives_what_the_whole_network_gives(spec: NetSpec) -> None:
    net, x = started(spec).eval(), images(2)
    features, logits = net.outputs(x)
    assert features.shape == (2, net.feature_size)
    assert torch.equal(net.features(x), features)
    assert torch.equal(net(x), logits)
    assert not torch.equal(logits[0], logits[1])  # the images reach the head
    for stage in net.stage_names:
        h = net.upto(stage, x)
        before = h.clone()
        again = net.after(stage, h)
        assert torch.equal(again[0], features)
        assert torch.equal(again[1], logits)
        assert torch.equal(h, before), f"what left {stage} was changed in place"
    assert torch.equal(net.upto(net.stage_names[-1], x), features)


def test_an_unknown_stage_is_answered_with_the_stages_there_are() -> None:
    net = build(NetSpec("cnn4", 1, 2, 28, width=1))
    with pytest.raises(BadInput, match=r"no stage 'stage4'; choose one of conv1, conv2, fc$"):
        net.upto("stage4", images(1))
    with pytest.raises(BadInput, match="no stage 'head'"):
        net.after("head", images(1))


@pytest.mark.parametrize("spec", EVERY, ids=names())
def test_every_parameter_has_a_gradient(spec: NetSpec) -> None:
    """Rectifying in place must not overwrite what the backward pass reads, and no layer may be left out."""
    net = started(spec).train()
    nn.functional.cross_entropy(net(images(4)), torch.tensor([0, 1, 2, 3])).backward()  # type: ignore[no-untyped-call]
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("spec", EVERY, ids=names())
def test_channels_last_changes_speed_only(spec: NetSpec) -> None:
    net, x = started(spec).eval(), images(2)
    expected = net.outputs(x)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = net.outputs(x.to(memory_format=torch.channels_last))
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn4", "small", "resnet18", "wrn16-2", "vgg8"])
def test_one_graph_without_breaks(name: str) -> None:
    """`fullgraph` raises where Python would depend on data: such a network could not be captured either."""
    net, x = started(NetSpec(name, 3, 4, 28, width=1)), images(2)
    whole = torch.compile(net.outputs, backend="eager", fullgraph=True)
    rest = torch.compile(lambda h: net.after(net.stage_names[0], h)[1], backend="eager", fullgraph=True)
    net.eval()
    torch.testing.assert_close(whole(x)[1], net(x))
    torch.testing.assert_close(rest(net.upto(net.stage_names[0], x)), net(x))


@pytest.mark.parametrize("spec", EVERY, ids=names())
def test_groups_are_the_state_dict_in_its_order(spec: NetSpec) -> None:
    net = build(spec)
    found = groups(net)
    assert list(found) == list(net.state_dict())
    assert [n for n, g in found.items() if g == "parameters"] == [n for n, _ in net.named_parameters()]
    layers = sum(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    assert sum(g == "statistics" for g in found.values()) == 2 * layers
    assert sum(g == "counters" for g in found.values()) == layers
    assert {net.state_dict()[n].dtype for n, g in found.items() if g == "counters"} <= {torch.int64}
    assert len(batch_norm_names(net)) == 5 * layers
    assert head_names(net) == {"head.weight", "head.bias"}


def test_a_layer_is_known_by_its_type_not_by_its_name() -> None:
    net = Oddly()
    assert groups(net) == {
        "scale.weight": "parameters",
        "scale.bias": "parameters",
        "scale.running_mean": "statistics",
        "scale.running_var": "statistics",
        "scale.num_batches_tracked": "counters",
        "bn.weight": "parameters",
        "bn.bias": "parameters",
        "plain.running_mean": "statistics",
        "plain.running_var": "statistics",
        "plain.num_batches_tracked": "counters",
    }
    assert batch_norm_names(net) == {
        *(f"scale.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
        *(f"plain.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")),
    }


def test_a_batch_norm_layer_alone_has_names_without_a_prefix() -> None:
    layer = nn.BatchNorm1d(2)
    assert batch_norm_names(layer) == set(layer.state_dict()) == set(groups(layer))
    assert groups(layer)["num_batches_tracked"] == "counters"
