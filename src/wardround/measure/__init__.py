"""Measures over predictions: what one predictor scores on one test, and what a study prints from many such scores."""

from wardround.measure.accuracy import Tally, macro_auc, tally
from wardround.measure.answers import (
    BINS,
    Answers,
    Bin,
    calibration_error,
    calibration_gap,
    calibration_gap_in_mix,
    count_answers,
    effective_trials,
    wilson,
)
from wardround.measure.forgetting import backward_transfer, consistency, forgetting_intervals, settled_after
from wardround.measure.manifold import Reach, reaches
from wardround.measure.projection import neighbourhoods, principal_components, project
from wardround.measure.rounds import OVER_ROUNDS, Course, course
from wardround.measure.summary import balance, bottom_decile, headlines, last_and_best, mean, worst

__all__ = [
    "BINS",
    "OVER_ROUNDS",
    "Answers",
    "Bin",
    "Course",
    "Reach",
    "Tally",
    "backward_transfer",
    "balance",
    "bottom_decile",
    "calibration_error",
    "calibration_gap",
    "calibration_gap_in_mix",
    "consistency",
    "count_answers",
    "course",
    "effective_trials",
    "forgetting_intervals",
    "headlines",
    "last_and_best",
    "macro_auc",
    "mean",
    "neighbourhoods",
    "principal_components",
    "project",
    "reaches",
    "settled_after",
    "tally",
    "wilson",
    "worst",
]
