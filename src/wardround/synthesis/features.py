"""Teachers' features as a lesson: a class is one number of a few, what a network sees in an image hundreds.

On images that are made, a student soon says what its teachers say and still knows little of real ones: which class it
is can be told from a detail that every made image has. To see all that its teachers see takes more. As in FitNets
(Romero et al., ICLR 2015), a map M_k that is learned along leads from the student's features f to each teacher's f_k:

    G = mean_k mean (c(f)·M_k − c(f_k) / s_k)²

c takes the mean over the batch away, s_k is the root of the mean square of c(f_k), so that teachers count alike however
large their features are. The maps are thrown away in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wardround.synthesis.student import Student
from wardround.synthesis.trained import Alongside

TINY = 1e-6  # of features that are the same for every image


class FeatureMaps(Alongside):
    """Maps from the student's features to those of each teacher."""

    def __init__(self, student: Student, widths: Sequence[int], momentum: float, generator: torch.Generator) -> None:
        width = student.net.feature_size
        drawn = [torch.randn((width, other), generator=generator) / width**0.5 for other in widths]
        super().__init__(student, {str(place): tensor for place, tensor in enumerate(drawn)}, momentum)
        self.maps = list(self.trained.values())

    def gap(self, features: Tensor, theirs: Sequence[Tensor]) -> Tensor:
        """G, differentiable in the student's features and in the maps."""
        mine = features - features.mean(dim=0)
        gaps = [(mine @ to - standardised(other)).square().mean() for to, other in zip(self.maps, theirs, strict=True)]
        return torch.stack(gaps).mean()


def standardised(features: Tensor) -> Tensor:
    """c(f_k) / s_k."""
    centred = features - features.mean(dim=0)
    return centred / centred.square().mean().sqrt().clamp_min(TINY)
