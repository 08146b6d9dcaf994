"""`fedbicross`: clusters of alike sites, a model per cluster that learns from the others as far as they help.

Xia et al., FedBiCross: Personalized One-Shot Federated Learning on Medical Images, arXiv 2601.01901v4; Algorithm 1.

Stage 1 clusters the uploaded models (§2.1, `synthesis/clusters.py`). Stage 2 synthesises images for all clusters in
lock-step (Eq. 2), teachers F̃ follow the noise (Eq. 3), and at S sampled steps (Eq. 9) every cluster model takes one
step on the weighted losses of all clusters (Eq. 5, 7) and its weights one step down the loss on its own held-out images
(Eq. 8; `synthesis/bilevel.py`). Only the current images are held, so memory does not grow with the length T of a
trajectory. Stage 3 is at the site: the cluster model is fine-tuned near itself and near what it uploaded (Eq. 10).

What the paper leaves open, and what is done here:
- One trajectory is S = 6 steps of SGD, which trains nothing. Stage 2 is repeated: `trajectories` (FedISCA has 100) with
  fresh noise, while models, weights and adapted statistics persist. `inner = "all"` learns at every step, too.
- η_G: SGD as FedISCA's, at 1e-2, a tenth after half of the trajectories and a hundredth after three quarters.
- η_w is not given, and the scale of Eq. 8's gradient is arbitrary (τ², η_G): it is divided by its largest entry
  (`normalise`).
- F_k is the mean of logits; KL has the factor τ² and temperature 20 in Eq. 5 and Eq. 10 alike. G_k meets the images of
  cluster j with the teachers of cluster j, each cluster's batch in a forward pass of its own.
- The validation pass uses batch statistics, as the training loss does, and leaves the running ones alone.
- Running statistics of G mix noise levels, so they are taken anew from the last images (`recalibrate`) of the clusters
  that G_k has weight on.
- The batch is split 80/20 by position; labels are cyclic, so both parts hold all classes alike.
- Stage 3 trains as the site does, at `personal_lr`. A site whose model is in no cluster gets the largest cluster's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import SIZE, Bundle
from wardround.exchange.payload import Payload, network_groups
from wardround.learn.fit import Fit, Objective, Step, Teacher
from wardround.learn.predictor import Member, Predictor, single
from wardround.methods.base import Answer, Context, Work, join_groups, layout_groups
from wardround.methods.distilled import SynthesisSettings, check_synthesis
from wardround.methods.oneshot import OneShot, trained_models
from wardround.methods.state import State
from wardround.settings import Count, Epochs, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis import simplex
from wardround.synthesis.bilevel import Lesson, bilevel_update, inner_update, recalibrate, sampled_steps
from wardround.synthesis.clusters import Clustering, answers_to_noise, group, parameters, similarity
from wardround.synthesis.inversion import balanced_labels, invert
from wardround.synthesis.student import Student, distillation
from wardround.synthesis.teachers import AdaptedTeachers, Teachers

OWN, CROSS = "own", "cross"
VALIDATION_SHARE = 0.2


@dataclass(frozen=True)
class Cluster:
    """One cluster at work: its teachers, their copies that follow the noise, and the model that learns."""

    teachers: Teachers
    adapted: AdaptedTeachers
    model: Student


class PersonalDistillation(Objective):
    """Eq. 10; the teachers are the cluster's model and, where the site has one, its own."""

    def __init__(self, shares: Sequence[float], temperature: float) -> None:
        self.shares, self.temperature = shares, temperature

    def loss(self, step: Step) -> Tensor:
        """CE + γ·KL(G_k ‖ f) + δ·KL(f_i ‖ f)."""
        total = F.cross_entropy(step.outputs.logits, step.labels)
        for share, teacher in zip(self.shares, step.teachers, strict=True):
            total = total + share * distillation(teacher.logits, step.outputs.logits, self.temperature)
        return total


class FedBiCross(OneShot):
    """Cluster, learn across clusters, personalise."""

    name = "fedbicross"
    paper = "Xia et al., arXiv 2601.01901, 2026"
    summary = "a model per cluster of alike sites, learned across clusters as far as they help, then personalised"

    class Settings(SynthesisSettings):
        """The ablations of Table 2: `cross`, `personal = false`, `clusters = 1`; Figure 2: `clustering`."""

        batch: Annotated[int, Field(ge=4)] = 256  # at least two images to train on and two to validate with
        trajectories: Count = 20
        samples: Count = 6  # S
        inner: Literal["sampled", "all"] = "sampled"
        lr: Positive = 1e-2  # η_G
        eta_w: Positive = 0.1
        normalise: bool = True
        cross: Literal["bilevel", "intra", "uniform", "similarity"] = "bilevel"
        clustering: Clustering = "predictions"
        clusters: Annotated[int, Field(ge=0)] = 0  # 0: by silhouette
        probes: Count = 256  # M
        probe: Literal["softmax", "logits"] = "softmax"
        follow: Share = 0.9  # β
        recalibrate: bool = True
        personal: bool = True
        personal_epochs: Epochs = 10
        personal_lr: Positive = 1e-2
        gamma: NotNegative = 0.5
        delta: NotNegative = 0.3

    def check(self, study: Study) -> None:
        """What any synthesis needs, and no more samples, clusters or comparisons than there can be."""
        s = self.settings
        check_synthesis(self.name, study, s.batch)
        if s.samples > s.steps:
            raise BadInput(f"{self.name}.samples = {s.samples} is more than {s.steps} steps; use fewer samples")
        if s.clusters > len(study.sites):
            raise BadInput(f"{self.name}.clusters = {s.clusters}, but there are {len(study.sites)} sites; use fewer")
        if s.clustering == "parameters" and len({study.spec(site) for site in study.sites}) > 1:
            raise BadInput(f"{self.name}: parameters of different networks cannot be compared; cluster by predictions")

    def payload(self, study: Study, site: str) -> Payload:
        """Up one network, home the cluster's model."""
        return Payload(up=super().payload(study, site).up, home=network_groups(study.student_spec))

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train alone, send the network, and keep it for Stage 3."""
        found = yield from super().answer(ctx, site, request, memory)
        trained = int(found.bundle.group(SIZE)["images"]) > 0
        return Answer(found.bundle, State({OWN: join_groups(found.bundle)}) if trained else memory)

    # Stages 1 and 2 ---------------------------------------------------------------------------------------------------

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """One state per trajectory. Everything drawn derives from its number, so that a resume changes nothing."""
        members = {site: Member(ctx.study.spec(site), w) for site, w in trained_models(answers).items()}
        if CROSS not in state.groups:
            state = self.clustered(ctx, members)
        facts, cross = dict(state.facts), state.groups[CROSS]["weights"].clone()
        at_work = [
            self._cluster(ctx, state, k, [members[site] for site in sites]) for k, sites in enumerate(facts["clusters"])
        ]
        total, begun = self.settings.trajectories, facts["trajectory"]
        with ctx.progress.task(f"{self.name}: trajectories of {len(at_work)} clusters", total, begun) as advance:
            for number in range(begun, total):
                last = self.trajectory(ctx, number, at_work, cross)
                if number + 1 == total and self.settings.recalibrate:
                    for cluster, weights in zip(at_work, cross.tolist(), strict=True):
                        recalibrate(cluster.model.net, [x for x, w in zip(last, weights, strict=True) if w > 0])
                groups = {CROSS: {"weights": cross.clone()}, **_groups(at_work)}
                self._require_finite(t for tensors in groups.values() for t in tensors.values())
                advance()
                yield State(groups, {**facts, "trajectory": number + 1})

    def clustered(self, ctx: Context, members: Mapping[str, Member]) -> State:
        """Stage 1: who is with whom, and the weights that Stage 2 begins with (1/K each in Algorithm 1)."""
        s, study, models = self.settings, ctx.study, list(members.values())
        noise = torch.randn(
            (s.probes, study.channels, study.size, study.size), generator=ctx.streams.torch("noise probes")
        )
        points = (
            parameters(models)
            if s.clustering == "parameters"
            else answers_to_noise(models, noise, ctx.device.torch, s.probe)
        )
        found = group(points, s.clustering, s.clusters, ctx.streams.number("clusters"))
        sites = [
            [site for site, label in zip(members, found.labels, strict=True) if label == k] for k in range(found.count)
        ]
        ctx.progress.say(f"{self.name}: {found.count} clusters: {' | '.join(', '.join(names) for names in sites)}")
        cross = torch.full((found.count, found.count), 1 / found.count, dtype=torch.float64)
        if s.cross == "intra":
            cross = torch.eye(found.count, dtype=torch.float64)
        elif s.cross == "similarity":
            cross = similarity(points, found.labels)
        silhouettes = {str(k): value for k, value in found.silhouettes.items()}
        return State({CROSS: {"weights": cross}}, {"trajectory": 0, "clusters": sites, "silhouettes": silhouettes})

    def trajectory(self, ctx: Context, number: int, at_work: list[Cluster], cross: Tensor) -> list[Tensor]:
        """Algorithm 1, lines 8 to 21, once; moves models and `cross`, and returns each cluster's last images."""
        s, study = self.settings, ctx.study
        labels = balanced_labels(s.batch, len(study.classes)).to(ctx.device.torch)
        shape = (study.channels, study.size, study.size)
        sampled = sampled_steps(s.steps, s.samples, ctx.streams.torch("sampled steps", index=number))
        paths = [
            invert(c.teachers, labels, shape, s.inversion(), ctx.streams.torch("synthesis", f"cluster-{k}", 0, number))
            for k, c in enumerate(at_work)
        ]
        for iterates in zip(*paths, strict=True):
            images, t = [iterate.images for iterate in iterates], iterates[0].step + 1
            for cluster, batch in zip(at_work, images, strict=True):
                cluster.adapted.follow(batch)
            if t in sampled or s.inner == "all":
                lessons = [
                    Lesson(batch, c.teachers.logits(batch), c.adapted.logits(batch), 1 - t / s.steps, s.temperature)
                    for c, batch in zip(at_work, images, strict=True)
                ]
                self._learn(at_work, lessons, cross, self.rate(number), outer=t in sampled)
        return images

    def _learn(self, at_work: list[Cluster], lessons: list[Lesson], cross: Tensor, rate: float, outer: bool) -> None:
        """Every model's step, and at sampled steps that of its weights, in place."""
        s = self.settings
        split = s.batch - max(2, round(VALIDATION_SHARE * s.batch))
        training = [lesson.part(slice(split)) for lesson in lessons]
        for k, cluster in enumerate(at_work):
            if outer and s.cross == "bilevel" and len(at_work) > 1:
                validation = lessons[k].part(slice(split, None))
                gradient = bilevel_update(cluster.model, training, validation, cross[k], rate)
                self._require_finite([gradient])
                cross[k] = simplex.descend(cross[k], gradient, s.eta_w, s.normalise)
            else:
                inner_update(cluster.model, training, cross[k], rate)

    def _require_finite(self, tensors: Iterable[Tensor]) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise RunFailed(f"{self.name}: a model diverged in Stage 2; use a smaller lr")

    def rate(self, number: int) -> float:
        """η_G in a trajectory: steps at half and three quarters."""
        passed = sum(number / self.settings.trajectories >= share for share in (0.5, 0.75))
        return float(self.settings.lr * 0.1**passed)

    def _cluster(self, ctx: Context, state: State, k: int, members: list[Member]) -> Cluster:
        s, spec, device = self.settings, ctx.study.student_spec, ctx.device.torch
        weights = state.groups.get(_name("model", k)) or ctx.study.fresh_weights(spec, "cluster model", f"cluster-{k}")
        model = Student(spec, dict(weights), device, s.momentum, s.weight_decay)
        model.restore_momentum(state.groups.get(_name("momentum", k), {}))
        adapted = AdaptedTeachers(members, device, "ema", s.follow)
        if _name("adapted", k) in state.groups:
            adapted.restore(state.groups[_name("adapted", k)])
        return Cluster(Teachers(members, device), adapted, model)

    # Home, and Stage 3 ------------------------------------------------------------------------------------------------

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """To each site the model of its cluster; to a site in none, that of the largest (of equals, the first)."""
        found = state.facts["clusters"]
        largest = max(range(len(found)), key=lambda k: (len(found[k]), -k))
        own = {site: k for k, sites in enumerate(found) for site in sites}
        homes = [
            layout_groups(ctx.study.student_spec, dict(state.groups[_name("model", k)])) for k in range(len(found))
        ]
        return {site: ctx.bundle("delivery", site, homes[own.get(site, largest)]) for site in ctx.study.sites}

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """Stage 3: fine-tune the cluster's model near itself and near the site's own."""
        s, spec, start = self.settings, ctx.study.student_spec, join_groups(delivered)
        if not s.personal:
            return single(spec, start)
        teachers = [(s.gamma, Teacher(spec, start))]
        if OWN in memory.groups:
            teachers.append((s.delta, Teacher(ctx.study.spec(site.name), dict(memory.groups[OWN]))))
        fitted = yield Fit(
            label=f"{site.name}, personal",
            spec=spec,
            start=start,
            data=site.train,
            validation=site.val,
            recipe=replace(ctx.study.recipe(0, s.personal_epochs), lr=s.personal_lr),
            seed=ctx.streams.number("personal", site.name),
            objective=PersonalDistillation([share for share, _ in teachers], s.temperature),
            teachers=tuple(teacher for _, teacher in teachers),
        )
        return single(spec, fitted.weights)

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The one cluster's model where there is only one."""
        alone = len(state.facts["clusters"]) == 1
        return single(ctx.study.student_spec, dict(state.groups[_name("model", 0)])) if alone else None


def _name(group: str, k: int) -> str:
    return f"{group}-{k:03d}"


def _groups(at_work: Sequence[Cluster]) -> dict[str, dict[str, Tensor]]:
    """What must be kept of the clusters."""
    found = {}
    for k, cluster in enumerate(at_work):
        found[_name("model", k)] = cluster.model.weights()
        found[_name("momentum", k)] = cluster.model.momentum()
        found[_name("adapted", k)] = cluster.adapted.statistics()
    return found
