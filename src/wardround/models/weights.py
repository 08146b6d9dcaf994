"""Weights in a file: safetensors, never pickle; checked against the network before anything uses them."""

from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.models.net import Weights
from wardround.models.registry import Layout, NetSpec, spec_layout

SHOWN = 3  # how many names of misfit tensors a message lists


def load_weights(path: Path | str, spec: NetSpec) -> Weights:
    """The weights in a safetensors file, in the order and types of `spec`'s network.

    Half-precision files are read as the network's own precision. Tensors are copies: the file may go afterwards.
    """
    try:
        found: Weights = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{path} cannot be read as a safetensors file ({_first_line(error)}); give a file that wardround saved"
        ) from error
    layout = spec_layout(spec)
    _check_names(path, found, spec, layout)
    _check_shapes(path, found, spec, layout)
    weights = {name: found[name].to(layout.dtypes[name], copy=True) for name in layout.names}
    broken = [name for name in layout.names if not bool(torch.isfinite(weights[name]).all())]
    if broken:
        raise BadInput(
            f"{path} holds NaN or infinite values in {_some(broken)}; its training diverged, use an earlier one"
        )
    return weights


def save_weights(weights: Weights, path: Path | str) -> None:
    """Write a safetensors file whole or not at all: a reader never sees half of it, a crash leaves the old one."""
    path = Path(path)
    data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    with disk_errors(path):
        write_atomically(path, data)


def _check_names(path: Path | str, found: Weights, spec: NetSpec, layout: Layout) -> None:
    missing = [name for name in layout.names if name not in found]
    extra = sorted(found.keys() - set(layout.names))
    if missing or extra:
        parts = [f"it lacks {_some(missing)}"] * bool(missing) + [f"it has {_some(extra)} besides"] * bool(extra)
        raise BadInput(
            f"{path} is not of this network ({spec.describe()}): {' and '.join(parts)}; "
            "set the model to the one that the file was saved from"
        )


def _check_shapes(path: Path | str, found: Weights, spec: NetSpec, layout: Layout) -> None:
    wrong = [
        f"{name} is {_form(found[name])}, not {_form(torch.empty(shape, dtype=layout.dtypes[name], device='meta'))}"
        for name, shape in layout.shapes.items()
        if tuple(found[name].shape) != shape or found[name].is_floating_point() != layout.dtypes[name].is_floating_point
    ]
    if wrong:
        raise BadInput(
            f"{path} does not fit this network ({spec.describe()}): {_some(wrong)}; {_likely_reason(found, layout)}"
        )


def _likely_reason(found: Weights, layout: Layout) -> str:
    """What to change: the class count shows in the head's rows, width and channels in the first convolution."""
    first = layout.names[0]
    has, wants = tuple(found[first].shape), layout.shapes[first]
    if len(has) == len(wants) and has[0] != wants[0]:
        return f"the file has width {has[0]}, the model {wants[0]}: set the model's width"
    if len(has) == len(wants) and has[1] != wants[1]:
        return f"the file is for images of {has[1]} channels, the model for {wants[1]}: set the number of channels"
    classes, wanted = found["head.weight"].shape[:1], layout.shapes["head.weight"][:1]
    if classes != wanted:
        return f"the file is for {classes[0] if classes else 'no'} classes, the model for {wanted[0]}: set the classes"
    return "check the model's name, width, stem and image size"


def _form(tensor: torch.Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'one'} {str(tensor.dtype).removeprefix('torch.')}"


def _some(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
