"""The network that the coordinator distils, and the mixed loss it learns by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from wardround.learn import nets
from wardround.learn.distillation import distillation
from wardround.models import NetSpec, Weights, build
from wardround.synthesis.fused_norm import TrainedNorm, replace_norms
from wardround.synthesis.teachers import Precision


def mixed_distillation(original: Tensor, adapted: Tensor, said: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """(1 − λ)·KD(original) + λ·KD(adapted) at the noise level λ (FedISCA Eq. 8, FedBiCross Eq. 5)."""
    near, far = distillation(original, said, temperature), distillation(adapted, said, temperature)
    return torch.lerp(near, far, noise)


EXPLODED = 1e9  # any number of a network; one that goes on beyond it is not a number a few steps later


def exploded(weights: Weights) -> bool:
    """Whether a student learned at too large a rate: some number of it is none, or beyond all measure.

    It need not end in NaN at once, as batch norm holds its answers together while its weights grow. Growth alone is no
    failure: a ResNet-18 that is DAFL's student at the published rate outgrows its teachers by thousands of times, and
    goes on learning. Variances count by their roots.
    """
    return not largest(weights) < EXPLODED  # also where it is not a number


def largest(weights: Weights) -> float:
    """The largest of all numbers, whatever its sign, of variances the root; NaN where there is one."""
    sizes = [
        t.abs().amax().float().sqrt() if name.endswith("running_var") else t.abs().amax().float()
        for name, t in weights.items()
        if t.is_floating_point()
    ]
    return float(torch.stack(sizes).amax())


class Student:
    """A network in training at the coordinator; `weights` and `momentum` are its whole state."""

    def __init__(
        self,
        spec: NetSpec,
        weights: Weights,
        device: torch.device,
        momentum: float,
        decay: float,
        precision: Precision = "fp32",
    ) -> None:
        self.net = build(spec).to(device)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        nets.load(self.net, weights)
        replace_norms(self.net, TrainedNorm)
        self.net.train()
        self.bf16 = precision == "bf16"
        self.rate = torch.zeros((), device=device)  # on the device, so that a captured step sees it change
        self._rate = 0.0
        self.optimiser = torch.optim.SGD(
            self.net.parameters(), lr=self.rate, momentum=momentum, weight_decay=decay, fused=True
        )
        if momentum > 0:  # made here, so that a captured step finds it where it will always be
            for parameter in self.net.parameters():
                buffer = torch.zeros_like(parameter, requires_grad=False)
                self.optimiser.state[parameter]["momentum_buffer"] = buffer

    def logits(self, pixels: Tensor) -> Tensor:
        """What the student says, in training mode; never in bf16, whatever it was worked out in."""
        return self.outputs(pixels)[1]

    def outputs(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What it sees and what it says: features and logits."""
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            features, logits = self.net.outputs(pixels)
        return (features.float(), logits.float()) if self.bf16 else (features, logits)

    def set_rate(self, rate: float) -> None:
        """The learning rate from now on; not within a captured step."""
        if rate != self._rate:
            self._rate = rate
            self.rate.fill_(rate)

    def step(self, loss: Tensor, clip_norm: float | None = None) -> None:
        """One step down the loss, at the rate that was set; `clip_norm` is the largest norm of the gradient."""
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            clip_grad_norm_(self.net.parameters(), clip_norm)
        self.optimiser.step()

    def weights(self) -> Weights:
        """A copy of the network's tensors."""
        return nets.read(self.net)

    def momentum(self) -> dict[str, Tensor]:
        """A copy of the optimiser's buffers, by parameter name."""
        return {name: buffer.clone() for name, buffer in self._buffers().items()}

    def restore_momentum(self, momentum: Mapping[str, Tensor]) -> None:
        """The inverse of `momentum`; nothing where there is none."""
        for name, buffer in self._buffers().items():
            if name in momentum:
                buffer.copy_(momentum[name])

    def _buffers(self) -> dict[str, Tensor]:
        state = self.optimiser.state
        return {
            name: state[parameter]["momentum_buffer"]
            for name, parameter in self.net.named_parameters()
            if "momentum_buffer" in state[parameter]
        }
