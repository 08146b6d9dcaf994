"""One cell of an experiment: a set, a level of skew and a seed, its sites trained once.

What is then asked of the same models (a site that lies, a class that nobody has seen, another reading of a paper) costs
no training of sites; networks are run once on every test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

from wardround import run
from wardround.data.federation import Federation, LocalTest, Site
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, RunFailed, SiteFailed
from wardround.exchange.bundle import Bundle
from wardround.exchange.inprocess import step_together
from wardround.learn.device import Device
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Fitted
from wardround.learn.predictor import Member, Predictor
from wardround.learn.side_by_side import Outcome, train_many
from wardround.learn.store import FitStore
from wardround.measure import Tally, tally
from wardround.methods.base import Context, Method, Work, join_groups
from wardround.methods.oneshot import OWN
from wardround.methods.registry import make, own_settings
from wardround.methods.state import State
from wardround.progress import NO_PROGRESS
from wardround.settings import overlay, validate
from wardround.study import Study
from wardround.tensorfile import canonical

Change = Callable[[Site], Site]


@dataclass
class Cell:
    """Sites that have been trained, and what they answer under `consult`: all that any one-shot method asks for.

    `own` are the methods' own settings by name, as a preset has them.
    """

    study: Study
    data: Federation
    device: Device
    fits: FitStore
    own: Mapping[str, Any] = field(default_factory=dict)
    answers: dict[str, Bundle] = field(default_factory=dict)
    # What fits that no store keeps came to, so that readings which differ afterwards alone train once; None: not kept.
    lessons: dict[str, Outcome] | None = None
    # Of each network on the test images. Networks are held, so that their tensors' addresses stay their own.
    said: dict[tuple[object, ...], tuple[Member, Tensor]] = field(default_factory=dict)

    def make(self, method: str, **changed: Any) -> Method:
        """A method under the preset, with some of its settings changed."""
        return make(method, {**own_settings(self.own, method), **changed})

    def context(self, method: Method) -> Context:
        """What a method's questions come with."""
        study = self.study.with_method(method.name, method.settings.model_dump(mode="json"))
        return Context(study, 0, self.device, self._fitted)

    def train(self, sites: Sequence[Site]) -> dict[str, Bundle]:
        """What these sites send: model, size and exact counts. Trained side by side, or out of the store."""
        method = self.make("consult")
        ctx = self.context(method)
        works = {site.name: method.answer(ctx, site, ctx.bundle("request", site.name, {}), State()) for site in sites}
        found = step_together(works, self._outcomes)
        for outcome in found.values():
            if isinstance(outcome, SiteFailed):
                raise RunFailed(str(outcome))
        return {name: outcome.bundle for name, outcome in found.items() if not isinstance(outcome, SiteFailed)}

    def shared(self, name: str, answers: Mapping[str, Bundle]) -> tuple[Context, Method, State, Predictor]:
        """A method's shared predictor from these answers."""
        method = self.make(name)
        ctx = self.context(method)
        *_, state = method.absorb(ctx, State(), answers)
        return ctx, method, state, shared_predictor(method, ctx, state)

    def personal(self, works: Mapping[str, Work[Predictor]]) -> dict[str, Predictor]:
        """What sites deploy, their training done side by side."""
        found = {}
        for name, predictor in step_together(works, self._outcomes).items():
            if isinstance(predictor, SiteFailed):
                raise RunFailed(str(predictor))
            found[name] = predictor
        return found

    def logits(self, predictor: Predictor) -> list[Tensor]:
        """Of its networks on the test images; each is run once, whoever asks."""
        precision = self.study.settings.train.precision
        for member in predictor.members:
            if member.identity() not in self.said:
                pixels = self.data.test.images
                outputs = network_outputs(member.spec, member.weights, pixels, self.device.torch, precision)
                self.said[member.identity()] = member, outputs.logits.float().cpu()
        return [self.said[member.identity()][1] for member in predictor.members]

    def scores(self, predictor: Predictor) -> Tensor:
        """On the test images."""
        return predictor.combined(self.logits(predictor), len(self.data.test))

    def tally(self, predictor: Predictor) -> Tally:
        """Its right answers on the test images."""
        return tally(self.scores(predictor), self.data.test.labels.cpu(), len(self.data.classes))

    def accuracies(self, deployed: Mapping[str, Predictor]) -> tuple[float, float]:
        """Local and global, of each site's own predictor, averaged over sites; the networks are forgotten after."""
        tallies = [(site, self.tally(deployed[site.name])) for site in self.data.sites]
        self.forget()
        local = mean(found.accuracy(site.test.class_weights) for site, found in tallies)
        return local, mean(found.accuracy() for _, found in tallies)

    def alone(self, panel: Predictor) -> dict[str, Predictor]:
        """The sites' own models, out of a predictor of all of them."""
        return {name: Predictor(panel.classes, (panel.members[i],)) for i, name in enumerate(sorted(self.answers))}

    def at_sites(self, method: Method, ctx: Context, state: State) -> tuple[float, float]:
        """Local and global accuracy of what sites make of a method's result; each remembers its own model."""
        home = method.deliver(ctx, state)
        memories = {name: State({OWN: join_groups(answer)}) for name, answer in self.answers.items()}
        works = {s.name: method.personal(ctx, s, home[s.name], memories[s.name]) for s in self.data.sites}
        return self.accuracies(self.personal(works))

    def forget(self) -> None:
        """Let go of the networks that have been tested."""
        self.said.clear()

    def _outcomes(self, fits: list[Fit]) -> list[Outcome]:
        if self.lessons is not None and all(fit.key() is None for fit in fits):
            return self._lessons(fits, self.lessons)
        keys = [fit.key() or "" for fit in fits]
        stored = {key: found for key in keys if key and (found := self.fits.get(key)) is not None}
        todo = [i for i, key in enumerate(keys) if key not in stored]
        new = dict(zip(todo, train_many([fits[i] for i in todo], self.device, lambda: None), strict=True))
        for i, outcome in new.items():
            if keys[i] and isinstance(outcome, Fitted):
                self.fits.put(keys[i], outcome)
        return [new[i] if i in new else stored[key] for i, key in enumerate(keys)]

    def _lessons(self, fits: list[Fit], kept: dict[str, Outcome]) -> list[Outcome]:
        """Train what is new of fits whose one teacher is the network that they start from."""
        names = [f"{canonical(fit.ingredients())} {fit.label} {vars(fit.objective)}" for fit in fits]
        todo = [i for i, name in enumerate(names) if name not in kept]
        kept |= zip(
            [names[i] for i in todo], train_many([fits[i] for i in todo], self.device, lambda: None), strict=True
        )
        return [kept[name] for name in names]

    def _fitted(self, fits: list[Fit]) -> list[Fitted]:
        found = self._outcomes(fits)
        if any(isinstance(outcome, SiteFailed) for outcome in found):
            raise RunFailed(str(next(outcome for outcome in found if isinstance(outcome, SiteFailed))))
        return [outcome for outcome in found if isinstance(outcome, Fitted)]


def shared_predictor(method: Method, ctx: Context, state: State) -> Predictor:
    """What all sites share; a method without it is refused."""
    predictor = method.predictor(ctx, state)
    if predictor is None:
        raise BadInput(f"{method.name} ends with no predictor that all sites share; choose another method")
    return predictor


def open_cell(
    tree: Mapping[str, Any], source: Path, alpha: float, seed: int, work: Path, change: Change = lambda s: s
) -> Cell:
    """Deal the images and train the sites, each changed first."""
    place = {"source": str(source.resolve()), "alpha": alpha, "partition_seed": seed}
    common = {key: value for key, value in tree.items() if key != "set"}
    settings = validate(overlay(common, {"method": "consult", "seed": seed, "data": place}))
    prepared = run.prepare(settings, [("consult", {})], NO_PROGRESS)
    data = _moved(prepared.federation, prepared.device, change)
    cell = Cell(prepared.study, data, prepared.device, FitStore(work / "fits"), tree.get("set", {}))
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
