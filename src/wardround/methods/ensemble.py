"""`ensemble`: every site's model is kept, and the mean of their logits decides.

What one-shot papers distil from, as a predictor of its own: the bar for any coordinator that makes one model out of
many. Its price is that every site downloads every other site's model, and that all of them run at every prediction.
Sites may use different architectures.

`Panel` is what the ensembles share: they differ in how the models' votes count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from wardround.data.federation import Site
from wardround.exchange.bundle import COUNTERS, PARAMETERS, STATISTICS, Bundle
from wardround.exchange.payload import Group, Payload, network_groups
from wardround.learn.predictor import Member, Predictor
from wardround.methods.base import Context, Work
from wardround.methods.oneshot import OneShot, trained_models
from wardround.methods.state import State
from wardround.models import spec_layout
from wardround.study import Study

KINDS = (PARAMETERS, STATISTICS, COUNTERS)


class Panel(OneShot):
    """Every site's model, kept by the coordinator and taken home by all; a subclass says how they combine."""

    @abstractmethod
    def predictor(self, ctx: Context, state: State) -> Predictor:
        """The panel, made from the state that `absorb` gave or `delivered_state` gives back."""

    def payload(self, study: Study, site: str) -> Payload:
        """Up one network, home all of them but those of sites that could not train."""
        up = super().payload(study, site).up
        home: dict[str, Group] = {}
        for sender in study.sites:
            for group in network_groups(study.spec(sender)):
                tensors = {f"{sender}/{name}": fixed for name, fixed in (group.tensors or {}).items()}
                before = home.get(group.name, Group(group.name, f"every site's {group.name}", 0, {}, partial=True))
                home[group.name] = replace(
                    before, max_bytes=before.max_bytes + group.max_bytes, tensors={**(before.tensors or {}), **tensors}
                )
        return Payload(up=up, home=tuple(home.values()), seen_by="the coordinator and every other site")

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """Keep every usable model."""
        yield State(trained_models(ctx, answers))

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """All models to all sites, in the three groups, each name preceded by its site's."""
        groups: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for sender, weights in state.groups.items():
            kind_of = spec_layout(ctx.study.spec(sender)).groups
            for name, tensor in weights.items():
                groups[kind_of[name]][f"{sender}/{name}"] = tensor
        return {site: ctx.bundle("delivery", site, groups) for site in ctx.study.sites}

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The shared panel, rebuilt from what was delivered."""
        return self.predictor(ctx, self.delivered_state(delivered))
        yield  # a Work that asks for no fit

    def delivered_state(self, delivered: Bundle) -> State:
        """At a site, the inverse of `deliver`: the models by their sites."""
        models: dict[str, dict[str, Tensor]] = {}
        for kind in KINDS:
            for path, tensor in delivered.group(kind).items():
                sender, _, name = path.partition("/")
                models.setdefault(sender, {})[name] = tensor
        return State(models)


class Ensemble(Panel):
    """The mean of the sites' logits."""

    name = "ensemble"
    paper = "the logit-mean ensemble of one-shot FL"
    summary = "every site's model kept, the mean of their logits decides"

    def predictor(self, ctx: Context, state: State) -> Predictor:
        """Every vote counts the same."""
        return Predictor(len(ctx.study.classes), panel_members(ctx.study, state))


def panel_members(study: Study, state: State) -> tuple[Member, ...]:
    """The kept networks, in the order of their sites' names."""
    return tuple(Member(study.spec(sender), dict(state.groups[sender])) for sender in sorted(state.groups))
