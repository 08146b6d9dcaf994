"""`fedbabu`: Oh, Kim and Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.

Algorithm 1: the head is drawn once and never trained while sites talk; they train, send and average the body alone. A
head that differs from site to site is what the paper finds to spoil the shared body. At the end every site fine-tunes
the whole network, head and body, on its own images, and deploys that.

What the paper leaves open, and what is done here:
- The head is the study's common initial one at every site, also where `init = "own"` draws other bodies. It is frozen
  by name, so that neither weight decay nor momentum moves it (a learning rate of 0 would not be enough), and it does
  not travel: a mean of equal heads differs from them in the last bit.
- Fine-tuning: 5 epochs with momentum 0.9 and no weight decay, at a tenth of the rate after half of the epochs and a
  hundredth after three quarters. The authors' rate is 0.1, which is what their training begins with; so here it is
  `train.lr`, unless `finetune_lr` is set. Optimiser, batch size and augmentation are those of training.
- Weights of the average: by images; the authors' code averages sites alike.
- "Local accuracy" in a round is that of the site's trained body under the common head: fine-tuning belongs to the end,
  and a comparison per round would otherwise measure work that no other method is given.

Batch norm: its layers are part of the body, treated as in FedAvg; fine-tuning moves a site's own copy. With
`train_head = true` and `finetune_epochs = 0` this is FedAvg bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from wardround.data.federation import Site
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import Fit
from wardround.learn.predictor import Predictor, single
from wardround.methods.base import Context, Work, join_groups
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.models import Weights, spec_layout
from wardround.settings import Epochs, Frozen, Positive
from wardround.study import Study

MOMENTUM, MILESTONES, GAMMA = 0.9, (0.5, 0.75), 0.1  # of fine-tuning, in the authors' code


class FedBABU(Averaging):
    """FedAvg of the body under a head that nobody trains, and fine-tuning at the end."""

    name = "fedbabu"
    paper = "Oh et al., ICLR 2022"
    summary = "FedAvg of the body under a common frozen head; sites fine-tune the whole network at the end"

    class Settings(Frozen):
        """How long and how fast to fine-tune; `train_head` trains and shares the head, too."""

        finetune_epochs: Epochs = 5
        finetune_lr: Positive | None = None  # None: train.lr
        train_head: bool = False

    def frozen(self, study: Study) -> frozenset[str]:
        """The head."""
        return frozenset() if self.settings.train_head else spec_layout(study.common_spec).head

    def shared(self, study: Study) -> frozenset[str] | None:
        """The body."""
        return (
            None if self.settings.train_head else frozenset(spec_layout(study.common_spec).names) - self.frozen(study)
        )

    def assemble(self, ctx: Context, site: Site, bundle: Bundle, memory: State) -> Weights:
        """The body that came, under the common head, which a site keeps once it has trained."""
        if self.settings.train_head:
            return super().assemble(ctx, site, bundle, memory)
        return {**(memory.groups.get("own") or ctx.study.initial()), **join_groups(bundle)}

    def prepare(self, visit: Visit) -> Work[Weights]:
        """Where a site draws its own initial weights, the head is still the common one."""
        start = yield from super().prepare(visit)
        common = self.assemble(visit.ctx, visit.site, visit.request, visit.memory)
        return {**start, **{name: common[name] for name in self.frozen(visit.ctx.study)}}

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The whole network, fine-tuned."""
        start = self.assemble(ctx, site, delivered, memory)
        if self.settings.finetune_epochs == 0:
            return single(ctx.study.spec(site.name), start)
        fitted = yield self.finetuning(ctx, site, start)
        return single(ctx.study.spec(site.name), fitted.weights)

    def finetuning(self, ctx: Context, site: Site, start: Weights) -> Fit:
        """A fit in which nothing is frozen."""
        recipe = replace(
            ctx.study.recipe(0, self.settings.finetune_epochs),
            lr=self.settings.finetune_lr or ctx.study.settings.train.lr,
            momentum=MOMENTUM,
            weight_decay=0.0,
            schedule="step",
            milestones=MILESTONES,
            gamma=GAMMA,
        )
        return Fit(
            label=f"{site.name}, fine-tuning",
            spec=ctx.study.spec(site.name),
            start=start,
            data=site.train,
            validation=site.val,
            recipe=recipe,
            seed=ctx.streams.number("fine-tuning", site.name),
        )
