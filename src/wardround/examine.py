"""Every predictor on every test it owes an answer to, each distinct pair of a network and a test once.

Rule 6: the record keeps site × round × split × model. With the default protocol all sites share one test set, so one
pass over it gives the global accuracy and, weighted to each site's label mix, every local one. Sites of a panel deploy
the same networks, each with a prior of its own, so a network's answers are kept as long as the shared panel is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wardround.data.federation import Federation, Site
from wardround.data.imageset import ImageSet
from wardround.learn.device import Device
from wardround.learn.evaluate import network_outputs
from wardround.learn.predictor import Member, Predictor, member_logits
from wardround.measure import Tally, calibration_gap_in_mix, count_answers, macro_auc, project, reaches, tally
from wardround.measure.answers import PLACES
from wardround.progress import Silent
from wardround.streams import Streams

GLOBAL, LOCAL = "global", "local"
SHARED, PERSONAL, TRAINED = "shared", "personal", "trained"
FEATURES_OF_A_SITE = 500  # images at most; the distances of all pairs are looked at
FEATURES_DRAWN = 300  # points of a picture of all sites


@dataclass(frozen=True)
class _Seen:
    by: Predictor | Member  # held, so that its tensors' addresses stay its own while they serve as a key
    images: ImageSet
    scores: Tensor  # of a member its logits


class Examiner:
    """Turns predictors into rows of the record."""

    def __init__(
        self, federation: Federation, device: Device, precision: str, method: str, seed: int, progress: Silent
    ) -> None:
        self.federation, self.device, self.precision, self.progress = federation, device, precision, progress
        self.labels = {"method": method, "seed": seed}
        self._seen: dict[tuple[object, ...], _Seen] = {}
        self._said: dict[tuple[object, ...], _Seen] = {}

    def shared(self, round: int, predictor: Predictor) -> Iterator[dict[str, Any]]:
        """The shared model on the global test and on every site's own."""
        yield from self._global_rows(round, SHARED, "", predictor)
        for site in self.federation.sites:
            yield from self._local_rows(round, SHARED, site, predictor)

    def personal(self, round: int, site: str, predictor: Predictor) -> Iterator[dict[str, Any]]:
        """A site's own predictor: the same one on its local test and on the global one."""
        yield from self._local_rows(round, PERSONAL, self._owner(site), predictor)
        yield from self._global_rows(round, PERSONAL, site, predictor)

    def trained(self, round: int, site: str, predictor: Predictor) -> Iterator[dict[str, Any]]:
        """What a site has right after its training of a round, on its local test."""
        yield from self._local_rows(round, TRAINED, self._owner(site), predictor)

    def answers(self, round: int, model: str, site: str, predictor: Predictor) -> Iterator[dict[str, Any]]:
        """What a predictor says for which class, counted: on the global test and, where it has other images, its own.

        A local test that is the global one weighted to the site's label mix has the same answers.
        """
        tests = [(GLOBAL, self.federation.test)]
        if site and self._owner(site).test.images is not self.federation.test:
            tests.append((LOCAL, self._owner(site).test.images))
        for split, images in tests:
            found = count_answers(self._scores(predictor, images), images.labels.cpu(), len(images.classes))
            place = {"site": site, "round": round, "split": split, "model": model}
            counts = {"confusion": found.confusion, "bins": found.bins}
            mixed = self._calibration_in_mix(site, predictor) if site and split == GLOBAL else None
            yield {"kind": "answers", **self.labels, **place, **counts, "local_calibration_error": mixed}

    def _calibration_in_mix(self, site: str, predictor: Predictor) -> float | None:
        """How well it is calibrated for its site's own mix of patients, where that is the global test weighted."""
        weights, test = self._owner(site).test.class_weights, self.federation.test
        if weights is None:
            return None
        return round(calibration_gap_in_mix(self._scores(predictor, test), test.labels.cpu(), weights.cpu()), PLACES)

    def features(self, network: Member, streams: Streams) -> Iterator[dict[str, Any]]:
        """How far each site's features under one network are from all sites' (FedMP, Eq. 4).

        Of training images, at most so many of a site, the same ones for every method; features are what the head reads.
        """
        features, labels = {}, {}
        for site in self.federation.sites:
            if len(site.train) == 0:
                continue
            order = torch.randperm(len(site.train), generator=streams.torch("features", site.name))
            chosen = order[:FEATURES_OF_A_SITE].sort().values.to(site.train.images.device)
            images, device = site.train.images[chosen], self.device
            found = network_outputs(
                network.spec, network.weights, images, device.torch, self.precision, device.workers
            ).features
            features[site.name], labels[site.name] = found.flatten(1).cpu(), site.train.labels[chosen].cpu()
        for name, reach in reaches(features, labels, len(self.federation.classes)).items():
            yield {
                "kind": "features",
                "site": name,
                "images": reach.features,
                "distance": reach.distance,
                "relative": reach.relative,
                "by_class": list(reach.by_class),
            }
        for projection in project(features, labels, streams, FEATURES_DRAWN):
            yield {"kind": "projection", **projection}

    def is_constant(self, predictor: Predictor) -> bool:
        """Whether this predictor gives one and the same class for the whole global test."""
        return self._tally(predictor, self.federation.test).is_constant

    def forget(self, except_for: Predictor | None = None) -> None:
        """Drop cached scores and the predictors they hold, so that memory does not grow with sites or rounds."""
        kept = except_for.identity() if except_for is not None else None
        networks = {member.identity() for member in except_for.members} if except_for is not None else set()
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] == kept}
        self._said = {key: said for key, said in self._said.items() if key[0] in networks}

    def _owner(self, name: str) -> Site:
        (owner,) = (site for site in self.federation.sites if site.name == name)
        return owner

    def _global_rows(self, round: int, model: str, site: str, predictor: Predictor) -> Iterator[dict[str, Any]]:
        test = self.federation.test
        found = self._tally(predictor, test)
        place = (round, GLOBAL, model, site, found.n)
        yield self._row(*place, "accuracy", found.accuracy())
        yield self._row(*place, "balanced_accuracy", found.balanced_accuracy())
        yield self._row(*place, "macro_auc", macro_auc(self._scores(predictor, test), test.labels.cpu()))

    def _local_rows(self, round: int, model: str, site: Site, predictor: Predictor) -> Iterator[dict[str, Any]]:
        found = self._tally(predictor, site.test.images)
        place = (round, LOCAL, model, site.name, found.n)
        weights = site.test.class_weights
        yield self._row(*place, "accuracy", found.accuracy(weights))
        yield self._row(*place, "balanced_accuracy", found.balanced_accuracy(weights))

    def _row(
        self, round: int, split: str, model: str, site: str, n: int, metric: str, value: float | None
    ) -> dict[str, Any]:
        return {
            "kind": "row",
            **self.labels,
            "site": site,
            "round": round,
            "split": split,
            "model": model,
            "metric": metric,
            "value": value,
            "n": n,
        }

    def _tally(self, predictor: Predictor, images: ImageSet) -> Tally:
        return tally(self._scores(predictor, images), images.labels.cpu(), len(images.classes))

    def _scores(self, predictor: Predictor, images: ImageSet) -> Tensor:
        key = (predictor.identity(), id(images))
        if key not in self._seen:
            scores = predictor.scores_of(self._logits(predictor, images), len(images))
            self._seen[key] = _Seen(predictor, images, scores)
        return self._seen[key].scores

    def _logits(self, predictor: Predictor, images: ImageSet) -> list[Tensor]:
        keys = [(member.identity(), id(images)) for member in predictor.members]
        new = {key: m for key, m in zip(keys, predictor.members, strict=True) if key not in self._said}
        found = member_logits([*new.values()], images.images, self.device, self.precision, self.progress)
        for (key, member), logits in zip(new.items(), found, strict=True):
            self._said[key] = _Seen(member, images, logits)
        return [self._said[key].scores for key in keys]
