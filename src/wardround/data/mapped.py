"""Images that stay on disk: uint8 tensors over files, of which the system keeps in memory what is used.

`gather` and `join` stand in for indexing and `torch.cat` where a copy of the images might not fit into memory: beyond
`IN_MEMORY` bytes the copy is a file, too, without a name, which goes when the tensor does.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wardround.errors import BadInput
from wardround.files import disk_errors

IN_MEMORY = 2**30
CHUNK = 2**26  # bytes that are copied at once


def map_file(path: Path, shape: Sequence[int]) -> Tensor:
    """The bytes of a file as a uint8 tensor that may be read only; writing to it would end the process."""
    array = np.memmap(path, np.uint8, mode="r", shape=tuple(shape))
    with warnings.catch_warnings():
        # torch warns that it cannot forbid writing. A private writable map would be counted as memory in full.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def gather(images: Tensor, index: Tensor, folder: Path | None = None, most: int = IN_MEMORY) -> Tensor:
    """`images[index]`; on disk, in `folder` (None: the data folder's cache), where that is more than `most` bytes."""
    if images.device.type != "cpu" or len(index) * images[:1].numel() <= most:
        return images[index]
    rows = max(1, CHUNK // max(1, images[:1].numel()))
    result = _scratch((len(index), *images.shape[1:]), folder)
    for start in range(0, len(index), rows):
        chosen = index[start : start + rows]
        result[start : start + len(chosen)] = images[chosen]
    return result


def join(parts: Sequence[Tensor], folder: Path | None = None, most: int = IN_MEMORY) -> Tensor:
    """`torch.cat(parts)`; on disk, in `folder` (None: the data folder's cache), beyond `most` bytes."""
    if parts[0].device.type != "cpu" or sum(part.numel() for part in parts) <= most:
        return torch.cat(list(parts))
    result = _scratch((sum(map(len, parts)), *parts[0].shape[1:]), folder)
    start = 0
    for part in parts:
        result[start : start + len(part)] = part
        start += len(part)
    return result


def _scratch(shape: Sequence[int], folder: Path | None) -> Tensor:
    """A tensor over a file without a name. Its space is reserved at once: a full disk must not end the process."""
    from wardround.data.sources import CACHE, default_data_folder  # here, since sources are read through this module

    folder, total = folder or default_data_folder() / CACHE, math.prod(shape)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix=".scratch", dir=folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, total)
            else:
                os.truncate(handle, total)
            return torch.from_file(name, shared=True, size=total, dtype=torch.uint8).reshape(tuple(shape))
        except RuntimeError as error:
            raise BadInput(f"{folder} cannot hold images outside memory ({error}); choose another disk") from error
        finally:
            os.close(handle)
            os.unlink(name)
