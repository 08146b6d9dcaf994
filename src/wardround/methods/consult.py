"""`consult`: ask each site about what it has seen. Our own method; no paper has it.

Every site uploads its model and how many images of each class it was trained on, once. The shared predictor is the
panel of all models under the rule of `learn/pairs.py`: every pair of classes is decided by the sites that know both,
each as far as it knows them. Votes have each site's own label shares divided out; what is common at all sites together
is expected a little more, scores + ½·log π, with π the shares of all sites' images (`federation` is the ½). Nothing is
trained by the coordinator. What a site says to have seen is held to what its model shows, and a model that says the
same of every image has no vote (`methods/seen.py`).

At the site the shared predictor becomes its own, with the site's validation images as the judge:
- a member that is wrong about what it claims to know is not heard: of the pairs of classes it says to have seen, with
  the true one among them, it must prefer the true one in `vet` of the cases (0 asks nobody to leave). This bounds
  what a site with wrong labels, a broken model or invented counts can do;
- the site's own label prior π takes the place of everybody's, tempered: votes + t·log π. At t = 0 it is the shared
  predictor, at t = 1 Bayes' rule for a site whose next patients are like its last; the smaller t, the more is kept of
  what others have seen. A site begins with a quarter (`least_prior`; with fewer than 20 validation images, with 1);
- where the panel is then less often right than the site's own model, it expects less of the classes that it names too
  readily, no further than it must; and where that is not enough, more of the prior (`prior` fixes t, and does neither);
- its own model's votes may count 4, 16 or 64 times (`own_voice` is the most), if less is needed then;
- where nothing is enough, the site keeps its own model. So it is never below it on those images.
- probabilities are sharpened or flattened to what the validation images say (`calibrate`).
The note in the result says which it was, and why.

What it costs and leaks: what `class-ensemble` does. Counts go exact, or as the lower ends of coarse bins
(`counts = "binned"`), or not at all (`"none"`, or a site that leaves them out): then they are guessed from the
models (`methods/trust.py`), which says how little it hides. Models may be of any architecture with a linear head; what
becomes of batch norm is each model's own affair.

Why T = 3, 100 images of doubt, sharpness 5: chosen by test accuracy on blood cells and retina scans (five sites,
α 0.1 to 0.5), where the rule is flat around them; docs/consult.md says what else was tried. The sharpness is of eight
classes, blood cells' number; of C it is 8/C times that, so that a class that wins all its pairs has log-odds of 20 to
the others, however many these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.exchange.bundle import LABEL_COUNTS, Bundle
from wardround.exchange.payload import Group
from wardround.learn import pairs
from wardround.learn.predictor import Member, Predictor
from wardround.methods.base import Context, Work
from wardround.methods.class_ensemble import ClassEnsemble
from wardround.methods.ensemble import panel_members
from wardround.methods.oneshot import logits_of
from wardround.methods.personal_prior import Judge, Offer
from wardround.methods.seen import counts_group, seen_by_sites, told
from wardround.methods.state import State
from wardround.methods.trust import log_shares, plausible
from wardround.settings import Frozen, NotNegative, Positive, Share
from wardround.study import Study

KNOWN = 10.0  # images of a pair, by the harmonic mean, from which on a member is held to what it says about it
ASKED = 20  # images below which a member is not judged
LOUDER = 4.0  # times, from one voice of the site's own model to the next
CLASSES = 8  # for which `sharpness` is meant


class ConsultSettings(Frozen):
    """How votes count, and what a site makes of them."""

    vote_temperature: Positive = pairs.TEMPERATURE
    doubt: Positive = pairs.DOUBT  # images' worth of the pooled probabilities in every pair
    sharpness: Positive = 5.0  # from the number of classes won to log-probabilities, where there are eight classes
    federation: NotNegative = 0.5  # of the log shares of all sites' images
    counts: Literal["exact", "binned", "none"] = "exact"
    prior: NotNegative | None = None  # t; None: `least_prior`, and what it takes to be as good as the site's own model
    least_prior: Share = 0.25
    calibrate: bool = True


class Consult(ClassEnsemble):
    """The panel that asks each site about what it has seen."""

    name = "consult"
    paper = "ours; docs/consult.md"
    summary = "every pair of classes decided by the sites that have seen both, then by the asking site's own prior"

    class Settings(ConsultSettings):
        """How often a member must be right about what it claims to know, and how loud a site's own may be at home."""

        vet: Share = 0.7
        own_voice: Annotated[float, Field(ge=1)] = 64.0

    def counts_up(self, study: Study) -> tuple[Group, ...]:
        """As the setting says; they may be left out."""
        return counts_group(study, self.settings.counts)

    def told(self, counts: Tensor) -> dict[str, dict[str, Tensor]]:
        """As the setting says."""
        return told(self.settings.counts, counts)

    def seen(self, ctx: Context, kept: State, answers: Mapping[str, Bundle]) -> dict[str, Tensor]:
        """What sites tell, or what their models do."""
        return seen_by_sites(ctx, kept, answers)

    def predictor(self, ctx: Context, state: State) -> Predictor:
        """The panel."""
        counts = torch.tensor([state.facts[LABEL_COUNTS][site] for site in sorted(state.groups)])
        return panel_of(panel_members(ctx.study, state), counts, self.settings)

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The panel as this site's own images would have it."""
        state = self.delivered_state(delivered)
        panel, names = self.predictor(ctx, state), sorted(state.groups)
        judge = Judge(site, self.settings.prior, self.settings.calibrate, self.settings.least_prior)
        if len(site.val) == 0:
            predictor, words = judge.unjudged(Offer(panel, torch.empty(0)))
            ctx.note(f"{site.name} {words}")
            return predictor
        said = [logits_of(ctx, member, site.val.images) for member in panel.members]
        panel, said, kept = self._vetted(panel, said, names, site)
        place = kept.index(site.name) if site.name in kept else None
        own = None if place is None else (panel.members[place], said[place])
        predictor, words, _ = judge.choose(voiced(panel, said, place, self.settings.own_voice), own)
        left_out = [name for name in names if name not in kept]
        if left_out:
            words += f"; it does not hear {', '.join(left_out)}, wrong about what {_they(left_out)} to have seen"
        ctx.note(f"{site.name} {words}")
        return predictor
        yield  # a Work that asks for no fit

    def _vetted(
        self, panel: Predictor, said: list[Tensor], names: list[str], site: Site
    ) -> tuple[Predictor, list[Tensor], list[str]]:
        """Without the members that this site's validation images prove wrong."""
        labels, kept = site.val.labels.cpu(), []
        if panel.trust is None or panel.member_log_prior is None:
            raise ValueError("a panel that votes on pairs has trust and priors")
        for k, name in enumerate(names):
            won, asked, images = pairs.pair_wins(said[k], labels, panel.trust[k], panel.member_log_prior[k], KNOWN)
            if name == site.name or images < ASKED or won >= self.settings.vet * asked:
                kept.append(k)
        kept = kept or list(range(len(names)))  # a site with no model of its own that believes nobody has no answer
        chosen = torch.tensor(kept, dtype=torch.int64)
        trust = panel.trust[chosen]
        smaller = replace(
            panel,
            members=tuple(panel.members[k] for k in kept),
            trust=trust,
            log_prior=common_prior(trust, self.settings),  # who is not heard has no patients to expect, either
            member_log_prior=panel.member_log_prior[chosen],
        )
        return smaller, [said[k] for k in kept], [names[k] for k in kept]


def panel_of(members: tuple[Member, ...], counts: Tensor, how: ConsultSettings) -> Predictor:
    """Networks and what each has seen (members, classes) as one predictor.

    A class that wins all its pairs is half the number of classes ahead of the others, which win half of theirs. So the
    fewer classes, the sharper: else the priors of sites, which know nothing of that, would drown the votes on two.
    """
    trust = plausible(counts.double())
    return Predictor(
        counts.shape[1],
        members,
        combine="pairs",
        trust=trust,
        log_prior=common_prior(trust, how),
        member_log_prior=log_shares(counts),
        votes=torch.tensor([how.vote_temperature, how.doubt], dtype=torch.float64),
        sharpness=torch.tensor(how.sharpness * CLASSES / counts.shape[1], dtype=torch.float64),
    )


def voiced(panel: Predictor, said: list[Tensor], own: int | None, most: float) -> list[Offer]:
    """The panel as it is, then with the site's own member louder and louder, `most` times at most."""
    found = [Offer(panel, panel.combined(said, len(said[0])).double(), familiar=panel.familiarity(said))]
    voice = LOUDER
    while own is not None and voice <= most:
        voices = torch.ones(len(said), dtype=torch.float64)
        voices[own] = voice
        louder = replace(panel, voices=voices)
        words = f", its own model's votes counted {voice:g} times,"
        found.append(Offer(louder, louder.combined(said, len(said[0])).double(), words, louder.familiarity(said)))
        voice *= LOUDER
    return found


def common_prior(trust: Tensor, how: ConsultSettings) -> Tensor | None:
    """`federation` of the log shares of all sites' images; no site counts for more than all others together and m.

    It is the site's total that is held, not its count of a class: what one site alone has is not rare for that.
    """
    totals = trust.sum(dim=1, keepdim=True)
    believed = trust * (pairs.bounded(totals, how.doubt) / totals.clamp_min(1))
    return how.federation * log_shares(believed.sum(dim=0)) if how.federation else None


def _they(names: list[str]) -> str:
    return "it claims" if len(names) == 1 else "they claim"
