"""Methods that talk to nobody: no round, nothing up, nothing down. The bars that federated learning has to clear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wardround.data.federation import Site
from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Payload
from wardround.learn.fit import Fit
from wardround.learn.predictor import Predictor
from wardround.methods.base import Answer, Context, Method, Work
from wardround.methods.state import State
from wardround.study import Study


class Alone(Method):
    """Each site on its own; a subclass answers `personal` only."""

    family = "bar"
    paper = "-"

    def rounds(self, study: Study) -> int:
        """None."""
        return 0

    def payload(self, study: Study, site: str) -> Payload:
        """Nothing leaves."""
        return Payload(seen_by="nobody")

    def begin(self, ctx: Context) -> State:
        """No state."""
        return State()

    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        """Done before it begins."""
        return None

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        """Never asked."""
        raise NotImplementedError("a method that talks to nobody is never asked")

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        """Never answered."""
        raise NotImplementedError("a method that talks to nobody has no answers to absorb")

    def deliver(self, ctx: Context, state: State) -> dict[str, Bundle]:
        """Nothing to take home."""
        return {}

    def predictor(self, ctx: Context, state: State) -> Predictor | None:
        """No shared model."""
        return None


def local_fit(ctx: Context, site: Site) -> Fit:
    """Train at the site alone for the study's whole budget of epochs.

    Every method that begins so asks for this very fit, and so shares its result with the others in a comparison.
    """
    return Fit(
        label=f"{site.name}, alone",
        spec=ctx.study.spec(site.name),
        start=ctx.study.initial(site.name),
        data=site.train,
        validation=site.val,
        recipe=ctx.study.recipe(0, ctx.study.total_epochs),
        seed=ctx.streams.number("fit", site.name, 0),
        reusable=True,
    )
