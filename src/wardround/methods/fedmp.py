"""`fedmp`: Zhou et al., FedMP: Tackling Medical Feature Heterogeneity in Federated Learning, 2025.

FedAvg with two more terms at the sites, from the second exchange on. Stochastic feature manifold completion (SFMC,
Eq. 5): embeddings of other sites' images run through the rest of the network and its head, with cross-entropy.
Class-prototype guided manifold alignment (cPGMA, Eq. 6 to 8): the site's own embeddings are pulled towards their
class's prototype, a mean over all sites. Eq. 1 scales both terms to the local loss (`learn/manifold.py`).

**Eq. 1 is mended.** The alignment loss (Eq. 8) is a cosine with a minus sign, so the weight printed, l_local / l, is
negative and would push embeddings away from their prototypes. Here it is l_local / max(|l|, 1e-6); `weights =
"literal"` takes the sign as printed, `"fixed"` takes the terms as they are.

What the paper leaves open, and what is done here:
- Embeddings are those of `stage` (from 1; the last is pooled). The default is the last: Tables 1, 2 and 4 agree on it.
  Embeddings of other sites are constants, so SFMC trains what comes after the stage; all of them are in every step.
- A site sends the embeddings of all its training images (at most `upload`), taken in one pass after training and not
  while weights still move. The coordinator keeps each site's latest and draws `download` of the others' for each site
  it asks; 100 is what Table 4's bytes come to.
- Moving averages (Eq. 6 at the site, Eq. 7 at the coordinator) are taken once a round; μ is the new value's weight.
  A first observation is taken as it is. Eq. 7's weights are the sites' images, over those that have the class.
- A class that no site has shown has no prototype: a note names it, and its images are not aligned.
- The optimiser is the study's. The paper's: Adam, 1e-4, weight decay 5e-4, batch 64; epochs and rounds are not stated.

Batch norm: averaged as FedAvg does; where other sites' embeddings run through it, it applies the running statistics and
does not learn from them. With `sfmc` and `cpgma` off this is FedAvg bit for bit, and nothing more travels.

What leaves a site beside the model: **one embedding with its label per image**. The paper's own attack (Table 5)
rebuilds images from embeddings, the better the earlier the stage, and a random sample of them goes to other sites. With
`sfmc` off only class means leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput
from wardround.exchange.bundle import LABEL_COUNTS, SIZE, Bundle
from wardround.exchange.payload import Group, Payload
from wardround.learn.embeddings import Embeddings, checked_embeddings, sample
from wardround.learn.fit import Fit, Fitted, Objective
from wardround.learn.manifold import Manifold, Scaling, Weighting
from wardround.learn.prototypes import Prototypes, class_means, weighted_mean
from wardround.learn.stages import stage_features, stage_name, stage_width
from wardround.methods.base import Answer, Context, Work
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.settings import Count, Frozen, NotNegative
from wardround.study import Study

EMBEDDINGS, PROTOTYPES = "embeddings", "prototypes"  # groups of a bundle
BANK, BANK_LABELS = "bank", "bank_labels"  # groups of the coordinator's state: every site's latest embeddings

NewShare = Annotated[float, Field(gt=0, le=1)]


class FedMP(Averaging):
    """FedAvg whose sites see one another's embeddings and align their own to common prototypes."""

    name = "fedmp"
    paper = "Zhou et al., FedMP, 2025"
    summary = "FedAvg with other sites' embeddings at the head, and embeddings pulled to common class prototypes"

    class Settings(Frozen):
        """Defaults are the paper's, and where it is silent what its Table 4 comes to."""

        sfmc: bool = True
        cpgma: bool = True
        stage: Count | None = None  # whose embeddings are shared, from 1; None: the last, pooled
        upload: Count = 100_000  # embeddings a site sends at most; of more images than that, a random choice
        download: Count = 100  # embeddings of other sites that a site gets
        mu_client: NewShare = 0.5
        mu_server: NewShare = 0.7
        class_counts: bool = False  # a site's weight in a prototype: its images of the class, not all its images
        weights: Scaling = "mended"
        sfmc_weight: NotNegative = 1.0  # a further factor of the term
        cpgma_weight: NotNegative = 1.0

    def exchanges(self, ctx: Context) -> bool:
        """Whether embeddings and prototypes go up in this round."""
        return True

    def check(self, study: Study) -> None:
        """One architecture, and one that has the stage."""
        super().check(study)
        self._stage(study)

    # What travels -----------------------------------------------------------------------------------------------------

    def payload(self, study: Study, site: str) -> Payload:
        """As FedAvg's; but other sites see embeddings."""
        declared = super().payload(study, site)
        seen_by = "the coordinator; random samples of the embeddings, with labels, by every other site"
        return replace(declared, seen_by=seen_by) if self.settings.sfmc else declared

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """How many images; every image's embedding; class means."""
        embeddings = (
            f"one feature vector and the label of every training image (at most {self.settings.upload:,}). It is no "
            "image, but whoever has the network and similar images can rebuild an image's likeness from it, the better "
            "the earlier the stage. Random ones are handed to other sites"
        )
        means = "this site's mean feature vector of each class it has: an image's own where it has one of that class"
        groups = (*super().more_up_groups(study), *self._declared(study, self.settings.upload, embeddings, means))
        if not (self.settings.cpgma and self.settings.class_counts):
            return groups
        classes = len(study.classes)
        counts, words = {"counts": ((classes,), "int64")}, "how many images of each class the site has"
        return (*groups, Group(LABEL_COUNTS, words, 8 * classes, counts, occasional=True))

    def more_down_groups(self, study: Study) -> tuple[Group, ...]:
        """Some of the other sites' embeddings, and the prototypes."""
        embeddings = f"at most {self.settings.download:,} feature vectors of other sites' images, with their labels"
        means = "the mean feature vector of each class over all sites"
        return self._declared(study, self.settings.download, embeddings, means)

    def _declared(self, study: Study, count: int, embeddings: str, means: str) -> tuple[Group, ...]:
        classes, width = len(study.classes), self._width(study)
        groups = []
        if self.settings.sfmc:
            groups.append(Group(EMBEDDINGS, embeddings, count * (4 * width + 8)))
        if self.settings.cpgma:
            tensors = {"means": ((classes, width), "float32"), "known": ((classes,), "bool")}
            groups.append(Group(PROTOTYPES, means, classes * (4 * width + 1), tensors, occasional=True))
        return tuple(groups)

    # At the site ------------------------------------------------------------------------------------------------------

    def objective(self, visit: Visit) -> Objective:
        """Both terms, as far as something for them came: cross-entropy alone in the first round."""
        study, request, s = visit.ctx.study, visit.request, self.settings
        external = self._embeddings(study, request) if EMBEDDINGS in request.groups else None
        prototypes = _prototypes(request) if PROTOTYPES in request.groups else None
        if external is None and prototypes is None:
            return Objective()
        weighting = Weighting(s.weights, s.sfmc_weight, s.cpgma_weight)
        return Manifold(study.common_spec, self._stage(study), external, prototypes, weighting)

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """What the trained network makes of this site's images; of none where it was too small to train."""
        up = super().more_up(visit, fit, fitted)
        ctx, study, s = visit.ctx, visit.ctx.study, self.settings
        if not self.exchanges(ctx) or not (s.sfmc or s.cpgma):
            return up
        images, labels = fit.data.images[: fitted.trained_on], fit.data.labels[: fitted.trained_on].cpu()
        stage, precision, classes = self._stage(study), fit.recipe.precision, len(study.classes)
        features = stage_features(fit.spec, fitted.weights, images, stage, ctx.device.torch, precision)
        if s.sfmc:
            found, draw = Embeddings(features, labels), ctx.streams.torch("fedmp-upload", visit.site.name, ctx.round)
            up[EMBEDDINGS] = (sample([found], s.upload, draw) or found).tensors()
        if s.cpgma:
            before = self._kept(study, visit.memory)
            up[PROTOTYPES] = before.moved(class_means(features, labels, classes), s.mu_client).tensors()
        if s.cpgma and s.class_counts:
            up[LABEL_COUNTS] = {"counts": torch.bincount(labels, minlength=classes)}
        return up

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """FedAvg's; the site keeps the class means that it sent, for the moving average."""
        answer = yield from super().answer(ctx, site, request, memory)
        sent = answer.bundle.group(PROTOTYPES)
        return replace(answer, memory=State({PROTOTYPES: sent})) if sent else answer

    # At the coordinator -----------------------------------------------------------------------------------------------

    def more_down(self, ctx: Context, site: str, state: State) -> dict[str, dict[str, Tensor]]:
        """Embeddings of the other sites, never its own, and the prototypes, once there are some."""
        down: dict[str, dict[str, Tensor]] = {}
        features, labels = state.groups.get(BANK, {}), state.groups.get(BANK_LABELS, {})
        others = [Embeddings(features[name], labels[name]) for name in sorted(features) if name != site]
        drawn = sample(others, self.settings.download, ctx.streams.torch("fedmp-download", site, ctx.round))
        if drawn is not None:
            down[EMBEDDINGS] = drawn.tensors()
        if PROTOTYPES in state.groups:
            down[PROTOTYPES] = dict(state.groups[PROTOTYPES])
        return down

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """The average, the bank with the new embeddings in it, and the moved prototypes."""
        for averaged in super().absorb(ctx, state, answers):
            groups = dict(averaged.groups)
            if self.settings.sfmc:
                new = {site: self._embeddings(ctx.study, answers[site]) for site in sorted(answers)}
                groups[BANK] = {**groups.get(BANK, {}), **{site: found.features for site, found in new.items()}}
                groups[BANK_LABELS] = {**groups.get(BANK_LABELS, {}), **{site: e.labels for site, e in new.items()}}
            if self.settings.cpgma:
                groups[PROTOTYPES] = self._moved(ctx, state, answers).tensors()
            yield State(groups, averaged.facts)

    def _moved(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Prototypes:
        """Eq. 7, and a note that names the classes nobody has shown."""
        sent = (answers[site] for site in sorted(answers))
        new = weighted_mean((_prototypes(answer), self._class_weights(answer)) for answer in sent)
        after = self._kept(ctx.study, state).moved(new, self.settings.mu_server)
        unseen = [name for name, known in zip(ctx.study.classes, after.known.tolist(), strict=True) if not known]
        if unseen:
            ctx.note(
                f"no site asked up to round {ctx.round + 1} has images of {', '.join(unseen)}: there is no prototype, "
                "and such images are not aligned"
            )
        return after

    def _class_weights(self, answer: Bundle) -> Tensor:
        """A site's weight in each class's prototype."""
        if not self.settings.class_counts:
            return answer.group(SIZE)["images"].expand(len(answer.group(PROTOTYPES)["known"]))
        counts = answer.group(LABEL_COUNTS).get("counts")
        if counts is None or int(counts.min()) < 0:
            raise BadInput(f"{answer.envelope}: its label counts are missing or below 0")
        return counts

    # Small things -----------------------------------------------------------------------------------------------------

    def _stage(self, study: Study) -> str:
        return stage_name(study.common_spec, self.settings.stage)

    def _width(self, study: Study) -> int:
        return stage_width(study.common_spec, self._stage(study))

    def _kept(self, study: Study, state: State) -> Prototypes:
        """The prototypes in a state or a memory."""
        kept = state.groups.get(PROTOTYPES)
        return Prototypes.of(kept) if kept else Prototypes.none(len(study.classes), self._width(study))

    def _embeddings(self, study: Study, bundle: Bundle) -> Embeddings:
        width, classes = self._width(study), len(study.classes)
        return checked_embeddings(bundle.group(EMBEDDINGS), str(bundle.envelope), width, classes)


def _prototypes(bundle: Bundle) -> Prototypes:
    """Class means that came from outside; their shapes are declared, and checked before."""
    sent = bundle.group(PROTOTYPES)
    if sent.keys() != {"means", "known"}:
        raise BadInput(f"{bundle.envelope} lacks class prototypes, their means and which are known")
    if not bool(torch.isfinite(sent["means"]).all()):
        raise BadInput(f"{bundle.envelope}: its class prototypes hold NaN or infinite values")
    return Prototypes.of(sent)
