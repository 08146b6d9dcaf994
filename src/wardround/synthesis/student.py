"""The network that the coordinator distils, and the loss it learns by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn import nets
from wardround.models import NetSpec, Weights, build


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


class Student:
    """A network in training at the coordinator; `weights` and `momentum` are its whole state."""

    def __init__(self, spec: NetSpec, weights: Weights, device: torch.device, momentum: float, decay: float) -> None:
        self.net = build(spec).to(device)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        nets.load(self.net, weights)
        self.net.train()
        self.optimiser = torch.optim.SGD(
            self.net.parameters(), lr=0.0, momentum=momentum, weight_decay=decay, fused=True
        )

    def logits(self, pixels: Tensor) -> Tensor:
        """What the student says, in training mode."""
        return self.net(pixels)  # type: ignore[no-any-return]

    def learn(self, loss: Tensor, rate: float) -> None:
        """One step down the loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()

    def weights(self) -> Weights:
        """A copy of the network's tensors."""
        return nets.read(self.net)

    def momentum(self) -> dict[str, Tensor]:
        """A copy of the optimiser's buffers, by parameter name; empty before the first step."""
        state = self.optimiser.state
        return {
            name: state[parameter]["momentum_buffer"].detach().clone()
            for name, parameter in self.net.named_parameters()
            if state.get(parameter, {}).get("momentum_buffer") is not None
        }

    def restore_momentum(self, momentum: Mapping[str, Tensor]) -> None:
        """The inverse of `momentum`.

        A buffer must lie in memory as its parameter does, which a saved one does not: the fused step goes through both
        address by address.
        """
        for name, parameter in self.net.named_parameters():
            if name in momentum:
                buffer = torch.empty_like(parameter, requires_grad=False).copy_(momentum[name])
                self.optimiser.state[parameter]["momentum_buffer"] = buffer
