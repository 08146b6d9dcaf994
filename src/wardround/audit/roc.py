"""How well scores tell members from others: the ROC curve, its area, and what can be had at a very low false rate.

An attacker who is right about a few patients and never wrong does harm that an average hides, so the true positive rate
at a false positive rate of 0.1 % stands beside the area (Carlini et al., "Membership Inference Attacks From First
Principles", S&P 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wardround.audit.report import Points
from wardround.errors import BadInput

LOW_RATE = 0.001


@dataclass(frozen=True)
class Roc:
    """Counts at every threshold, the strictest first: at `thresholds[i]`, all scores from there up are called members.

    `hits` and `alarms` are int64 counts of members and of others that are called members. The first point calls
    nobody (its threshold is infinite), the last one everybody. Equal scores are one point, never an order.
    """

    thresholds: Tensor
    hits: Tensor
    alarms: Tensor

    @property
    def members(self) -> int:
        """How many were trained on."""
        return int(self.hits[-1])

    @property
    def others(self) -> int:
        """How many were not."""
        return int(self.alarms[-1])

    @property
    def auc(self) -> float:
        """The chance that a member outranks another image, a tie counting half; by trapezoids in whole numbers."""
        heights = self.hits[1:] + self.hits[:-1]
        return int((heights * self.alarms.diff()).sum()) / (2 * self.members * self.others)

    def tpr_at(self, rate: float = LOW_RATE) -> float:
        """The largest true positive rate of a threshold whose false positive rate is not above `rate`.

        Nothing is interpolated: with fewer than 1/rate others, this is the rate without a single false alarm.
        """
        allowed = math.floor(rate * self.others + 1e-9)  # 0.29·100 is a hair below 29
        return int(self.hits[self.alarms <= allowed].max()) / self.members

    @property
    def smallest_rate(self) -> float:
        """The smallest false positive rate above zero that so many others can show."""
        return 1 / self.others

    def points(self) -> Points:
        """(false positive rate, true positive rate) at the curve's corners."""
        x, y = self.alarms, self.hits
        turns = x.diff()[1:] * y.diff()[:-1] != x.diff()[:-1] * y.diff()[1:]
        kept = torch.cat([torch.tensor([True]), turns, torch.tensor([True])])
        rates = zip((x[kept] / self.others).tolist(), (y[kept] / self.members).tolist(), strict=True)
        return tuple(rates)


def roc(members: Tensor, others: Tensor) -> Roc:
    """The curve of the scores of members and of others; a higher score says "member"."""
    if not len(members) or not len(others):
        raise BadInput(
            f"a membership attack needs images that were trained on and others, not {len(members)} and {len(others)}; "
            "hold some images out"
        )
    scores = torch.cat([members, others]).double().cpu()
    if bool(scores.isnan().any()):
        raise ValueError("a score is not a number")
    is_member = torch.arange(len(scores)) < len(members)
    levels, place = torch.unique(scores, return_inverse=True)  # rising
    hits = torch.bincount(place[is_member], minlength=len(levels)).flip(0).cumsum(0)
    alarms = torch.bincount(place[~is_member], minlength=len(levels)).flip(0).cumsum(0)
    nobody = torch.zeros(1, dtype=torch.int64)
    thresholds = torch.cat([torch.tensor([math.inf], dtype=torch.float64), levels.flip(0)])
    return Roc(thresholds, torch.cat([nobody, hits]), torch.cat([nobody, alarms]))
