"""Steps on kept images: which are kept, what is asked of them, how batches mix; and FedBiCross with them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import CPU, context, drive, federation, study
from wardround.exchange.bundle import Bundle
from wardround.learn.device import Device
from wardround.learn.distillation import distillation
from wardround.learn.fit import weights_hash
from wardround.learn.predictor import Member
from wardround.methods import cross_cluster
from wardround.methods.base import Context
from wardround.methods.fedbicross import FedBiCross
from wardround.methods.state import State
from wardround.models import NetSpec, build, fresh
from wardround.synthesis.rehearsal import Kept, Rehearsal, _places, mixed_batch
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Precision, Teachers

SPEC = NetSpec("small", 3, 4, 8, width=2)
AS_IT_IS = torch.tensor([4, 4, 0])  # a crop out of the middle of the padded image, not flipped


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(seed: int) -> dict[str, Tensor]:
    return fresh(SPEC, torch.Generator().manual_seed(seed))


def teachers(seed: int, precision: Precision = "fp32") -> Teachers:
    return Teachers([Member(SPEC, weights(seed + i)) for i in (0, 1)], CPU, precision)


def kept(seed: int = 0, batches: int = 2, size: int = 4, precision: Precision = "fp32", full: int = 0) -> Kept:
    """What a cluster keeps, with `full` batches in it."""
    found = Kept(teachers(seed, precision), torch.zeros(size, 3, 8, 8), 4, batches, temperature=2.0)
    for number in range(full):
        found.add(drawn(100 * seed + number, size, 3, 8, 8), drawn(number, size, 4), torch.tensor(0.1 * number))
    return found


# Which images of which cluster ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "size", "counts"),
    [
        ([1.0], 3, [3]),
        ([0.5, 0.5], 8, [4, 4]),
        ([1.0, 0.0], 8, [8, 0]),
        ([0.0, 1.0], 8, [0, 8]),
        ([1 / 3, 1 / 3, 1 / 3], 8, [3, 3, 2]),  # 2⅔ each: two left, of equals to the first
        ([0.5, 0.3, 0.2], 4, [2, 1, 1]),  # 2, 1.2 and 0.8: one left, to the largest remainder
        ([0.5, 0.5], 5, [3, 2]),
        ([0.1, 0.2, 0.7], 2, [0, 1, 1]),  # 0.2, 0.4 and 1.4
        ([0.29, 0.71], 100, [29, 71]),  # 0.29 · 100 is a little less than 29 in floating point
    ],
)
def test_places_by_largest_remainders(shares: list[float], size: int, counts: list[int]) -> None:
    found = _places(torch.tensor(shares, dtype=torch.float64), size)
    assert found.tolist() == [k * size + i for k, count in enumerate(counts) for i in range(count)]


@given(parts=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), size=st.integers(1, 64))
@settings(deadline=None, max_examples=25)
def test_places_are_as_many_as_a_batch_and_within_one_of_their_share(parts: list[int], size: int) -> None:
    shares = torch.tensor(parts, dtype=torch.float64) / sum(parts)
    found = _places(shares, size)
    assert len(found) == len(found.unique()) == size  # type: ignore[no-untyped-call]
    counts = torch.bincount(found // size, minlength=len(parts))
    assert bool(((counts - shares * size).abs() < 1).all())
    for k, count in enumerate(counts.tolist()):
        assert found[found // size == k].tolist() == list(range(k * size, k * size + count))


def test_a_mixed_batch_has_the_first_images_of_each_cluster() -> None:
    batches = [torch.arange(4.0).reshape(4, 1, 1, 1) + 10 * k for k in range(3)]
    found = mixed_batch(batches, torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))
    assert found.flatten().tolist() == [0, 1, 20, 21]


# What is kept ---------------------------------------------------------------------------------------------------------


def test_the_oldest_batch_makes_room() -> None:
    of = kept(batches=2)
    assert len(of) == 0
    for number, length in ((1, 4), (2, 8), (3, 8), (4, 8), (5, 8)):
        of.add(torch.full((4, 3, 8, 8), float(number)), torch.full((4, 4), 10.0 * number), torch.tensor(0.1 * number))
        assert len(of) == length
        newest = [number, number - 1] if number % 2 else [number - 1, number]  # the first place is for odd ones
        for place, expected in list(zip((slice(4), slice(4, 8)), newest, strict=True))[: length // 4]:
            assert set(of.images[place].flatten().tolist()) == {float(expected)}
            assert set(of.adapted[place].flatten().tolist()) == {10.0 * expected}
            torch.testing.assert_close(of.noise[place], torch.full((4, 1), 0.1 * expected))


class Says:
    """A teacher that always says the same, and remembers what it was shown."""

    bf16 = False

    def __init__(self, logits: Tensor) -> None:
        self.answer, self.seen = logits, torch.zeros(0)

    def logits(self, pixels: Tensor) -> Tensor:
        self.seen = pixels
        return self.answer


def test_targets_are_a_mixture_of_what_the_teachers_say() -> None:
    """At temperature 2, logits 2 ln p say p. F̃ says (½, ½) at λ = ¼ and (1/5, 4/5) at λ = 1, F says (¾, ¼) always."""
    near = 2 * torch.tensor([[0.75, 0.25]]).log()
    says = Says(near.expand(2, 2))
    of = Kept(cast(Teachers, says), torch.zeros(1, 1, 8, 8), 2, batches=2, temperature=2.0)
    of.add(torch.full((1, 1, 8, 8), 3.0), 2 * torch.tensor([[0.5, 0.5]]).log(), torch.tensor(0.25))
    of.add(torch.full((1, 1, 8, 8), 5.0), 2 * torch.tensor([[0.2, 0.8]]).log(), torch.tensor(1.0))
    pixels, targets = of.recall(torch.tensor([1, 0]), AS_IT_IS.expand(2, 3))
    assert [set(image.flatten().tolist()) for image in pixels] == [{5.0}, {3.0}]
    assert torch.equal(says.seen, pixels)  # F is asked about what the model will see
    torch.testing.assert_close(targets, torch.tensor([[0.2, 0.8], [0.6875, 0.3125]]))


def test_the_slope_of_that_target_is_equation_5s() -> None:
    said, near, far = (drawn(seed, 5, 4) for seed in range(3))
    said.requires_grad_(True)
    target = 0.3 * (far / 2).softmax(dim=1) + 0.7 * (near / 2).softmax(dim=1)
    ours = F.cross_entropy(said / 2, target) * 4
    equation = 0.3 * distillation(far, said, 2.0) + 0.7 * distillation(near, said, 2.0)
    slopes = [torch.autograd.grad(loss, said)[0] for loss in (ours, equation)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_kept_goes_through_a_file(precision: Precision) -> None:
    """Half full, and after the oldest has gone: the next batch takes the place it would have taken."""
    for full in (1, 3):
        of, again = kept(precision=precision, full=full), kept(precision=precision)
        state = State({"kept": of.state()})
        before = state.to_bytes()
        again.restore(State.from_bytes(before).groups["kept"])
        assert of.images.dtype == again.images.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        for one in (of, again):
            one.add(drawn(9, 4, 3, 8, 8), drawn(8, 4, 4), torch.tensor(0.7))
        assert len(of) == len(again) == 8
        assert State({"kept": of.state()}).to_bytes() == State({"kept": again.state()}).to_bytes() != before
        assert state.to_bytes() == before  # a state is a copy


# Steps ----------------------------------------------------------------------------------------------------------------

CROSS = torch.tensor([[0.75, 0.25], [0.3, 0.7]], dtype=torch.float64)


def students() -> list[Student]:
    return [Student(SPEC, weights(20 + k), CPU, momentum=0.9, decay=5e-4) for k in (0, 1)]


def rehearsal(workers: int = 1) -> Rehearsal:
    return Rehearsal([kept(k, full=3 - k) for k in (0, 1)], students(), Device(CPU, workers))


def begin(of: Rehearsal, steps: int = 2) -> Rehearsal:
    of.begin(CROSS, 0.05, steps, [torch.Generator().manual_seed(k) for k in (5, 6)])
    return of


def cut(image: Tensor, row: int, column: int, flip: int) -> Tensor:
    padded = F.pad(image[None], (4, 4, 4, 4), mode="replicate")[0]
    found = padded[:, row : row + 8, column : column + 8]
    return found.flip(2) if flip else found


def plain_rehearsal(of: Rehearsal, steps: int) -> list[dict[str, Tensor]]:
    """Two models on mixed batches of four: three and one, and one and three."""
    nets = [build(SPEC) for _ in students()]
    optimisers = []
    for k, net in enumerate(nets):
        net.load_state_dict(weights(20 + k))
        optimisers.append(torch.optim.SGD(net.train().parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4))
    lessons = []
    for k, one in enumerate(of.kept):
        draw = torch.Generator().manual_seed(5 + k)
        rows = torch.randint(len(one), (steps, 4), generator=draw)
        offsets = torch.randint(0, 9, (steps * 4, 2), generator=draw)
        crops = torch.cat([offsets, torch.randint(0, 2, (steps * 4, 1), generator=draw)], dim=1)
        members = [build(SPEC) for _ in (0, 1)]
        for i, member in enumerate(members):
            member.load_state_dict(weights(k + i))
            member.eval()
        for step in range(steps):
            chosen = rows[step].tolist()
            cuts = crops[4 * step : 4 * step + 4].tolist()
            images = torch.stack([cut(one.images[row], *how) for row, how in zip(chosen, cuts, strict=True)])
            with torch.no_grad():
                near = (torch.stack([member(images) for member in members]).mean(dim=0) / 2).softmax(dim=1)
            noise = one.noise[chosen]
            lessons.append((images, noise * (one.adapted[chosen] / 2).softmax(dim=1) + (1 - noise) * near))
    for step in range(steps):
        (ours, wanted), (others, theirs) = lessons[step], lessons[steps + step]
        for net, optimiser, share in zip(nets, optimisers, (3, 1), strict=True):
            x = torch.cat([ours[:share], others[: 4 - share]])
            target = torch.cat([wanted[:share], theirs[: 4 - share]])
            loss = -4 * (target * (net(x) / 2).log_softmax(dim=1)).sum(dim=1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return [dict(net.state_dict()) for net in nets]


def test_steps_are_a_plain_loop() -> None:
    of = begin(rehearsal())
    expected = plain_rehearsal(of, 2)
    for number in (0, 1):
        of.step(number)
    for student, plain in zip(of.students, expected, strict=True):
        found = student.weights()
        for name, tensor in plain.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def contents(of: Rehearsal) -> list[bytes]:
    return [State({"weights": s.weights(), "momentum": s.momentum()}).to_bytes() for s in of.students]


def test_a_step_depends_on_its_number_alone_and_not_on_workers() -> None:
    """A rehearsal that begins again after its first step goes on with the second."""
    straight, beside, stopped = begin(rehearsal()), begin(rehearsal(workers=2)), begin(rehearsal())
    for number in (0, 1):
        straight.step(number)
        beside.step(number)
    stopped.step(0)
    assert contents(stopped) != contents(straight)
    begin(stopped).step(1)
    assert contents(stopped) == contents(beside) == contents(straight)


# FedBiCross -----------------------------------------------------------------------------------------------------------

Three = tuple[Context, dict[str, Bundle]]


def method(**own: Any) -> FedBiCross:
    short = {"trajectories": 2, "steps": 6, "samples": 3, "batch": 8, "synthesis_lr": 0.1}
    return FedBiCross(FedBiCross.Settings(**{**short, **own}))


@pytest.fixture(scope="module")
def three() -> Three:
    """Three sites that have sent what they send."""
    ctx, of = context(study(method="fedbicross")), method()
    requests = of.ask(ctx, State()) or {}
    works = {site.name: of.answer(ctx, site, requests[site.name], State()) for site in federation().sites}
    return ctx, {site: drive(ctx, work).bundle for site, work in works.items()}


def pair() -> State:
    """As if Stage 1 had found two clusters."""
    cross = torch.full((2, 2), 0.5, dtype=torch.float64)
    found = [["site-1", "site-3"], ["site-2"]]
    return State({"cross": {"weights": cross}}, {"trajectory": 0, "clusters": found, "silhouettes": {}})


def absorbed(of: FedBiCross, three: Three) -> Sequence[State]:
    return list(of.absorb(three[0], pair(), three[1]))


def timeless(state: State) -> bytes:
    """All of a state but how long it took."""
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


def test_a_stop_after_any_step_of_a_rehearsal_changes_nothing(three: Three) -> None:
    """Six steps, three of rehearsal; of three batches more than two are to be kept, so the oldest go."""
    ctx, answers = three
    of = method(rehearsal=3, kept=2)
    *_, expected = of.absorb(ctx, pair(), answers)
    states = list(of.absorb(replace(ctx, due=lambda: True), pair(), answers))
    assert len(states) == 2 * (6 + 3 + 1)
    assert timeless(states[-1]) == timeless(expected)
    assert len(expected.groups["kept-000"]["images"]) == 2 * 8
    assert int(expected.groups["kept-000"]["added"]) > 2
    for state in states[:-1]:
        *_, last = of.absorb(ctx, State.from_bytes(state.to_bytes()), answers)
        assert timeless(last) == timeless(expected)
        assert {part: done["steps"] for part, done in last.facts["work"].items()} == {
            "synthesis": 12,
            "distillation": 6,
        }
    plain = absorbed(method(), three)[-1]
    assert weights_hash(dict(plain.groups["model-000"])) != weights_hash(dict(expected.groups["model-000"]))


def test_only_the_second_half_of_a_trajectory_is_rehearsed(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six steps, 4 to 6; λ = 1 − t/6 is then below a half. As long as nothing is kept, nothing is rehearsed."""
    sampled = iter([{1}, {3, 4}, {2}, {5, 6}])
    monkeypatch.setattr(cross_cluster, "sampled_steps", lambda *_: frozenset(next(sampled)))
    states = absorbed(method(trajectories=4, rehearsal=2), three)
    assert [int(state.groups["kept-001"]["added"]) for state in states] == [0, 1, 1, 3]
    noise = states[-1].groups["kept-001"]["noise"].reshape(3, 8)
    torch.testing.assert_close(noise, torch.tensor([[1 / 3], [1 / 6], [0.0]]).expand(3, 8))
    rehearsed = [state.facts["work"].get("distillation", {"steps": 0})["steps"] for state in states]
    assert rehearsed == [0, 2, 4, 6]


def test_batches_mix_by_the_weights_as_they_are_and_at_the_models_rate(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[Tensor, float, int, list[int]]] = []
    original = Rehearsal.begin

    def begin(self: Rehearsal, cross: Tensor, rate: float, steps: int, draws: Sequence[torch.Generator]) -> None:
        begun.append((cross.clone(), rate, steps, [draw.initial_seed() for draw in draws]))
        original(self, cross, rate, steps, draws)

    monkeypatch.setattr(Rehearsal, "begin", begin)
    states = absorbed(method(rehearsal=2, lr=0.02), three)
    for state, (cross, _, steps, _) in zip(states, begun, strict=True):
        assert torch.equal(cross, state.groups["cross"]["weights"])
        assert not torch.equal(cross, pair().groups["cross"]["weights"])
        assert steps == 2
    assert [rate for _, rate, _, _ in begun] == pytest.approx([0.02, 0.002])
    assert len({seed for *_, seeds in begun for seed in seeds}) == 4  # of two trajectories and two clusters
