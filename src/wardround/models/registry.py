"""Networks by name: what a study writes down, the network it means, and the weights that network starts from."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.errors import BadInput
from wardround.models.cnn import cnn4, small
from wardround.models.group_norm import with_group_norm
from wardround.models.net import StagedNet, Weights, batch_norm_names, groups, head_names
from wardround.models.resnet import STEMS, resnet
from wardround.models.vgg import vgg
from wardround.models.wide_resnet import wrn16_2

IMAGENET_STEM_SMALLEST = 16  # pixels: the stem halves the image twice before the first stage


@dataclass(frozen=True)
class NetSpec:
    """A network in full: two equal specs have the same tensors. One that exists can be built.

    `width` is the number of maps of the first convolution, to which every other layer is in proportion; None is the
    network's own. `stem` is for the ResNets: "small" (the default) or "imagenet".
    """

    name: str
    channels: int
    classes: int
    size: int
    width: int | None = None
    stem: str | None = None

    def __post_init__(self) -> None:
        kind = _kind(self.name)
        if self.channels < 1:
            raise BadInput(
                f"a network needs at least 1 image channel, not {self.channels}; grey images have 1, colour 3"
            )
        if self.classes < 2:
            raise BadInput(f"a network needs at least 2 classes, not {self.classes}; name the class of the rest too")
        if self.width is not None and self.width < 1:
            raise BadInput(f"a network's width is at least 1, not {self.width}; leave it out for {kind.width}")
        if self.stem is not None and self.stem not in kind.stems:
            choice = f"choose {' or '.join(kind.stems)}" if kind.stems else "leave the stem out"
            raise BadInput(f"{self.name} has no stem '{self.stem}'; {choice}")
        least = IMAGENET_STEM_SMALLEST if self.stem == "imagenet" else kind.smallest
        if self.size < least:
            raise BadInput(f"{self.name} needs images of at least {least} pixels, not {self.size}; enlarge the images")

    def describe(self) -> str:
        """One line for a person, such as "resnet18, width 64, small stem, 3×28×28 images, 8 classes"."""
        kind = _kind(self.name)
        stem = [f"{self.stem or kind.stems[0]} stem"] if kind.stems else []
        return ", ".join(
            [
                f"{self.name}, width {self.width or kind.width}",
                *stem,
                f"{self.channels}×{self.size}×{self.size} images",
                f"{self.classes} classes",
            ]
        )


@dataclass(frozen=True)
class Layout:
    """The tensors of a network in the order of its state dict, without their values."""

    names: tuple[str, ...]
    groups: Mapping[str, str]  # "parameters", "statistics" or "counters"
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    head: frozenset[str]
    batch_norm: frozenset[str]
    stages: tuple[str, ...]
    feature_size: int

    @property
    def has_batch_norm(self) -> bool:
        """Whether there are running statistics to share, and to synthesise images from."""
        return bool(self.batch_norm)

    def in_group(self, group: str) -> tuple[str, ...]:
        """The names of one group, in order."""
        return tuple(name for name in self.names if self.groups[name] == group)

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained; running statistics and counters are not."""
        return sum(math.prod(self.shapes[name]) for name in self.in_group("parameters"))


@dataclass(frozen=True)
class ModelInfo:
    """A line of the list of networks."""

    name: str
    what: str
    source: str


@dataclass(frozen=True)
class _Kind:
    """What the registry knows of a network: how it is made, its own width, and the smallest image that it takes."""

    info: ModelInfo
    make: Callable[[NetSpec, int], StagedNet]
    width: int
    smallest: int
    stems: tuple[str, ...] = ()


def _resnet_kind(depth: int, what: str) -> _Kind:
    def make(spec: NetSpec, width: int) -> StagedNet:
        return resnet(depth, spec.channels, spec.classes, width, spec.stem or STEMS[0])

    info = ModelInfo(f"resnet{depth}", what, "He et al., CVPR 2016")
    return _Kind(info, make, width=64, smallest=8, stems=STEMS)


def _vgg_kind(depth: int, source: str) -> _Kind:
    def make(spec: NetSpec, width: int) -> StagedNet:
        return vgg(depth, spec.channels, spec.classes, width)

    info = ModelInfo(f"vgg{depth}", "plain 3×3 convolutions with batch norm, no shortcuts", source)
    return _Kind(info, make, width=64, smallest=16)


def _with_group_norm(kind: _Kind) -> _Kind:
    """The same network with group norm, for training with differential privacy."""
    what = f"{kind.info.name} with group norm in the place of batch norm, for training with differential privacy"
    info = ModelInfo(f"{kind.info.name}-gn", what, f"{kind.info.source}; Wu & He, ECCV 2018")
    return replace(kind, info=info, make=lambda spec, width: with_group_norm(kind.make(spec, width)))


_KINDS = {
    kind.info.name: kind
    for kind in (
        _Kind(
            ModelInfo("small", "four 3×3 convolutions with batch norm; trains in seconds on a CPU", "wardround"),
            lambda spec, width: small(spec.channels, spec.classes, width),
            width=16,
            smallest=4,
        ),
        _Kind(
            ModelInfo("cnn4", "two 5×5 convolutions and a hidden layer; no batch norm", "FedKPer's public code"),
            lambda spec, width: cnn4(spec.channels, spec.classes, spec.size, width),
            width=32,
            smallest=4,
        ),
        _resnet_kind(18, "the network of FedISCA and FedBiCross"),
        _resnet_kind(34, "a deeper ResNet-18"),
        _resnet_kind(50, "the network of FedMP (with the imagenet stem)"),
        _Kind(
            ModelInfo("wrn16-2", "a wide ResNet with pre-activation", "Zagoruyko & Komodakis, BMVC 2016"),
            lambda spec, width: wrn16_2(spec.channels, spec.classes, width),
            width=16,
            smallest=4,
        ),
        _vgg_kind(8, "the VGG of knowledge-distillation work, after Simonyan & Zisserman, ICLR 2015"),
        _vgg_kind(11, "Simonyan & Zisserman, ICLR 2015"),
        _vgg_kind(16, "Simonyan & Zisserman, ICLR 2015"),
    )
}
_KINDS |= {f"{name}-gn": _with_group_norm(_KINDS[name]) for name in ("small", "resnet18")}


def names() -> list[str]:
    """The names that a `NetSpec` may have."""
    return list(_KINDS)


def catalogue() -> list[ModelInfo]:
    """Every network, with what it is and where it comes from."""
    return [kind.info for kind in _KINDS.values()]


def build(spec: NetSpec) -> StagedNet:
    """The network on the CPU, with every parameter zero except the norms' weights, which are one.

    Made on the meta device first, because PyTorch's layers draw from the global generator when made on a real one.
    """
    net = _on_meta(spec).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    for layer in net.modules():
        if isinstance(layer, _BatchNorm | nn.GroupNorm):
            layer.reset_parameters()
    return net


def fresh(spec: NetSpec, generator: torch.Generator) -> Weights:
    """Initial weights, drawn from `generator` alone, layer after layer in the order of the network.

    As PyTorch draws them, which the public code of FedISCA, DENSE and FedKPer leaves as it is. He's normal draw, six
    times the variance, trains as well, but batch norm hides its scale from everything but an inversion: the distances
    of batch-norm statistics (FedISCA Eq. 6) are then several times as large beside the other terms.
    """
    net = build(spec)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            _draw_as_pytorch_does(layer, generator)
    return dict(net.state_dict())


def _draw_as_pytorch_does(layer: nn.Conv2d | nn.Linear, generator: torch.Generator) -> None:
    """Weights and bias uniform in ±1/√fan_in, written by PyTorch as Kaiming's rule with a = √5."""
    bound = 1 / math.sqrt(layer.weight[0].numel())
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    if layer.bias is not None:
        nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


@functools.cache
def spec_layout(spec: NetSpec) -> Layout:
    """The names, groups, shapes and types of the network's tensors; no memory is taken for their values."""
    net = _on_meta(spec)
    state = net.state_dict()
    return Layout(
        names=tuple(state),
        groups=MappingProxyType(groups(net)),
        shapes=MappingProxyType({name: tuple(tensor.shape) for name, tensor in state.items()}),
        dtypes=MappingProxyType({name: tensor.dtype for name, tensor in state.items()}),
        head=head_names(net),
        batch_norm=batch_norm_names(net),
        stages=net.stage_names,
        feature_size=net.feature_size,
    )


def _on_meta(spec: NetSpec) -> StagedNet:
    kind = _kind(spec.name)
    with torch.device("meta"):
        return kind.make(spec, spec.width or kind.width)


def _kind(name: str) -> _Kind:
    if name not in _KINDS:
        close = get_close_matches(name.lower(), _KINDS, n=1, cutoff=0.4)
        advice = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(_KINDS)}"
        raise BadInput(f"there is no network '{name}'; {advice}")
    return _KINDS[name]
