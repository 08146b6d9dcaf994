"""`fedkd`: Wu et al., Communication-efficient federated learning via knowledge distillation, Nat. Commun. 2022.

Every site has two networks. The *mentor* never leaves it; the *mentee* is the one that is shared. They learn from the
labels and from each other (`learn/mutual.py`). What travels, both ways, is the mentee's update as truncated singular
value decompositions (`learn/lowrank.py`) that keep a share of its energy, growing from `energy_start` to `energy_end`
over the rounds: T = T_start + (T_end − T_start)·(t + 1)/T_rounds, as the public code counts.

What is done here where the paper is silent or speaks of something else:
- The paper sends gradients; here a round is `train.epochs` of training, and the update is what they changed.
- The coordinator averages the sites' updates by images, truncates the mean again, and moves its own mentee by exactly
  what it sends, so that all hold the same one. A site that did not answer in the last round gets the whole mentee.
- The mentee has the mentor's architecture, or another `mentee_width`. It is drawn apart from the mentor, as two equal
  networks have nothing to teach each other; with `model.weights` and one architecture both start from that file.
- W and the mentor are trained by the study's recipe. Gradients are clipped at `clip_norm` (of the mentee, and of mentor
  and W together) unless `train.clip_norm` says otherwise: without it public versions diverge.
- Convolutions are matrices of as many rows as output maps. Vectors, and whatever two factors would not make smaller,
  are sent whole. One singular value at least is kept.
- The last epoch's mentor is kept, whatever `train.keep` says of the mentee.

Batch norm: parameters are part of the update; running statistics are averaged and sent whole, counters take the
largest. The mentor keeps its own. What a site deploys is its mentor (what public versions measure); the shared model
is the mentee. There is no setting under which this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput, SiteDiverged
from wardround.exchange.bundle import COUNTERS, PARAMETERS, SIZE, STATISTICS, Bundle
from wardround.exchange.payload import SIZE_GROUP, Group, Payload, network_groups
from wardround.learn.fit import Fit, Fitted, Recipe
from wardround.learn.lowrank import Packed, pack, unpack
from wardround.learn.mutual import MutualDistillation
from wardround.learn.predictor import Predictor, single
from wardround.methods.base import Answer, Context, Work, join_groups, layout_groups
from wardround.methods.state import State
from wardround.methods.template import Averaging, average
from wardround.models import NetSpec, Weights, spec_layout
from wardround.settings import Count, Frozen, Positive
from wardround.study import Study

UPDATE = ("update", "update_left", "update_right")  # groups of a bundle: whole tensors, and factors
MENTOR, MENTEE, PROJECTION = "mentor", "mentee", "projection"  # groups of a site's memory

Energy = Annotated[float, Field(gt=0, le=1)]


class FedKD(Averaging):
    """A mentee that travels in few numbers, and a mentor that stays."""

    name = "fedkd"
    paper = "Wu et al., Nature Communications 2022"
    summary = "a small shared network and one that stays teach each other; low-rank updates travel"

    class Settings(Frozen):
        """Energies are the paper's; the clip is what its public versions need."""

        energy_start: Energy = 0.95
        energy_end: Energy = 0.98
        mentee_width: Count | None = None  # maps of the mentee's first convolution; None: the mentor's
        clip_norm: Positive = 1.0  # where train.clip_norm is not set

    def mentee(self, study: Study) -> NetSpec:
        """The network that travels."""
        return replace(study.common_spec, width=self.settings.mentee_width or study.common_spec.width)

    def energy(self, ctx: Context) -> float:
        """The share of an update's energy that is kept in this round."""
        s = self.settings
        return float(s.energy_start + (s.energy_end - s.energy_start) * (ctx.round + 1) / self.rounds(ctx.study))

    def payload(self, study: Study, site: str) -> Payload:
        """Never the mentor. An update needs at most what its tensors would; at first the whole mentee comes down."""
        mentee = {group.name: group for group in network_groups(self.mentee(study))}
        parameters = mentee.pop(PARAMETERS)
        words = ("those sent whole", "left factors of the others", "right factors of the others")
        update = tuple(
            Group(name, f"what training changed in {parameters.what}: {what}", parameters.max_bytes)
            for name, what in zip(UPDATE, words, strict=True)
        )
        others = tuple(mentee.values())
        down = (replace(parameters, occasional=True), *update, *others)
        return Payload(up=(*update, *others, SIZE_GROUP), down=down, home=(parameters, *others))

    # At the coordinator -----------------------------------------------------------------------------------------------

    def begin(self, ctx: Context) -> State:
        """The mentee's initial weights, which nobody has yet."""
        spec, study = self.mentee(ctx.study), ctx.study
        from_file = study.settings.model.weights is not None and spec == study.common_spec
        return State({"model": study.initial() if from_file else study.fresh_weights(spec, "mentee")}, {"current": []})

    def request(self, ctx: Context, site: str, state: State) -> Bundle:
        """The last round's update to those that had a part in it, the whole mentee to others."""
        model = dict(state.groups["model"])
        groups: dict[str, Mapping[str, Tensor]] = dict(layout_groups(self.mentee(ctx.study), model))
        if site in state.facts["current"]:
            del groups[PARAMETERS]
            groups |= {name: state.groups[name] for name in UPDATE}
        return ctx.bundle("request", site, groups)

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """The mean update, truncated again; the mentee moves by what is sent of it."""
        spec = self.mentee(ctx.study)
        mean = average(Unpacked(answers, spec), self.weigh)
        parameters = spec_layout(spec).in_group(PARAMETERS)
        packed = pack({name: mean.pop(name) for name in parameters}, self.energy(ctx))
        moved = self._moved(spec, state.groups["model"], packed, "the mean update")
        groups = {"model": {**moved, **{name: tensor.cpu() for name, tensor in mean.items()}}}
        yield State({**groups, **dict(zip(UPDATE, packed, strict=True))}, {"current": sorted(answers)})

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """The mentee, for sites that have no mentor, and for whoever wants a small model."""
        groups = layout_groups(self.mentee(ctx.study), dict(state.groups["model"]))
        return {site: ctx.bundle("delivery", site, groups) for site in ctx.study.sites}

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The mentee."""
        return single(self.mentee(ctx.study), dict(state.groups["model"]))

    # At the site ------------------------------------------------------------------------------------------------------

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train both, send what the mentee learned, keep the mentor."""
        received = self._received(ctx, request, memory)
        objective = self._objective(ctx, site, memory)
        fitted = yield self._fit(ctx, site, received, objective)
        objective.finish()
        if not all(bool(t.isfinite().all()) for t in objective.mentor.values()):
            raise SiteDiverged("its mentor diverged; use a smaller learning rate or clip_norm")
        kept = State(
            {
                MENTOR: objective.mentor,
                PROJECTION: {"weight": objective.projection},
                MENTEE: {name: received[name] for name in spec_layout(self.mentee(ctx.study)).in_group(PARAMETERS)},
            }
        )
        bundle = self._answer(ctx, site, received, fitted)
        return Answer(bundle, kept, single(ctx.study.common_spec, objective.mentor))

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """The mentor; the mentee where the site was never asked."""
        if MENTOR in memory.groups:
            return single(ctx.study.common_spec, dict(memory.groups[MENTOR]))
        return single(self.mentee(ctx.study), join_groups(delivered))
        yield  # a Work that asks for no fit

    def _received(self, ctx: Context, request: Bundle, memory: State) -> Weights:
        """The mentee as all sites have it now."""
        spec, sent = self.mentee(ctx.study), join_groups(request)
        if PARAMETERS not in request.groups:
            if MENTEE not in memory.groups:
                raise BadInput(f"{request.envelope} is an update, and this site has no mentee to move; send it whole")
            sent = {**self._moved(spec, memory.groups[MENTEE], _packed(request), str(request.envelope)), **sent}
        if sent.keys() != set(spec_layout(spec).names):
            raise BadInput(f"{request.envelope} lacks a part of the mentee; send it whole")
        return sent

    def _moved(self, spec: NetSpec, model: Mapping[str, Tensor], packed: Packed, where: str) -> Weights:
        """Worked out alike by the coordinator and at every site."""
        update = unpack(packed, _shapes(spec), where)
        return {name: model[name].cpu() + tensor for name, tensor in update.items()}

    def _objective(self, ctx: Context, site: Site, memory: State) -> MutualDistillation:
        study = ctx.study
        spec, mentee = study.common_spec, self.mentee(study)
        mentor = memory.groups.get(MENTOR) or study.initial(site.name)
        kept = memory.groups.get(PROJECTION)
        inputs, outputs = spec_layout(mentee).feature_size, spec_layout(spec).feature_size
        projection = kept["weight"] if kept else _drawn(inputs, outputs, ctx.streams.torch("fedkd-projection"))
        return MutualDistillation(spec, dict(mentor), projection, self._recipe(ctx))

    def _recipe(self, ctx: Context) -> Recipe:
        recipe = ctx.study.recipe(ctx.round, self.epochs(ctx))
        return replace(recipe, clip_norm=recipe.clip_norm or self.settings.clip_norm)

    def _fit(self, ctx: Context, site: Site, start: Weights, objective: MutualDistillation) -> Fit:
        return Fit(
            label=f"{site.name}, round {ctx.round + 1}",
            spec=self.mentee(ctx.study),
            start=start,
            data=site.train,
            validation=site.val,
            recipe=self._recipe(ctx),
            seed=ctx.streams.number("fit", site.name, ctx.round),
            objective=objective,
        )

    def _answer(self, ctx: Context, site: Site, received: Weights, fitted: Fitted) -> Bundle:
        spec = self.mentee(ctx.study)
        groups: dict[str, Mapping[str, Tensor]] = dict(layout_groups(spec, fitted.weights))
        trained = groups.pop(PARAMETERS)
        update = {name: tensor.cpu() - received[name].cpu() for name, tensor in trained.items()}
        groups |= dict(zip(UPDATE, pack(update, self.energy(ctx)), strict=True))
        groups[SIZE] = {"images": torch.tensor(fitted.trained_on)}
        return ctx.bundle("answer", site.name, groups)


@dataclass(frozen=True)
class Unpacked(Mapping[str, Bundle]):
    """Answers whose updates are whole again, as parameters; one at a time, so that one is in memory."""

    answers: Mapping[str, Bundle]
    spec: NetSpec

    def __getitem__(self, site: str) -> Bundle:
        answer = self.answers[site]
        update = unpack(_packed(answer), _shapes(self.spec), str(answer.envelope))
        kept = {name: answer.group(name) for name in (STATISTICS, COUNTERS, SIZE)}
        return replace(answer, groups={PARAMETERS: update, **kept})

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)


def _packed(bundle: Bundle) -> Packed:
    return Packed(*(dict(bundle.group(name)) for name in UPDATE))


def _shapes(spec: NetSpec) -> dict[str, tuple[int, ...]]:
    layout = spec_layout(spec)
    return {name: layout.shapes[name] for name in layout.in_group(PARAMETERS)}


def _drawn(inputs: int, outputs: int, generator: torch.Generator) -> Tensor:
    """W as PyTorch draws a linear layer."""
    bound = inputs**-0.5
    return torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
