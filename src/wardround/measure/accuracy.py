"""How often a predictor is right: accuracy, balanced accuracy, macro-AUC, and whether it has learnt anything at all.

Everything here takes the scores of a whole test set on the CPU, float `(n, classes)` logits or log-probabilities, and
int64 labels `(n,)`. Counts are kept per class because a site's local test is the official test set weighted to the
site's label mix, which only needs the recall of each class: one pass over the images serves every site.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wardround.errors import Diverged, RunFailed


@dataclass(frozen=True)
class Tally:
    """Right answers of one predictor on one test set, by class: three int64 tensors `(classes,)`."""

    correct: Tensor  # images of the class that were predicted as the class
    totals: Tensor  # images of the class
    predicted: Tensor  # images of any class that were predicted as the class

    @property
    def n(self) -> int:
        """How many images were tested."""
        return int(self.totals.sum())

    @property
    def is_constant(self) -> bool:
        """Whether one class was predicted for every image of a test that has more than one class."""
        return int((self.predicted > 0).sum()) == 1 and int((self.totals > 0).sum()) > 1

    def accuracy(self, class_weights: Tensor | None = None) -> float:
        """The share of right answers; with weights, what it would be under that label mix: Σ_c weight_c · recall_c.

        Recall is unknown for a class without test images, so the weights of the other classes are scaled to sum to 1.
        """
        tested = self._tested(class_weights)
        if class_weights is None:
            return int(self.correct.sum()) / self.n
        weights = class_weights[tested].double()
        return float((weights * self._recall(tested)).sum() / weights.sum())

    def balanced_accuracy(self, class_weights: Tensor | None = None) -> float:
        """The mean recall over the classes with test images and, where weights are given, with a positive weight.

        The weights choose the classes only: a site is not judged on diseases it never sees, and those it does see
        count alike.
        """
        return float(self._recall(self._tested(class_weights)).mean())

    def _recall(self, classes: Tensor) -> Tensor:
        return self.correct[classes].double() / self.totals[classes].double()

    def _tested(self, class_weights: Tensor | None) -> Tensor:
        """A mask of the classes that can be judged; an error where there are none."""
        tested = self.totals > 0
        if class_weights is not None:
            _check_weights(class_weights, len(self.totals))
            tested = tested & (class_weights > 0)
        if not bool(tested.any()):
            raise RunFailed(
                "no test image belongs to a class that counts here; give the test set images of such a class"
            )
        return tested


def tally(scores: Tensor, labels: Tensor, classes: int) -> Tally:
    """Count right answers by class; the answer is the highest score, and the first of equally high ones."""
    check_scores(scores, labels, classes)
    answers = scores.argmax(dim=1)
    return Tally(
        correct=torch.bincount(labels[answers == labels], minlength=classes),
        totals=torch.bincount(labels, minlength=classes),
        predicted=torch.bincount(answers, minlength=classes),
    )


def macro_auc(scores: Tensor, labels: Tensor) -> float | None:
    """The area under the ROC curve as MedMNIST reports it, from softmax probabilities.

    With two classes it is the AUC of the probability of class 1; with more, the mean over classes of the AUC of one
    class against the rest (Yang et al., "MedMNIST v2", Scientific Data 2023, and `getAUC` of its evaluator). Classes
    for which it is undefined, having no images or all of them, are left out; None when that leaves nothing.
    """
    classes = scores.shape[1]
    check_scores(scores, labels, classes)
    probabilities = scores.double().softmax(dim=1)
    judged = [1] if classes == 2 else range(classes)
    areas = [_auc(probabilities[:, c], labels == c) for c in judged]
    defined = [area for area in areas if area is not None]
    return sum(defined) / len(defined) if defined else None


def _auc(values: Tensor, positive: Tensor) -> float | None:
    """The chance that a positive outranks a negative, a tie counting half: the Mann-Whitney U over its maximum.

    Ranks are taken among the sorted negatives only: the number below and the number not above a positive average
    to its tied rank, and both are whole numbers, so nothing is rounded before the one division.
    """
    positives, negatives = values[positive], values[~positive].sort().values
    if not len(positives) or not len(negatives):
        return None
    below = torch.searchsorted(negatives, positives, right=False).sum()
    not_above = torch.searchsorted(negatives, positives, right=True).sum()
    return int(below + not_above) / (2 * len(positives) * len(negatives))


def check_scores(scores: Tensor, labels: Tensor, classes: int) -> None:
    """Refuse scores that do not fit the labels, and those of a training that diverged."""
    if scores.shape != (len(labels), classes):
        raise ValueError(f"scores must be ({len(labels)}, {classes}), one row per label, not {tuple(scores.shape)}")
    if len(labels) and not (0 <= int(labels.min()) and int(labels.max()) < classes):
        raise ValueError(f"labels run from {int(labels.min())} to {int(labels.max())}, outside 0 to {classes - 1}")
    # A row's maximum is NaN if any score is, +inf after an overflow, and -inf only if every class is ruled out.
    broken = int((~scores.amax(dim=1).isfinite()).sum())
    if broken:
        raise Diverged(
            f"the predictor's scores are not numbers for {broken} of {len(labels)} images, so its training diverged; "
            "lower the learning rate"
        )


def _check_weights(weights: Tensor, classes: int) -> None:
    if weights.shape != (classes,):
        raise ValueError(f"class weights must be {classes} numbers, one per class, not of shape {tuple(weights.shape)}")
    if not bool((weights >= 0).all() and weights.isfinite().all()):
        raise ValueError("class weights must be finite and not negative")
