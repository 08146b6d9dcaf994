"""Batch-norm statistics taken anew, where those that came with a network belong to other images than it will see."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.learn import nets
from wardround.models import NetSpec, Weights

BATCH = 256


def retaken(
    spec: NetSpec, weights: Weights, batches: Iterable[Tensor], device: torch.device, precision: str = "fp32"
) -> Weights:
    """The same network with running statistics that are the plain mean over these batches of pixels.

    Every batch counts alike, however small: use `even_parts`.
    """
    with nets.borrow(spec, device, weights) as net:
        layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
        momentum = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean
        net.train()
        try:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                for pixels in batches:
                    net(pixels)
        finally:  # the network is another's next
            for layer, kept in zip(layers, momentum, strict=True):
                layer.momentum = kept
        return nets.read(net)


def even_parts(images: Tensor) -> tuple[Tensor, ...]:
    """In as few parts as have `BATCH` images at most, none with more than one image less than another.

    A last batch of what is left over would be a few images, and they would count as much as all of any other.
    """
    return torch.tensor_split(images, max(1, math.ceil(len(images) / BATCH)))
