"""`fedntd`: Lee et al., Preservation of the Global Knowledge by Not-True Distillation, NeurIPS 2022.

What a site forgets is what it has no images of. So it keeps the received model's opinion of the classes that an image
does not belong to: it minimises F_k + β·τ²·KL(q̃_glob ‖ q̃), where q̃ is the softmax over the logits z_c/τ of all classes
c ≠ y but the true one y, and q̃_glob that of the received model's logits. The divergence is summed over classes and
averaged over the batch. The received model answers in evaluation mode, once per image and round where nothing is
augmented.

What the paper leaves open, and what is here:
- β = 1 and τ = 1 are those of the published configuration (the public class defaults to τ = 3).
- With two classes one is left, its probability is always 1 and the term always 0: such a study is refused.
- Batch norm: as in FedAvg. Sites weigh by their images.

At β = 0 this is FedAvg bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.errors import BadInput
from wardround.learn.fit import Objective, Step, Teacher
from wardround.methods.template import Averaging, Visit
from wardround.settings import Frozen, NotNegative, Positive
from wardround.study import Study


class FedNTD(Averaging):
    """FedAvg with distillation of the received model on the classes that are not true."""

    name = "fedntd"
    paper = "Lee et al., NeurIPS 2022"
    summary = "FedAvg whose sites keep the received model's opinion of the classes an image does not belong to"

    class Settings(Frozen):
        """`beta` is the weight of the distillation, `tau` its temperature."""

        beta: NotNegative = 1.0
        tau: Positive = 1.0

    def check(self, study: Study) -> None:
        """Two classes leave nothing to distil."""
        super().check(study)
        if self.settings.beta > 0 and len(study.classes) < 3:
            raise BadInput(
                f"fedntd needs at least 3 classes, not {' and '.join(study.classes)} alone: with one class left beside "
                "the true one its term is always 0; use fedprox or moon"
            )

    def objective(self, visit: Visit) -> Objective:
        """Cross-entropy and the distillation, or plain cross-entropy at β = 0."""
        return NotTrue(self.settings.beta, self.settings.tau) if self.settings.beta > 0 else Objective()

    def teachers(self, visit: Visit) -> tuple[Teacher, ...]:
        """The received model."""
        spec = visit.ctx.study.spec(visit.site.name)
        return (Teacher(spec, visit.received),) if self.settings.beta > 0 else ()


class NotTrue(Objective):
    """Cross-entropy, and β·τ² times the divergence from the one teacher over the classes that are not true."""

    def __init__(self, beta: float, tau: float) -> None:
        self.beta, self.tau = beta, tau

    def loss(self, step: Step) -> Tensor:
        """Cross-entropy and the distillation."""
        (teacher,) = step.teachers
        return super().loss(step) + self.beta * self.distillation(step.outputs.logits, teacher.logits, step.labels)

    def distillation(self, logits: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
        """The mean over the batch of τ²·KL(q̃_glob ‖ q̃)."""
        own = F.log_softmax(not_true(logits, labels) / self.tau, dim=1)
        received = F.log_softmax(not_true(taught, labels) / self.tau, dim=1)
        return self.tau**2 * F.kl_div(own, received, reduction="batchmean", log_target=True)


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits `(n, classes − 1)` without the column of each row's label."""
    places = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, places + (places >= labels.unsqueeze(1)))
