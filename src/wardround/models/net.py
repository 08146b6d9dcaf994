"""A network as named stages and a linear head, and what each of its tensors is.

Methods cut networks in different places: FedPer keeps the head at home, FedMP mixes features in after a stage, FedBN
keeps batch-norm layers at home, synthesis matches running statistics. A `StagedNet` can be cut after any stage, and
`groups` tells the three kinds of tensor apart by the type of the layer that owns them, never by its name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from wardround.errors import BadInput

Weights: TypeAlias = dict[str, Tensor]
"""Every tensor of a network by its name in the state dict: parameters, running statistics and counters."""


class GlobalPool(nn.Module):
    """The mean over height and width: `(n, channels, h, w)` to `(n, channels)`, whatever the image size."""

    def forward(self, maps: Tensor) -> Tensor:
        """Average every map to one number."""
        return maps.mean(dim=(2, 3))


def activate(norm: nn.Module, maps: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """relu(norm(maps) + shortcut), in place where it can be.

    Written once for all blocks, because a stand-in for the norm (synthesis has one) may do all of it in one pass.
    """
    at_once = getattr(norm, "activate", None)
    if at_once is not None:
        return cast(Tensor, at_once(maps, shortcut))
    normed: Tensor = norm(maps)
    if shortcut is not None:
        normed += shortcut
    return F.relu_(normed)


def twin(maps: Tensor) -> Tensor:
    """The same maps for a second use.

    Where two layers read the same maps, their slopes are added up on the way back. A stand-in that made the maps may
    have left a twin with them, and then takes both slopes and adds them in the pass that it does anyway. So a gradient
    by such maps themselves would be that of one use; stand-ins are for gradients by pixels and parameters.
    """
    return getattr(maps, "twin", maps)


class StagedNet(nn.Module):
    """Stages in order, then one linear layer. What leaves the last stage are the features: `(n, feature_size)`.

    In the convolutional networks pooling is a stage of its own without parameters, "pool", so that the maps of every
    stage before it can be cut out. No stage changes its input in place: what `upto` returns stays valid after `after`.
    """

    def __init__(self, stages: Mapping[str, nn.Module], feature_size: int, classes: int) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(stages)
        self.head = nn.Linear(feature_size, classes)
        self.stage_names = tuple(stages)
        self.checkpointing = False  # whether training keeps the stages' inputs only; see `_through`

    @property
    def feature_size(self) -> int:
        """The width of the features, which is what the head reads."""
        return self.head.in_features

    def features(self, x: Tensor) -> Tensor:
        """Images to features `(n, feature_size)`."""
        for stage in self.stages.values():
            x = self._through(stage, x)
        return x

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images to features and logits, in one pass."""
        features = self.features(x)
        return features, self.head(features)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits `(n, classes)`."""
        return cast(Tensor, self.head(self.features(x)))

    def upto(self, stage: str, x: Tensor) -> Tensor:
        """What leaves `stage` when the images `x` go in."""
        for name in self.stage_names[: self._end_of(stage)]:
            x = self._through(self.stages[name], x)
        return x

    def after(self, stage: str, h: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits when `h` is what left `stage`; after the last stage `h` are the features themselves."""
        for name in self.stage_names[self._end_of(stage) :]:
            h = self._through(self.stages[name], h)
        return h, self.head(h)

    def _through(self, stage: nn.Module, x: Tensor) -> Tensor:
        """What a stage makes of its input; with checkpointing it is made again for the gradient, and not kept."""
        if not (self.checkpointing and self.training and torch.is_grad_enabled()):
            return cast(Tensor, stage(x))
        again: Any = lambda: (nullcontext(), _counting_nothing(stage))  # noqa: E731
        made = checkpoint(stage, x, use_reentrant=False, preserve_rng_state=False, context_fn=again)
        return cast(Tensor, made)

    def _end_of(self, stage: str) -> int:
        if stage not in self.stage_names:
            raise BadInput(f"this network has no stage '{stage}'; choose one of {', '.join(self.stage_names)}")
        return self.stage_names.index(stage) + 1


@contextmanager
def _counting_nothing(stage: nn.Module) -> Iterator[None]:
    """Batch norm as it is, but without learning the statistics of this batch a second time."""
    layers = [layer for layer in stage.modules() if isinstance(layer, _BatchNorm)]
    before = [(layer, layer.momentum, layer.num_batches_tracked) for layer in layers]
    for layer in layers:
        layer.momentum, layer.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for layer, momentum, counter in before:
            layer.momentum, layer.num_batches_tracked = momentum, counter


def groups(net: nn.Module) -> dict[str, str]:
    """The group of every tensor: "parameters", "statistics" (running mean and variance) or "counters".

    The three are averaged differently: counters (`num_batches_tracked`, integers) never are. The order is the state
    dict's. A buffer that belongs to no batch-norm layer has no group, and a network may not have one.
    """
    found = {name: "parameters" for name, _ in net.named_parameters()}
    for prefix, layer in _batch_norm_layers(net).items():
        for name, _ in layer.named_buffers(prefix):
            found[name] = "counters" if name.endswith("num_batches_tracked") else "statistics"
    return {name: found[name] for name in net.state_dict()}


def batch_norm_names(net: nn.Module) -> frozenset[str]:
    """Every tensor of a batch-norm layer: weight, bias, running statistics and counter; what FedBN keeps at home."""
    return frozenset(
        name
        for prefix, layer in _batch_norm_layers(net).items()
        for name, _ in chain(layer.named_parameters(prefix), layer.named_buffers(prefix))
    )


def head_names(net: StagedNet) -> frozenset[str]:
    """The tensors of the last linear layer, which FedPer and FedBABU treat apart from the body."""
    return frozenset(f"head.{name}" for name in net.head.state_dict())


def _batch_norm_layers(net: nn.Module) -> dict[str, _BatchNorm]:
    return {prefix: layer for prefix, layer in net.named_modules() if isinstance(layer, _BatchNorm)}
