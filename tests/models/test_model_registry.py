"""Names, specs, layouts, and the weights that a network starts from."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wardround.errors import BadInput
from wardround.models import NetSpec, Weights, build, catalogue, fresh, names, spec_layout

GROUP_NORM = ["small-gn", "resnet18-gn"]
TINY = [NetSpec(name, 1, 2, 28, width=2) for name in names()]


def drawn(spec: NetSpec, seed: int) -> Weights:
    return fresh(spec, torch.Generator().manual_seed(seed))


def test_the_list_of_networks() -> None:
    assert names() == [
        "small",
        "cnn4",
        "resnet18",
        "resnet34",
        "resnet50",
        "wrn16-2",
        "vgg8",
        "vgg11",
        "vgg16",
        *GROUP_NORM,
    ]
    assert [info.name for info in catalogue()] == names()
    assert all(info.what and info.source for info in catalogue())


def test_describe_says_what_is_left_out() -> None:
    assert NetSpec("resnet18", 3, 8, 28).describe() == "resnet18, width 64, small stem, 3×28×28 images, 8 classes"
    assert NetSpec("small", 1, 2, 64, width=8).describe() == "small, width 8, 1×64×64 images, 2 classes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet81", 3, 8, 28), r"^there is no network 'resnet81'; did you mean resnet18\?$"),
        (("WRN16_2", 3, 8, 28), r"did you mean wrn16-2\?"),
        (("transformer", 3, 8, 28), "choose one of small, cnn4, resnet18"),
        (("", 3, 8, 28), "there is no network ''; choose one of"),
        (("small", 0, 8, 28), "at least 1 image channel, not 0"),
        (("small", 3, 1, 28), "at least 2 classes, not 1"),
        (("small", 3, 8, 28, 0), "width is at least 1, not 0; leave it out for 16"),
        (("small", 3, 8, 28, None, "imagenet"), "small has no stem 'imagenet'; leave the stem out"),
        (("resnet18", 3, 8, 28, None, "big"), "resnet18 has no stem 'big'; choose small or imagenet"),
        (("cnn4", 3, 8, 3), "cnn4 needs images of at least 4 pixels, not 3"),
        (("vgg16", 3, 8, 15), "vgg16 needs images of at least 16 pixels, not 15"),
        (("resnet18", 3, 8, 7), "at least 8 pixels, not 7"),
        (("resnet18", 3, 8, 15, None, "imagenet"), "at least 16 pixels, not 15"),
    ],
)
def test_a_spec_that_cannot_be_built_cannot_exist(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        NetSpec(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", TINY, ids=names())
def test_the_global_generator_is_left_alone(spec: NetSpec) -> None:
    before = torch.get_rng_state()
    build(spec)
    drawn(spec, 0)
    spec_layout.cache_clear()
    spec_layout(spec)
    assert torch.equal(torch.get_rng_state(), before)


def group_norm_names(net: nn.Module) -> frozenset[str]:
    layers = [(prefix, layer) for prefix, layer in net.named_modules() if isinstance(layer, nn.GroupNorm)]
    return frozenset(f"{prefix}.{name}" for prefix, layer in layers for name, _ in layer.named_parameters())


def test_group_norm_replaces_every_batch_norm_and_nothing_else() -> None:
    for name in GROUP_NORM:
        plain, grouped = (build(NetSpec(n, 1, 2, 28, width=4)) for n in (name.removesuffix("-gn"), name))
        assert not spec_layout(NetSpec(name, 1, 2, 28, width=4)).has_batch_norm
        norms = [layer for layer in plain.modules() if isinstance(layer, nn.BatchNorm2d)]
        groups = [layer for layer in grouped.modules() if isinstance(layer, nn.GroupNorm)]
        assert [layer.num_features for layer in norms] == [layer.num_channels for layer in groups]
        assert all(layer.num_channels // layer.num_groups >= 2 for layer in groups)
        assert {k for k, _ in plain.named_parameters()} == {k for k, _ in grouped.named_parameters()}


@pytest.mark.parametrize("spec", TINY, ids=names())
def test_build_is_all_zeros_and_ones(spec: NetSpec) -> None:
    net = build(spec)
    layout = spec_layout(spec)
    for name, tensor in net.state_dict().items():
        one = name in layout.batch_norm | group_norm_names(net) and name.endswith((".weight", ".running_var"))
        assert torch.equal(tensor, torch.full_like(tensor, int(one))), name
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("spec", TINY, ids=names())
def test_the_layout_is_the_networks(spec: NetSpec) -> None:
    layout, net = spec_layout(spec), build(spec)
    state = net.state_dict()
    assert layout.names == tuple(state)
    assert dict(layout.shapes) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert dict(layout.dtypes) == {name: tensor.dtype for name, tensor in state.items()}
    assert layout.head == {"head.weight", "head.bias"}
    assert (layout.stages, layout.feature_size) == (net.stage_names, net.feature_size)
    assert spec_layout(NetSpec(**vars(spec))) is layout


@pytest.mark.parametrize("spec", TINY, ids=names())
def test_fresh_weights_fit_and_follow_the_generator(spec: NetSpec) -> None:
    layout, weights, again, other = spec_layout(spec), drawn(spec, 0), drawn(spec, 0), drawn(spec, 1)
    assert tuple(weights) == layout.names
    build(spec).load_state_dict(weights)
    assert not any(tensor.requires_grad for tensor in weights.values())
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name]), name
        if name in layout.batch_norm | group_norm_names(build(spec)):
            one = name.endswith((".weight", ".running_var"))
            assert torch.equal(tensor, torch.full_like(tensor, int(one))), name
        else:
            assert not torch.equal(tensor, other[name]), name


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(2, 12), st.integers(16, 40), st.sampled_from(names()))
def test_only_the_head_knows_the_classes(channels: int, classes: int, size: int, name: str) -> None:
    layout = spec_layout(NetSpec(name, channels, classes, size, width=1))
    other = spec_layout(NetSpec(name, channels, classes + 1, size, width=1))
    differing = {n for n in layout.names if layout.shapes[n] != other.shapes[n]}
    assert layout.names == other.names
    assert differing == layout.head
    assert layout.shapes["head.weight"] == (classes, layout.feature_size)


def test_small_networks_start_as_pytorch_would_start_them() -> None:
    """Uniform in ±1/√fan_in, bias too: bounds and spread over enough numbers to tell it from another rule."""
    weights = drawn(NetSpec("cnn4", 3, 8, 28), 0)
    for layer, fan_in in (("stages.conv2.0", 32 * 25), ("stages.fc.1", 3136), ("head", 512)):
        bound = 1 / math.sqrt(fan_in)
        weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
        assert 0.99 * bound < float(weight.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
        assert 0 < float(bias.abs().max()) <= bound
        assert float(weight.mean()) == pytest.approx(0, abs=0.03 * bound)


def test_large_networks_start_as_pytorchs_layers_do() -> None:
    """Uniform in ±1/√fan_in: as the public code of the papers leaves them, and not He's normal."""
    weights = drawn(NetSpec("resnet18", 3, 8, 28), 0)
    for name, fan_in in (("stages.stage2.0.conv1.weight", 64 * 9), ("stages.stage3.0.downsample.0.weight", 128)):
        bound = 1 / math.sqrt(fan_in)
        assert float(weights[name].std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert 0.99 * bound < float(weights[name].abs().max()) <= bound
    assert float(weights["head.weight"].abs().max()) <= 1 / math.sqrt(512)


def test_the_same_draws_as_pytorchs_own_layers() -> None:
    """A convolution and a linear layer, drawn by PyTorch itself from an equal generator, in the same order."""
    weights = drawn(NetSpec("small", 1, 2, 28, width=1), 7)
    generator = torch.Generator().manual_seed(7)
    for name in ("stages.conv1.0.weight", "stages.conv2.0.weight"):
        own = nn.init.kaiming_uniform_(torch.empty_like(weights[name]), a=math.sqrt(5), generator=generator)
        torch.testing.assert_close(weights[name], own)


def test_the_draws_do_not_change_between_versions() -> None:
    """The last numbers drawn depend on every draw before them: a layer added, dropped or moved shows here."""
    small = drawn(NetSpec("small", 1, 2, 28, width=2), 0)
    assert small["head.bias"].tolist() == pytest.approx([-0.126810, 0.066797], abs=1e-5)
    resnet = drawn(NetSpec("resnet18", 1, 2, 28, width=2), 0)
    assert resnet["stages.stem.conv1.weight"].flatten()[:2].tolist() == pytest.approx([-0.002496, 0.178815], abs=1e-5)
    assert resnet["head.bias"].tolist() == pytest.approx([0.212241, 0.226812], abs=1e-5)
