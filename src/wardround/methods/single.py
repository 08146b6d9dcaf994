"""`single`: train alone, average once at the end (what FedMP's Table 1 calls Single).

FedAvg with one round that holds the whole budget of epochs. Not to be confused with `local`, which never averages:
FedKD and PFLlib call that one "Local".
"""

from __future__ import annotations

from wardround.exchange.bundle import Bundle
from wardround.methods.base import Context
from wardround.methods.state import State
from wardround.methods.template import Averaging
from wardround.study import Study


class Single(Averaging):
    """One average after rounds × epochs of training."""

    name = "single"
    family = "one-shot"
    paper = "the Single baseline of FedMP"
    summary = "train alone for the whole budget, average once"

    def rounds(self, study: Study) -> int:
        """One."""
        return 1

    def epochs_in(self, study: Study, round: int) -> int:
        """All of them."""
        return study.total_epochs

    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        """Every site takes part: there is no second round to ask the others in."""
        if ctx.round >= 1:
            return None
        return {site: self.request(ctx, site, state) for site in ctx.study.sites}
