"""What a predictor answers, counted: which class it says for which, and how often it is right when it is how sure.

Counts of images, never images: confusion matrices, sensitivities and calibration are derived from these alone, so a
result needs to hold nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wardround.measure.accuracy import check_scores

BINS = 15  # of confidence, of equal width, as Guo et al. (ICML 2017) count the calibration error
NORMAL_95 = 1.959963984540054  # standard deviations on either side that hold 95 % of a normal distribution
PLACES = 6  # of a mean confidence, so that records do not depend on the last bits of a softmax


class Bin(NamedTuple):
    """The answers given with a confidence within one bin."""

    images: int
    right: int
    confidence: float  # mean, 0 where there are none


@dataclass(frozen=True)
class Answers:
    """Of one predictor to one test: `confusion[t][p]` images of class t were called p; bins of rising confidence."""

    confusion: tuple[tuple[int, ...], ...]
    bins: tuple[Bin, ...]


def count_answers(scores: Tensor, labels: Tensor, classes: int) -> Answers:
    """Count them; scores are logits or log-probabilities `(n, classes)`, the first of equally high ones counts.

    The confidence of an answer is its softmax probability. Bin b of B holds confidences in (b/B, (b+1)/B].
    """
    check_scores(scores, labels, classes)
    answers, confidence = scores.argmax(dim=1), scores.double().softmax(dim=1).amax(dim=1)
    confusion = torch.bincount(labels * classes + answers, minlength=classes**2).reshape(classes, classes)
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    images = torch.bincount(place, minlength=BINS)
    right = torch.bincount(place[answers == labels], minlength=BINS)
    total = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, confidence)
    means = (total / images.clamp_min(1)).tolist()
    bins = zip(images.tolist(), right.tolist(), means, strict=True)
    return Answers(tuple(map(tuple, confusion.tolist())), tuple(Bin(n, r, round(c, PLACES)) for n, r, c in bins))


def calibration_error(bins: Sequence[Bin]) -> float | None:
    """Σ_b (n_b / n) · |accuracy_b − mean confidence_b|: 0 where a predictor is right as often as it says it is."""
    images = sum(b.images for b in bins)
    gaps = [abs(b.right - b.images * b.confidence) for b in bins]
    return math.fsum(gaps) / images if images else None


def calibration_gap(scores: Tensor, labels: Tensor, bins: int = BINS, weights: Tensor | None = None) -> float:
    """The same from scores `(n, classes)`; `weights` are those of the images, where they do not count alike."""
    weights = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double()
    sure, answers = scores.softmax(dim=1).max(dim=1)
    right = (answers == labels).double()
    place = (sure * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, weights * (sure.double() - right))
    return float(gaps.abs().sum() / weights.sum())


def calibration_gap_in_mix(scores: Tensor, labels: Tensor, shares: Tensor) -> float:
    """That on a test whose classes weigh `shares`, however many images each has there."""
    each = shares.double() / labels.bincount(minlength=len(shares)).clamp_min(1)
    return calibration_gap(scores.double(), labels, weights=each[labels])


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n independent trials (JASA 1927); it stays within 0 to 1."""
    if n < 1:
        raise ValueError("an interval needs at least one trial")
    square = NORMAL_95**2
    centre = (share + square / (2 * n)) / (1 + square / n)
    half = NORMAL_95 / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def effective_trials(trials: Sequence[int]) -> float:
    """How many trials of one kind the mean of several groups' shares is worth: k² / Σ 1/n over the k groups.

    A group of few weighs as much in that mean as one of many, so it is worth less than all trials together, unless the
    groups are of one size: the variance of the mean is p (1 - p) / k² · Σ 1/n where all groups have the same p.
    """
    return len(trials) ** 2 / math.fsum(1 / n for n in trials)
