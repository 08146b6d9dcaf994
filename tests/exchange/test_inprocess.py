"""Sites in one process: stepped together or apart, a failing one spoils no other, and every bundle is checked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tiny import CPU, context, federation, study
from wardround.data.federation import Site
from wardround.errors import BadInput, SiteFailed
from wardround.exchange.bundle import SIZE, Bundle
from wardround.exchange.inprocess import InProcess, step_together
from wardround.learn.fit import Fit, Fitted
from wardround.learn.predictor import Predictor
from wardround.learn.side_by_side import Outcome
from wardround.learn.trainer import train_one
from wardround.methods.base import Answer, Context, Work
from wardround.methods.fedavg import FedAvg
from wardround.methods.state import State
from wardround.methods.template import Visit


def train(fits: list[Fit]) -> list[Outcome]:
    return [train_one(fit, CPU) for fit in fits]


class TwoFits(FedAvg):
    """Trains twice in a round, the second time from where the first ended, as Ditto and FedAS do."""

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        first = yield from super().answer(ctx, site, request, memory)
        again = ctx.bundle("request", site.name, {k: v for k, v in first.bundle.groups.items() if k != SIZE})
        second = yield from super().answer(ctx, site, again, memory)
        return Answer(second.bundle, State({}, {"asked": memory.facts.get("asked", 0) + 1}))


class Transport:
    """A transport with its memories and what it was told, for one exchange after another."""

    def __init__(self, at_once: int, train: Callable[[list[Fit]], list[Outcome]] = train) -> None:
        self.crossed: list[Bundle] = []
        self.memories: dict[str, State] = {}
        self.inner = InProcess(federation(), train, self.crossed.append, at_once)

    def exchange(self, method: FedAvg, requests: dict[str, Bundle], ctx: Context) -> Any:
        recall = lambda site: self.memories.get(site, State())  # noqa: E731
        return self.inner.exchange(ctx, method, requests, recall, self.memories.__setitem__)


def asked(method: FedAvg) -> tuple[Context, dict[str, Bundle]]:
    ctx = context(study())
    requests = method.ask(ctx, method.begin(ctx))
    assert requests is not None
    return ctx, requests


@pytest.mark.parametrize("method", [FedAvg(), TwoFits()])
def test_sites_that_are_stepped_together_answer_as_they_do_apart(method: FedAvg) -> None:
    ctx, requests = asked(method)
    together = Transport(at_once=3).exchange(method, requests, ctx)
    for at_once in (1, 2):
        found = Transport(at_once).exchange(method, requests, ctx)
        assert list(found.answers) == list(together.answers) == ["site-1", "site-2", "site-3"]
        assert [b.sha256() for b in found.answers.values()] == [b.sha256() for b in together.answers.values()]
    for site, request in requests.items():
        alone = Transport(at_once=1).exchange(method, {site: request}, ctx)
        assert alone.answers[site].sha256() == together.answers[site].sha256()


def test_what_sites_want_at_the_same_time_is_trained_in_one_call() -> None:
    calls: list[int] = []

    def counted(fits: list[Fit]) -> list[Outcome]:
        calls.append(len(fits))
        return train(fits)

    ctx, requests = asked(TwoFits())
    Transport(3, counted).exchange(TwoFits(), requests, ctx)
    assert calls == [3, 3]
    calls.clear()
    Transport(2, counted).exchange(TwoFits(), requests, ctx)
    assert calls == [2, 2, 1, 1]


def test_the_request_is_handed_over_and_not_changed() -> None:
    ctx, requests = asked(FedAvg())
    before = {site: request.sha256() for site, request in requests.items()}
    Transport(3).exchange(FedAvg(), requests, ctx)
    assert {site: request.sha256() for site, request in requests.items()} == before


def test_memory_is_kept_per_site() -> None:
    method, transport = TwoFits(), Transport(2)
    ctx, requests = asked(method)
    transport.exchange(method, requests, ctx)
    transport.exchange(method, {"site-2": requests["site-2"]}, ctx)
    assert {site: memory.facts["asked"] for site, memory in transport.memories.items()} == {
        "site-1": 1,
        "site-2": 2,
        "site-3": 1,
    }


def test_one_site_that_fails_is_named_and_the_others_go_on() -> None:
    def diverge(fits: list[Fit]) -> list[Outcome]:
        return [SiteFailed("diverged") if f.label.startswith("site-2") else train_one(f, CPU) for f in fits]

    ctx, requests = asked(FedAvg())
    transport = Transport(3, diverge)
    found = transport.exchange(FedAvg(), requests, ctx)
    assert list(found.answers) == ["site-1", "site-3"]
    assert {site: str(failure) for site, failure in found.failures.items()} == {"site-2": "diverged"}
    assert set(transport.memories) == {"site-1", "site-3"}
    assert [b.envelope.site for b in transport.crossed if b.envelope.kind == "answer"] == ["site-1", "site-3"]
    assert len([b for b in transport.crossed if b.envelope.kind == "request"]) == 3  # it was asked, and that cost
    good = Transport(3).exchange(FedAvg(), requests, ctx)
    assert found.answers["site-3"].sha256() == good.answers["site-3"].sha256()


class Leaky(FedAvg):
    """Slips a site's images into its answer."""

    def more_up(self, visit: Visit, fit: Fit, fitted: Fitted) -> dict[str, dict[str, torch.Tensor]]:
        return {"images": {"stolen": visit.site.train.images}}


def test_what_a_method_did_not_declare_does_not_leave() -> None:
    ctx, requests = asked(Leaky())
    transport = Transport(3)
    with pytest.raises(BadInput, match="answer of site-1 in round 1 holds group 'images'"):
        transport.exchange(Leaky(), requests, ctx)
    assert [b for b in transport.crossed if b.envelope.kind == "answer"] == []


def test_an_unknown_site_is_refused() -> None:
    ctx, requests = asked(FedAvg())
    stray = ctx.bundle("request", "site-9", requests["site-1"].groups)
    with pytest.raises(BadInput, match="no site 'site-9'"):
        Transport(1).exchange(FedAvg(), {"site-9": stray}, ctx)


class Late(FedAvg):
    """Answers with what it had ready for another round, or for another site."""

    def __init__(self, round: int, site: str) -> None:
        super().__init__()
        self.late = round, site

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        found = yield from super().answer(ctx, site, request, memory)
        round, name = self.late
        envelope = replace(found.bundle.envelope, round=round, site=name or site.name)
        return Answer(Bundle(envelope, found.bundle.groups), found.memory)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Late(4, ""), r"^the answer of site-1 in round 5 came in round 1; use the bundle of this round$"),
        (Late(0, "site-2"), r"^the answer of site-2 in round 1 came in place of the answer of site-1; send each"),
    ],
)
def test_an_answer_that_belongs_elsewhere_is_refused_and_not_counted(method: FedAvg, words: str) -> None:
    ctx, requests = asked(method)
    transport = Transport(1)
    with pytest.raises(BadInput, match=words):
        transport.exchange(method, requests, ctx)
    assert [b.envelope.kind for b in transport.crossed] == ["request"]
    assert transport.memories == {}


def test_a_request_of_another_round_is_refused() -> None:
    ctx, requests = asked(FedAvg())
    with pytest.raises(BadInput, match="the request of site-1 in round 1 came in round 2"):
        Transport(1).exchange(FedAvg(), requests, replace(ctx, round=1))


def test_what_a_site_has_after_its_training_is_shown_and_does_not_travel() -> None:
    ctx, requests = asked(FedAvg())
    shown: dict[str, Predictor] = {}
    transport = Transport(2)
    found = transport.inner.exchange(ctx, FedAvg(), requests, lambda _: State(), lambda *_: None, shown.__setitem__)
    assert list(shown) == ["site-1", "site-2", "site-3"]
    for site, predictor in shown.items():
        sent = found.answers[site].group("parameters")
        assert all(torch.equal(predictor.members[0].weights[name], tensor) for name, tensor in sent.items())


def test_every_site_gets_a_predictor_from_what_it_takes_home() -> None:
    method, ctx = FedAvg(), context(study(), round=1)
    state = method.begin(ctx)
    transport = Transport(2)
    found = dict(transport.inner.personalise(ctx, method, method.deliver(ctx, state), lambda site: State()))
    assert list(found) == ["site-1", "site-2", "site-3"]
    for predictor in found.values():
        assert isinstance(predictor, Predictor)
        (member,) = predictor.members
        assert member.weights.keys() == state.groups["model"].keys()
    assert [(b.envelope.kind, b.envelope.round) for b in transport.crossed] == [("delivery", 1)] * 3


# step_together by itself: works over numbers instead of networks ------------------------------------------------------


def worker(name: str, wishes: list[int]) -> Any:
    got = []
    for wish in wishes:
        got.append((yield (name, wish)))
    return got


def test_works_of_different_length_end_each_in_its_time() -> None:
    calls: list[list[Any]] = []

    def echo(wanted: list[Any]) -> list[Any]:
        calls.append(wanted)
        return [f"{name}{wish}" for name, wish in wanted]

    works = {"a": worker("a", [1, 2]), "b": worker("b", []), "c": worker("c", [3])}
    assert step_together(works, echo) == {"b": [], "c": ["c3"], "a": ["a1", "a2"]}
    assert calls == [[("a", 1), ("c", 3)], [("a", 2)]]


def test_a_work_may_catch_its_failure_and_try_again() -> None:
    def stubborn() -> Any:
        try:
            yield "too fast"
        except SiteFailed:
            return (yield "slower")

    def picky(wanted: list[Any]) -> list[Any]:
        return [SiteFailed("diverged") if wish == "too fast" else f"did {wish}" for wish in wanted]

    assert step_together({"a": stubborn()}, picky) == {"a": "did slower"}


def test_a_failure_before_any_fit_counts_too() -> None:
    def broken() -> Any:
        raise SiteFailed("no images")
        yield

    found = step_together({"a": broken(), "b": worker("b", [1])}, lambda wanted: cast(Any, [0 for _ in wanted]))
    assert isinstance(found["a"], SiteFailed)
    assert found["b"] == [0]


def test_a_fault_of_the_method_is_not_taken_for_a_site_that_failed() -> None:
    def faulty() -> Any:
        raise KeyError("typo")
        yield

    with pytest.raises(KeyError, match="typo"):
        step_together({"a": faulty()}, lambda wanted: [])
