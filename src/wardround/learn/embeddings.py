"""Embeddings of images with their labels, as sites hand them to one another: checked, kept, drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wardround.errors import BadInput


@dataclass(frozen=True)
class Embeddings:
    """`features` is float32 `(n, width)`, `labels` int64 `(n,)`."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def tensors(self) -> dict[str, Tensor]:
        """As they are sent."""
        return {"features": self.features, "labels": self.labels}

    def take(self, index: Tensor) -> Embeddings:
        """Those at `index`, in that order."""
        return Embeddings(self.features[index], self.labels[index])

    def to(self, device: str) -> Embeddings:
        """The same on a device."""
        return Embeddings(self.features.to(device), self.labels.to(device))


def sample(parts: list[Embeddings], count: int, generator: torch.Generator) -> Embeddings | None:
    """`count` embeddings drawn from all parts together without repetition, or all where there are fewer.

    Each of them is as likely as any other, whosever it is. None where there is nothing to draw from.
    """
    total = sum(len(part) for part in parts)
    if total == 0:
        return None
    chosen = torch.randperm(total, generator=generator)[:count].sort().values
    drawn, begun = [], 0
    for part in parts:
        here = chosen[(chosen >= begun) & (chosen < begun + len(part))]
        drawn.append(part.take(here - begun))
        begun += len(part)
    return Embeddings(torch.cat([part.features for part in drawn]), torch.cat([part.labels for part in drawn]))


def checked_embeddings(tensors: Mapping[str, Tensor], where: str, width: int, classes: int) -> Embeddings:
    """Embeddings that came from outside, or a `BadInput` that says what of them cannot be used."""
    if tensors.keys() != {"features", "labels"}:
        raise BadInput(f"{where}: embeddings are features and labels, not {', '.join(sorted(tensors)) or 'nothing'}")
    features, labels = tensors["features"], tensors["labels"]
    if features.dtype != torch.float32 or features.ndim != 2 or features.shape[1] != width:
        raise BadInput(
            f"{where}: embeddings are {_form(features)}, and this network's stage gives float32 of {width} numbers "
            "each; all sites must use the same stage"
        )
    if labels.dtype != torch.int64 or labels.shape != features.shape[:1]:
        raise BadInput(f"{where}: the labels are {_form(labels)}, not one int64 for each of {len(features)} embeddings")
    if len(labels) and not (0 <= int(labels.min()) and int(labels.max()) < classes):
        raise BadInput(
            f"{where}: labels run from {int(labels.min())} to {int(labels.max())}, and the study has classes 0 to "
            f"{classes - 1}"
        )
    if not bool(torch.isfinite(features).all()):
        raise BadInput(f"{where}: embeddings hold NaN or infinite values")
    return Embeddings(features, labels)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
