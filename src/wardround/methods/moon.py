"""`moon`: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.

A site's features z of an image should be nearer to those of the model it received, z_glob, than to those of the model
it had itself after its last training, z_prev. Eq. 3 and 4: it minimises
F_k + μ·mean(−log(e^{s⁺/τ} / (e^{s⁺/τ} + e^{s⁻/τ}))) with s⁺ = cos(z, z_glob) and s⁻ = cos(z, z_prev). The logarithm is
softplus((s⁻ − s⁺)/τ), which cannot overflow. Both other models are frozen, in evaluation mode, and answer once per
image and round where nothing is augmented.

The previous model is what the site kept in its memory after its last training: never a copy that was taken after the
received one had been loaded over it. With that slip z_prev = z_glob, the term is a constant, and MOON is FedAvg.

What the paper leaves open, and what is here:
- A site that is asked for the first time has no previous model. With the received one in its place the term is
  constant, so the site trains on cross-entropy alone. (The public code takes a random network.)
- Features are what the head reads. The paper puts a projection head of 256 units between them; there is none here, so
  that the network is that of the other methods. FedNTD's version, which FedKPer's table follows, has none either.
- μ = 1 is within the paper's grid of 0.1 to 10, whose best value differs by data set; FedNTD's configuration has 0.1.
  τ = 0.5 is the paper's.
- A site too small to train keeps the previous model it has.
- Batch norm: as in FedAvg.

At μ = 0 this is FedAvg bit for bit, and no site keeps anything.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from wardround.learn.fit import Fit, Fitted, Objective, Step, Teacher
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.settings import Frozen, NotNegative, Positive

PREVIOUS = "previous"


class Moon(Averaging):
    """FedAvg with a contrast between the received model and the site's own last one."""

    name = "moon"
    paper = "Li et al., CVPR 2021"
    summary = "FedAvg whose sites keep features near the received model's and away from their own last one's"

    class Settings(Frozen):
        """`mu` is the weight of the contrast, `tau` its temperature."""

        mu: NotNegative = 1.0
        tau: Positive = 0.5

    def objective(self, visit: Visit) -> Objective:
        """Cross-entropy, and the contrast from the second time on that a site trains."""
        return Contrast(self.settings.mu, self.settings.tau) if self._contrasts(visit) else Objective()

    def teachers(self, visit: Visit) -> tuple[Teacher, ...]:
        """The received model, and the site's own of the last time."""
        if not self._contrasts(visit):
            return ()
        spec = visit.ctx.study.spec(visit.site.name)
        return Teacher(spec, visit.received), Teacher(spec, dict(visit.memory.groups[PREVIOUS]))

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        """The model that this training left."""
        if self.settings.mu == 0 or fitted.trained_on == 0:
            return visit.memory
        return State({PREVIOUS: fitted.weights})

    def _contrasts(self, visit: Visit) -> bool:
        return self.settings.mu > 0 and PREVIOUS in visit.memory.groups


class Contrast(Objective):
    """Eq. 4, for the features of two teachers: the received model and the previous one."""

    def __init__(self, mu: float, tau: float) -> None:
        self.mu, self.tau = mu, tau

    def loss(self, step: Step) -> Tensor:
        """Cross-entropy and μ times the contrast."""
        received, previous = step.teachers
        return super().loss(step) + self.mu * self.contrast(step.outputs.features, received.features, previous.features)

    def contrast(self, own: Tensor, received: Tensor, previous: Tensor) -> Tensor:
        """The mean of −log(e^{s⁺/τ} / (e^{s⁺/τ} + e^{s⁻/τ})) over the batch."""
        near = F.cosine_similarity(own, received, dim=1)
        far = F.cosine_similarity(own, previous, dim=1)
        return F.softplus((far - near) / self.tau).mean()
