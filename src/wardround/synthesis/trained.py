"""What is trained and what its optimiser remembers, as one set of tensors: copied into a state, restored in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wardround.synthesis.student import Student


class Trained:
    """Tensors by name and the optimiser that trains them.

    Everything is restored in place, so that one captured step serves before and after.
    """

    trained: Mapping[str, Tensor]
    optimiser: torch.optim.Optimizer

    def state(self) -> dict[str, Tensor]:
        """A copy of all that is trained and of the optimiser's memory, to be kept in a state."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        memory = {
            f"optimiser.{name}.{kind}": tensor
            for name, of in self.trained.items()
            for kind, tensor in self.optimiser.state[of].items()
        }
        return {**self.trained, **memory}


class Alongside(Trained):
    """Tensors that a student's lesson needs beside it: they learn with it, at its rate, and are thrown away."""

    def __init__(self, student: Student, tensors: Mapping[str, Tensor], momentum: float) -> None:
        device = student.net.head.weight.device
        self.trained = {name: tensor.to(device).requires_grad_() for name, tensor in tensors.items()}
        self.optimiser = torch.optim.SGD(self.trained.values(), lr=student.rate, momentum=momentum, fused=True)
        if momentum > 0:  # made here, so that a captured step finds it where it will always be
            for tensor in self.trained.values():
                self.optimiser.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor, requires_grad=False)

    def step(self) -> None:
        """Down the slopes that the student's step has left, which are then forgotten."""
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
