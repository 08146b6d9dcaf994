"""FedBiCross's Stage 2 at work: every cluster's images, teachers and model, in lock-step (`fedbicross.py` says why).

`settings` are those of `FedBiCross`, with the values that depend on the images' size filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wardround.errors import Diverged
from wardround.learn import nets
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay, together
from wardround.learn.statistics import retaken
from wardround.methods.base import Context
from wardround.methods.parts import Parts
from wardround.methods.state import State
from wardround.synthesis import gallery, simplex
from wardround.synthesis.bilevel import ClusterModel, Lesson, sampled_steps
from wardround.synthesis.inversion import Synthesis, balanced_labels, shared_labels
from wardround.synthesis.rehearsal import Kept, Rehearsal, mixed_batch
from wardround.synthesis.stopwatch import Stopwatch
from wardround.synthesis.student import Student, exploded
from wardround.synthesis.teachers import AdaptedTeachers, Teachers

CROSS = "cross"
FACTS = ("clusters", "mix", "silhouettes", "similarity", "course")  # the last three for the report alone
VALIDATION_SHARE = 0.2
DIVERGED = "fedbicross: a model diverged in Stage 2; use a smaller lr"
UNANSWERED = "the synthesis diverged: what teachers say to its images is no longer finite; use a smaller synthesis_lr"


class Cluster:
    """One cluster at work: its teachers, their copies that follow the noise, its images and the model that learns."""

    def __init__(self, ctx: Context, s: Any, state: State, k: int, members: list[Member], begin: Member | None) -> None:
        study, device, precision = ctx.study, ctx.device.torch, ctx.study.settings.train.precision
        spec = study.student_spec
        self.k = k
        self.teachers = Teachers(members, device, precision, s.mean)
        self.adapted = AdaptedTeachers(members, device, "ema", s.follow, precision, s.mean)
        shares = state.facts.get("mix")
        drawn = (
            shared_labels(s.batch, torch.tensor(shares[k])) if shares else balanced_labels(s.batch, len(study.classes))
        )
        labels = drawn.to(device)
        self.synthesis = Synthesis(self.teachers, labels, study.image_shape, s.inversion())
        self.follow = Replay(self.adapted.follow, device)
        self.ask = Replay(lambda images: (self.teachers.logits(images), self.adapted.logits(images)), device)
        start = begin.weights if begin else study.fresh_weights(spec, "cluster model", f"cluster-{k}")
        weights = state.groups.get(group_name("model", k)) or start
        self.student = Student(spec, dict(weights), device, s.momentum, s.weight_decay, precision)
        self.student.restore_momentum(state.groups.get(group_name("momentum", k), {}))
        training = s.batch - max(2, round(VALIDATION_SHARE * s.batch))
        self.model = ClusterModel(self.student, k, training, s.temperature, device)
        if group_name("adapted", k) in state.groups:
            self.adapted.restore(state.groups[group_name("adapted", k)])
        self.trail = gallery.Trail(labels, study.classes, s.steps, whole=True)
        self.trail.load(state, self.title)

    @property
    def title(self) -> str:
        """In the gallery."""
        return f"cluster {self.k + 1}"

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """What must be kept of it between two trajectories."""
        self.follow.join()
        return {
            group_name("model", self.k): self.student.weights(),
            group_name("momentum", self.k): self.student.momentum(),
            group_name("adapted", self.k): self.adapted.statistics(),
        }


class StageTwo:
    """Algorithm 1, lines 8 to 21: all clusters in lock-step. Only the current images are held."""

    def __init__(self, ctx: Context, settings: Any, state: State, members: Mapping[str, Member]) -> None:
        self.ctx, self.settings = ctx, settings
        self.cross = state.groups[CROSS]["weights"].clone()
        self.facts = dict(state.facts)
        clusters = state.facts["clusters"]
        begin = state.facts.get("central", [None] * len(clusters))  # known until there is a model to go on with
        self.clusters = [
            Cluster(ctx, settings, state, k, [members[site] for site in sites], members.get(begin[k]))
            for k, sites in enumerate(clusters)
        ]
        self.rehearsal = self._rehearsal(state) if settings.rehearsal else None
        self.watch = Stopwatch(ctx.device.torch, state.facts.get("work"))
        self.parts = Parts(ctx, self.watch, state.facts.get("midway"))

    def _rehearsal(self, state: State) -> Rehearsal:
        s, study = self.settings, self.ctx.study
        batches = min(s.trajectories * s.samples, s.kept)
        kept = [
            Kept(c.teachers, c.synthesis.images.detach(), len(study.classes), batches, s.temperature)
            for c in self.clusters
        ]
        for k, of in enumerate(kept):
            if group_name("kept", k) in state.groups:
                of.restore(state.groups[group_name("kept", k)])
        return Rehearsal(kept, [cluster.student for cluster in self.clusters], self.ctx.device)

    def trajectory(self, number: int, rate: float, stopped: State | None) -> Iterator[None]:
        """One trajectory of every cluster; moves models and cross-cluster weights. Yields when a checkpoint is due."""
        s, draw = self.settings, self.ctx.streams.torch
        done = self.parts.done.get("synthesis", 0)
        for cluster in self.clusters:
            generator = draw("synthesis", f"cluster-{cluster.k}", 0, number)
            if done and stopped is not None:
                cluster.synthesis.restore(stopped.groups[group_name("images", cluster.k)], done, generator)
            else:
                cluster.synthesis.begin(generator)
        self.sampled = sampled_steps(s.steps, s.samples, draw("sampled steps", index=number))
        self.rate = rate
        yield from self.parts.run("synthesis", self._step, s.steps)
        if self.rehearsal is not None and len(self.rehearsal.kept[0]) > 0:  # one sample may fall on noise
            draws = [draw("rehearsal", f"cluster-{cluster.k}", 0, number) for cluster in self.clusters]
            self.rehearsal.begin(self.cross, rate, s.rehearsal, draws)
            yield from self.parts.run("distillation", self.rehearsal.step, s.rehearsal)

    def _step(self, number: int) -> None:
        """Eq. 2 and 3 for every cluster, and at the steps that are sampled Eq. 7 and 8.

        On a GPU the teachers follow the images while the next step of the synthesis runs already.
        """
        device, s, t = self.ctx.device, self.settings, number + 1
        together([cluster.synthesis.start for cluster in self.clusters], device)
        images = [cluster.synthesis.wait().images for cluster in self.clusters]
        pairs = list(zip(self.clusters, images, strict=True))
        together([partial(cluster.follow.start, batch) for cluster, batch in pairs], device)
        for cluster, batch in pairs:
            cluster.trail.see(number, batch)
        if t in self.sampled or s.inner == "all":
            noise = torch.full((), 1 - t / s.steps, device=device.torch)
            for cluster in self.clusters:
                cluster.follow.join()
            together([partial(cluster.ask.start, batch) for cluster, batch in pairs], device)
            lessons = [Lesson(batch, *cluster.ask.wait(), noise) for cluster, batch in pairs]
            if self.rehearsal is not None and t in self.sampled and 2 * t > s.steps:  # mostly noise before
                for kept, lesson in zip(self.rehearsal.kept, lessons, strict=True):
                    kept.add(lesson.images, lesson.adapted, noise)
            self._learn(lessons, outer=t in self.sampled and s.cross == "bilevel" and len(self.clusters) > 1)

    def _learn(self, lessons: list[Lesson], outer: bool) -> None:
        """Every model's step, and with `outer` that of its weights, in place."""
        together(
            [partial(c.model.start, lessons, self.cross[c.k], self.rate, outer) for c in self.clusters],
            self.ctx.device,
        )
        for cluster in self.clusters:
            found = cluster.model.wait()
            if outer:
                gradient = found.double().cpu()  # only here does the coordinator wait for the device
                if not bool(gradient.isfinite().all()):
                    answered = all(bool(lesson.original.isfinite().all()) for lesson in lessons)
                    raise Diverged(DIVERGED if answered else UNANSWERED)
                s = self.settings
                self.cross[cluster.k] = simplex.descend(self.cross[cluster.k], gradient, s.eta_w, s.normalise)

    def recalibrate(self) -> None:
        """Every model's running statistics anew, from the last images of all clusters by its weights on them."""
        last, train = [cluster.synthesis.images.detach() for cluster in self.clusters], self.ctx.study.settings.train
        for cluster in self.clusters:
            batch, net = mixed_batch(last, self.cross[cluster.k]), cluster.student.net
            spec, device = self.ctx.study.student_spec, self.ctx.device.torch
            nets.load(net, retaken(spec, cluster.student.weights(), [batch], device, train.precision))

    def kept(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """What must be kept to go on from here; in the middle of a trajectory, the images, too."""
        groups: dict[str, dict[str, Tensor]] = {}
        for cluster in self.clusters:
            groups |= cluster.groups()
            if self.parts.done:
                groups[group_name("images", cluster.k)] = cluster.synthesis.state()
            if self.rehearsal is not None:
                groups[group_name("kept", cluster.k)] = self.rehearsal.kept[cluster.k].state()
        finite = all(bool(t.isfinite().all()) for tensors in groups.values() for t in tensors.values())
        if not finite or any(exploded(cluster.student.weights()) for cluster in self.clusters):
            raise Diverged(DIVERGED)
        shown, facts = self.shown()
        return {**groups, **shown}, {**facts, "midway": dict(self.parts.done)} if self.parts.done else facts

    def shown(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Of that, what there is to look at: who is with whom, weights, images on their way, and times."""
        groups, facts = gallery.merged({cluster.title: cluster.trail for cluster in self.clusters})
        kept = {name: self.facts[name] for name in FACTS if name in self.facts}
        return {CROSS: {"weights": self.cross.clone()}, **groups}, {**kept, **facts, "work": self.watch.record()}


def group_name(group: str, k: int) -> str:
    """Of a cluster's tensors in a state."""
    return f"{group}-{k:03d}"
