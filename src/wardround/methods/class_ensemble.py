"""`class-ensemble`: every site's model is kept, and its vote on a class counts by its share of that class's images.

The score of class c is Σ_k W_kc·p_k(c|x), renormalised over classes, with p_k the softmax of site k's model and
W_kc = n_kc / Σ_j n_jc, where n_kc counts the images of class c that site k trained on. Where no site has any, all
weights are equal. With `divide_prior` each site's label prior is divided out first: p_k = softmax(z_k − log π_k), π_k
from its counts + 1/2, so that a model that says little of its rare classes is heard on them.

Why: under label skew a model says nothing of worth about classes it never saw, and the mean of logits listens to it
all the same. This is the bar for a coordinator that knows who saw what.

What it costs and leaks: what `ensemble` does, and one integer per class from every site, seen by the coordinator and,
as every site combines the models itself, by every other site. The counts are the make-up of a site's training images;
a count of 1 is about one patient. A site too small to train sends zeros. No paper prints this bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import LABEL_COUNTS, SIZE, Bundle
from wardround.exchange.payload import Group, Payload
from wardround.learn.predictor import Predictor
from wardround.methods.base import Answer, Context, Work
from wardround.methods.ensemble import Panel, panel_members
from wardround.methods.state import State
from wardround.methods.trust import log_shares
from wardround.settings import Frozen
from wardround.study import Study


class ClassEnsemble(Panel):
    """The sites' probabilities, weighed per class by who has seen how much of it."""

    name = "class-ensemble"
    paper = "-"
    summary = "every site's model kept, each vote counts by the site's share of a class's images"

    class Settings(Frozen):
        """`divide_prior` takes each site's label prior out of its model's probabilities."""

        divide_prior: bool = False

    def payload(self, study: Study, site: str) -> Payload:
        """What `ensemble` sends, and label counts with every model."""
        panel = super().payload(study, site)
        counts = ((len(study.classes),), "int64")
        size = 8 * len(study.classes)
        home = Group(
            LABEL_COUNTS,
            "how many images of each class every site trained on",
            size * len(study.sites),
            {f"{sender}/counts": counts for sender in study.sites},
            partial=True,
        )
        return replace(panel, up=(*panel.up, *self.counts_up(study)), home=(*panel.home, home))

    def counts_up(self, study: Study) -> tuple[Group, ...]:
        """What may leave of a site's counts."""
        counts = {"counts": ((len(study.classes),), "int64")}
        what = "how many images of each class the site trained on"
        return (Group(LABEL_COUNTS, what, 8 * len(study.classes), counts),)

    def told(self, counts: Tensor) -> dict[str, dict[str, Tensor]]:
        """What a site tells of its counts."""
        return {LABEL_COUNTS: {"counts": counts}}

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train alone, send the network and the counts of what it was trained on."""
        answer = yield from super().answer(ctx, site, request, memory)
        groups = {**answer.bundle.groups, **self.told(trained_on(site, answer.bundle))}
        return Answer(ctx.bundle("answer", site.name, groups), answer.memory)

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """Keep every usable model, and what its site has seen."""
        for kept in super().absorb(ctx, state, answers):
            yield with_counts(kept, self.seen(ctx, kept, answers))

    def seen(self, ctx: Context, kept: State, answers: Mapping[str, Bundle]) -> dict[str, Tensor]:
        """The counts of every site whose model is kept."""
        counts = {site: answers[site].group(LABEL_COUNTS)["counts"] for site in kept.groups}
        for site, found in counts.items():
            if int(found.min()) < 0:
                raise RunFailed(f"the label counts of {site} cannot be used: it sent a number below 0")
        return counts

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """All models and their sites' counts to all sites."""
        counts = {f"{site}/counts": torch.tensor(found) for site, found in state.facts[LABEL_COUNTS].items()}
        return {
            site: ctx.bundle("delivery", site, {**bundle.groups, LABEL_COUNTS: counts})
            for site, bundle in super().deliver(ctx, state).items()
        }

    def delivered_state(self, delivered: Bundle) -> State:
        """The models and the counts by their sites."""
        counts = {path.partition("/")[0]: found for path, found in delivered.group(LABEL_COUNTS).items()}
        found = super().delivered_state(delivered)
        if lacking := sorted(found.groups.keys() - counts.keys()):
            raise BadInput(f"the delivery has no label counts of {lacking[0]}; ask the coordinator for a whole one")
        return with_counts(found, counts)

    def predictor(self, ctx: Context, state: State) -> Predictor:
        """Trust (members, classes) is the counts themselves: the predictor normalises it over members."""
        counts = torch.tensor([state.facts[LABEL_COUNTS][site] for site in sorted(state.groups)]).double()
        return Predictor(
            len(ctx.study.classes),
            panel_members(ctx.study, state),
            combine="softmax",
            trust=torch.where(counts.sum(dim=0) > 0, counts, 1.0),
            member_log_prior=log_shares(counts) if self.settings.divide_prior else None,
        )


def trained_on(site: Site, answer: Bundle) -> Tensor:
    """How many images of each class the network in an answer was trained on; none where the site is too small."""
    counts = site.train.counts().cpu()
    return counts if int(answer.group(SIZE)["images"]) else torch.zeros_like(counts)


def with_counts(state: State, counts: Mapping[str, Tensor]) -> State:
    """Counts are facts: as a group they could have the name of a site."""
    return State(state.groups, {LABEL_COUNTS: {site: found.tolist() for site, found in counts.items()}})
