"""The gradient of each image by itself, which is what differential privacy clips.

An objective sees a batch of one image: whatever it says, an image's gradient then depends on that image alone, which is
all that the guarantee needs. With plain cross-entropy all images of a batch are done at once (`torch.func`); any other
objective goes image by image through the very code that ordinary training uses. Opacus' own hooks would do neither,
since the networks here work in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from wardround.learn.fit import Objective, Outputs, Step
from wardround.models import StagedNet

NUMBERS_AT_ONCE = 2**26  # of per-image gradients held at a time: 256 MiB


def images_at_once(trained: dict[str, Tensor]) -> int:
    """How many images' gradients may be held."""
    return max(1, NUMBERS_AT_ONCE // max(1, sum(t.numel() for t in trained.values())))


def gradients(
    net: StagedNet, objective: Objective, step: Step, trained: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """By name the gradients `(n, ...)` of `n` images, and the sum of their losses.

    `step.outputs` is not read: it is computed here, image by image.
    """
    if type(objective) is Objective and not step.teachers:
        return _at_once(net, step, trained)
    return one_by_one(net, objective, step, trained)


def _at_once(net: StagedNet, step: Step, trained: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    fixed = {name: t.detach() for name, t in net.state_dict(keep_vars=True).items() if name not in trained}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(net, {**fixed, **parameters}, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    each = vmap(grad_and_value(loss), in_dims=(None, 0, 0))
    found, losses = each({name: t.detach() for name, t in trained.items()}, step.images, step.labels)
    return found, losses.sum()


def one_by_one(
    net: StagedNet, objective: Objective, step: Step, trained: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """The slow way, which any objective can go."""
    rows: list[tuple[Tensor, ...]] = []
    total = step.images.new_zeros(())
    for i in range(len(step.images)):
        pick = slice(i, i + 1)
        outputs = objective.outputs(net, step.images[pick])
        teachers = tuple(Outputs(t.features[pick], t.logits[pick]) for t in step.teachers)
        alone = Step(step.positions[pick], step.images[pick], step.labels[pick], outputs, teachers)
        loss = objective.loss(alone)
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        zeros = (torch.zeros_like(t) if g is None else g for g, t in zip(found, trained.values(), strict=True))
        rows.append(tuple(zeros))
        total = total + loss.detach()
    stacked = (torch.stack(column) for column in zip(*rows, strict=True))
    return dict(zip(trained, stacked, strict=True)), total
