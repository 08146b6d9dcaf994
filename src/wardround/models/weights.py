"""Weights in a file: safetensors, never pickle; checked against the network before anything uses them."""

from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from wardround.errors import BadInput
from wardround.models.net import Weights
from wardround.models.pretrained import advice, for_channels, is_published, renamed
from wardround.models.registry import Layout, NetSpec, fresh, spec_layout

RESNETS = ("resnet18", "resnet34", "resnet50")
SHOWN = 3  # how many names of misfit tensors a message lists


def load_weights(path: Path | str, spec: NetSpec, initial: Weights | None = None) -> Weights:
    """The weights in a safetensors file, in the order and types of `spec`'s network.

    It must hold the tensors of the network's state dict, no others. Published ResNet weights are renamed (see
    `pretrained`); their head is used where it has as many classes, else the head of `initial` is (None: one that is
    drawn). Half-precision files are read as the network's own precision. Tensors are copies: the file may go
    afterwards.
    """
    try:
        found: Weights = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{path} cannot be read as a safetensors file ({_first_line(error)}); write the network's weights with "
            "safetensors.torch.save_file"
        ) from error
    layout = spec_layout(spec)
    if spec.name in RESNETS and is_published(found):
        found = _as_published(path, found, spec, layout, initial)
    _check_names(path, found, spec, layout)
    _check_shapes(path, found, spec, layout)
    weights = {name: found[name].to(layout.dtypes[name], copy=True) for name in layout.names}
    broken = [name for name in layout.names if not bool(torch.isfinite(weights[name]).all())]
    if broken:
        raise BadInput(
            f"{path} holds NaN or infinite values in {_some(broken)}; its training diverged, use an earlier one"
        )
    return weights


def _as_published(path: Path | str, found: Weights, spec: NetSpec, layout: Layout, initial: Weights | None) -> Weights:
    """Published weights as this network's own, with a head; or one line that says what does not fit."""
    weights = for_channels(renamed(found), spec.channels)
    body = [name for name in layout.names if name not in layout.head]
    misfits = [f"{name} is missing" for name in body if name not in weights]
    misfits += [
        f"{name} is {_form(weights[name])}, not {'×'.join(map(str, layout.shapes[name]))}"
        for name in body
        if name in weights and tuple(weights[name].shape) != layout.shapes[name]
    ]
    misfits += [f"{name} is not in the model" for name in weights if name not in layout.names]
    if misfits:
        first = layout.shapes.get("stages.stem.conv1.weight", layout.shapes[layout.names[0]])
        what = f"{path} does not fit this network ({spec.describe()}): {_some(misfits)}"
        raise BadInput(f"{what}; {advice(weights, spec.name, first)}")
    heads = {name: weights[name] for name in layout.head if name in weights}
    if {name: tuple(tensor.shape) for name, tensor in heads.items()} != {n: layout.shapes[n] for n in layout.head}:
        drawn = initial if initial is not None else fresh(spec, torch.Generator().manual_seed(0))
        heads = {name: drawn[name] for name in layout.head}
    return {**{name: weights[name] for name in body}, **heads}


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
