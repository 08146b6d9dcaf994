"""What is agreed once the images are known: the task, who takes part, which network, which schedule.

A `Study` is what a method sees. It answers every question about the schedule (rounds, epochs, participants, learning
rate), so that one-shot, few-shot and multi-round runs are the same method under another schedule.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

from wardround.data.federation import Federation
from wardround.errors import BadInput
from wardround.exchange.bundle import NAME
from wardround.learn.fit import Recipe
from wardround.models import NetSpec, Weights, fresh, load_weights
from wardround.settings import Settings
from wardround.streams import Streams
from wardround.tensorfile import canonical

ROUNDS = 20  # of a multi-round method where the settings say nothing


@dataclass(frozen=True)
class Study:
    """The agreement: settings plus what the data fixes."""

    settings: Settings
    classes: tuple[str, ...]
    channels: int
    size: int
    sites: tuple[str, ...]
    partition_hash: str
    agreed_id: str = ""  # of the agreement between real sites, where there is one

    @cached_property
    def id(self) -> str:
        """A short hash of what is agreed; two studies that differ in anything that matters differ here."""
        if self.agreed_id:
            return self.agreed_id
        agreed = self.settings.model_dump(mode="json", exclude={"name", "device", "workers", "policies"})
        record = {"settings": agreed, "classes": list(self.classes), "partition": self.partition_hash}
        return hashlib.sha256(canonical(record).encode()).hexdigest()[:16]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Of one image: channels, height, width."""
        return self.channels, self.size, self.size

    @property
    def streams(self) -> Streams:
        """The random streams of this study's seed."""
        return Streams(self.settings.seed)

    @property
    def rounds(self) -> int:
        """How many rounds a multi-round method takes."""
        return self.settings.rounds or ROUNDS

    def epochs(self, round: int) -> int:
        """Local epochs in a round; the last number of a list holds for the rounds after it."""
        epochs = self.settings.train.epochs
        return epochs if isinstance(epochs, int) else epochs[min(round, len(epochs) - 1)]

    @property
    def total_epochs(self) -> int:
        """The whole local budget: what a method that talks once trains for, so that comparisons are fair."""
        return sum(self.epochs(round) for round in range(self.rounds))

    def recipe(self, round: int, epochs: int | None = None) -> Recipe:
        """How sites train in this round."""
        train = self.settings.train
        return Recipe(
            epochs=self.epochs(round) if epochs is None else epochs,
            lr=train.lr * train.round_decay**round,
            **train.model_dump(exclude={"epochs", "lr", "round_decay"}),
        )

    def participants(self, round: int) -> tuple[str, ...]:
        """The sites asked in a round: at least one, in the order of their names.

        Drawn from the partition seed, not the study's seed, so that every method and every seed asks the same sites in
        the same order (FedKPer's paired comparison).
        """
        count = max(1, round_half_up(self.settings.participants * len(self.sites)))
        if count >= len(self.sites):
            return self.sites
        draw = Streams(self.settings.data.partition_seed).numpy("participants", round=round)
        chosen = draw.choice(len(self.sites), size=count, replace=False)
        return tuple(self.sites[i] for i in sorted(chosen.tolist()))

    def spec(self, site: str) -> NetSpec:
        """The network of a site."""
        model = self.settings.model
        name = model.per_site.get(site, model.name)
        own = name == model.name
        return NetSpec(
            name, self.channels, len(self.classes), self.size, model.width if own else None, model.stem if own else None
        )

    @property
    def student_spec(self) -> NetSpec:
        """The network that a coordinator makes for all: the study's own, whatever single sites use."""
        model = self.settings.model
        return NetSpec(model.name, self.channels, len(self.classes), self.size, model.width, model.stem)

    @property
    def common_spec(self) -> NetSpec:
        """The network of all sites, where they agree; a `BadInput` that says so where they do not."""
        specs = {self.spec(site) for site in self.sites}
        if len(specs) > 1:
            names = ", ".join(sorted(spec.name for spec in specs))
            raise BadInput(
                f"{self.settings.method} needs the same model at every site, but there are {names}; "
                "remove model.per_site, or use local or ensemble"
            )
        return specs.pop()

    def initial(self, site: str | None = None) -> Weights:
        """The weights that training starts from.

        `init = "common"`: one draw for all sites of an architecture. `"own"`: each site draws its own, as FedISCA's
        sites do; the coordinator (site None) then starts from the common one.
        """
        spec = self.common_spec if site is None else self.spec(site)
        own = site if site is not None and self.settings.init == "own" else ""
        drawn = self.fresh_weights(spec, "init", own)
        path = self.settings.model.weights
        return drawn if path is None else load_weights(path, spec, drawn)

    def fresh_weights(self, spec: NetSpec, purpose: str, site: str = "") -> Weights:
        """Random initial weights that belong to this purpose and site."""
        return fresh(spec, self.streams.torch(purpose, site))

    def with_method(self, method: str, own_settings: dict[str, object]) -> Study:
        """The same study under another method, as `compare` runs it."""
        return replace(self, settings=self.settings.model_copy(update={"method": method, "set": own_settings}))


def agree(settings: Settings, federation: Federation) -> Study:
    """The study that these settings and this data make."""
    names = tuple(site.name for site in federation.sites)
    for key, named in (("model.per_site", settings.model.per_site), ("policies", settings.policies)):
        for name in sorted(set(named) - set(names)):
            raise BadInput(f"{key} names {name!r}, which is no site; sites are {', '.join(names)}")
    for name in names:
        if not NAME.fullmatch(name):
            raise BadInput(f"site {name!r} is no name; use letters, digits, '.', '_' and '-', at most 64")
        if name == "shared":
            raise BadInput("a site cannot be called 'shared', which means the model of all sites; give it another name")
    test = federation.test
    return Study(settings, federation.classes, test.channels, test.size, names, federation.partition_hash)


def round_half_up(value: float) -> int:
    """1.5 is 2 and 2.5 is 3; Python's own rounding would make both 2."""
    return int(value + 0.5)
