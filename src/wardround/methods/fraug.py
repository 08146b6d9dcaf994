"""`fraug`: Chen et al., FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation, 2023.

(ICCV 2023.) FedAvg whose sites add to each batch embeddings that were generated: by a generator G that all share and
that is averaged with the model, made fit for the site by a transformation R that never leaves it
(`learn/representation.py` has the losses). The share of the loss that generated embeddings have is
q = min(q_max, e^(γ(t − T))) in round t of T.

What is done here where the paper leaves a choice, or the public code has one per data set:
- Distances: MMD with Gaussian kernels for G (its PACS and Office-Home), squared ones for R (its PACS). a = b = 1.
- Embeddings that R's result is added to: this batch's, and as many class means (a moving average at the site, 0.3 for
  the new value). Labels for the latter are drawn from the site's classes: one that it never saw has no mean. G is
  trained under the batch's labels.
- G and R have one hidden layer each and no batch norm (the public code has some, with rules of its own for what of it
  is averaged); G's noise is half as wide as its embeddings. Both take plain SGD steps after each backward pass of the
  network. There is no interpolation between made and real embeddings (as on its Digits).
- Epochs are epochs; in the public code `local_epochs` counts batches.

Batch norm: parameters are averaged, running statistics and counters stay at the site, which always uses its own. With
`statistics = "averaged"` they go up, too, and their mean completes the shared model, which a site never uses; with
`"private"` there is no shared model to measure. There is no setting under which this is FedAvg.

What leaves a site: the model, and the generator. G is trained to be of a class without being like this site's
embeddings, but it was trained on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from wardround.errors import SiteDiverged
from wardround.exchange.bundle import COUNTERS, PARAMETERS, SIZE, STATISTICS, Bundle
from wardround.exchange.payload import Group
from wardround.learn.fit import Fit, Fitted, Objective
from wardround.learn.prototypes import Prototypes
from wardround.learn.representation import Augmented, Strengths, two_layers
from wardround.methods.base import Context
from wardround.methods.fedper import Fate, KeepsLayers
from wardround.methods.state import State
from wardround.methods.template import Visit, average
from wardround.models import spec_layout
from wardround.settings import Count, Frozen, NotNegative, Share
from wardround.study import Study

GENERATOR = "generator"  # of a bundle and of the coordinator's state
TRANSFORM, MEANS = "transform", "means"  # of a site's memory

Rate = Annotated[float, Field(gt=0, le=1e6)]


class FRAug(KeepsLayers):
    """FedAvg of the network and of a generator of embeddings."""

    name = "fraug"
    paper = "Chen et al., ICCV 2023"
    summary = "FedAvg whose heads also learn from embeddings of a shared generator, fitted to each site"

    class Settings(Frozen):
        """Values of the public code; where it has several, those of its PACS runs but for a."""

        q_max: Share = 0.5
        gamma: NotNegative = 0.01
        generator_distance: NotNegative = 1.0  # a
        transform_distance: NotNegative = 1.0  # b
        generator_lr: Rate = 0.05
        transform_lr: Rate = 0.05
        momentum: Share = 0.5  # of both
        means_momentum: Annotated[float, Field(gt=0, le=1)] = 0.3  # weight of a batch's class means
        noise: Count | None = None  # numbers that an embedding is made from; None: half as many as it has
        statistics: Fate = "averaged"

    def kept(self, study: Study) -> frozenset[str]:
        """Running statistics and counters."""
        layout = spec_layout(study.common_spec)
        return frozenset(layout.in_group(STATISTICS) + layout.in_group(COUNTERS))

    def averages_kept(self) -> bool:
        """As the settings say."""
        return bool(self.settings.statistics == "averaged")

    def share(self, ctx: Context) -> float:
        """The share q of a round, counted from 0."""
        return min(float(self.settings.q_max), math.exp(self.settings.gamma * (ctx.round - self.rounds(ctx.study))))

    # What travels -----------------------------------------------------------------------------------------------------

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """The generator, and how many images."""
        return (*super().more_up_groups(study), self._generator_group(study))

    def more_down_groups(self, study: Study) -> tuple[Group, ...]:
        """The averaged generator."""
        return (*super().more_down_groups(study), self._generator_group(study))

    def _generator_group(self, study: Study) -> Group:
        features, classes = spec_layout(study.common_spec).feature_size, len(study.classes)
        inputs = self._noise(features) + classes
        shapes = {"hidden.weight": (features, inputs), "hidden.bias": (features,)}
        shapes |= {"out.weight": (features, features), "out.bias": (features,)}
        size = 4 * sum(math.prod(shape) for shape in shapes.values())
        what = "a small network that makes embeddings of a class out of noise"
        return Group(GENERATOR, what, size, {name: (shape, "float32") for name, shape in shapes.items()})

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """The generator as this site trained it."""
        trained = _augmented(fit)
        trained.finish()
        made = [*trained.generator.values(), *trained.transform.values(), trained.means.means]
        if not all(bool(tensor.isfinite().all()) for tensor in made):
            raise SiteDiverged("its generator diverged; use a smaller generator_lr or transform_lr")
        return {**super().more_up(visit, fit, fitted), GENERATOR: trained.generator}

    def more_down(self, ctx: Context, site: str, state: State) -> dict[str, dict[str, Tensor]]:
        """The averaged one."""
        return {**super().more_down(ctx, site, state), GENERATOR: dict(state.groups[GENERATOR])}

    # At the coordinator -----------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> State:
        """The initial model and generator."""
        features = spec_layout(ctx.study.common_spec).feature_size
        inputs = self._noise(features) + len(ctx.study.classes)
        generator = two_layers(inputs, features, features, ctx.streams.torch("fraug-generator"))
        return State({**super().begin(ctx).groups, GENERATOR: generator})

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """Both averaged, with the same weights."""
        generators = {
            site: replace(answer, groups={PARAMETERS: answer.group(GENERATOR), SIZE: answer.group(SIZE)})
            for site, answer in answers.items()
        }
        for averaged in super().absorb(ctx, state, answers):
            yield State({**averaged.groups, GENERATOR: average(generators, self.weigh)}, averaged.facts)

    # At the site ------------------------------------------------------------------------------------------------------

    def objective(self, visit: Visit) -> Objective:
        """The network's loss, with the generator that came and what the site keeps."""
        ctx, study, s, name = visit.ctx, visit.ctx.study, self.settings, visit.site.name
        features, classes = spec_layout(study.common_spec).feature_size, len(study.classes)
        hidden = max(1, features // 2)
        own = visit.memory.groups
        drawn = two_layers(features + classes, hidden, features, ctx.streams.torch("fraug-transform", name))
        return Augmented(
            dict(visit.request.group(GENERATOR)),
            dict(own[TRANSFORM]) if TRANSFORM in own else drawn,
            Prototypes.of(own[MEANS]) if MEANS in own else Prototypes.none(classes, features),
            visit.site.train.counts().nonzero().squeeze(1).cpu(),
            Strengths(
                self.share(ctx),
                s.generator_distance,
                s.transform_distance,
                s.generator_lr,
                s.transform_lr,
                s.momentum,
                s.means_momentum,
            ),
            ctx.streams.torch("fraug-draws", name, ctx.round),
        )

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        """The site's statistics, its transformation and its class means."""
        kept = super().remember(visit, fit, fitted)
        if not fitted.trained_on:
            return kept
        trained = _augmented(fit)
        return State({**kept.groups, TRANSFORM: trained.transform, MEANS: trained.means.tensors()})

    def _noise(self, features: int) -> int:
        return self.settings.noise or max(1, features // 2)


def _augmented(fit: Fit) -> Augmented:
    if not isinstance(fit.objective, Augmented):
        raise TypeError("a fit of fraug has another objective")
    return fit.objective
