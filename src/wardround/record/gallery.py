"""`gallery.safetensors`: the images that a method made and shows, and what they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wardround import tensorfile
from wardround.errors import BadInput
from wardround.files import disk_errors
from wardround.methods.state import State
from wardround.synthesis.gallery import GALLERY

FILE = "gallery.safetensors"


@dataclass(frozen=True)
class Gallery:
    """Images by title, each uint8 `(frames, images, channels, height, width)`; all of the same classes and steps."""

    pictures: Mapping[str, Tensor]
    labels: tuple[int, ...]  # the class of each image
    steps: tuple[int, ...]  # the synthesis step of each frame
    left_out: tuple[int, ...] = ()  # classes that are not shown


def write(run: Path, state: State) -> str | None:
    """Keep what the state shows in a run's directory; the file's name, or None where it shows nothing.

    As it is: whether it can be shown is for `read` to say, since no run should fail over its pictures.
    """
    pictures = state.groups.get(GALLERY)
    if not pictures:
        return None
    with disk_errors(run):
        tensorfile.write(run / FILE, {GALLERY: pictures}, {GALLERY: state.facts.get(GALLERY)})
    return FILE


def read(path: Path) -> Gallery:
    """A gallery that can be shown; `BadInput` says why there is none."""
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise BadInput(f"{path.name} is not a plain file")
    try:
        groups, record = tensorfile.from_bytes(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read: {error.strerror or error}") from error
    pictures, facts = groups.get(GALLERY, {}), record.get(GALLERY)
    if not pictures or not isinstance(facts, dict):
        raise BadInput(f"{path.name} holds no gallery")
    labels, steps, left_out = (_numbers(facts.get(key, []), path.name) for key in ("labels", "steps", "left_out"))
    for title, tensor in pictures.items():
        fits = tensor.dim() == 5 and tensor.shape[:3] in {(len(steps), len(labels), channels) for channels in (1, 3)}
        if tensor.dtype != torch.uint8 or not fits or not tensor.numel():
            raise BadInput(
                f"{path.name}: {title[:40]!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected uint8, "
                f"{len(steps)} frames of {len(labels)} images of 1 or 3 channels"
            )
    return Gallery(pictures, labels, steps, left_out)


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise BadInput(f"{name}: its labels and steps must be lists of whole numbers")
    return tuple(value)
