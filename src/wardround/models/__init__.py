"""Networks as named stages and a head, by name."""

from wardround.models.net import StagedNet, Weights, batch_norm_names, groups, head_names
from wardround.models.registry import (
    Layout,
    ModelInfo,
    NetSpec,
    build,
    catalogue,
    fresh,
    names,
    spec_layout,
)
from wardround.models.weights import load_weights

__all__ = [
    "Layout",
    "ModelInfo",
    "NetSpec",
    "StagedNet",
    "Weights",
    "batch_norm_names",
    "build",
    "catalogue",
    "fresh",
    "groups",
    "head_names",
    "load_weights",
    "names",
    "spec_layout",
]
