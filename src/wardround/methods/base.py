"""The method protocol: a few questions, answered over explicit state.

A method is written once and runs unchanged in-process, over files and over a network, because it never touches any of
them: the coordinator's side sees `State` and the bundles that sites sent, the site's side sees its own images, the
bundle it was sent and its own memory. Only a `Bundle` travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from wardround.data.federation import Site
from wardround.exchange.bundle import COUNTERS, PARAMETERS, STATISTICS, Bundle, Envelope, Kind
from wardround.exchange.payload import Payload
from wardround.learn.device import Device
from wardround.learn.fit import Fit, Fitted
from wardround.learn.predictor import Predictor
from wardround.methods.state import State
from wardround.models import NetSpec, Weights, spec_layout
from wardround.progress import NO_PROGRESS, Silent
from wardround.settings import Frozen
from wardround.streams import Streams
from wardround.study import Study

T = TypeVar("T")
Work = Generator[Fit, Fitted, T]
"""What a site does: a generator that yields `Fit`s, is sent each `Fitted`, and returns its answer."""

Family = Literal["bar", "one-shot", "multi-round"]


@dataclass(frozen=True)
class Answer:
    """A site's answer: what travels, and what the site itself remembers until it is asked again.

    `trained` stays at the site, too: what it would predict with right after its work of this round, to be measured.
    """

    bundle: Bundle
    memory: State
    trained: Predictor | None = None


@dataclass(frozen=True)
class Context:
    """What every question comes with: the study, the round, the device, and training for the coordinator's own use."""

    study: Study
    round: int
    device: Device
    train: Callable[[list[Fit]], list[Fitted]]
    progress: Silent = NO_PROGRESS
    due: Callable[[], bool] = lambda: False  # whether `absorb` should yield a state now, for a checkpoint
    note: Callable[[str], None] = lambda text: None  # what whoever reads the result must know

    @property
    def streams(self) -> Streams:
        """The study's random streams; derive with a purpose, the site and the round."""
        return self.study.streams

    def bundle(self, kind: Kind, site: str, groups: Mapping[str, Mapping[str, Tensor]]) -> Bundle:
        """A bundle of this study and round, without empty groups."""
        envelope = Envelope(kind, self.study.id, self.study.settings.method, site, self.round)
        return Bundle(envelope, {name: tensors for name, tensors in groups.items() if tensors})


class Method(ABC):
    """One way to turn the sites' images into predictors. Subclasses live one per file in `wardround.methods`."""

    name: ClassVar[str]
    family: ClassVar[Family]
    paper: ClassVar[str]  # citation in one line
    summary: ClassVar[str]  # what it does, in one line

    class Settings(Frozen):
        """The method's own settings; set with `--set key=value`."""

    def __init__(self, settings: Any = None) -> None:
        self.settings: Any = settings or self.Settings()

    def check(self, study: Study) -> None:  # noqa: B027 - most methods can do any study
        """Refuse a study that this method cannot do, before any work starts; `BadInput` says why."""

    def rounds(self, study: Study) -> int:
        """How many rounds to expect, for progress; `ask` decides."""
        return 1

    @abstractmethod
    def payload(self, study: Study, site: str) -> Payload:
        """What may leave this site and come to it."""

    @abstractmethod
    def begin(self, ctx: Context) -> State:
        """The coordinator's state before the first round."""

    @abstractmethod
    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        """What each asked site gets now; None: done."""

    @abstractmethod
    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """At the site: work on its own images and answer."""

    @abstractmethod
    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """At the coordinator: yield states that can be saved and continued from; the last one is the result.

        A run that was killed goes on by asking again, with a state that this yielded before and the same answers. It
        is never asked to go on from the last one.
        """

    @abstractmethod
    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """What each site takes home."""

    @abstractmethod
    def personal(self, ctx: Context, site: Site, delivered: Bundle, memory: State) -> Work[Predictor]:
        """At the site: what it would deploy. Stays there."""

    @abstractmethod
    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """The shared model; None where there is none."""


def split_groups(ctx: Context, site: str, weights: Weights) -> dict[str, dict[str, Tensor]]:
    """The tensors of a site's network in the three groups of rule 5: parameters, statistics, counters."""
    return layout_groups(ctx.study.spec(site), weights)


def layout_groups(spec: NetSpec, weights: Weights) -> dict[str, dict[str, Tensor]]:
    """The tensors of any network in the same three groups."""
    layout = spec_layout(spec)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        groups.setdefault(layout.groups[name], {})[name] = tensor
    return groups


def join_groups(bundle: Bundle) -> Weights:
    """The inverse of `split_groups`: the network's tensors out of a bundle."""
    return {
        name: tensor for group in (PARAMETERS, STATISTICS, COUNTERS) for name, tensor in bundle.group(group).items()
    }
