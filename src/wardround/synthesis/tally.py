"""The panel's tally as a lesson: how the votes on every pair of classes fell and who claims what, not only who won.

On images that were made for a class the panel is sure. On real ones its answer turns on how votes fell, and a student
that has learned answers alone knows nothing of that. So a layer beside the student's head learns, from its features,
the share of the votes on each pair that anyone knows, and the claims S (`learn/pairs.py`):

    D = mean_cd BCE(v_cd, Σ_k h_kcd·σ(ℓ_kc − ℓ_kd) / Σ_k h_kcd) + mean_c BCE(s_c, S_c)

In the end the student's head learns what the rule makes of the layer's answers, on features of made images mixed two by
two, λ·f + (1 − λ)·f': between them it matters how votes fall. The layer is then thrown away, and one plain network goes
home.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.learn.distillation import distillation
from wardround.learn.pairs import TINY, Tally, bounded, harmonic
from wardround.synthesis.panel import PanelTeachers
from wardround.synthesis.student import Student
from wardround.synthesis.trained import Alongside

SPREAD = 0.01  # of the layer's first weights
STEPS, BATCH, RATE = 600, 256, 3e-3  # of the head's last lesson, with Adam, at a rate that falls to nothing in a line


class TallyLayer(Alongside):
    """From the student's features to the votes on pairs and the claims of classes."""

    def __init__(self, student: Student, teachers: PanelTeachers, momentum: float, generator: torch.Generator) -> None:
        self.teachers = teachers
        classes = teachers.counts.shape[1]
        self.pairs = torch.triu_indices(classes, classes, 1, device=teachers.counts.device)
        self.known = bounded(harmonic(teachers.counts), teachers.doubt).sum(dim=0)
        self.asked = (self.known[self.pairs[0], self.pairs[1]] > 0).float()  # of each pair, whether anyone knows it
        outputs = self.pairs.shape[1] + classes
        weight = SPREAD * torch.randn((outputs, student.net.feature_size), generator=generator)
        super().__init__(student, {"weight": weight, "bias": torch.zeros(outputs)}, momentum)

    def gap(self, features: Tensor, tally: Tally) -> Tensor:
        """D, differentiable in the student's features and in the layer."""
        votes, claims = self._said(features)
        won = (tally.won / self.known.clamp_min(TINY))[:, self.pairs[0], self.pairs[1]]
        wrong = F.binary_cross_entropy_with_logits(votes, won.clamp(0, 1), reduction="none") * self.asked
        pairs = wrong.sum() / (len(features) * self.asked.sum().clamp_min(1))
        return pairs + F.binary_cross_entropy_with_logits(claims, tally.claims.clamp(0, 1))

    def scores(self, features: Tensor) -> Tensor:
        """What the panel's rule makes of the layer's answers."""
        votes, claims = (said.sigmoid() for said in self._said(features))
        share = torch.zeros((len(features), *self.known.shape), device=features.device)
        share[:, self.pairs[0], self.pairs[1]] = votes
        share[:, self.pairs[1], self.pairs[0]] = 1 - votes
        return self.teachers.decided(Tally(self.known * share, self.known, claims))

    def teach(self, head: nn.Linear, features: Tensor, generator: torch.Generator) -> None:
        """Let the head learn what the rule makes of the layer's answers, on these features mixed two by two."""
        parameters = list(head.parameters())
        optimiser = torch.optim.Adam(parameters, lr=RATE)
        for number in range(STEPS):
            for group in optimiser.param_groups:
                group["lr"] = RATE * (1 - number / STEPS)
            mixed = self._mixed(features, generator)
            with torch.no_grad():
                wanted = self.scores(mixed)
            gradients = torch.autograd.grad(distillation(wanted, head(mixed), 1.0), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    def _said(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Votes on pairs and claims of classes, as logits."""
        said = F.linear(features, self.trained["weight"], self.trained["bias"])
        return said[:, : self.pairs.shape[1]], said[:, self.pairs.shape[1] :]

    def _mixed(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """A batch of two features each, anywhere between them."""
        one, other = torch.randint(len(features), (2, BATCH), generator=generator).to(features.device)
        share = torch.rand((BATCH, 1), generator=generator).to(features.device)
        return share * features[one] + (1 - share) * features[other]
