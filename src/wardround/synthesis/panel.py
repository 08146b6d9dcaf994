"""Teachers that answer as a panel: each heard on the pairs of classes it has seen, as `learn/pairs.py` has it.

Also in the synthesis: each teacher is shown the mix of classes that its site had (`deal.py`), and a class's images are
asked of the teachers that know it, W_kc = n_kc / Σ_j n_jc of each, with the teacher's label prior divided out; the mean
of logits would ask all the others, too, who cannot tell.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn.pairs import Tally, decided, shares, tallied
from wardround.learn.predictor import Predictor
from wardround.learn.replay import each
from wardround.synthesis.deal import Deal
from wardround.synthesis.teachers import Precision, Teachers


class PanelTeachers(Teachers):
    """The members of a predictor that votes on pairs, frozen."""

    def __init__(self, panel: Predictor, device: torch.device, precision: Precision = "fp32") -> None:
        super().__init__(panel.members, device, precision)
        if panel.trust is None or panel.member_log_prior is None or panel.votes is None or panel.sharpness is None:
            raise ValueError("a panel that votes on pairs has trust, priors, votes and sharpness")
        self.counts = panel.trust.float().to(device)
        self.log_prior = panel.member_log_prior.float().to(device)
        self.temperature, self.doubt = panel.votes.tolist()
        self.sharpness = float(panel.sharpness)
        self.shares = shares(self.counts, self.doubt)
        expected = torch.zeros(panel.classes) if panel.log_prior is None else panel.log_prior
        self.expected = expected.float().to(device)

    def logits(self, pixels: Tensor) -> Tensor:
        """The panel's scores, without a gradient."""
        return self.decided(self.outputs(pixels)[1])

    def outputs(self, pixels: Tensor) -> tuple[list[Tensor], Tally]:
        """What each teacher sees, its features, and how the panel's votes fall, without a gradient."""
        pixels = pixels.bfloat16() if self.bf16 else pixels
        with torch.no_grad():
            found = each([partial(teacher.outputs, pixels) for teacher in self.teachers])
            votes = torch.stack([logits for _, logits in found])
            tally = tallied(votes, self.counts, self.log_prior, self.temperature, self.doubt)
            return [features for features, _ in found], tally

    def decided(self, tally: Tally) -> Tensor:
        """The panel's scores where votes fall so."""
        return self.sharpness * decided(tally, self.doubt) + self.expected

    def opinion(self, pixels: Tensor, dealt: Deal) -> tuple[Tensor, Tensor]:
        """How far the images are from their labels, and from the sites' statistics, differentiable in the pixels.

        The first is the mean over classes c of Σ_k W_kc·CE(z_k − log π_k, c), itself a mean over the images of c that k
        is shown; the second the mean over teachers of FedISCA's Eq. 6.
        """
        pixels = pixels.bfloat16() if self.bf16 else pixels
        shown = [pixels.index_select(0, rows).contiguous(memory_format=torch.channels_last) for rows in dealt.rows]
        found = each([partial(of.view, images) for of, images in zip(self.teachers, shown, strict=True)])
        wrong = [
            (F.cross_entropy(logits - prior, dealt.labels[rows], reduction="none") * weights).sum()
            for (logits, _), prior, rows, weights in zip(found, self.log_prior, dealt.rows, dealt.weights, strict=True)
        ]
        return torch.stack(wrong).sum() / dealt.classes, torch.stack([gap for _, gap in found]).mean()
