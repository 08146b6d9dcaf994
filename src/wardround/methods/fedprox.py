"""`fedprox`: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

Eq. 2: a site minimises F_k(v) + (μ/2)·||v − w||², with w the model it received. The term's gradient is μ(v − w), so
it is added to the gradient directly: one multiply-add per tensor and no graph. Only trained parameters are pulled;
batch-norm statistics and frozen tensors are not.

What the paper leaves open: μ, tuned per data set over {0.001, 0.01, 0.1, 1}. The default here is 0.01 (what the
public medical comparisons use); FedNTD's published configuration, which FedKPer's table follows, has 1. At μ = 0 this
is FedAvg bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from wardround.learn.fit import Objective
from wardround.methods.template import Averaging, Visit
from wardround.models import Weights
from wardround.settings import Frozen


class FedProx(Averaging):
    """FedAvg with a pull towards the received model."""

    name = "fedprox"
    paper = "Li et al., MLSys 2020"
    summary = "FedAvg with a proximal term that keeps sites near the received model"

    class Settings(Frozen):
        """`mu` is the strength of the pull."""

        mu: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01

    def objective(self, visit: Visit) -> Objective:
        """Cross-entropy with the proximal gradient, or plain cross-entropy at μ = 0."""
        return Proximal(self.settings.mu, visit.received) if self.settings.mu > 0 else Objective()


class Proximal(Objective):
    """Adds μ(v − anchor) to every trained gradient. The anchor is what was received: never the live weights."""

    def __init__(self, mu: float, anchor: Weights) -> None:
        self.mu, self.anchor = mu, anchor

    def to(self, device: str) -> None:
        """The anchor moves with the fit."""
        self.anchor = {name: tensor.to(device) for name, tensor in self.anchor.items()}

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        """Eq. 2's second term, differentiated."""
        gradients = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
        live = [parameter.detach() for parameter in trained.values() if parameter.grad is not None]
        anchors = [self.anchor[name] for name, parameter in trained.items() if parameter.grad is not None]
        torch._foreach_add_(gradients, live, alpha=self.mu)
        torch._foreach_add_(gradients, anchors, alpha=-self.mu)
