"""`consult-distilled`: the panel of `consult` in one network, distilled without data. Our own method; no paper has it.

Sites send what they do for `consult`, but only the coordinator sees it: a site gets one network home, not everybody's.
A generator (`synthesis/generator.py`) makes images from random codes and a class. In each epoch (`panel_epochs.py`) it
takes steps down

    L = mean_c Σ_k W_kc·CE(z_k(x) − log π_k, c) + λ·mean_k Σ_l ‖μ_l(x) − μ_kl‖ + ‖σ²_l(x) − σ²_kl‖

with a class asked of the models that have seen it, and every model k shown the mix of classes that its site had
(`synthesis/deal.py`): its batch-norm statistics are of that mix. Then the student takes steps on new images of it,
equally many of each class, cropped and flipped, towards the panel's probabilities, T²·KL, towards seeing what each
model sees (`synthesis/features.py`) and towards knowing how the panel's votes fall (`synthesis/tally.py`). It begins as
one of the models, which has seen real images. The generator goes on from epoch to epoch; the student's learning rate
falls along a cosine, and what goes home is the mean of the students of the last epochs (`averaged` is their share):
each has learned from images a little different.

At the site the student meets real images for the first time, and it is offered in three forms: as it came; with
batch-norm statistics taken anew (`retake`), of the classes that the site has seen from its own images, of the others
from made ones, equally many of each; and then taught on the same images what the site knows (`home_lesson.py`,
`tune_epochs`), keeping what it thinks of classes that the site has not seen. Then as with `consult`: the site's prior,
tempered, its validation images the judge, its own model the bar; the form that needs the least is taken, and of those
that need equally little the one that is most often right. A site begins with none of its prior here: the lesson has
taken from classes that it has not seen already. What the panel expects of all sites together the student has
learned, so it stays, and the site's prior comes on top. Where no prior makes any form as good as the site's own model,
it is as a rule the site's own classes that the student confuses; and where one does only if classes are expected much
less, these may be lost. There each form and the site's own model are also heard together (`with_own`), as a panel in
which the student alone tells what the site has not seen, or as a chain, P(c) = P(C)·P_own(c | C) for the classes C that
the site has seen, with P the student's; and what needs the least is taken. Two networks are deployed then, and the
site's own alone where even that is not enough.

What leaks: the synthetic images go to every site. They are made from all models and resemble their training images as
far as batch-norm statistics and class outputs do; `wardround audit` measures it. `replayed = 0` sends none, and the
student stays as it came. It descends from one site's model, so what that remembers of its images may be left in it;
`begin = "random"` avoids it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.data.imageset import ImageSet
from wardround.errors import SiteDiverged
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group, Payload
from wardround.learn.fit import Fit, Teacher
from wardround.learn.pairs import harmonic
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member, Predictor, single
from wardround.learn.statistics import even_parts, retaken
from wardround.methods.base import Answer, Context, Work, join_groups
from wardround.methods.class_ensemble import trained_on
from wardround.methods.consult import ConsultSettings, panel_of, voiced
from wardround.methods.distilled import Distilled, Epochs, Sized, check_synthesis
from wardround.methods.home_lesson import HomeLesson
from wardround.methods.oneshot import logits_of, own_model, remembering, trained_models
from wardround.methods.panel_epochs import SYNTHETIC, PanelEpochs
from wardround.methods.personal_prior import Judge, Offer, accuracy
from wardround.methods.seen import counts_group, seen_by_sites, told, untrained
from wardround.methods.state import State
from wardround.methods.trust import log_shares, plausible
from wardround.models import Weights
from wardround.settings import Count, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis.student import Student

SEEN = 5  # images from which on a class is the site's own
LOUDEST = 64.0  # times that the votes of a site's own model may count beside the student's
LEAST, MOST = 16, 1024  # images of each class that the student is shown at the site
RETAKEN, TAUGHT = ", its batch-norm statistics taken anew,", ", taught what the site has seen,"


class ConsultDistilled(Distilled):
    """One network that answers as the panel would."""

    name = "consult-distilled"
    paper = "ours; docs/consult.md"
    summary = "the panel of `consult` distilled into one network on synthetic images, then adapted by each site"

    class Settings(ConsultSettings, Sized):
        """Those of `consult`, of the generator, of the distillation, and how much is replayed at the site."""

        SIZED: ClassVar[dict[str, tuple[int, int]]] = {"batch": (256, 50)}

        epochs: Count = 16
        shots: Count | None = None  # exchanges with the sites; None: as many as `rounds` says where set, else one
        batch: Annotated[int, Field(ge=2)] | None = None  # None: 256, and 50 for images above 128 pixels
        codes: Count = 100  # random numbers that an image is made from
        generator_steps: Count = 300
        generator_lr: Positive = 1e-3
        bn_weight: NotNegative = 1.0  # λ
        kd_steps: Count = 500
        begin: Literal["member", "random"] = "member"  # the student before its first step
        feature_weight: NotNegative = 3.0  # of G
        tally_weight: NotNegative = 4.0  # of D
        temperature: Positive = 4.0  # of the distillation
        lr: Positive = 0.02
        momentum: Share = 0.9
        weight_decay: NotNegative = 5e-4
        averaged: Annotated[float, Field(ge=0, le=1)] = 0.25  # of the epochs, those at the end; 0: the last one alone
        replayed: Annotated[int, Field(ge=0)] = 512  # synthetic images that go home
        retake: bool = True  # batch-norm statistics at the site
        tune_epochs: Annotated[int, Field(ge=0)] = 20  # of the lesson at the site
        tune_lr: Positive = 1e-2
        tune_share: Share = 0.5  # κ
        least_prior: Share = 0.0  # a student that was taught by its site leans to what the site has already
        with_own: bool = True  # where the student alone is not as good as the site's model, or hardly, both are heard

    def check(self, study: Study) -> None:
        """Every teacher must have batch-norm statistics, and a batch must hold every class."""
        check_synthesis(self.name, study, self.settings.at(study.size).batch)
        self.check_shots(study)

    def payload(self, study: Study, site: str) -> Payload:
        """Up a network and counts, home the student and synthetic images."""
        found = super().payload(study, site)
        up = (*found.up, *counts_group(study, self.settings.counts))
        home = (*found.home, *self._synthetic_group(study))
        return replace(found, up=up, home=home)

    def _synthetic_group(self, study: Study) -> tuple[Group, ...]:
        n = self.settings.replayed
        shape = (n, *study.image_shape)
        tensors = {"images": (shape, "uint8"), "labels": ((n,), "int64")}
        what = "images that the coordinator made from all models, with the classes that the panel sees in them"
        return (Group(SYNTHETIC, what, math.prod(shape) + 8 * n, tensors),) if n else ()

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train, send the network and the counts of what it was trained on, and remember the network."""
        found = yield from super().answer(ctx, site, request, memory)
        counts = trained_on(site, found.bundle)
        groups = {**found.bundle.groups, **told(self.settings.counts, counts)}
        return remembering(Answer(ctx.bundle("answer", site.name, groups), memory))

    # At the coordinator -----------------------------------------------------------------------------------------------

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """As any distillation, with what each site has seen."""
        models = trained_models(ctx, answers)
        for site in untrained(ctx, models):  # nor does it teach
            del models[site]
        self.counts = seen_by_sites(ctx, State(models), answers)
        yield from super().absorb(ctx, state, {site: answers[site] for site in models})

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """The generator's steps, then the student's on what it makes."""
        counts = self.counts_of_members()
        panel = panel_of(tuple(members), counts, self.settings)
        work = PanelEpochs(ctx, self.settings.at(ctx.study.size), state, panel, counts, student, self.watch)
        self.trail = work.trail
        yield from self.through(ctx, state, work, student, begun)

    def begins_as(self, ctx: Context, members: list[Member]) -> Weights:
        """The member that has seen the most pairs of classes, max_k Σ_cd log(1 + h_kcd); a new network where none fits.

        It has seen real images, and what it sees in them is kept.
        """
        fits = [place for place, member in enumerate(members) if member.spec == ctx.study.student_spec]
        if self.settings.begin == "random" or not fits:
            return super().begins_as(ctx, members)
        known = harmonic(plausible(self.counts_of_members().double())).log1p().sum(dim=(1, 2))
        return members[max(fits, key=lambda place: float(known[place]))].weights

    def counts_of_members(self) -> Tensor:
        """What each has seen (members, classes), in the order of the members."""
        return torch.stack([self.counts[site] for site in sorted(self.counts)])

    def rate(self, epoch: int) -> float:
        """Along a cosine."""
        return float(self.settings.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.settings.epochs)))

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """The student and some synthetic images to every site."""
        synthetic = {SYNTHETIC: dict(state.groups[SYNTHETIC])} if SYNTHETIC in state.groups else {}
        return {
            site: ctx.bundle("delivery", site, {**bundle.groups, **synthetic})
            for site, bundle in super().deliver(ctx, state).items()
        }

    # At the site ------------------------------------------------------------------------------------------------------

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The student in the form that fits the site, with some of its prior, or the site's own model."""
        forms = yield from self._forms(ctx, site, delivered)
        judge = Judge(site, self.settings.prior, self.settings.calibrate, self.settings.least_prior)
        if len(site.val) == 0:
            (form, how), *_ = forms
            predictor, words = judge.unjudged(Offer(form, torch.empty(0), how))
            ctx.note(f"{site.name} {words}")
            return predictor
        own = own_model(ctx, site, memory)
        bar = None if own is None else (own, logits_of(ctx, own, site.val.images))
        if bar is not None and not bool(bar[1].isfinite().all()):
            bar = None  # a model that diverged is no bar
        offers = [self._offer(ctx, site, form, how) for form, how in forms]
        chosen, words, _ = judge.choose(offers, bar, self._with_own(offers, bar, site))
        ctx.note(f"{site.name} {words}{self._beside(offers, site)}")
        return chosen

    def _with_own(self, offers: Sequence[Offer], own: tuple[Member, Tensor] | None, site: Site) -> list[Offer]:
        """Each form and the site's own model as the panel of `consult` would have them, the latter ever louder.

        The student counts as if it had seen as many images of every class as the site of its commonest. Then as a
        chain: the student tells what the site has not seen, and its own model all that it has.
        """
        if own is None or not self.settings.with_own or len(site.train) == 0:
            return []
        counts = site.train.counts().cpu()
        seen = torch.stack([torch.full_like(counts, int(counts.max())), counts])
        how = self.settings.model_copy(update={"federation": 0.0})  # the student has learned it
        found = []
        for offer in offers:
            panel = panel_of((*offer.predictor.members, own[0]), seen, how)
            said, words = [offer.scores.float(), own[1]], f"{offer.how.rstrip(',')}, heard with its own model"
            for each in voiced(panel, said, 1, LOUDEST):
                found.append(each._replace(how=f"{words}{each.how or ','}"))
            chain = chain_of(offer.predictor.members[0], own[0], counts)
            told_apart = f"{offer.how.rstrip(',')}, its own model telling apart what it has seen,"
            found.append(Offer(chain, chain.combined(said, len(own[1])).double(), told_apart, chain.familiarity(said)))
        return found

    def _beside(self, offers: Sequence[Offer], site: Site) -> str:
        """How often each form of the student is right before any prior, so that one sees what it was chosen from."""
        if self.settings.prior is not None or len(offers) == 1:
            return ""
        labels = site.val.labels.cpu()
        found = [f"{offer.how.strip(', ') or 'as it came'} {accuracy(offer.scores, labels):.1%}" for offer in offers]
        return f"; the student before any prior: {', '.join(found)}"

    def _offer(self, ctx: Context, site: Site, form: Predictor, how: str) -> Offer:
        said = logits_of(ctx, form.members[0], site.val.images)
        return Offer(form, said.double(), how, form.familiarity([said]))

    def _forms(self, ctx: Context, site: Site, delivered: Bundle) -> Work[list[tuple[Predictor, str]]]:
        """The student as it came, and before it the forms that it takes at the site, the last one first."""
        forms = [(single(ctx.study.student_spec, join_groups(delivered)), "")]
        seen = site.train.counts().cpu() >= SEEN
        mix = self._mix(ctx, site, seen, delivered.group(SYNTHETIC))
        if mix is None:
            return forms
        if self.settings.retake:
            forms.insert(0, (self._retaken(ctx, forms[0][0], mix), RETAKEN))
        if self.settings.tune_epochs and bool(seen.any()):
            try:
                taught = yield from self._taught(ctx, site, forms[0][0], mix, seen)
                forms.insert(0, (taught, TAUGHT))
            except SiteDiverged:
                ctx.note(f"the lesson at {site.name} diverged and is left out; use a smaller tune_lr")
        return forms

    def _mix(self, ctx: Context, site: Site, seen: Tensor, synthetic: Mapping[str, Tensor]) -> ImageSet | None:
        """Equally many images of each class: the site's own of those it has seen, made ones of the others.

        As many as the site has of its commonest class, within limits. None where no images came home or the site has
        none: then there is nothing to meet.
        """
        if not synthetic or len(site.train) == 0:
            return None
        draws = ctx.streams.torch("at home", site.name)
        each = min(MOST, max(LEAST, int(site.train.counts().max())))
        own = evenly(site.train.labels.cpu(), seen, each, draws)
        made = evenly(synthetic["labels"].cpu(), ~seen, each, draws)
        if len(own) + len(made) < 2:
            return None
        order = torch.randperm(len(own) + len(made), generator=draws)
        images = torch.cat([_taken(site.train.images, own), _taken(synthetic["images"], made)])[order]
        labels = torch.cat([_taken(site.train.labels, own), _taken(synthetic["labels"], made)])[order]
        return ImageSet(images, labels, site.train.classes).to(site.train.images.device)

    def _retaken(self, ctx: Context, came: Predictor, mix: ImageSet) -> Predictor:
        """The student with statistics of real images as far as the site has them.

        Those of made images are near real ones, but not the same, and every layer adds to the difference. Those of the
        site's images alone would be of its own mix of classes, and the student is to know the others, too.
        """
        device, precision, (student,) = ctx.device.torch, ctx.study.settings.train.precision, came.members
        batches = (normalise(part.to(device)) for part in even_parts(mix.images))
        return single(student.spec, retaken(student.spec, student.weights, batches, device, precision))

    def _taught(self, ctx: Context, site: Site, shared: Predictor, mix: ImageSet, seen: Tensor) -> Work[Predictor]:
        """The student after a lesson on the site's images and made ones."""
        (student,), s = shared.members, self.settings
        recipe = replace(ctx.study.recipe(0, s.tune_epochs), lr=s.tune_lr, schedule="cosine", keep="last")
        fitted = yield Fit(
            label=f"{site.name}, at home",
            spec=student.spec,
            start=student.weights,
            data=mix,
            recipe=recipe,
            seed=ctx.streams.number("tune", site.name),
            objective=HomeLesson(seen, s.tune_share),
            teachers=(Teacher(student.spec, student.weights),),
        )
        return single(student.spec, fitted.weights)


def chain_of(student: Member, own: Member, counts: Tensor) -> Predictor:
    """The student, and for the classes that a site has seen its own model, whose shares are divided out."""
    trust = torch.stack([torch.ones(len(counts)), (counts >= SEEN).float()]).double()
    priors = torch.stack([torch.zeros(len(counts), dtype=torch.float64), log_shares(counts)])
    return Predictor(len(counts), (student, own), combine="chain", trust=trust, member_log_prior=priors)


def evenly(labels: Tensor, classes: Tensor, each: int, draws: torch.Generator) -> Tensor:
    """Where in `labels` to find `each` images of every class that is marked and there at all, drawn with repetition."""
    there = [torch.nonzero(labels == c).flatten() for c in torch.nonzero(classes).flatten().tolist()]
    found = [places[torch.randint(len(places), (each,), generator=draws)] for places in there if len(places)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _taken(images: Tensor, places: Tensor) -> Tensor:
    return images[places.to(images.device)].cpu()
