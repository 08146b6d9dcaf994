"""Working networks, built once and borrowed: one per architecture and worker, however many sites there are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from wardround.models import NetSpec, StagedNet, Weights, build

_free: dict[tuple[NetSpec, torch.device], list[StagedNet]] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def borrow(spec: NetSpec, device: torch.device, weights: Weights) -> Iterator[StagedNet]:
    """A network of this architecture with a copy of these weights, to be left to the next borrower afterwards."""
    with _lock:
        shelf = _free.setdefault((spec, device), [])
        net = shelf.pop() if shelf else None
    if net is None:
        net = build(spec).to(device)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    load(net, weights)
    try:
        yield net
    finally:
        net.zero_grad(set_to_none=True)
        net.requires_grad_(True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next borrower may work on another stream
        with _lock:
            shelf.append(net)


def load(net: StagedNet, weights: Weights) -> None:
    """Copy weights into a network, name by name; a missing or additional name or another shape is an error."""
    own = net.state_dict()
    if own.keys() != weights.keys():
        raise KeyError(f"weights and network differ in {sorted(own.keys() ^ weights.keys())[:5]}")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != weights[name].shape:  # `copy_` would spread one number over a whole tensor
                raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, the network's {tuple(tensor.shape)}")
            tensor.copy_(weights[name])


def read(net: StagedNet) -> Weights:
    """A copy of a network's weights, contiguous, that later training does not touch."""
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in net.state_dict().items()
    }
