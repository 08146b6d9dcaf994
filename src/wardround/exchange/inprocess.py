"""All sites in one process: the embedded transport, and the fast one.

Bundles are checked against the method's declaration and for where they belong, and counted to the byte exactly as if
they were sent, but handed over without a copy. The sites' work is stepped together, so that what they train at the same
time trains side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TypeVar

from wardround.data.federation import Federation, Site
from wardround.errors import BadInput, SiteFailed, WardroundError
from wardround.exchange.answers import Answers, refuse_stray
from wardround.exchange.bundle import Bundle, Envelope, Kind
from wardround.exchange.policy import Gate, Refused
from wardround.learn.fit import Fit
from wardround.learn.predictor import Predictor
from wardround.learn.side_by_side import Outcome
from wardround.methods.base import Answer, Context, Method, Work
from wardround.methods.state import State
from wardround.privacy.guard import NO_GUARDS, Guard

T = TypeVar("T")
SITES_IN_STEP = 16  # whose work and answers are held at once; how many of them train at once is the device's matter
Train = Callable[[list[Fit]], list[Outcome]]
NO_GATES: Mapping[str, Gate] = MappingProxyType({})


@dataclass
class Exchange:
    """What one round brought: the answers, and why some sites did not answer."""

    answers: Answers
    failures: dict[str, WardroundError] = field(default_factory=dict)


class InProcess:
    """Sites as objects. `count` is told every bundle that crosses a boundary.

    `gates` are the sites' policies, `guards` what protects their images where the study has privacy on.
    """

    def __init__(
        self,
        federation: Federation,
        train: Train,
        count: Callable[[Bundle], None],
        in_step: int = SITES_IN_STEP,
        gates: Mapping[str, Gate] = NO_GATES,
        *,
        guards: Mapping[str, Guard] = NO_GUARDS,
    ) -> None:
        self.sites = {site.name: site for site in federation.sites}
        self.train, self.count, self.in_step, self.gates, self.guards = train, count, in_step, gates, guards

    def exchange(
        self,
        ctx: Context,
        method: Method,
        requests: Mapping[str, Bundle],
        recall: Callable[[str], State],
        remember: Callable[[str, State], None],
        measure: Callable[[str, Predictor], None] | None = None,
    ) -> Exchange:
        """Ask the sites and collect their answers; a site that fails is named and the others go on.

        `measure` is shown what each site has right after its training, where a method says.
        """
        found = Exchange(Answers(ctx.study.id, ctx.study.settings.method, ctx.round))
        names = iter(sorted(requests))
        while wave := list(islice(names, self.in_step)):
            works = {}
            for name in wave:
                try:
                    works[name] = self._ask(ctx, method, name, requests[name], recall(name))
                except Refused as refusal:
                    found.failures[name] = refusal
            for name, outcome in step_together(works, self.train).items():
                try:
                    if isinstance(outcome, SiteFailed):
                        raise outcome
                    sent = self._cross(method, ctx, "answer", name, self._outgoing(name, outcome.bundle))
                except (SiteFailed, Refused) as failure:
                    found.failures[name] = failure
                    continue
                remember(name, outcome.memory)
                if measure is not None and outcome.trained is not None:
                    measure(name, outcome.trained)
                found.answers.add(name, sent)
        return found

    def personalise(
        self, ctx: Context, method: Method, delivered: Mapping[str, Bundle], recall: Callable[[str], State]
    ) -> Iterator[tuple[str, Predictor | SiteFailed]]:
        """Each site's own predictor, made at the site from what it takes home."""
        names = iter(sorted(self.sites))
        while wave := list(islice(names, self.in_step)):
            works = {}
            for name in wave:
                bundle = delivered.get(name)
                if bundle is None:
                    bundle = ctx.bundle("delivery", name, {})
                else:
                    self._cross(method, ctx, "delivery", name, bundle)
                works[name] = self._guarded(ctx, name, method.personal(ctx, self.sites[name], bundle, recall(name)))
            yield from step_together(works, self.train).items()

    def _ask(self, ctx: Context, method: Method, name: str, request: Bundle, memory: State) -> Work[Answer]:
        site = self._site(name)
        self._cross(method, ctx, "request", name, request)
        if name in self.gates:
            payload = method.payload(ctx.study, name)
            promised = self.guards[name].promised() if name in self.guards else {}
            self.gates[name].before(ctx.study, method, payload, "", promised)
        return self._guarded(ctx, name, method.answer(ctx, site, request, memory))

    def _guarded(self, ctx: Context, name: str, work: Work[T]) -> Work[T]:
        """A site's work under its guard, where the study has privacy on."""
        return self.guards[name].doing(work, ctx.device.torch) if name in self.guards else work

    def _outgoing(self, name: str, bundle: Bundle) -> Bundle:
        return self.guards[name].outgoing(bundle) if name in self.guards else bundle

    def _cross(self, method: Method, ctx: Context, kind: Kind, site: str, bundle: Bundle) -> Bundle:
        """What every bundle goes through at a site's boundary, and what comes out of it."""
        refuse_stray(bundle, Envelope(kind, ctx.study.id, ctx.study.settings.method, site, ctx.round))
        payload = method.payload(ctx.study, site)
        payload.check(bundle)
        if kind == "answer" and site in self.gates:
            spent = self.guards[site].spent() if site in self.guards else {}
            bundle = self.gates[site].outgoing(bundle, payload, privacy=spent)
        self.count(bundle)
        return bundle

    def _site(self, name: str) -> Site:
        if name not in self.sites:
            raise BadInput(f"there is no site {name!r} in this study; sites are {', '.join(self.sites)}")
        return self.sites[name]


def step_together(works: Mapping[str, Work[T]], train: Train) -> dict[str, T | SiteFailed]:
    """Run generators in step: whatever they ask for at the same time is trained side by side."""
    outcomes: dict[str, T | SiteFailed] = {}
    wanted: dict[str, Fit] = {}

    def advance(name: str, move: Callable[[], Fit]) -> None:
        try:
            wanted[name] = move()
        except StopIteration as stop:
            outcomes[name] = stop.value
        except SiteFailed as failure:
            outcomes[name] = failure

    for name, work in works.items():
        advance(name, lambda work=work: next(work))  # type: ignore[misc]
    while wanted:
        asked, wanted = wanted, {}
        for (name, _), result in zip(asked.items(), train(list(asked.values())), strict=True):
            work = works[name]
            if isinstance(result, SiteFailed):
                advance(name, lambda work=work, result=result: work.throw(result))  # type: ignore[misc]
            else:
                advance(name, lambda work=work, result=result: work.send(result))  # type: ignore[misc]
    return outcomes
