"""What a site teaches a network that came to it: its own classes, and to keep what it thinks of the others.

The network has learned from made images alone, so it errs on real ones; the site has real ones, but of some classes
only. A fine-tune by their labels would teach it that there are no others. So the network's own answers p before the
lesson are changed no further than the site knows better. On a real image of class y, with the classes C that the site
has seen,

    q_c = (1 − κ)·p_c for c outside C,    q_y = 1 − Σ_{c outside C} q_c,    0 for the rest of C

that is: what p gave to classes that the site knows goes to the right one, and of what it gave to the others a share κ,
for a network that mistakes its images for something else. On a made image, which is of a class outside C, q = p. The
loss is the cross-entropy of q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn.fit import Objective, Step


class HomeLesson(Objective):
    """Towards q; the one teacher is the network as it was before. `seen` marks the classes C."""

    def __init__(self, seen: Tensor, share: float) -> None:
        self.seen, self.share = seen, share

    def to(self, device: str) -> None:
        """Move the marks."""
        self.seen = self.seen.to(device)

    def loss(self, step: Step) -> Tensor:
        """Cross-entropy of q: the label of a made image is outside C, and that alone tells it."""
        before = step.teachers[0].logits.softmax(dim=1)
        own = self.seen[step.labels].unsqueeze(1)
        kept = before * (~own + own * ~self.seen * (1 - self.share))
        left = 1 - kept.sum(dim=1, keepdim=True)
        right = torch.zeros_like(kept).scatter(1, step.labels.unsqueeze(1), left)
        return F.cross_entropy(step.outputs.logits, kept + right)
