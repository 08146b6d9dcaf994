"""Measures over predictions: what one predictor scores on one test, and what a study prints from many such scores."""

from wardround.measure.accuracy import Tally, macro_auc, tally
from wardround.measure.forgetting import backward_transfer, consistency, settled_after
from wardround.measure.manifold import Reach, reaches
from wardround.measure.rounds import OVER_ROUNDS, Course, course
from wardround.measure.summary import balance, bottom_decile, headlines, last_and_best, mean, worst

__all__ = [
    "OVER_ROUNDS",
    "Course",
    "Reach",
    "Tally",
    "backward_transfer",
    "balance",
    "bottom_decile",
    "consistency",
    "course",
    "headlines",
    "last_and_best",
    "macro_auc",
    "mean",
    "reaches",
    "settled_after",
    "tally",
    "worst",
]
