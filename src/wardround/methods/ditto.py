"""`ditto`: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

Algorithm 1: beside FedAvg on w, every site has a personal model v that never leaves it. When it is asked, it also
minimises F_k(v) + (λ/2)·||v − w_t||², with the same optimiser, epochs and batches as for w. w_t is the model
it **received**, not the one it has just trained: so it does not matter which of the two is trained first. Here w is,
and then v; each from its own start, with the same shuffles, as the public code shows both the same batch.

What the paper leaves open, and what is done here:
- λ: 1, as in the authors' scripts (they also try a choice among 0.1, 1 and 2 on validation images).
- Where v starts: the paper's v_k⁰ is given. Here it is the model that a site received when it was first asked, which
  in the first round is the common initial model, as in the public code. A site that is not asked keeps the v it has; a
  site that was never asked has none and deploys the shared model.
- Weights of the average: by images; the authors' code averages sites alike.
- "Local accuracy" in a round is that of v.

Batch norm: v has parameters, running statistics and counters of its own, and only its parameters are pulled. On w all
is as in FedAvg, bit for bit at every λ. At λ = 0 sites train v alone, from a common start; with `personal = false`
there is no v, and this is FedAvg bit for bit in everything.
"""

from __future__ import annotations

from dataclasses import replace

from wardround.data.federation import Site
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import Fit, Objective
from wardround.learn.predictor import Predictor, single
from wardround.methods.base import Answer, Context, Work
from wardround.methods.fedprox import Proximal
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.models import Weights
from wardround.settings import Frozen, NotNegative


class Ditto(Averaging):
    """FedAvg, and a personal model that is pulled towards its average."""

    name = "ditto"
    paper = "Li et al., ICML 2021"
    summary = "FedAvg, and a personal model at every site that is pulled towards the shared one"

    class Settings(Frozen):
        """`lam` is the strength λ of the pull; `personal` whether there are personal models at all."""

        lam: NotNegative = 1.0
        personal: bool = True

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """FedAvg's answer; then a round of training for v, which is remembered and never sent."""
        answer = yield from super().answer(ctx, site, request, memory)
        if not self.settings.personal:
            return answer
        received = self.assemble(ctx, site, request, memory)
        fit = self.personal_fit(Visit(ctx, site, request, received, memory))
        fitted = yield fit
        kept = State({"personal": fitted.weights}) if fitted.trained_on else memory
        return replace(answer, memory=kept, trained=single(fit.spec, fitted.weights))

    def personal_fit(self, visit: Visit) -> Fit:
        """The personal objective from the site's own v, or from what it received where it has none yet."""
        own: Weights = dict(visit.memory.groups.get("personal", visit.received))
        pull = Proximal(self.settings.lam, visit.received) if self.settings.lam > 0 else Objective()
        fit = self.fit(visit, own)
        return replace(fit, label=f"{fit.label}, personal", objective=pull)

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """v; the shared model where there is none."""
        own = memory.groups.get("personal")
        if own is not None:
            return single(ctx.study.spec(site.name), dict(own))
        return (yield from super().personal(ctx, site, delivered, memory))
