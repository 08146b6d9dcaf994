"""From what left a site to the attacks that apply to it, one `Job` each.

A job runs by itself and always gives the same figures, so an audit that was stopped goes on with the jobs that are
left. Decoders and inversions share nothing but the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.audit.decoder import DecoderTraining
from wardround.audit.exposure import label_count_audit, prototype_audit
from wardround.audit.frechet import FeatureNetwork, random_network
from wardround.audit.inversion import invert, likeness
from wardround.audit.membership import Shadows, lira_offline, loss_threshold, train_shadows
from wardround.audit.reconstruction import Halves, Rebuilt, decode_prototypes, halves, rebuild, rebuild_from_stage
from wardround.audit.report import Attack, Figure
from wardround.audit.target import Pools, Target, pools
from wardround.data.imageset import merge
from wardround.errors import BadInput
from wardround.exchange.bundle import COUNTERS, LABEL_COUNTS, PARAMETERS, SIZE, STATISTICS
from wardround.learn.device import Device
from wardround.learn.embeddings import Embeddings
from wardround.learn.predictor import Member, Predictor
from wardround.learn.prototypes import Prototypes
from wardround.learn.stages import stage_features, stage_name, stage_shape
from wardround.progress import Silent
from wardround.settings import hint
from wardround.streams import Streams
from wardround.synthesis.inversion import Inversion
from wardround.tensorfile import Groups

LOSS, LIRA, INVERSION, DECODER = "loss-threshold", "lira-offline", "model-inversion", "decoder"
PROTOTYPES, DECODED, COUNTS = "prototypes", "decoded-prototypes", "label-counts"
SYNTHETIC, STATED = "synthetic-images", "stated"
ATTACKS = (LOSS, LIRA, INVERSION, DECODER, PROTOTYPES, DECODED, COUNTS, SYNTHETIC, STATED)
OF_NETWORKS = (PARAMETERS, STATISTICS, COUNTERS)
KEPT = "predictor (stays at the site)"
COMPUTED = "synthetic images (computed from what left)"
SHADOW_SHARE = 0.75  # of the attacker's images that each shadow model learns from, so that shadows differ


@dataclass(frozen=True)
class Effort:
    """How hard the attacks try. The defaults take minutes on a CPU for a small network."""

    shadows: int = 4
    decoder_epochs: int = 60
    inversion_steps: int = 200
    inversion_images: int = 32
    most: int = 2000  # images of each kind that are used, at most


@dataclass(frozen=True)
class Done:
    """What a job gives: figures for the record, and pictures that stay at the site."""

    attack: Attack
    pictures: Groups = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One attack on one payload group."""

    group: str
    name: str
    run: Callable[[], Done]


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The attacks that a user named; all where none is. An unknown name is refused."""
    for name in names:
        if name not in ATTACKS:
            near = hint(name, ATTACKS)
            raise BadInput(f"there is no attack {name!r}; {near + ' ' if near else ''}known are {', '.join(ATTACKS)}")
    return tuple(names) or ATTACKS


class Attacker:
    """The attacks on one target; `jobs` lists those that apply."""

    def __init__(self, target: Target, seed: int, effort: Effort, device: Device, progress: Silent) -> None:
        self.target, self.seed, self.effort = target, seed, effort
        self.device, self.progress = device, progress
        self.streams, self.training = Streams(seed), DecoderTraining(epochs=effort.decoder_epochs)

    def jobs(self) -> Iterator[Job]:
        """In the order of the record: group by group."""
        target = self.target
        if target.model is not None:
            group = KEPT if target.kept else PARAMETERS
            yield Job(group, LOSS, self._loss)
            yield Job(group, LIRA, self._lira)
            yield Job(group, INVERSION, self._inversion)
        if "embeddings" in target.bundle.groups:
            yield Job("embeddings", DECODER, self._decoder)
        if "prototypes" in target.bundle.groups and target.model is not None:
            yield Job("prototypes", PROTOTYPES, self._prototypes)
            yield Job("prototypes", DECODED, self._decoded)
        if LABEL_COUNTS in target.bundle.groups:
            yield Job(LABEL_COUNTS, COUNTS, self._counts)
        for group in (SIZE, "images"):
            if group in target.bundle.groups:
                yield Job(group, STATED, lambda group=group: self._stated(group))  # type: ignore[misc]
        if target.synthetic is not None:
            yield Job(COMPUTED, SYNTHETIC, self._synthetic)

    def unjudged(self) -> list[str]:
        """Groups that left and that no attack here is made for."""
        judged = {job.group for job in self.jobs()}
        sent = self.target.bundle.groups
        return [g for g in sent if g not in judged and not (g in OF_NETWORKS and PARAMETERS in judged)]

    # Models -----------------------------------------------------------------------------------------------------------

    @property
    def _member(self) -> Member:
        assert self.target.model is not None  # noqa: S101 - `jobs` names no attack that needs one where there is none
        return self.target.model

    @property
    def _predictor(self) -> Predictor:
        return Predictor(self._member.spec.classes, (self._member,))

    @cached_property
    def _pools(self) -> Pools:
        return pools(self.target.site, self.streams, self.effort.most)

    def _loss(self) -> Done:
        found = loss_threshold(self._predictor, self._pools.members, self._pools.others, self.device)
        return Done(found.attack(self.seed))

    def _lira(self) -> Done:
        parts, auxiliary = self._pools, self._pools.auxiliary
        size = max(2, min(len(self.target.site.train), int(SHADOW_SHARE * len(auxiliary))))
        shadows = train_shadows(
            self._member.spec,
            self.target.recipe,
            auxiliary,
            merge([parts.members, parts.others]),
            Shadows(self.effort.shadows, size),
            self.streams,
            self.device,
            self.progress,
        )
        return Done(lira_offline(self._predictor, parts.members, parts.others, shadows, self.device).attack(self.seed))

    def _inversion(self) -> Done:
        effort = self.effort
        how = Inversion(steps=effort.inversion_steps, batch=effort.inversion_images)
        with self.progress.task("inverting the model", effort.inversion_steps) as advance:
            made = invert(self._member, how, self.streams, self.device.torch, advance)
        alike = likeness(made.images, made.labels, self.target.site.train, self.streams, self._few)
        return Done(made.attack(alike, self.seed), alike.pictures())

    # Features ---------------------------------------------------------------------------------------------------------

    def _decoder(self) -> Done:
        rebuilt = self._rebuilt_as_sent()
        return Done(rebuilt.attack(self._eye, self.seed), rebuilt.pictures())

    def _rebuilt_as_sent(self) -> Rebuilt:
        """The attack on the very rows that left, noise and clipping included, each beside the image it came from."""
        sent, images = self.target.bundle.groups["embeddings"], self.target.site.train
        features, rows = sent["features"], self._rows_of(sent["features"], sent["labels"])
        used = torch.unique(rows)  # noise may let two rows look like one image's: it must not be in both halves
        split = halves(images.take(used), self.streams, self.target.name, self.effort.most)
        parts = Halves(
            *(torch.isin(rows, used[half]).nonzero().flatten() for half in (split.auxiliary, split.attacked))
        )
        shape, own = self._shape(features), images.images[rows]
        return rebuild(features, shape, own, parts, self.training, self.streams, self.device.torch, self.progress)

    def _rows_of(self, features: Tensor, labels: Tensor) -> Tensor:
        """Which image each sent row is of: the site's order, or where only some were sent, the most alike of its class.

        Alike by direction, which clipping leaves as it is.
        """
        images, labels = self.target.site.train, labels.cpu()
        if torch.equal(labels, images.labels.cpu()):
            return torch.arange(len(images))
        if self.target.model is None:
            raise BadInput("the embeddings are of some of the images only, and without the model nobody can say which")
        own = self._features()
        if own.shape[1] != features.shape[1]:
            raise BadInput("the embeddings are not of the stage that the study names; give the parcel's own study")
        own, sent = F.normalize(own), F.normalize(features.cpu())
        found = []
        for rows, of in zip(torch.split(sent, 256), torch.split(labels, 256), strict=True):
            alike = rows @ own.T
            found.append(alike.masked_fill(of.unsqueeze(1) != images.labels.cpu(), -torch.inf).argmax(dim=1))
        return torch.cat(found)

    def _shape(self, features: Tensor) -> tuple[int, ...]:
        if self.target.model is None:
            return (features.shape[1],)
        spec = self._member.spec
        return stage_shape(spec, stage_name(spec, self.target.stage))

    def _features(self) -> Tensor:
        model, images = self._member, self.target.site.train.images
        name = stage_name(model.spec, self.target.stage)
        return stage_features(model.spec, model.weights, images, name, self.device.torch)

    def _prototypes(self) -> Done:
        own = Embeddings(self._features(), self.target.site.train.labels.cpu())
        return Done(prototype_audit(self._sent_prototypes, own, self.target.site.train.classes, self.seed))

    def _decoded(self) -> Done:
        rebuilt = rebuild_from_stage(
            self._member,
            self.target.site.train,
            self.target.stage,
            self.training,
            self.streams,
            self.device.torch,
            site=self.target.name,
            most=self.effort.most,
            progress=self.progress,
        )
        blends = likeness(
            *decode_prototypes(rebuilt.decoder, self._sent_prototypes), self.target.site.train, self.streams, self._few
        )
        what = "a decoder makes an image of each class's mean embedding"
        return Done(blends.attack(self.seed, DECODED, what), blends.pictures())

    @property
    def _sent_prototypes(self) -> Prototypes:
        return Prototypes.of(self.target.bundle.groups["prototypes"])

    # The rest ---------------------------------------------------------------------------------------------------------

    def _counts(self) -> Done:
        (counts,) = self.target.bundle.groups[LABEL_COUNTS].values()
        return Done(label_count_audit(counts, self.target.site.train.classes, self.seed))

    def _stated(self, group: str) -> Done:
        if group == SIZE:
            told = int(self.target.bundle.groups[SIZE]["images"])
            figure = Figure("images", told, "how many images the site trained on, as it was sent", 1)
            return Done(Attack(STATED, "the number is read as it was sent", self.seed, (figure,)))
        sent = sum(len(t) for name, t in self.target.bundle.groups[group].items() if name.endswith("images"))
        figure = Figure("images", sent, "how many images were sent as they are", 1)
        return Done(
            Attack(STATED, "nothing need be attacked", self.seed, (figure,), ("the images themselves leave the site",))
        )

    def _synthetic(self) -> Done:
        assert self.target.synthetic is not None  # noqa: S101 - as above
        alike = likeness(*self.target.synthetic, self.target.site.train, self.streams, self._few)
        what = f"{len(alike.images)} images that were computed from what left are held against the training images"
        return Done(alike.attack(self.seed, SYNTHETIC, what), alike.pictures())

    @property
    def _few(self) -> int:
        return min(self.effort.most, 500)

    @property
    def _eye(self) -> FeatureNetwork:
        return random_network(self.target.site.train.channels)
