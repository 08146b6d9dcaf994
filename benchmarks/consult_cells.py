"""One cell of the experiments with `consult`: a set, a level of skew and a seed, its sites trained once.

What is then asked of the same models (a site that lies, a class that nobody has seen) costs no training: networks are
run once on every test, and only how they are combined changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround import run
from wardround.data.federation import Federation, LocalTest, Site
from wardround.data.imageset import ImageSet
from wardround.errors import RunFailed, SiteFailed
from wardround.exchange.bundle import Bundle
from wardround.exchange.inprocess import step_together
from wardround.learn.device import Device
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Fitted
from wardround.learn.predictor import Member, Predictor
from wardround.learn.side_by_side import Outcome, train_many
from wardround.learn.store import FitStore
from wardround.measure import Tally, tally
from wardround.methods.base import Context, Method
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.progress import NO_PROGRESS
from wardround.settings import overlay, validate
from wardround.study import Study

Change = Callable[[Site], Site]


@dataclass
class Cell:
    """Sites that have been trained, and what they answer under `consult`."""

    study: Study
    data: Federation
    device: Device
    fits: FitStore
    answers: dict[str, Bundle] = field(default_factory=dict)
    # Of each network on the test images. Networks are held, so that their tensors' addresses stay their own.
    said: dict[tuple[object, ...], tuple[Member, Tensor]] = field(default_factory=dict)

    def context(self, method: str) -> Context:
        """What a method's questions come with."""
        study = self.study.with_method(method, make(method, {}).settings.model_dump(mode="json"))
        return Context(study, 0, self.device, self._fitted)

    def train(self, sites: Sequence[Site]) -> dict[str, Bundle]:
        """What these sites send: model, size and exact counts. Trained side by side, or out of the store."""
        ctx, method = self.context("consult"), make("consult", {})
        works = {site.name: method.answer(ctx, site, ctx.bundle("request", site.name, {}), State()) for site in sites}
        found = step_together(works, self._outcomes)
        for outcome in found.values():
            if isinstance(outcome, SiteFailed):
                raise RunFailed(str(outcome))
        return {name: outcome.bundle for name, outcome in found.items() if not isinstance(outcome, SiteFailed)}

    def shared(self, name: str, answers: Mapping[str, Bundle]) -> tuple[Context, Method, State, Predictor]:
        """A method's shared predictor from these answers."""
        ctx, method = self.context(name), make(name, {})
        *_, state = method.absorb(ctx, State(), answers)
        predictor = method.predictor(ctx, state)
        if predictor is None:
            raise RunFailed(f"{name} has no shared predictor")
        return ctx, method, state, predictor

    def scores(self, predictor: Predictor) -> Tensor:
        """On the test images; each network is run once, whoever asks."""
        precision = self.study.settings.train.precision
        for member in predictor.members:
            if member.identity() not in self.said:
                pixels = self.data.test.images
                outputs = network_outputs(member.spec, member.weights, pixels, self.device.torch, precision)
                self.said[member.identity()] = member, outputs.logits.float().cpu()
        logits = [self.said[member.identity()][1] for member in predictor.members]
        return predictor.combined(logits, len(self.data.test))

    def tally(self, predictor: Predictor) -> Tally:
        """Its right answers on the test images."""
        return tally(self.scores(predictor), self.data.test.labels.cpu(), len(self.data.classes))

    def _outcomes(self, fits: list[Fit]) -> list[Outcome]:
        keys = [fit.key() or "" for fit in fits]
        stored = {key: found for key in keys if key and (found := self.fits.get(key)) is not None}
        todo = [i for i, key in enumerate(keys) if key not in stored]
        new = dict(zip(todo, train_many([fits[i] for i in todo], self.device, lambda: None), strict=True))
        for i, outcome in new.items():
            if keys[i] and isinstance(outcome, Fitted):
                self.fits.put(keys[i], outcome)
        return [new[i] if i in new else stored[key] for i, key in enumerate(keys)]

    def _fitted(self, fits: list[Fit]) -> list[Fitted]:
        found = self._outcomes(fits)
        if any(isinstance(outcome, SiteFailed) for outcome in found):
            raise RunFailed(str(next(outcome for outcome in found if isinstance(outcome, SiteFailed))))
        return [outcome for outcome in found if isinstance(outcome, Fitted)]


def open_cell(
    tree: Mapping[str, Any], source: Path, alpha: float, seed: int, work: Path, change: Change = lambda s: s
) -> Cell:
    """Deal the images and train the sites, each changed first."""
    place = {"source": str(source.resolve()), "alpha": alpha, "partition_seed": seed}
    common = {key: value for key, value in tree.items() if key != "set"}
    settings = validate(overlay(common, {"method": "consult", "seed": seed, "data": place}))
    prepared = run.prepare(settings, [("consult", {})], NO_PROGRESS)
    data = _moved(prepared.federation, prepared.device, change)
    cell = Cell(prepared.study, data, prepared.device, FitStore(work / "fits"))
    cell.answers = cell.train(data.sites)
    return cell


def _moved(data: Federation, device: Device, change: Change) -> Federation:
    """The sites as changed, on the device; all are tested on one set of images, each by its own label mix."""

    def move(images: ImageSet) -> ImageSet:
        return images.to(device.torch)

    test = move(data.test)
    sites = []
    for site in map(change, data.sites):
        own = LocalTest(test, site.test.class_weights)
        sites.append(replace(site, train=move(site.train), val=move(site.val), test=own))
    return replace(data, sites=tuple(sites), test=test)
