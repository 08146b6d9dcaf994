"""`deepinversion` and `fedisca`: whole epochs against plain loops, and their pieces."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from methods.plain import followers, kd, mean_logits, members, network, snapshot, synthesis
from tiny import CPU, context, drive, federation, study
from wardround.data.federation import Federation
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import weights_hash
from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import StagedNet, Weights
from wardround.synthesis.inversion import Iterate, Synthesis
from wardround.synthesis.memory import placed
from wardround.synthesis.student import Student, mixed_distillation
from wardround.synthesis.teachers import AdaptedTeachers, Teachers

BOTH = ["deepinversion", "fedisca"]
OWN: dict[str, dict[str, Any]] = {
    "deepinversion": {"epochs": 3, "steps": 4, "batch": 6, "kd_steps": 3, "lr": 0.05, "shots": 1},
    "fedisca": {"epochs": 3, "steps": 4, "batch": 6, "lr": 0.05, "shots": 1},
}


def method(name: str, **changes: Any) -> Distilled:
    found = make(name, {**OWN[name], **changes})
    assert isinstance(found, Distilled)
    return found


def answers(ctx: Context, data: Federation) -> dict[str, Bundle]:
    """What the sites really send."""
    asked = method(ctx.study.settings.method)
    requests = asked.ask(ctx, State())
    assert requests is not None
    return {site.name: drive(ctx, asked.answer(ctx, site, requests[site.name], State())).bundle for site in data.sites}


Two = tuple[Context, dict[str, Bundle]]


@pytest.fixture(scope="module")
def two() -> Two:
    """Two sites that have sent fedisca what they send."""
    data = federation((9, 6))
    ctx = context(study(data, method="fedisca"))
    return ctx, answers(ctx, data)


def assert_close(found: Any, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4)


# Plain loops ----------------------------------------------------------------------------------------------------------


def learner(ctx: Context) -> tuple[StagedNet, torch.optim.SGD]:
    spec = ctx.study.student_spec
    net = network(Member(spec, ctx.study.fresh_weights(spec, "student"))).train()
    return net, torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4, fused=False)


def learn(optimiser: torch.optim.SGD, loss: Tensor, rate: float) -> None:
    optimiser.param_groups[0]["lr"] = rate
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()


RATES = (0.05, 0.05, 0.005)  # of three epochs: half of them have passed before the third


def plain_memory(ctx: Context, teachers: list[StagedNet], epoch: int, s: Any) -> list[Tensor]:
    """What an epoch learns from: iterates, the same as the next step showed them to the teachers, or noise."""
    if s.learn_from == "noise":
        draws = [ctx.streams.torch("noise", index=epoch * s.steps + i) for i in range(s.steps)]
        return [torch.randn(6, 3, 8, 8, generator=draw) for draw in draws]
    jitter = 2 if s.jitter is None else s.jitter
    points = synthesis(teachers, ctx.streams.torch("synthesis", index=epoch), s.steps, jitter=jitter)
    if s.reuse:
        return [*(point.seen for point in points[1:]), points[-1].images]
    return [point.images for point in points]


def plain_fedisca(ctx: Context, of: list[Member], s: Any) -> Iterator[tuple[Weights, list[StagedNet]]]:
    """Algorithm 1, with s from 1 to S: all S steps back to noise are taken, whether they are felt or not."""
    teachers, adapted = [network(m) for m in of], followers(of, s.follow)
    student, optimiser = learner(ctx)
    for epoch, rate in enumerate(RATES[: s.epochs]):
        memory = plain_memory(ctx, teachers, epoch, s)
        with torch.no_grad():
            for x in reversed(memory):
                for net in adapted if s.adaptation == "ema" else []:
                    net.train()(x)
        for number, iterate in enumerate(memory, 1):
            x = memory[-1] if s.learn_from == "images" else iterate
            noise = 1 - number / s.steps if s.adaptation != "none" else 0.0
            with torch.no_grad():
                for net in adapted:
                    net.train(s.adaptation == "batch")
                far, near = mean_logits(adapted, x), mean_logits(teachers, x)
            own = student(x)
            learn(optimiser, noise * kd(far, own) + (1 - noise) * kd(near, own), rate)
        yield snapshot(student), adapted


def plain_deepinversion(ctx: Context, of: list[Member], keep: str) -> Iterator[tuple[Weights, list[Tensor]]]:
    """Invert six images, pool them, take three steps on six of the pool."""
    teachers = [network(m) for m in of]
    student, optimiser = learner(ctx)
    pool: list[Tensor] = []
    for epoch, rate in enumerate(RATES):
        draw = ctx.streams.torch("synthesis", index=epoch)
        points = synthesis(teachers, draw, 4)
        lowest = min(range(1, 4), key=lambda k: points[k].loss) - 1  # a loss is that of the images before its step
        pool.append(points[-1 if keep == "last" else lowest].images)
        pooled = torch.cat(pool)
        for _ in range(3):
            x = pooled[torch.randint(len(pooled), (6,), generator=draw)]
            with torch.no_grad():
                target = mean_logits(teachers, x)
            learn(optimiser, kd(target, student(x)), rate)
        yield snapshot(student), list(pool)


def assert_followed(state: State, adapted: list[StagedNet], rtol: float, atol: float) -> None:
    """The adapted statistics in a state are those of plain networks."""
    for i, net in enumerate(adapted):
        for name, buffer in net.named_buffers():
            if buffer.is_floating_point():
                found = state.groups["adapted"][f"{i:03d}.{name}"]
                torch.testing.assert_close(found, buffer, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "changes",
    [
        {"adaptation": "ema"},
        {"adaptation": "batch"},
        {"adaptation": "none"},
        {"learn_from": "images", "adaptation": "none"},
        {"learn_from": "noise"},
        {"learn_from": "noise", "reuse": True},
        {"reuse": True},
        {"reuse": True, "learn_from": "images", "adaptation": "none"},
        {"jitter": 0},  # what teachers said in the synthesis is not asked again, and that changes nothing
        {"jitter": 0, "adaptation": "batch"},
        {"jitter": 0, "learn_from": "images", "adaptation": "none"},
        {"jitter": 0, "steps": 1},
        {"steps": 5},  # teachers are asked about two batches at once, and of the last pair there is but one
        {"steps": 5, "adaptation": "batch"},
        {"steps": 5, "adaptation": "batch", "reuse": True},
        {"follow": 0.0},
        {"follow": 0.5, "steps": 26, "epochs": 1},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_fedisca_is_a_plain_loop(changes: dict[str, Any], two: Two) -> None:
    ctx, sent = two
    of = method("fedisca", **changes)
    states = of.absorb(ctx, State(), sent)
    for state, (weights, adapted) in zip(states, plain_fedisca(ctx, members(ctx, sent), of.settings), strict=True):
        assert_close(state.groups["student"], weights)
        if of.settings.adaptation != "batch":  # else nobody asks them
            assert_followed(state, adapted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("adaptation", ["ema", "batch"])
def test_the_last_images_have_no_noise_to_adapt_to(adaptation: str) -> None:
    with pytest.raises(BadInput, match=r"its last images have none; set fedisca\.adaptation to none"):
        method("fedisca", learn_from="images", adaptation=adaptation).check(study(method="fedisca"))
    method("fedisca", learn_from="images", adaptation="none").check(study(method="fedisca"))


@pytest.mark.parametrize(("changes", "asked"), [({"jitter": 0}, 1), ({"reuse": True}, 1), ({}, 2)])
def test_what_teachers_said_in_the_synthesis_is_not_asked_again(
    changes: dict[str, Any], asked: int, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four iterates only the last, which no step shows; else each pair of them."""
    times = []

    def logits(self: Teachers, pixels: Tensor) -> Tensor:
        times.extend([len(pixels)] if type(self) is Teachers else [])
        return ask(self, pixels)

    ask = Teachers.logits
    monkeypatch.setattr(Teachers, "logits", logits)
    ctx, sent = two
    list(method("fedisca", epochs=1, **changes).absorb(ctx, State(), sent))
    assert times == [6 if asked == 1 else 12] * asked


@pytest.mark.parametrize(("follow", "steps", "taken"), [(0.5, 26, 24), (0.5, 20, 20), (0.1, 26, 8), (0.0, 5, 1)])
def test_steps_back_that_are_not_taken_would_not_be_felt(follow: float, steps: int, taken: int, two: Two) -> None:
    """Following all of the very same iterates gives the same statistics, to the last digits of a float32."""
    ctx, sent = two
    of = method("fedisca", follow=follow, steps=steps, epochs=1)
    after = next(
        state
        for state in of.absorb(replace(ctx, due=lambda: True), State(), sent)
        if state.facts["midway"].get("adaptation", 0) == taken
    )
    assert after.facts["work"]["adaptation"]["steps"] == taken
    memory = [images for _, images in sorted(after.groups["memory"].items())]
    assert len(memory) == steps
    plain = [network(m) for m in members(ctx, sent)]
    for net in plain:
        for layer in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
            layer.momentum = 1 - follow
        with torch.no_grad():
            for x in reversed(memory):
                net.train()(x)
    assert_followed(after, plain, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("changes", "taken"), [({}, 158), ({"steps": 100}, 100), ({"adaptation": "batch"}, None)])
def test_how_many_steps_back_are_taken(
    changes: dict[str, Any], taken: int | None, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.9¹⁵⁷ > 2⁻²⁴ > 0.9¹⁵⁸. With nothing to do but count."""
    monkeypatch.setattr(AdaptedTeachers, "follow", lambda self, pixels: None)
    monkeypatch.setattr(Synthesis, "_step", lambda self, shift: (torch.ones(()), self.images.detach(), torch.ones(())))
    monkeypatch.setattr(Student, "step", lambda self, loss: None)
    ctx, sent = two
    (state,) = method("fedisca", **{"steps": 200, "epochs": 1, **changes}).absorb(ctx, State(), sent)
    assert state.facts["work"].get("adaptation", {}).get("steps") == taken


@pytest.mark.parametrize("keep", ["lowest", "last"])
def test_deepinversion_is_a_plain_loop(keep: str) -> None:
    data = federation((9, 6))
    ctx = context(study(data, method="deepinversion"))
    sent = answers(ctx, data)
    states = method("deepinversion", keep=keep).absorb(ctx, State(), sent)
    for state, (weights, pool) in zip(states, plain_deepinversion(ctx, members(ctx, sent), keep), strict=True):
        assert_close(state.groups["student"], weights)
        torch.testing.assert_close(
            torch.cat([t for _, t in sorted(state.groups["pool"].items())]), torch.cat(pool), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", BOTH)
def test_states_are_values(name: str) -> None:
    """A state that was yielded does not change while the next epochs go on."""
    data = federation((9, 6))
    ctx = context(study(data, method=name))
    kept, later = [], []
    for state in method(name).absorb(ctx, State(), answers(ctx, data)):
        kept.append(state.to_bytes())
        later.append(state)
    assert [state.to_bytes() for state in later] == kept
    assert [state.facts["epoch"] for state in later] == [1, 2, 3]
    assert len(set(kept)) == 3
    if name == "deepinversion":
        assert [len(state.groups["pool"]) for state in later] == [1, 2, 3]


@pytest.mark.parametrize("name", BOTH)
def test_other_seeds_and_epochs_synthesise_other_images(name: str) -> None:
    data = federation((9, 6))
    hashes = set()
    for seed in (0, 1):
        ctx = context(study(data, method=name, seed=seed))
        sent = answers(context(study(data, method=name)), data)
        (*_, state) = method(name).absorb(ctx, State(), sent)
        hashes.add(weights_hash(dict(state.groups["student"])))
    assert len(hashes) == 2


# Pieces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.25, 1.0])
def test_equation_8_at_a_noise_level(noise: float) -> None:
    adapted, original, student = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = noise * kd(adapted, student) + (1 - noise) * kd(original, student)
    found = mixed_distillation(original, adapted, student, torch.tensor(noise), 20.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_equation_8_ignores_who_has_no_weight() -> None:
    own, teacher = torch.zeros(1, 2), torch.tensor([[3.0, 0.0]])
    assert mixed_distillation(own, teacher, own, torch.tensor(0.0), 20.0).item() == pytest.approx(0.0, abs=1e-6)
    assert mixed_distillation(teacher, own, own, torch.tensor(1.0), 20.0).item() == pytest.approx(0.0, abs=1e-6)
    assert mixed_distillation(own, teacher, own, torch.tensor(1.0), 20.0).item() > 0.1


def test_the_students_rate_falls_after_half_and_after_three_quarters_of_the_epochs() -> None:
    rates = [method("fedisca", epochs=100, lr=1.0).rate(epoch) for epoch in (0, 49, 50, 74, 75, 99)]
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.01])
    assert method("fedisca", epochs=1, lr=1.0).rate(0) == 1.0


TRAJECTORY = [9.0, 5.0, 2.0, 4.0]  # losses before each update: of the noise, and of iterates 0, 1 and 2


@pytest.mark.parametrize(
    ("keep", "steps", "kept"), [("lowest", 4, 1), ("last", 4, 3), ("lowest", 1, 0), ("last", 1, 0)]
)
def test_which_iterate_is_kept(keep: str, steps: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: Synthesis) -> Iterate:
        step, self.done = self.done, self.done + 1
        images = torch.full((6, 3, 8, 8), float(step))
        return Iterate(step, images, torch.tensor(TRAJECTORY[step]), images, torch.zeros(6, 4))

    monkeypatch.setattr(Synthesis, "start", lambda self: None)
    monkeypatch.setattr(Synthesis, "wait", wait)
    data = federation((9, 6))
    ctx = context(study(data, method="deepinversion"))
    of = method("deepinversion", keep=keep, steps=steps, epochs=1)
    (state,) = of.absorb(ctx, State(), answers(ctx, data))
    assert set(state.groups["pool"]["000000"].flatten().tolist()) == {float(kept)}


def test_a_pooled_batch_out_of_a_file_lies_in_memory_as_a_fresh_one() -> None:
    """Or a GPU might choose another convolution for it after a resume, and round differently."""
    fresh = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    filed = State.from_bytes(State({"pool": {"000000": fresh}}).to_bytes()).groups["pool"]["000000"]
    assert filed.stride() != fresh.stride()
    assert placed(filed, CPU).stride() == fresh.stride()
