"""`local`: each site trains alone, on its own images, and never talks to anyone.

The bar every personalised method must clear on local accuracy. Trains for the study's whole budget, rounds × epochs.
A site too small to train (see `learn.trainer`) keeps the initial weights.
"""

from __future__ import annotations

from wardround.data.federation import Site
from wardround.exchange.bundle import Bundle
from wardround.learn.predictor import Predictor, single
from wardround.methods.alone import Alone, local_fit
from wardround.methods.base import Context, Work
from wardround.methods.state import State


class Local(Alone):
    """A network per site, never shared."""

    name = "local"
    summary = "each site trains alone and never shares"

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The site's own network."""
        fitted = yield local_fit(ctx, site)
        return single(ctx.study.spec(site.name), fitted.weights)
