"""`efedisca`: Algorithm 2 against a plain loop, Table 2's ablations, what is kept, resumes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.plain import kd, mean_logits, members, network, snapshot, synthesis
from tiny import context, coordinate, drive, federation, predictor_bytes, study, watch_bundles
from wardround.data.federation import Federation
from wardround.errors import RunFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.predictor import Member
from wardround.methods import efedisca
from wardround.methods.base import Context
from wardround.methods.efedisca import EFedISCA
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import StagedNet, Weights
from wardround.record import absorbing
from wardround.synthesis.inversion import Synthesis
from wardround.synthesis.noise import bank

OWN: dict[str, Any] = {
    "epochs": 3,
    "shots": 1,
    "steps": 4,
    "batch": 6,
    "kd_steps": 3,
    "memory": 2,
    "noise_images": 5,
    "noise": "spectrum",
    "lr": 0.05,
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "IS": {"noise": "none", "adaptation": "none"},
    "N": {"synthesis": False, "adaptation": "none"},
    "IS&N": {"adaptation": "none"},
    "N&Ada": {"synthesis": False},
    "IS&N&Ada": {},
}


def method(**changes: Any) -> EFedISCA:
    found = make("efedisca", {**OWN, **changes})
    assert isinstance(found, EFedISCA)
    return found


def ready(**changes: Any) -> tuple[Context, dict[str, Bundle]]:
    """Two sites that have sent what they send."""
    data: Federation = federation((9, 6))
    ctx = context(study(data, method="efedisca", **changes))
    requests = method().ask(ctx, State())
    assert requests is not None
    work = {site.name: method().answer(ctx, site, requests[site.name], State()) for site in data.sites}
    return ctx, {name: drive(ctx, asked).bundle for name, asked in work.items()}


def states(ctx: Context, sent: dict[str, Bundle], **changes: Any) -> list[State]:
    return list(method(**changes).absorb(ctx, State(), sent))


# Against a plain loop -------------------------------------------------------------------------------------------------


def networks(ctx: Context, sent: dict[str, Bundle]) -> list[StagedNet]:
    return [network(member) for member in members(ctx, sent)]


def plain_efedisca(
    ctx: Context, teachers: list[StagedNet], adapted: list[StagedNet], of: EFedISCA
) -> Iterator[Weights]:
    """Algorithm 2 with S = 3 for both loops, S = 4 for the synthesis, and n = 2 snapshots of half precision."""
    s = of.settings
    memory = [point.images.half().float() for point in synthesis(teachers, ctx.streams.torch("synthesis"), 4)[-2:]]
    if s.noise == "gaussian":
        structured: Tensor | None = None
    else:
        structured = bank("spectrum", 5, 3, 8, ctx.streams.torch("structured noise")) / 127.5 - 1
    spec = ctx.study.student_spec
    student = network(Member(spec, ctx.study.fresh_weights(spec, "student"))).train()
    optimiser = torch.optim.SGD(student.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)

    def pseudo(level: float, draw: torch.Generator) -> Tensor:
        image = noise = torch.zeros(6, 3, 8, 8)
        if s.synthesis:
            image = memory[int(torch.randint(2, (), generator=draw))]
        if structured is not None and s.noise != "none":
            noise = structured[torch.randint(5, (6,), generator=draw)]
        elif s.noise == "gaussian":
            noise = torch.randn(6, 3, 8, 8, generator=draw)
        level = 1.0 if not s.synthesis else 0.0 if s.noise == "none" else level
        return level * noise + (1 - level) * image

    for epoch, rate in enumerate((s.lr, s.lr, s.lr / 10)):
        for step, level in enumerate((1 / 3, 2 / 3, 1.0)):
            x = pseudo(level, ctx.streams.torch("adaptation", index=3 * epoch + step))
            with torch.no_grad():
                for net in adapted:
                    net.train()(x)
        for step, level in enumerate((2 / 3, 1 / 3, 0.0)):
            x = pseudo(level, ctx.streams.torch("distillation", index=3 * epoch + step))
            for net in adapted:
                net.train(s.adaptation == "batch")
            with torch.no_grad():
                far, near = mean_logits(adapted, x), mean_logits(teachers, x)
            own = student(x)
            share = 0.0 if s.adaptation == "none" else level
            optimiser.param_groups[0]["lr"] = rate
            optimiser.zero_grad()
            loss = share * kd(far, own) + (1 - share) * kd(near, own)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        yield snapshot(student)


@pytest.mark.parametrize(
    "changes", [*ABLATIONS.values(), {"adaptation": "batch"}, {"noise": "gaussian"}], ids=lambda c: str(c)
)
def test_every_epoch_is_that_of_a_plain_loop(changes: dict[str, Any]) -> None:
    """At a rate at which the student moves a hundred times the tolerance, and rounding does not grow."""
    ctx, sent = ready()
    adapted, asked = networks(ctx, sent), method(lr=0.005, **changes)
    plain = plain_efedisca(ctx, networks(ctx, sent), adapted, asked)
    start = ctx.study.fresh_weights(ctx.study.student_spec, "student")
    for state, weights in zip(asked.absorb(ctx, State(), sent), plain, strict=True):
        student = state.groups["student"]
        assert student.keys() == weights.keys()
        assert max(float((student[n] - start[n]).abs().max()) for n in start if n.endswith("weight")) > 2e-3
        for name, tensor in weights.items():
            torch.testing.assert_close(student[name], tensor, rtol=1e-4, atol=2e-5)
        if changes.get("adaptation") is None:
            for i, net in enumerate(adapted):
                for name, buffer in net.named_buffers():
                    if buffer.is_floating_point():
                        found = state.groups["adapted"][f"{i:03d}.{name}"]
                        torch.testing.assert_close(found, buffer, rtol=1e-3, atol=1e-3)


def test_the_ablations_differ_from_one_another_and_keep_what_they_need() -> None:
    ctx, sent = ready()
    ends = {name: states(ctx, sent, **changes)[-1] for name, changes in ABLATIONS.items()}
    assert len({str(sorted(end.groups["student"]["head.weight"].flatten().tolist())) for end in ends.values()}) == 5
    assert {name: len(end.groups["memory"]) for name, end in ends.items()} == {
        "IS": 2,
        "N": 0,
        "IS&N": 2,
        "N&Ada": 0,
        "IS&N&Ada": 2,
    }
    assert {name for name, end in ends.items() if "adapted" in end.groups} == {"N&Ada", "IS&N&Ada"}


@pytest.mark.parametrize("kind", ["stylegan", "deadleaves", "spectrum", "gaussian"])
def test_every_kind_of_noise_teaches_something_else(kind: str) -> None:
    ctx, sent = ready()
    found = states(ctx, sent, noise=kind, epochs=1)[-1].groups["student"]
    other = states(ctx, sent, noise="none", adaptation="none", epochs=1)[-1].groups["student"]
    assert any(not torch.equal(found[name], other[name]) for name in found)


def test_the_statistics_are_those_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred steps of which 24 are felt, and are taken: the same noise for the last of them gives the same end."""
    ctx, sent = ready()
    levels: list[float] = []

    def watched(images: Any, noise: Any, level: float, generator: torch.Generator) -> Tensor:
        levels.append(level)
        return torch.full((6, 3, 8, 8), level) + torch.arange(6).reshape(6, 1, 1, 1)

    monkeypatch.setattr(efedisca, "mixture", watched)
    changes: dict[str, Any] = {"epochs": 1, "kd_steps": 100, "follow": 0.5, "lr": 1e-9}
    few = states(ctx, sent, **changes)[-1].groups["adapted"]
    assert levels[:24] == pytest.approx([s / 100 for s in range(77, 101)])
    assert levels[24:] == pytest.approx([1 - s / 100 for s in range(1, 101)])
    monkeypatch.setattr(efedisca, "felt", lambda *_: 100)
    levels.clear()
    all_of_them = states(ctx, sent, **changes)[-1].groups["adapted"]
    assert len(levels) == 200
    for name, tensor in all_of_them.items():
        torch.testing.assert_close(few[name], tensor, rtol=1e-6, atol=1e-6)


# Runs -----------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What `kill -9` is to a process."""


def syntheses(patch: pytest.MonkeyPatch) -> list[int]:
    begun: list[int] = []
    begin = Synthesis.begin

    def watched(self: Synthesis, generator: torch.Generator) -> None:
        begun.append(len(begun))
        begin(self, generator)

    patch.setattr(Synthesis, "begin", watched)
    return begun


def test_a_killed_run_ends_as_if_it_had_not_been_and_synthesises_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)
    begun, crossed = syntheses(monkeypatch), watch_bundles(monkeypatch)

    def delivered() -> dict[str, bytes]:
        return {b.envelope.site: b.to_bytes() for b in crossed if b.envelope.kind == "delivery"}

    coordinate(tmp_path / "straight", method(epochs=4))
    straight = delivered()
    assert (sorted(straight), len(begun)) == (["site-1", "site-2", "site-3"], 1)

    rate = EFedISCA.rate

    def dies(self: EFedISCA, epoch: int) -> float:
        if epoch == 3:
            raise Killed
        return rate(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(EFedISCA, "rate", dies)
        with pytest.raises(Killed):
            coordinate(tmp_path / "killed", method(epochs=4))
    assert len(begun) == 2
    crossed.clear()
    coordinate(tmp_path / "killed", method(epochs=4))
    assert len(begun) == 2
    assert delivered() == straight
    assert predictor_bytes(tmp_path / "killed") == predictor_bytes(tmp_path / "straight")


@pytest.mark.parametrize("changes", [{}, *ABLATIONS.values(), {"adaptation": "batch"}], ids=lambda c: str(c))
def test_any_state_but_the_last_can_be_continued_from(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a file, which keeps neither memory layout nor identity."""
    ctx, sent = ready()
    (*between, last) = states(ctx, sent, **changes)
    begun = syntheses(monkeypatch)
    for state in between:
        (*_, again) = method(**changes).absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        assert again.groups.keys() == last.groups.keys()
        assert replace(again, facts={}).to_bytes() == replace(last, facts={}).to_bytes()
    assert begun == []


@pytest.mark.parametrize("changes", [{}, {"threshold": 30.0, "memory": 3}, *ABLATIONS.values()], ids=str)
def test_the_synthesis_can_be_stopped_after_any_step(changes: dict[str, Any]) -> None:
    """It comes before the first epoch and may take longer than all of it; from every state to the next alone."""
    ctx, sent = ready()
    often, steps = replace(ctx, due=lambda: True), OWN["steps"] if changes.get("synthesis", True) else 0
    last, stopped = states(ctx, sent, **changes)[-1], states(often, sent, **changes)
    assert [state.facts["midway"] for state in stopped[:steps]] == [{"synthesis": n + 1} for n in range(steps)]
    state = State()
    for following in stopped:
        state = next(method(**changes).absorb(often, State.from_bytes(state.to_bytes()), sent))
        assert untimed(state) == untimed(following)
    assert state.groups.keys() == last.groups.keys()
    assert untimed(state) == untimed(last)
    assert state.facts["work"].get("synthesis", {"steps": 0})["steps"] == steps


def untimed(state: State) -> bytes:
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


def test_an_epoch_can_be_stopped_after_any_step() -> None:
    """A checkpoint that is always due: three steps of adaptation and three of distillation make seven states."""
    ctx, sent = ready()
    last = states(ctx, sent)[-1]
    stopped = states(replace(ctx, due=lambda: True), sent)
    stopped = stopped[OWN["steps"] :]
    assert [state.facts.get("midway") is None for state in stopped] == 3 * [*([False] * 6), True]
    assert stopped[-1].groups.keys() == last.groups.keys()
    for state in stopped[:-1]:
        (*_, again) = method().absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        assert replace(again, facts={}).to_bytes() == replace(last, facts={}).to_bytes()


def test_the_way_from_noise_to_images_is_kept_for_the_report() -> None:
    ctx, sent = ready()
    (first, *_, last) = states(ctx, sent)
    assert last.facts["gallery"]["steps"] == [1, 2, 3, 4]
    assert last.groups["gallery"]["images"].shape == (4, 4, 3, 8, 8)
    assert torch.equal(first.groups["gallery"]["images"], last.groups["gallery"]["images"])
    assert "gallery" not in states(ctx, sent, synthesis=False)[-1].groups


def test_every_part_is_timed() -> None:
    ctx, sent = ready()
    work = states(ctx, sent)[-1].facts["work"]
    assert {part: found["steps"] for part, found in work.items()} == {
        "synthesis": 4,
        "adaptation": 9,
        "distillation": 9,
    }


def test_states_are_values() -> None:
    ctx, sent = ready()
    kept, later = [], []
    for state in method().absorb(ctx, State(), sent):
        kept.append(state.to_bytes())
        later.append(state)
    assert [state.to_bytes() for state in later] == kept
    assert len(set(kept)) == 3


def test_other_seeds_give_other_students() -> None:
    _, sent = ready()
    ends = [states(ready(seed=seed)[0], sent)[-1].groups["student"] for seed in (0, 1)]
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"synthesis_lr": 1e30}, "the synthesis diverged"), ({"lr": 1e30}, "the student diverged in epoch 1")],
)
def test_divergence_fails_the_run_and_says_which(changes: dict[str, Any], words: str) -> None:
    ctx, sent = ready()
    with pytest.raises(RunFailed, match=words):
        states(ctx, sent, **changes)


def test_a_bank_is_made_once_and_nothing_is_drawn_from_it_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def watched(*asked: Any) -> Tensor:
        made.append(asked[:4])
        return bank(*asked)

    monkeypatch.setattr(efedisca, "bank", watched)
    ctx, sent = ready()
    states(ctx, sent)
    assert made == [("spectrum", 5, 3, 8)]
