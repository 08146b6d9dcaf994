"""Published ResNet weights under this package's names: ImageNet's, or those of self-supervised learning.

Three layouts are known, behind any prefix (`module.encoder_q.`, `backbone.`, `teacher.backbone.`): torchvision's and
timm's (`conv1`, `bn1`, `layer1` to `layer4`, `fc`), and the numbered one of a network that was wrapped in a
`Sequential` (`0`, `1`, `4` to `7`). What lies beside the network (projection heads, queues, a momentum copy) is left
out. Grey images get a stem whose three colour kernels are added up: a grey picture as colour would see the same sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from wardround.models.net import Weights

FIRST = {"conv1.weight": "named", "0.weight": "numbered"}  # the stem's convolution in the layouts
PLACES = {
    "named": {"conv1": "stem.conv1", "bn1": "stem.bn1", **{f"layer{n}": f"stage{n}" for n in range(1, 5)}},
    "numbered": {"0": "stem.conv1", "1": "stem.bn1", **{str(n + 3): f"stage{n}" for n in range(1, 5)}},
}
PREFERRED = ("encoder_q", "teacher", "online", "student")  # of several copies in one file, the first of these
OTHERS = ("encoder_k", "momentum", "target", "_ema", "key_encoder")


def is_published(found: Iterable[str]) -> bool:
    """Whether the names are of one of the known layouts."""
    return _prefix(set(found)) is not None


def renamed(found: Weights) -> Weights:
    """The network's tensors under this package's names; the head is there where it is one linear layer."""
    where = _prefix(set(found))
    if where is None:
        return dict(found)
    prefix, layout = where
    result: Weights = {}
    for name, tensor in found.items():
        first, dot, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or not dot:
            continue
        if first in PLACES[layout]:
            result[f"stages.{PLACES[layout][first]}.{rest}"] = tensor
        elif layout == "named" and first == "fc" and rest in ("weight", "bias"):
            result[f"head.{rest}"] = tensor
    for name in [n for n in result if n.endswith(".running_var")]:
        counter = name.removesuffix("running_var") + "num_batches_tracked"
        result.setdefault(counter, torch.zeros((), dtype=torch.int64))  # files of old versions have none
    return result


def for_channels(weights: Weights, channels: int) -> Weights:
    """The same for grey images, where the file is for colour."""
    stem = weights.get("stages.stem.conv1.weight")
    if channels != 1 or stem is None or stem.ndim != 4 or stem.shape[1] != 3:
        return weights
    return {**weights, "stages.stem.conv1.weight": stem.sum(dim=1, keepdim=True)}


def advice(weights: Weights, name: str, stem: tuple[int, ...]) -> str:
    """What to change where renamed weights do not fit the network `name`, whose first convolution has shape `stem`."""
    kernel = weights.get("stages.stem.conv1.weight")
    if kernel is not None and kernel.ndim == 4 and kernel.shape[2] != stem[2]:
        wanted = "imagenet" if kernel.shape[2] == 7 else "small"
        return f"the file's first convolution is {kernel.shape[2]}×{kernel.shape[3]}: set model.stem={wanted}"
    kind = _kind(weights)
    if kind and kind != name:
        return f"the file looks like a {kind}: set model.name to it, if there is one"
    return "check the model's name, width and stem"


def _kind(weights: Weights) -> str:
    blocks = {n: {name.split(".")[2] for name in weights if name.startswith(f"stages.stage{n}.")} for n in (1, 3)}
    deep = "stages.stage1.0.conv3.weight" in weights
    known = {(False, 2, 2): 18, (False, 3, 6): 34, (True, 3, 6): 50, (True, 3, 23): 101, (True, 3, 36): 152}
    depth = known.get((deep, len(blocks[1]), len(blocks[3])))
    return f"resnet{depth}" if depth else ""


def _prefix(names: set[str]) -> tuple[str, str] | None:
    """What stands in front of the network's names, and their layout; the preferred copy where there are several."""
    found = []
    for first, layout in FIRST.items():
        norm, block = ("bn1", "layer1") if layout == "named" else ("1", "4")
        for name in names:
            prefix = name.removesuffix(first)
            is_one = name.endswith(first) and (not prefix or prefix.endswith("."))
            if is_one and f"{prefix}{norm}.running_mean" in names and f"{prefix}{block}.0.conv1.weight" in names:
                found.append((prefix, layout))
    return min(found, key=lambda one: (_rank(one[0]), one[0]), default=None)


def _rank(prefix: str) -> int:
    if any(re.search(rf"(^|\.){word}|{word}\.", prefix) for word in OTHERS):
        return len(PREFERRED) + 1
    return next((rank for rank, word in enumerate(PREFERRED) if word in prefix), len(PREFERRED))
