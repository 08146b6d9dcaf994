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
from wardround.learn.fit import Objective, Outputs, Recipe, Step
from wardround.learn.trainer import learning_rate, make_optimiser, optimiser_state, restore_optimiser
from wardround.models import NetSpec, StagedNet, Weights, build
from wardround.tensorfile import flatten, unflatten

SMALLEST = 1e-6  # of the denominator


class MutualDistillation(Objective):
    """The fit's network is the mentee. The mentor and W are this objective's own, with an optimiser of their own.

    They are trained by the same recipe, step for step. `mentor` and `projection` are read after the fit.
    """

    capturable = False

    def __init__(
        self, spec: NetSpec, mentor: Weights, projection: Tensor, recipe: Recipe, steps_per_epoch: int
    ) -> None:
        self.spec, self.mentor, self.projection = spec, mentor, projection
        self.recipe, self.steps_per_epoch, self.done = recipe, steps_per_epoch, 0

    def to(self, device: str) -> None:
        """The mentor as a network on the device; until now it was weights only."""
        self.net = build(self.spec).to(device)
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        nets.load(self.net, self.mentor)
        self.net.train()
        self.projection = self.projection.detach().to(device, copy=True).requires_grad_(True)
        self.rate = torch.tensor(self.recipe.lr, device=device)
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
        taught = distillation(mentee.logits, mentor.logits) + distillation(mentor.logits, mentee.logits)
        hidden = F.mse_loss(F.linear(mentee.features, self.projection), mentor.features)
        return own + (taught + hidden) / own.detach().clamp_min(SMALLEST)

    def correct(self, trained: Mapping[str, Tensor]) -> None:
        """The mentor's and W's step, at the rate that the mentee's step has."""
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.clip_norm)
        self.rate.fill_(learning_rate(self.recipe, self.done, self.steps_per_epoch))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.done += 1
        del self.seen

    def state(self) -> dict[str, Tensor]:
        """The mentor, W, and what their optimiser carries."""
        own = {"projection": self.projection, "done": torch.tensor(self.done)}
        return flatten({"mentor": self.net.state_dict(), "optimiser": optimiser_state(self.optimiser), "own": own})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Into the live tensors, which the optimiser trains."""
        found = unflatten(state)
        nets.load(self.net, found["mentor"])
        with torch.no_grad():
            self.projection.copy_(found["own"]["projection"])
        restore_optimiser(self.optimiser, found.get("optimiser", {}))
        self.done = int(found["own"]["done"])

    def finish(self) -> None:
        """Read the mentor and W back, once the fit is over; where it was skipped they are what they were."""
        if self.done:
            self.mentor, self.projection = nets.read(self.net), self.projection.detach()
            del self.net, self.optimiser, self.trained


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student) per image, averaged over the batch; the teacher has no gradient."""
    return F.kl_div(student.log_softmax(1), teacher.detach().log_softmax(1), reduction="batchmean", log_target=True)
