"""`deepinversion` and `fedisca`: whole epochs against plain loops, resumes, the studies that they take or refuse."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny import CPU, context, coordinate, deployed, drive, federation, predictor_bytes, study, watch_bundles
from wardround import coordinator
from wardround.data.federation import Federation
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import weights_hash
from wardround.learn.predictor import Member
from wardround.methods import deepinversion
from wardround.methods.base import Context
from wardround.methods.deepinversion import DeepInversion
from wardround.methods.distilled import Distilled
from wardround.methods.fedisca import FedISCA
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import StagedNet, Weights, build, spec_layout
from wardround.synthesis.inversion import Iterate

BOTH = ["deepinversion", "fedisca"]
OWN: dict[str, dict[str, Any]] = {
    "deepinversion": {"epochs": 3, "steps": 4, "batch": 6, "kd_steps": 3, "lr": 0.05},
    "fedisca": {"epochs": 3, "steps": 4, "batch": 6, "lr": 0.05},
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


def members(ctx: Context, sent: dict[str, Bundle]) -> list[Member]:
    return [
        Member(
            ctx.study.spec(site),
            {n: t for kind, group in sent[site].groups.items() if kind != "size" for n, t in group.items()},
        )
        for site in sorted(sent)
    ]


def assert_close(found: Any, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-4)


# Plain loops ----------------------------------------------------------------------------------------------------------


def network(of: Member) -> StagedNet:
    net = build(of.spec)
    net.load_state_dict(of.weights)
    return net.eval()


def mean_logits(teachers: list[StagedNet], x: Tensor) -> Tensor:
    return sum((teacher(x) for teacher in teachers), torch.zeros(())) / len(teachers)


def statistics_distance(teacher: StagedNet, x: Tensor) -> Tensor:
    """Eq. 6 of one teacher, layer by layer through its stages."""
    total = torch.zeros(())
    for stage in teacher.stages.values():
        for layer in stage.children() if isinstance(stage, nn.Sequential) else [stage]:
            if isinstance(layer, nn.BatchNorm2d):
                mean = x.mean(dim=(0, 2, 3))
                variance = ((x - mean.reshape(1, -1, 1, 1)) ** 2).mean(dim=(0, 2, 3))
                total = total + ((mean - layer.running_mean) ** 2).sum().sqrt()
                total = total + ((variance - layer.running_var) ** 2).sum().sqrt()
            x = layer(x.clone())
    return total


def synthesis(teachers: list[StagedNet], draw: torch.Generator) -> tuple[list[Tensor], list[float]]:
    """Four steps of Adam at 0.05 on six images: iterates, and the loss before each step."""
    x = torch.randn(6, 3, 8, 8, generator=draw)
    shifts = torch.randint(-2, 3, (4, 2), generator=draw)
    x.requires_grad_(True)
    adam = torch.optim.Adam([x], lr=0.05)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    found, losses = [], []
    for dy, dx in shifts.tolist():
        seen = x.roll((dy, dx), dims=(2, 3))
        variation = (
            (seen[:, :, :, 1:] - seen[:, :, :, :-1]).norm()
            + (seen[:, :, 1:] - seen[:, :, :-1]).norm()
            + (seen[:, :, 1:, 1:] - seen[:, :, :-1, :-1]).norm()
            + (seen[:, :, 1:, :-1] - seen[:, :, :-1, 1:]).norm()
        )
        distance = sum((statistics_distance(t, seen) for t in teachers), torch.zeros(())) / len(teachers)
        loss = F.cross_entropy(mean_logits(teachers, seen), labels) + 10 * distance + 2.5e-5 * variation
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        found.append(x.detach().clone())
        losses.append(loss.item())
    return found, losses


def kd(teacher: Tensor, student: Tensor) -> Tensor:
    p, q = (teacher / 20).softmax(dim=1), (student / 20).softmax(dim=1)
    return 400 * (p * (p.log() - q.log())).sum(dim=1).mean()


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


def plain_fedisca(ctx: Context, of: list[Member], adaptation: str) -> Iterator[tuple[Weights, list[StagedNet]]]:
    """Algorithm 1, with s from 1 to S."""
    teachers, adapted = [network(m) for m in of], [network(m) for m in of]
    student, optimiser = learner(ctx)
    for epoch, rate in enumerate(RATES):
        memory, _ = synthesis(teachers, ctx.streams.torch("synthesis", index=epoch))
        with torch.no_grad():
            for x in reversed(memory):
                for net in adapted:
                    net.train()(x)
        for s, x in enumerate(memory, 1):
            with torch.no_grad():
                for net in adapted:
                    net.train(adaptation == "batch")
                far, near = mean_logits(adapted, x), mean_logits(teachers, x)
            own = student(x)
            learn(optimiser, (1 - s / 4) * kd(far, own) + s / 4 * kd(near, own), rate)
        yield {name: t.clone() for name, t in student.state_dict().items()}, adapted


def plain_deepinversion(ctx: Context, of: list[Member], keep: str) -> Iterator[tuple[Weights, list[Tensor]]]:
    """Invert six images, pool them, take three steps on six of the pool."""
    teachers = [network(m) for m in of]
    student, optimiser = learner(ctx)
    pool: list[Tensor] = []
    for epoch, rate in enumerate(RATES):
        draw = ctx.streams.torch("synthesis", index=epoch)
        iterates, losses = synthesis(teachers, draw)
        lowest = min(range(1, 4), key=lambda k: losses[k]) - 1  # losses[k] is that of iterates[k - 1]
        pool.append(iterates[-1] if keep == "last" else iterates[lowest])
        pooled = torch.cat(pool)
        for _ in range(3):
            x = pooled[torch.randint(len(pooled), (6,), generator=draw)]
            with torch.no_grad():
                target = mean_logits(teachers, x)
            learn(optimiser, kd(target, student(x)), rate)
        yield {name: t.clone() for name, t in student.state_dict().items()}, list(pool)


@pytest.mark.parametrize("adaptation", ["ema", "batch"])
def test_fedisca_is_a_plain_loop(adaptation: str) -> None:
    data = federation((9, 6))
    ctx = context(study(data, method="fedisca"))
    sent = answers(ctx, data)
    states = method("fedisca", adaptation=adaptation).absorb(ctx, State(), sent)
    for state, (weights, adapted) in zip(states, plain_fedisca(ctx, members(ctx, sent), adaptation), strict=True):
        assert_close(state.groups["student"], weights)
        if adaptation == "ema":
            for i, net in enumerate(adapted):
                for name, buffer in net.named_buffers():
                    if buffer.is_floating_point():
                        torch.testing.assert_close(
                            state.groups["adapted"][f"{i:03d}.{name}"], buffer, rtol=1e-3, atol=1e-4
                        )


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
    found = method("fedisca")
    assert isinstance(found, FedISCA)
    expected = noise * kd(adapted, student) + (1 - noise) * kd(original, student)
    torch.testing.assert_close(found.loss(adapted, original, student, noise), expected, rtol=1e-4, atol=1e-6)


def test_equation_8_ignores_who_has_no_weight() -> None:
    own, teacher = torch.zeros(1, 2), torch.tensor([[3.0, 0.0]])
    found = method("fedisca")
    assert isinstance(found, FedISCA)
    assert found.loss(teacher, own, own, 0.0).item() == pytest.approx(0.0, abs=1e-6)
    assert found.loss(own, teacher, own, 1.0).item() == pytest.approx(0.0, abs=1e-6)


def test_the_students_rate_falls_after_half_and_after_three_quarters_of_the_epochs() -> None:
    rates = [method("fedisca", epochs=100, lr=1.0).rate(epoch) for epoch in (0, 49, 50, 74, 75, 99)]
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01, 0.01])
    assert method("fedisca", epochs=1, lr=1.0).rate(0) == 1.0


TRAJECTORY = [9.0, 5.0, 2.0, 4.0]  # losses before each update: of the noise, and of iterates 0, 1 and 2


@pytest.mark.parametrize(
    ("keep", "steps", "kept"), [("lowest", 4, 1), ("last", 4, 3), ("lowest", 1, 0), ("last", 1, 0)]
)
def test_which_iterate_is_kept(keep: str, steps: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(*_: Any) -> Iterator[Iterate]:
        for step, loss in enumerate(TRAJECTORY[:steps]):
            yield Iterate(step, torch.full((6, 3, 8, 8), float(step)), torch.tensor(loss))

    monkeypatch.setattr(deepinversion, "invert", walk)
    found = method("deepinversion", keep=keep)
    assert isinstance(found, DeepInversion)
    images = found._kept(None, torch.zeros(6), (3, 8, 8), torch.Generator())  # type: ignore[arg-type]
    assert images.unique().tolist() == [kept]


def test_a_pooled_batch_out_of_a_file_lies_in_memory_as_a_fresh_one() -> None:
    """Or a GPU might choose another convolution for it after a resume, and round differently."""
    fresh = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    filed = State.from_bytes(State({"pool": {"000000": fresh}}).to_bytes()).groups["pool"]["000000"]
    assert filed.stride() != fresh.stride()
    assert deepinversion._placed(filed, CPU).stride() == fresh.stride()


# Runs -----------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What `kill -9` is to a process."""


def delivered(crossed: list[Bundle]) -> dict[str, bytes]:
    return {b.envelope.site: b.to_bytes() for b in crossed if b.envelope.kind == "delivery"}


@pytest.mark.parametrize("name", BOTH)
def test_a_run_killed_between_epochs_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "ABSORB_CHECKPOINT_SECONDS", -1.0)
    crossed = watch_bundles(monkeypatch)
    changes: dict[str, Any] = {"epochs": 4}
    coordinate(tmp_path / "straight", method(name, **changes))
    straight = delivered(crossed)
    assert sorted(straight) == ["site-1", "site-2", "site-3"]

    begun: list[int] = []
    fatal = [3]
    rate = Distilled.rate

    def watched(self: Distilled, epoch: int) -> float:
        if epoch in fatal:
            raise Killed
        if epoch not in begun:
            begun.append(epoch)
        return rate(self, epoch)

    monkeypatch.setattr(Distilled, "rate", watched)
    with pytest.raises(Killed):
        coordinate(tmp_path / "killed", method(name, **changes))
    assert begun == [0, 1, 2]
    begun.clear()
    fatal.clear()
    crossed.clear()
    coordinate(tmp_path / "killed", method(name, **changes))
    assert begun == [2, 3]  # the state after epoch 1 is the last that another followed
    assert delivered(crossed) == straight
    assert predictor_bytes(tmp_path / "killed") == predictor_bytes(tmp_path / "straight")


@pytest.mark.parametrize("name", BOTH)
def test_any_state_but_the_last_can_be_continued_from(name: str) -> None:
    """Through a file, which keeps neither memory layout nor identity."""
    data = federation((9, 6))
    ctx = context(study(data, method=name))
    sent = answers(ctx, data)
    (*between, last) = method(name).absorb(ctx, State(), sent)
    for state in between:
        (*_, again) = method(name).absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        assert again.to_bytes() == last.to_bytes()


@pytest.mark.parametrize("name", BOTH)
def test_every_site_takes_the_student_home(name: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", method(name))
    assert list(predictor_bytes(tmp_path / "run")) == ["shared.safetensors"]
    rows = result["ledger"]["rows"]
    parameters = 4 * spec_layout(study().common_spec).parameter_count
    home = [row for row in rows if row["kind"] == "delivery"]
    assert [row["groups"]["parameters"] for row in home] == [parameters] * 3
    up = [row for row in rows if row["kind"] == "answer"]
    assert [set(row["groups"]) for row in up] == [{"parameters", "statistics", "counters", "size"}] * 3


@pytest.mark.parametrize("name", BOTH)
def test_a_site_too_small_to_train_is_left_out(name: str, tmp_path: Path) -> None:
    """The student is that of the other two alone, and goes to all three."""
    coordinate(tmp_path / "three", method(name), federation((9, 6, 1)))
    coordinate(tmp_path / "two", method(name), federation((9, 6)))
    three, two = (deployed(tmp_path / run, "site-1").members[0].weights for run in ("three", "two"))
    assert weights_hash(three) == weights_hash(two)
    assert weights_hash(deployed(tmp_path / "three", "site-3").members[0].weights) == weights_hash(two)


@pytest.mark.parametrize("name", BOTH)
def test_two_classes_and_one_channel(name: str, tmp_path: Path) -> None:
    coloured = federation((8, 6), classes=2)

    def grey(of: ImageSet) -> ImageSet:
        return replace(of, images=of.images[:, :1].contiguous())

    test = grey(coloured.test)
    sites = tuple(
        replace(s, train=grey(s.train), val=grey(s.val), test=replace(s.test, images=test)) for s in coloured.sites
    )
    data = replace(coloured, sites=sites, test=test)
    coordinate(tmp_path / "run", method(name), data)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert (member.spec.channels, member.spec.classes) == (1, 2)
    assert member.weights["stages.conv1.0.weight"].shape[1] == 1


@pytest.mark.parametrize("name", BOTH)
def test_sites_may_differ_in_architecture_from_each_other_and_from_the_student(name: str, tmp_path: Path) -> None:
    """Every site has batch norm; the student is a cnn4, which has none, and that is what goes home."""
    per_site = {"site-1": "small", "site-2": "wrn16-2"}
    changes: dict[str, Any] = {"model": {"name": "cnn4", "width": 2, "per_site": per_site}}
    data = federation((8, 6))
    agreed = study(data, method=name, **changes)
    method(name).check(agreed)
    result = coordinate(tmp_path / "run", method(name), data, **changes)
    (member,) = deployed(tmp_path / "run", "site-2").members
    assert member.spec == agreed.student_spec
    home = [row["groups"] for row in result["ledger"]["rows"] if row["kind"] == "delivery"]
    assert [set(groups) for groups in home] == [{"parameters"}] * 2


def test_the_student_does_not_start_from_the_sites_weights() -> None:
    ctx = context(study(method="fedisca"))
    spec = ctx.study.student_spec
    assert weights_hash(ctx.study.fresh_weights(spec, "student")) != weights_hash(ctx.study.initial())


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("model", [{"name": "cnn4"}, {"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}}])
def test_a_network_without_batch_norm_is_refused_by_name(name: str, model: dict[str, Any]) -> None:
    agreed = study(method=name, model=model)
    with pytest.raises(BadInput, match=f"^{name} makes images from batch-norm statistics, and cnn4 has none") as caught:
        method(name).check(agreed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BOTH)
def test_a_batch_must_hold_every_class(name: str) -> None:
    method(name, batch=4).check(study(method=name))
    with pytest.raises(BadInput, match=rf"^{name}\.batch is 3, too small for each of 4 classes to be in it; use 4"):
        method(name, batch=3).check(study(method=name))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", 0),
        ("steps", 0),
        ("batch", 1),
        ("synthesis_lr", 0),
        ("jitter", -1),
        ("temperature", 0),
        ("momentum", 1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(BadInput, match=key):
        method(name, **{key: value})


@pytest.mark.parametrize("name", BOTH)
def test_an_upload_that_is_not_finite_is_refused_by_its_site(name: str) -> None:
    data = federation((9, 6))
    ctx = context(study(data, method=name))
    sent = answers(ctx, data)
    broken = {kind: dict(group) for kind, group in sent["site-2"].groups.items()}
    broken["statistics"] = {n: torch.full_like(t, torch.nan) for n, t in broken["statistics"].items()}
    sent["site-2"] = ctx.bundle("answer", "site-2", broken)
    with pytest.raises(RunFailed, match="the model of site-2 is not finite"):
        next(iter(method(name).absorb(ctx, State(), sent)))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("changes", "words"),
    [({"synthesis_lr": 1e30}, "the synthesis diverged"), ({"lr": 1e30}, "the student diverged in epoch 1")],
)
def test_divergence_fails_the_run_and_says_which(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match=words):
        coordinate(tmp_path / "run", method(name, **changes), federation((9, 6)))
