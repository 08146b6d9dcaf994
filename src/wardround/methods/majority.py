"""`majority`: each site always predicts its own commonest class.

No paper prints this bar, yet under strong label skew it is high: with Dirichlet(0.1) over five sites a constant per
site is right for well over half of that site's images. A method below it has not learned to look at the image. Ties
go to the class with the lower number.
"""

from __future__ import annotations

import torch

from wardround.data.federation import Site
from wardround.exchange.bundle import Bundle
from wardround.learn.predictor import Predictor
from wardround.methods.alone import Alone
from wardround.methods.base import Context, Work
from wardround.methods.state import State


class Majority(Alone):
    """A constant per site."""

    name = "majority"
    summary = "each site always predicts its commonest class"

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The log of the site's label shares as scores; no network."""
        counts = site.train.counts().cpu().double()
        return Predictor(len(ctx.study.classes), log_prior=torch.log((counts + 1e-9) / (counts + 1e-9).sum()))
        yield  # a Work that asks for no fit
