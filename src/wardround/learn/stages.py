"""The features of any stage of a network: where FedMP cuts, and how features of another site run on from there.

Stages are counted from 1 as FedMP's Table 2 counts them: the stem is none, and the last one is taken with its pooling,
so that a ResNet-50's four have 1,048,576, 524,288, 262,144 and 2,048 numbers per image of 256 pixels.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.errors import BadInput
from wardround.learn import nets
from wardround.learn.evaluate import batch_size
from wardround.learn.pixels import normalise
from wardround.models import NetSpec, StagedNet, Weights, build, spec_layout


def stage_name(spec: NetSpec, number: int | None) -> str:
    """The stage of this number; None is the last, whose features are what the head reads."""
    names = [name for name in spec_layout(spec).stages if name != "stem"]
    if names[-1] == "pool":
        del names[-2]
    if number is not None and number > len(names):
        raise BadInput(f"{spec.name} has {len(names)} stages, not {number}; choose a stage from 1 to {len(names)}")
    return names[-1 if number is None else number - 1]


@cache
def stage_shape(spec: NetSpec, stage: str) -> tuple[int, ...]:
    """The shape of one image's features after a stage; nothing is computed for it."""
    net = build(spec).to("meta").eval()
    image = torch.empty(1, spec.channels, spec.size, spec.size, device="meta")
    return tuple(net.upto(stage, image).shape[1:])


def stage_width(spec: NetSpec, stage: str) -> int:
    """How many numbers one image's features after a stage are."""
    return math.prod(stage_shape(spec, stage))


def stage_features(
    spec: NetSpec, weights: Weights, images: Tensor, stage: str, device: torch.device, precision: str = "fp32"
) -> Tensor:
    """The features of uint8 images after a stage, flattened: float32 `(n, width)` on the CPU, in evaluation mode."""
    found = [torch.empty(0, stage_width(spec, stage))]
    with nets.borrow(spec, device, weights) as net:
        net.eval()
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        with torch.no_grad(), autocast:
            for batch in torch.split(images, batch_size(device)):
                found.append(net.upto(stage, normalise(batch.to(device))).flatten(1).float().cpu())
    return torch.cat(found)


def run_on(net: StagedNet, stage: str, features: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Logits of flattened features that left this stage elsewhere.

    Batch norm applies its running statistics and does not learn them from here: they are to describe this site. No
    checkpointing: batch norm would be learning again when the stages are made a second time, for the gradient.
    """
    checkpointing, net.checkpointing = net.checkpointing, False
    learning = [layer for layer in net.modules() if isinstance(layer, _BatchNorm) and layer.training]
    for layer in learning:
        layer.eval()
    try:
        _, logits = net.after(stage, features.reshape(-1, *shape))
    finally:
        net.checkpointing = checkpointing
        for layer in learning:
            layer.train()
    return logits
