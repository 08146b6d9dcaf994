"""`fedper`: Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019.

A network is base layers and personalisation layers (Algorithms 1 and 2). A site trains both together with
one optimiser, from the averaged base and its own last personalisation layers; only the base travels and is averaged,
weighted by images. A site deploys the base it took home under its own layers.

What the paper leaves open, and what is done here:
- How many layers are personal is tuned (K_P from 1 to 4 blocks). Here `layers` counts the parts that a network is
  named by, from the end: the head, then its last stage, and so on. The default, 1, is the head, as in every later
  comparison.
- There is no model without a head, so there is no shared model to measure: `heads = "private"`, the default. Papers
  that print a global accuracy of FedPer need one, so `"averaged"` lets the sites' own layers go up, too. Their mean
  completes the shared model and is what a site that never trained takes home; no other site ever uses it, so training
  is the same to the bit under both.
- A site that never trained has, under `"private"`, untrained layers of its own; a note says so.

Batch norm: parameters, running statistics and counters belong to the stage they stand in, and travel with it or stay
with it; what travels is treated as FedAvg does. With `layers = 0` this is FedAvg bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Payload, network_groups
from wardround.learn.fit import Fit, Fitted
from wardround.learn.predictor import Predictor
from wardround.methods.base import Context, Work, join_groups, split_groups
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.models import NetSpec, Weights, spec_layout
from wardround.settings import Frozen
from wardround.study import Study

Fate = Literal["private", "averaged"]


class KeepsLayers(Averaging):
    """FedAvg of a network of which a part is each site's own. Which part, and whether it goes up, is the subclass's."""

    @abstractmethod
    def kept(self, study: Study) -> frozenset[str]:
        """The names of the tensors that are a site's own; none: this is FedAvg."""

    @abstractmethod
    def averages_kept(self) -> bool:
        """Whether they go up for the shared model. They never come back to a site that has its own."""

    def shared(self, study: Study) -> frozenset[str] | None:
        """All but what is kept."""
        kept = self.kept(study)
        return frozenset(spec_layout(study.common_spec).names) - kept if kept else None

    def payload(self, study: Study, site: str) -> Payload:
        """The shared tensors; where kept ones are averaged, the whole network up and home."""
        payload = super().payload(study, site)
        if not self.averages_kept():
            return payload
        whole = network_groups(study.spec(site))
        return Payload(up=(*whole, *self.more_up_groups(study)), down=payload.down, home=whole)

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """Beside what the template sends, the whole network in place of the shared part, where it may go up."""
        more = super().more_up(visit, fit, fitted)
        if not self.averages_kept():
            return more
        return {**split_groups(visit.ctx, visit.site.name, fitted.weights), **more}

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """The shared tensors, or the whole shared model where there is one."""
        if not self.averages_kept():
            return super().deliver(ctx, state)
        model = dict(state.groups["model"])
        return {site: ctx.bundle("delivery", site, split_groups(ctx, site, model)) for site in ctx.study.sites}

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The averaged network, where the coordinator has all of it."""
        whole = self.averages_kept() or self.shared(ctx.study) is None
        return super().predictor(ctx, state) if whole else None

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """What was delivered, under the site's own layers."""
        if self.lacks_kept(ctx, delivered, memory):
            ctx.note(f"{site.name} never trained: the layers that {self.name} leaves to a site are untrained there")
        return (yield from super().personal(ctx, site, delivered, memory))

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        """The site's own layers; a site that was skipped by rule still has none."""
        return super().remember(visit, fit, fitted) if fitted.trained_on else visit.memory

    def assemble(self, ctx: Context, site: Site, bundle: Bundle, memory: State) -> Weights:
        """What came, with the site's own layers in their place; initial ones where it has none and none came."""
        drawn = ctx.study.initial(site.name) if self.lacks_kept(ctx, bundle, memory) else {}
        return {**drawn, **join_groups(bundle), **memory.groups.get("own", {})}

    def lacks_kept(self, ctx: Context, bundle: Bundle, memory: State) -> bool:
        """Whether the kept layers are neither in the site's memory nor in the bundle."""
        return bool(self.kept(ctx.study) - memory.groups.get("own", {}).keys() - join_groups(bundle).keys())


class FedPer(KeepsLayers):
    """FedAvg of all but the last layers."""

    name = "fedper"
    paper = "Arivazhagan et al., arXiv:1912.00818, 2019"
    summary = "FedAvg of the body; the head stays at the site"

    class Settings(Frozen):
        """`layers` is how many stay at the site, from the end; `heads` whether they are averaged for the record."""

        layers: Annotated[int, Field(ge=0)] = 1
        heads: Fate = "private"

    def check(self, study: Study) -> None:
        """Something has to be shared."""
        super().check(study)
        count = len(layers_of(study.common_spec))
        if self.settings.layers >= count:
            raise BadInput(
                f"fedper.layers = {self.settings.layers} leaves nothing to share: {study.common_spec.name} has "
                f"{count} layers; use at most {count - 1}, or method local"
            )

    def kept(self, study: Study) -> frozenset[str]:
        """The last layers."""
        return last_layers(study.common_spec, self.settings.layers)

    def averages_kept(self) -> bool:
        """As the settings say."""
        return bool(self.settings.heads == "averaged")


def layers_of(spec: NetSpec) -> tuple[frozenset[str], ...]:
    """The tensors of every named part of a network that has some, from first to last: its stages, then the head."""
    layout = spec_layout(spec)
    stages = [frozenset(n for n in layout.names if n.startswith(f"stages.{stage}.")) for stage in layout.stages]
    return (*filter(None, stages), layout.head)


def last_layers(spec: NetSpec, count: int) -> frozenset[str]:
    """The tensors of the last `count` layers; none at 0."""
    layers = layers_of(spec)
    return frozenset().union(*layers[len(layers) - count :])
