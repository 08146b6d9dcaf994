"""What one network learns from the answers of another (Hinton, Vinyals and Dean, arXiv:1503.02531, 2015)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distillation(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T²·KL(p(teacher, T) ‖ p(student, T)), the mean over the batch (FedISCA Eq. 2 and 4).

    The factor T² is the public code's and Hinton's: without it the gradient would shrink with the temperature.
    """
    divergence = F.kl_div(
        F.log_softmax(student / temperature, dim=1),
        F.log_softmax(teacher / temperature, dim=1),
        reduction="batchmean",
        log_target=True,
    )
    return divergence * temperature**2
