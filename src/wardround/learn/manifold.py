"""FedMP's objective: a site's cross-entropy, completed with other sites' embeddings and aligned to prototypes.

Eq. 1 scales both further terms to the size of the local loss, so whether Eq. 5 and Eq. 8 sum or average changes
nothing. As printed it is wrong for Eq. 8, which is a cosine with a minus sign: its weight l_local / l is negative and
turns the gradient round. Mended, the weight is l_local / |l|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn.embeddings import Embeddings
from wardround.learn.fit import Objective, Outputs, Step
from wardround.learn.prototypes import Prototypes, alignment
from wardround.learn.stages import run_on, stage_shape
from wardround.models import NetSpec, StagedNet

Scaling = Literal["mended", "literal", "fixed"]
SMALLEST = 1e-6  # a term below this is not scaled up to the local loss


@dataclass(frozen=True)
class Weighting:
    """How the terms are scaled (Eq. 1 mended, as printed, or not at all), and a further factor of each."""

    scaling: Scaling = "mended"
    sfmc: float = 1.0
    cpgma: float = 1.0

    def scale(self, term: Tensor, local: Tensor) -> Tensor:
        """Eq. 1's weight of a term, which has no gradient."""
        size = term.detach()
        if self.scaling == "mended":
            return local.detach() / size.abs().clamp_min(SMALLEST)
        if self.scaling == "literal":
            return local.detach() / torch.where(size.abs() < SMALLEST, SMALLEST, size)
        return torch.ones_like(size)


class Manifold(Objective):
    """Cross-entropy, SFMC (Eq. 5) where there are embeddings of others, cPGMA (Eq. 8) where there are prototypes."""

    def __init__(
        self,
        spec: NetSpec,
        stage: str,
        external: Embeddings | None,
        prototypes: Prototypes | None,
        weighting: Weighting = Weighting(),  # noqa: B008 - frozen
    ) -> None:
        self.stage, self.shape = stage, stage_shape(spec, stage)
        self.external, self.prototypes, self.weighting = external, prototypes, weighting

    def to(self, device: str) -> None:
        """What came moves with the fit."""
        self.external = self.external.to(device) if self.external else None
        self.prototypes = self.prototypes.to(device) if self.prototypes else None

    def outputs(self, net: StagedNet, pixels: Tensor) -> Outputs:
        """The same forward pass, with a look at the stage."""
        features = net.upto(self.stage, pixels)
        self.seen = (net, features)
        return Outputs(*net.after(self.stage, features))

    def loss(self, step: Step) -> Tensor:
        """Eq. 1. The embeddings of others are constants: they train what comes after the stage."""
        net, features = self.seen
        del self.seen
        weighting, local = self.weighting, super().loss(step)
        total = local
        if self.external is not None:
            logits = run_on(net, self.stage, self.external.features, self.shape)
            completion = F.cross_entropy(logits, self.external.labels)
            total = total + weighting.sfmc * weighting.scale(completion, local) * completion
        if self.prototypes is not None:
            aligned = alignment(features.flatten(1).float(), step.labels, self.prototypes)
            total = total + weighting.cpgma * weighting.scale(aligned, local) * aligned
        return total
