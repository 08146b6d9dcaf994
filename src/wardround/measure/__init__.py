"""Measures over predictions: what one predictor scores on one test, and what a study prints from many such scores."""

from wardround.measure.accuracy import Tally, macro_auc, tally
from wardround.measure.summary import balance, bottom_decile, headlines, last_and_best, mean, worst

__all__ = ["Tally", "balance", "bottom_decile", "headlines", "last_and_best", "macro_auc", "mean", "tally", "worst"]
