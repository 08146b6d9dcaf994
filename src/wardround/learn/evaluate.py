"""What networks answer: outputs over many images, in batches, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait

import torch
from torch import Tensor

from wardround.learn import nets
from wardround.learn.device import worker_pool
from wardround.learn.fit import Outputs
from wardround.learn.pixels import normalise
from wardround.models import NetSpec, StagedNet, Weights

CPU_BATCH = 128  # larger batches are slower per image on a CPU: they leave the cache
CUDA_BATCH = 2048


def batch_size(device: torch.device) -> int:
    """How many images are shown to a network at once."""
    return CUDA_BATCH if device.type == "cuda" else CPU_BATCH


def network_outputs(
    spec: NetSpec,
    weights: Weights,
    images: Tensor,
    device: torch.device,
    precision: str = "fp32",
    workers: int = 1,
    on_batch: Callable[[], None] = lambda: None,
) -> Outputs:
    """Features and logits (float32, on the device) of uint8 images, in evaluation mode.

    Several workers share the batches on a CPU; each batch is computed by one, so their number changes no value.
    """
    batches = torch.split(images, batch_size(device))
    with nets.borrow(spec, device, weights) as net:
        net.eval()

        def outputs(batch: Tensor) -> Outputs:
            found = batch_outputs(net, batch.to(device), precision)
            on_batch()
            return found

        if workers > 1 and len(batches) > 1 and device.type == "cpu":
            found = _on_workers(outputs, batches, workers)
        else:
            found = [outputs(batch) for batch in batches]
    return Outputs(torch.cat([o.features for o in found]), torch.cat([o.logits for o in found]))


def _on_workers(outputs: Callable[[Tensor], Outputs], batches: Sequence[Tensor], workers: int) -> list[Outputs]:
    """Every batch's outputs; whatever happens, no worker still holds the network when this returns."""
    futures = [worker_pool(workers).submit(outputs, batch) for batch in batches]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def batch_outputs(net: StagedNet, images: Tensor, precision: str) -> Outputs:
    """Of uint8 images on the network's device. Gradient and autocast modes are a thread's: each batch sets its own."""
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
        features, logits = net.outputs(normalise(images))
    return Outputs(features.float(), logits.float())
