"""FedKD's objective: a network that travels and one that stays teach each other while both learn from the labels.

With p the softmax, h the features, CE the cross-entropy of the mentee (s) and the mentor (t):

    CE_s + CE_t + [KL(p_t ‖ p_s) + KL(p_s ‖ p_t) + MSE(W·h_s, h_t)] / (CE_s + CE_t)

Each of two networks that are both wrong has little to teach, so distillation counts by how right they are. The
denominator is detached (else a network could lower the loss by raising its cross-entropy), and so is in each divergence
the one that teaches. The last term moves both networks and W, which maps the mentee's features to the mentor's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn import nets
from wardround.learn.distillation import distillation
from wardround.learn.fit import Objective, Outputs, Recipe, Step
from wardround.learn.trainer import make_optimiser, optimiser_state, restore_optimiser
from wardround.models import NetSpec, StagedNet, Weights, build
from wardround.tensorfile import flatten, unflatten

SMALLEST = 1e-6  # of the denominator


class MutualDistillation(Objective):
    """The fit's network is the mentee. The mentor and W are this objective's own, with an optimiser of their own.

    They are trained by the same recipe, step for step, at the very rate that the mentee's step has: one tensor for
    both, so that a captured step sees it change. `mentor` and `projection` are read after the fit.
    """

    def __init__(self, spec: NetSpec, mentor: Weights, projection: Tensor, recipe: Recipe) -> None:
        self.spec, self.mentor, self.projection, self.recipe = spec, mentor, projection, recipe

    def follow(self, rate: Tensor) -> None:
        """The mentee's rate is the mentor's and W's."""
        self.rate = rate

    def to(self, device: str) -> None:
        """The mentor as a network on the device; until now it was weights only."""
        self.net = build(self.spec).to(device)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        nets.load(self.net, self.mentor)
        self.net.train()
        self.net.checkpointing = self.recipe.checkpointing
        self.projection = self.projection.detach().to(device, copy=True).requires_grad_(True)
        self.trained = [*self.net.parameters(), self.projection]
        self.optimiser = make_optimiser(self.recipe, self.trained, self.rate)

    def outputs(self, net: StagedNet, pixels: Tensor) -> Outputs:
        """Both networks on the same pixels."""
        features, logits = self.net.outputs(pixels)
        self.seen = Outputs(features.float(), logits.float())
        return Outputs(*net.outputs(pixels))

    def loss(self, step: Step) -> Tensor:
        """Both networks' losses in one sum: what belongs to one has no gradient in the other, but for W's term."""
        mentor, mentee = self.seen, step.outputs
        own = F.cross_entropy(mentee.logits, step.labels) + F.cross_entropy(mentor.logits, step.labels)
        forth = distillation(mentor.logits.detach(), mentee.logits, 1.0)
        back = distillation(mentee.logits.detach(), mentor.logits, 1.0)
        hidden = F.mse_loss(F.linear(mentee.features, self.projection), mentor.features)
        return own + (forth + back + hidden) / own.detach().clamp_min(SMALLEST)

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        """The mentor's and W's step."""
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.clip_norm)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        del self.seen

    def state(self) -> dict[str, Tensor]:
        """The mentor, W, and what their optimiser carries."""
        own = {"projection": self.projection}
        return flatten({"mentor": self.net.state_dict(), "optimiser": optimiser_state(self.optimiser), "own": own})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Into the live tensors, which the optimiser trains."""
        found = unflatten(state)
        nets.load(self.net, found["mentor"])
        with torch.no_grad():
            self.projection.copy_(found["own"]["projection"])
        restore_optimiser(self.optimiser, found.get("optimiser", {}))

    def finish(self) -> None:
        """Read the mentor and W back, once the fit is over; where it was skipped they are what they were."""
        if hasattr(self, "net"):
            self.mentor, self.projection = nets.read(self.net), self.projection.detach()
            del self.net, self.optimiser, self.trained
