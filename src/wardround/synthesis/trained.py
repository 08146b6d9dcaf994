"""What is trained and what its optimiser remembers, as one set of tensors: copied into a state, restored in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


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
