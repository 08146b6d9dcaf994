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
  (`normalise`) and η_w = 0.01.
- F_k is the mean of logits, as in FedISCA's code; the text speaks of averaged predictions, which may mean
  probabilities: `mean = "probabilities"`. KL has the factor τ² and temperature 20 in Eq. 5 and Eq. 10 alike. G_k meets
  the images of cluster j with the teachers of cluster j, each cluster's batch in a forward pass of its own.
- The validation pass uses batch statistics, as the training loss does, and leaves the running ones alone.
- Running statistics of G mix noise levels, so they are taken anew from the last images, as many of each cluster as its
  weight says (`recalibrate = "synthetic"`), and again at the site from its own images before anything else (`"site"`,
  the default): those of synthetic images do not fit real ones.
- `rehearsal` is ours, and 0 by default: more steps of Eq. 7 on images that were kept (`synthesis/rehearsal.py`). So is
  `begin = "member"`: G_k begins as the uploaded model nearest to its cluster's centre, not at random as in Algorithm 1.
  Where no member has the student's architecture it is random still.
- The batch is split 80/20 by position; labels are cyclic or evenly mixed, so both parts hold classes alike. The paper
  draws them from all classes, also for a cluster that has never seen most of them. `targets = "known"` draws from those
  that its members seem to have seen, by the last layers of their networks (`methods/trust.py`): no site tells its
  classes here. `"shares"` draws as many of each as they seem to have had: batch-norm statistics are of that mix.
- Stage 3 trains as the site does, but at 1e-2 (`personal_lr`): the paper gives 1e-3 for the sites' own training alone,
  and ten epochs of that win too little back from so poor a start. It keeps the last epoch: Algorithm 1 has no
  validation images there. A site whose model is in no cluster gets the largest cluster's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.data.federation import Site
from wardround.errors import BadInput, Diverged
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Group, Payload, network_groups
from wardround.learn.distillation import distillation
from wardround.learn.fit import Fit, Objective, Recipe, Step, Teacher
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member, Predictor, single
from wardround.learn.statistics import even_parts, retaken
from wardround.methods.base import Answer, Context, Work, join_groups, layout_groups
from wardround.methods.cross_cluster import CROSS, StageTwo, group_name
from wardround.methods.distilled import SynthesisSettings, check_synthesis
from wardround.methods.oneshot import OneShot, own_model, refused, remembering, trained_models
from wardround.methods.state import State
from wardround.methods.trust import guessed_shares, known_classes
from wardround.models import Weights
from wardround.settings import Count, Epochs, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis import subspaces
from wardround.synthesis.clusters import Clustering, answers_to_noise, central, group, parameters, similarity
from wardround.synthesis.teachers import Mean

SUBSPACE = "subspace"


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

        batch: Annotated[int, Field(ge=4)] | None = None  # at least two images to train on and two to validate with
        trajectories: Count = 20
        samples: Count = 6  # S
        inner: Literal["sampled", "all"] = "sampled"
        begin: Literal["random", "member"] = "random"  # G_k^(0)
        targets: Literal["all", "known", "shares"] = "all"  # y
        mean: Mean = "logits"  # of a cluster's models, F_k
        lr: Positive = 1e-2  # η_G
        schedule: Literal["step", "cosine"] = "step"
        eta_w: Positive = 0.01
        rehearsal: Annotated[int, Field(ge=0)] = 0  # steps after each trajectory on batches kept from all of them
        kept: Count = 64  # batches of each cluster that are kept for it
        normalise: bool = True
        cross: Literal["bilevel", "intra", "uniform", "similarity"] = "bilevel"
        clustering: Clustering = "predictions"
        clusters: Annotated[int, Field(ge=0)] = 0  # 0: by silhouette
        directions: Count = subspaces.DIRECTIONS  # of a site's images, with clustering by subspaces
        probes: Count = 256  # M
        probe: Literal["softmax", "logits"] = "softmax"
        follow: Share = 0.9  # β
        recalibrate: Literal["site", "synthetic", "none"] = "site"
        personal: bool = True
        personal_epochs: Epochs = 10
        personal_lr: Positive = 1e-2
        personal_schedule: Literal["constant", "step", "cosine"] | None = None  # None: the study's
        personal_temperature: Positive = 20.0
        gamma: NotNegative = 0.5
        delta: NotNegative = 0.3

    def check(self, study: Study) -> None:
        """What any synthesis needs, and no more samples, clusters or comparisons than there can be."""
        s = self.settings.at(study.size)
        check_synthesis(self.name, study, s.batch)
        if s.samples > s.steps:
            raise BadInput(f"{self.name}.samples = {s.samples} is more than {s.steps} steps; use fewer samples")
        if s.clusters > len(study.sites):
            raise BadInput(f"{self.name}.clusters = {s.clusters}, but there are {len(study.sites)} sites; use fewer")
        pixels = study.channels * study.size**2
        if s.directions > pixels:
            raise BadInput(f"{self.name}.directions = {s.directions} is more than {pixels} values an image has; use 3")
        if s.clustering == "parameters" and len({study.spec(site) for site in study.sites}) > 1:
            raise BadInput(f"{self.name}: parameters of different networks cannot be compared; cluster by predictions")

    def payload(self, study: Study, site: str) -> Payload:
        """Up one network, home the cluster's model; to cluster as PACFL does, directions of the site's images, too."""
        up = super().payload(study, site).up
        if self.settings.clustering == "subspaces":
            up = (*up, self._subspace_group(study))
        return Payload(up=up, home=network_groups(study.student_spec))

    def _subspace_group(self, study: Study) -> Group:
        features, directions = study.channels * study.size**2, self.settings.directions
        what = "the main directions of the site's images: blends that look like images, though like no patient's alone"
        return Group(SUBSPACE, what, 4 * features * directions, {"directions": ((features, directions), "float32")})

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Train alone, send the network, and keep it for Stage 3."""
        found = yield from super().answer(ctx, site, request, memory)
        if self.settings.clustering == "subspaces":
            directions = subspaces.signature(site.train.images, self.settings.directions)
            bundle = ctx.bundle("answer", site.name, {**found.bundle.groups, SUBSPACE: {"directions": directions}})
            found = Answer(bundle, found.memory)
        return remembering(found)

    # Stages 1 and 2 ---------------------------------------------------------------------------------------------------

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """One state per trajectory, and more where one takes long.

        Everything drawn derives from a trajectory's number, so that a resume changes nothing.
        """
        members = {site: Member(ctx.study.spec(site), w) for site, w in trained_models(ctx, answers).items()}
        if CROSS not in state.groups:
            state = self.clustered(ctx, members, answers)
        stage = StageTwo(ctx, self.settings.at(ctx.study.size), state, members)
        try:
            yield from self._states(ctx, stage, state)
        except Diverged as error:
            error.made = State(*stage.shown())
            raise

    def _states(self, ctx: Context, stage: StageTwo, state: State) -> Iterator[State]:
        total, begun = self.settings.trajectories, state.facts["trajectory"]
        label = f"{self.name}: trajectories of {len(stage.clusters)} clusters"
        with ctx.progress.task(label, total, begun) as advance:
            for number in range(begun, total):
                for _ in stage.trajectory(number, self.rate(number), state if number == begun else None):
                    yield self._kept(stage, number)
                if number + 1 == total and self.settings.recalibrate != "none":
                    stage.recalibrate()
                stage.parts.done = {}
                stage.facts["course"] = [*stage.facts.get("course", ()), _rounded(stage.cross)]
                advance()
                yield self._kept(stage, number + 1)

    def _kept(self, stage: StageTwo, number: int) -> State:
        groups, facts = stage.kept()
        return State(groups, {**facts, "trajectory": number})

    def clustered(self, ctx: Context, members: Mapping[str, Member], answers: Mapping[str, Bundle]) -> State:
        """Stage 1: who is with whom, and the weights that Stage 2 begins with (1/K each in Algorithm 1)."""
        s, study, models = self.settings, ctx.study, list(members.values())
        if s.clustering == "parameters":
            points = parameters(models)
        elif s.clustering == "subspaces":
            points = subspaces.proximity([answers[site].group(SUBSPACE)["directions"] for site in members])
        else:
            shape = (s.probes, *study.image_shape)
            noise = torch.randn(shape, generator=ctx.streams.torch("noise probes"))
            points = answers_to_noise(models, noise, ctx.device.torch, s.probe)
        found = group(points, s.clustering, s.clusters, ctx.streams.number("clusters"))
        sites = [
            [site for site, label in zip(members, found.labels, strict=True) if label == k] for k in range(found.count)
        ]
        ctx.progress.say(f"{self.name}: {found.count} clusters: {' | '.join(', '.join(names) for names in sites)}")
        if len(members) < s.clusters:
            ctx.note(f"{s.clusters} clusters were asked for, but there are only {len(members)} models")
        elif found.count < s.clusters:
            differ = f"only {found.count} models differ" if found.count > 1 else "no two models differ"
            ctx.note(f"{s.clusters} clusters were asked for, but {differ}{self._as_compared()}")
        elif not s.clusters and found.count == 1:
            why = "fewer than three models" if len(members) < 3 else f"no two models differ{self._as_compared()}"
            ctx.note(f"all sites are one cluster: there is nothing to choose from with {why}")
        cross = torch.full((found.count, found.count), 1 / found.count, dtype=torch.float64)
        if s.cross == "intra":
            cross = torch.eye(found.count, dtype=torch.float64)
        elif s.cross == "similarity":
            cross = similarity(points, found.labels)
        facts = {
            "trajectory": 0,
            "clusters": sites,
            "silhouettes": {str(k): value for k, value in found.silhouettes.items()},
            "course": [_rounded(cross)],
        }
        if s.begin == "member":
            alike = [member.spec == study.student_spec for member in models]
            names = [*members]
            facts["central"] = [None if i is None else names[i] for i in central(points, found.labels, alike)]
        if s.targets != "all":
            seen = known_classes if s.targets == "known" else guessed_shares
            facts["mix"] = [seen([members[site] for site in names]).tolist() for names in sites]
        if s.clustering != "subspaces":  # there a point is a row of angles already
            facts["similarity"] = {"sites": [*members], "of": s.clustering, "values": _alike(torch.from_numpy(points))}
        return State({CROSS: {"weights": cross}}, facts)

    def _as_compared(self) -> str:
        """In what models may be the same to a clustering; many are certain of one class of noise."""
        s = self.settings
        if s.clustering in ("predictions", "hierarchical") and s.probe == "softmax":
            return ' in their softmax answers to noise; probe = "logits" may tell more apart'
        return f" by {s.clustering}"

    def rate(self, number: int) -> float:
        """η_G in a trajectory: a tenth after half of them and a hundredth after three quarters, or along a cosine."""
        passed = number / self.settings.trajectories
        if self.settings.schedule == "cosine":
            return float(self.settings.lr * 0.5 * (1 + math.cos(math.pi * passed)))
        return float(self.settings.lr * 0.1 ** sum(passed >= share for share in (0.5, 0.75)))

    # Home, and Stage 3 ------------------------------------------------------------------------------------------------

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """To each site the model of its cluster; to a site in none, that of the largest (of equals, the first)."""
        found = state.facts["clusters"]
        largest = max(range(len(found)), key=lambda k: (len(found[k]), -k))
        own = {site: k for k, sites in enumerate(found) for site in sites}
        homes = [
            layout_groups(ctx.study.student_spec, dict(state.groups[group_name("model", k)])) for k in range(len(found))
        ]
        return {site: ctx.bundle("delivery", site, homes[own.get(site, largest)]) for site in ctx.study.sites}

    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """Stage 3: fine-tune the cluster's model near itself and near the site's own."""
        s, spec, start = self.settings, ctx.study.student_spec, join_groups(delivered)
        if s.recalibrate == "site" and len(site.train) > 1:
            start = self._at_home(ctx, site, start)
        if not s.personal:
            return single(spec, start)
        teachers = [(s.gamma, Teacher(spec, start))]
        own = own_model(ctx, site, memory)
        reason = "" if own is None else refused(ctx, own)
        if reason:
            ctx.note(f"{site.name} does not learn from its own model: {reason}")
        elif own is not None:
            teachers.append((s.delta, Teacher(own.spec, own.weights)))
        fitted = yield Fit(
            label=f"{site.name}, personal",
            spec=spec,
            start=start,
            data=site.train,
            recipe=self.personal_recipe(ctx.study),
            seed=ctx.streams.number("personal", site.name),
            objective=PersonalDistillation([share for share, _ in teachers], s.personal_temperature),
            teachers=tuple(teacher for _, teacher in teachers),
        )
        return single(spec, fitted.weights)

    def personal_recipe(self, study: Study) -> Recipe:
        """As the site trains, for `personal_epochs` at `personal_lr`, all of them."""
        s, recipe = self.settings, study.recipe(0, self.settings.personal_epochs)
        return replace(recipe, lr=s.personal_lr, schedule=s.personal_schedule or recipe.schedule, keep="last")

    def _at_home(self, ctx: Context, site: Site, weights: Weights) -> Weights:
        """The cluster's model with the statistics of the site's own images."""
        order = torch.randperm(len(site.train), generator=ctx.streams.torch("statistics", site.name))
        images = site.train.images
        pixels = (normalise(images[part.to(images.device)].to(ctx.device.torch)) for part in even_parts(order))
        precision = ctx.study.settings.train.precision
        return retaken(ctx.study.student_spec, weights, pixels, ctx.device.torch, precision)

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The one cluster's model where there is only one."""
        alone = len(state.facts["clusters"]) == 1
        return single(ctx.study.student_spec, dict(state.groups[group_name("model", 0)])) if alone else None


def _alike(points: Tensor) -> list[list[float]]:
    """Cosines between the points that were clustered: which sites' models are alike, for the report."""
    directions = F.normalize(points, dim=1)
    return _rounded(directions @ directions.T)


def _rounded(matrix: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in matrix.tolist()]
