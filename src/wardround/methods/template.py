"""The FedAvg-shaped template: broadcast, train locally, average. Most multi-round methods are a small variation of it.

A variation overrides one or two of the hooks. At the site: `prepare` (what it trains from, after work of its own),
`objective` (a loss term or a gradient correction), `teachers`, `frozen` (what is not trained), `remember` (what it
keeps), `more_up` (what goes up beside the model). At the coordinator: `weigh` (a site's weight in the average),
`more_down` (what goes down beside the model), `absorb`. For both: `shared` (which tensors travel), and the
declarations `more_up_groups` and `more_down_groups`.

What happens to batch norm (rule 5): parameters and running statistics are averaged with the same weights; the integer
step counters are never averaged, the largest is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput, Diverged, RunFailed, SiteFailed
from wardround.exchange.bundle import COUNTERS, PARAMETERS, SIZE, STATISTICS, Bundle, Kind
from wardround.exchange.payload import SIZE_GROUP, Group, Payload, network_groups
from wardround.learn.fit import Fit, Fitted, Objective, Teacher
from wardround.learn.predictor import Predictor, single
from wardround.methods.base import Answer, Context, Family, Method, Work, join_groups, split_groups
from wardround.methods.state import State
from wardround.models import Weights
from wardround.study import Study

NOTHING: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})


@dataclass(frozen=True)
class Visit:
    """All a site has when it is asked: the request, the network assembled from it, and its own memory."""

    ctx: Context
    site: Site
    request: Bundle
    received: Weights
    memory: State


class Averaging(Method):
    """FedAvg with every choice a variation may want to change as a method of its own."""

    family: ClassVar[Family] = "multi-round"

    # Hooks ------------------------------------------------------------------------------------------------------------

    def rounds(self, study: Study) -> int:
        """How many rounds."""
        return study.rounds

    def epochs(self, ctx: Context) -> int:
        """Local epochs of this round."""
        return self.epochs_in(ctx.study, ctx.round)

    def epochs_in(self, study: Study, round: int) -> int:
        """The same of any round, before there is one."""
        return study.epochs(round)

    def shared(self, study: Study) -> frozenset[str] | None:
        """The names of the tensors that travel; None: all of them. The rest stay in the site's memory."""
        return None

    def frozen(self, study: Study) -> frozenset[str]:
        """The names of the tensors that are not trained."""
        return frozenset()

    def prepare(self, visit: Visit) -> Work[Weights]:
        """The weights that training starts from; a method that works on them first yields its own fits here."""
        return visit.received
        yield  # a Work that asks for no fit

    def objective(self, visit: Visit) -> Objective:
        """What the site minimises."""
        return Objective()

    def teachers(self, visit: Visit) -> tuple[Teacher, ...]:
        """Frozen networks whose outputs the objective reads."""
        return ()

    def more_up_groups(self, study: Study) -> tuple[Group, ...]:
        """The declaration of what `more_up` sends."""
        return (SIZE_GROUP,)

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, Tensor]]:
        """What goes up beside the model: how many images it was trained on."""
        return {SIZE: {"images": torch.tensor(fitted.trained_on)}}

    def more_down_groups(self, study: Study) -> tuple[Group, ...]:
        """The declaration of what `more_down` sends."""
        return ()

    def more_down(self, ctx: Context, site: str, state: State) -> dict[str, dict[str, Tensor]]:
        """What goes down to a site beside the model."""
        return {}

    def weigh(self, answer: Bundle) -> float:
        """A site's weight in the average: the images it trained on (0 where it was skipped by rule)."""
        return float(answer.group(SIZE)["images"])

    # The protocol -----------------------------------------------------------------------------------------------------

    def check(self, study: Study) -> None:
        """Averaging needs one architecture, and in every round something to average."""
        _ = study.common_spec
        for round in range(self.rounds(study)):
            if self.epochs_in(study, round) == 0:
                raise BadInput(
                    f"{self.name} would train for 0 epochs in round {round + 1}, and average nothing; "
                    "give every round one epoch or more"
                )

    def payload(self, study: Study, site: str) -> Payload:
        """The shared tensors both ways, and the number of images up."""
        network = network_groups(study.spec(site), self.shared(study))
        up, down = (*network, *self.more_up_groups(study)), (*network, *self.more_down_groups(study))
        return Payload(up=up, down=down, home=network)

    def begin(self, ctx: Context) -> State:
        """The common initial weights."""
        return State({"model": ctx.study.initial()})

    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        """The shared tensors of the current model to this round's participants."""
        if ctx.round >= self.rounds(ctx.study):
            return None
        return {site: self.request(ctx, site, state) for site in ctx.study.participants(ctx.round)}

    def request(self, ctx: Context, site: str, state: State) -> Bundle:
        """What a site is sent in a round."""
        return self._bundle(ctx, "request", site, state, self.more_down(ctx, site, state))

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train from what was received (with the site's own tensors where it keeps some) and send the shared ones."""
        received = self.assemble(ctx, site, request, memory)
        if ctx.round == 0 and ctx.study.settings.init == "own":
            received = ctx.study.initial(site.name)
        visit = Visit(ctx, site, request, received, memory)
        start = yield from self.prepare(visit)
        fit = self.fit(visit, start)
        fitted = yield fit
        sent = {name: fitted.weights[name] for name in join_groups(request)}
        more = self.more_up(visit, fit, fitted)
        require_finite(more)
        groups = {**split_groups(ctx, site.name, sent), **more}
        trained = single(fit.spec, fitted.weights)
        return Answer(ctx.bundle("answer", site.name, groups), self.remember(visit, fit, fitted), trained)

    def fit(self, visit: Visit, start: Weights) -> Fit:
        """What the site trains in this round."""
        ctx, site = visit.ctx, visit.site
        return Fit(
            label=f"{site.name}, round {ctx.round + 1}",
            spec=ctx.study.spec(site.name),
            start=start,
            data=site.train,
            validation=site.val,
            recipe=ctx.study.recipe(ctx.round, self.epochs(ctx)),
            seed=ctx.streams.number("fit", site.name, ctx.round),
            objective=self.objective(visit),
            teachers=self.teachers(visit),
            frozen=self.frozen(ctx.study),
            reusable=self.rounds(ctx.study) == 1,  # a one-round method trains what other one-shot methods train
        )

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """The weighted mean of the shared tensors; the others stay as they began."""
        averaged = average(answers, self.weigh, ctx.note)
        yield State({**state.groups, "model": {**state.groups["model"], **averaged}}, state.facts)

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """The final shared tensors to every site."""
        return {site: self._bundle(ctx, "delivery", site, state) for site in ctx.study.sites}

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """What was delivered, with the site's own tensors where it keeps some."""
        return single(ctx.study.spec(site.name), self.assemble(ctx, site, delivered, memory))
        yield  # a Work that asks for no fit

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The averaged network."""
        return single(ctx.study.common_spec, dict(state.groups["model"]))

    # Site memory ------------------------------------------------------------------------------------------------------

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        """What the site keeps: by default exactly the tensors that do not travel."""
        shared = self.shared(visit.ctx.study)
        if shared is None:
            return visit.memory
        return State({"own": {name: tensor for name, tensor in fitted.weights.items() if name not in shared}})

    def assemble(self, ctx: Context, site: Site, bundle: Bundle, memory: State) -> Weights:
        """A whole network: what came, what the site kept, and the initial weights for what it never had."""
        weights = join_groups(bundle)
        if self.shared(ctx.study) is None:
            return weights
        own = memory.groups.get("own") or ctx.study.initial(site.name)
        return {**own, **weights}

    def _bundle(
        self, ctx: Context, kind: Kind, site: str, state: State, extra: Mapping[str, Mapping[str, Tensor]] = NOTHING
    ) -> Bundle:
        shared = self.shared(ctx.study)
        model = {name: t for name, t in state.groups["model"].items() if shared is None or name in shared}
        return ctx.bundle(kind, site, {**split_groups(ctx, site, model), **extra})


def require_finite(groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """What a site would send beside its weights, which training has looked at.

    Features or gradients of finite weights need not be finite, and would spoil the round of all: then this site does
    not answer, and the others go on.
    """
    for name, tensors in groups.items():
        finite = [torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point()]
        if finite and not bool(torch.stack(finite).all()):
            raise SiteFailed(
                f"its {name} would hold NaN or infinite values; use a smaller train.lr, or set train.clip_norm"
            )


def like_parameters(study: Study, name: str, what: str) -> Group:
    """The declaration of one number per parameter; occasional, as there may be nothing to send."""
    (parameters,) = (group for group in network_groups(study.common_spec) if group.name == PARAMETERS)
    return replace(parameters, name=name, what=what, occasional=True)


def told_weight(told: Tensor) -> float:
    """A weight that a site works out itself: one that is not a positive number would take other sites' part away."""
    weight = float(told)
    return weight if 0 < weight < math.inf else 0.0


def average(
    answers: Mapping[str, Bundle], weigh: Callable[[Bundle], float], note: Callable[[str], None] | None = None
) -> Weights:
    """Σ_k p_k·θ_k with p_k = weight_k / Σ weights, one answer at a time in the order of site names.

    Memory for one answer beside the sum, however many sites there are. Counters take the largest. When no site carries
    weight (all were skipped) the round cannot be used and says so. Where the mean is not finite, sites that sent NaN or
    infinity are refused by name with a `note`, and the rest go on; without `note`, or without a rest, that is the end.
    """
    weights = {site: weigh(answers[site]) for site in sorted(answers)}
    total = sum(weights.values())
    if not total > 0:
        raise RunFailed(
            "no site could train: every answer of this round carries weight 0; give sites more images, or with batch "
            "norm batches of more than one"
        )
    mean: Weights = {}
    counters: Weights = {}
    for site, weight in weights.items():
        if weight == 0:
            continue
        answer = answers[site]
        for name, tensor in answer.group(COUNTERS).items():
            counters[name] = torch.maximum(counters[name], tensor.to(counters[name])) if name in counters else tensor
        floats = {**answer.group(PARAMETERS), **answer.group(STATISTICS)}
        if mean:  # an answer that was kept on disk comes back on the CPU, wherever the others are
            arrived = [tensor.to(mean[name].device) for name, tensor in floats.items()]
            torch._foreach_add_([mean[name] for name in floats], arrived, alpha=weight / total)
        else:
            mean = {name: tensor * (weight / total) for name, tensor in floats.items()}
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in mean.values()]).tolist()
    broken = [name for name, ok in zip(mean, finite, strict=True) if not ok]
    if not broken:
        return {**mean, **counters}
    culprits = {site for site in weights if not _finite(answers[site], broken)}
    if note is None or not culprits or not any(weights[site] > 0 for site in weights.keys() - culprits):
        who = ", ".join(sorted(culprits)) or "the sites together"
        raise Diverged(  # to go on would lead here again
            f"the average of {broken[0]} is not finite; {who} sent NaN or infinity; use a smaller train.lr, or set "
            "train.clip_norm"
        )
    for site in sorted(culprits):
        note(f"{answers[site].envelope} is refused: it holds NaN or infinite values")
    return average(answers, lambda answer: 0.0 if answer.envelope.site in culprits else weigh(answer))


def _finite(answer: Bundle, names: Sequence[str]) -> bool:
    tensors = join_groups(answer)
    return all(bool(torch.isfinite(tensors[name]).all()) for name in names)
