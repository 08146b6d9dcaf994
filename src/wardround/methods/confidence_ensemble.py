"""`confidence-ensemble`: every site's model is kept, and each one's vote on an image counts by how sure it is.

For an image x the probabilities are Σ_k w_k(x)·p_k(x), with p_k the softmax of site k's model and w_k(x) its
confidence in x over the sum of all models' confidences. Measures of confidence: 1 − H(p_k)/log C (`entropy`), the
largest probability less the second (`margin`), or the largest (`maximum`).

Why: under label skew a model that never saw a class must still answer, and the mean of logits lets it outvote those
that know. Weighing needs nothing but the models, so this is the bar for what can be had without a word about labels.
It trusts networks to know what they do not know, which they often do not: a model may be sure, and wrong, of an image
unlike any it has seen.

What it costs and leaks is what `ensemble` does: all models go to all sites and all run at every prediction. No paper
prints this bar.
"""

from __future__ import annotations

from wardround.learn.predictor import Measure, Predictor
from wardround.methods.base import Context
from wardround.methods.ensemble import Panel, panel_members
from wardround.methods.state import State
from wardround.settings import Frozen


class ConfidenceEnsemble(Panel):
    """The sites' probabilities, weighed per image by confidence."""

    name = "confidence-ensemble"
    paper = "-"
    summary = "every site's model kept, each vote counts by how sure the model is of the image"

    class Settings(Frozen):
        """`measure` is what counts as being sure."""

        measure: Measure = "entropy"

    def predictor(self, ctx: Context, state: State) -> Predictor:
        """The predictor itself weighs, as the weights depend on the image."""
        return Predictor(len(ctx.study.classes), panel_members(ctx.study, state), combine=self.settings.measure)
