"""`dense`, `coboosting`, `dafl`: whole epochs against plain loops, resumes, which studies they take and refuse."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from tiny import context, deployed, drive, federation
from wardround.data.federation import Federation
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.pixels import augment, draw_augmentation
from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.methods.coboosting import CoBoosting
from wardround.methods.dafl import DAFL
from wardround.methods.dense import DENSE
from wardround.methods.distilled import Distilled
from wardround.methods.registry import known
from wardround.methods.state import State
from wardround.models import StagedNet, Weights, build
from wardround.settings import checked
from wardround.study import Study

KINDS: dict[str, type[Distilled]] = {"dense": DENSE, "coboosting": CoBoosting, "dafl": DAFL}
ALL = sorted(KINDS)
OWN: dict[str, dict[str, Any]] = {
    "dense": {"epochs": 3, "batch": 6, "codes": 5, "generator_steps": 3, "lr": 0.02},
    "coboosting": {"epochs": 3, "batch": 6, "codes": 5, "generator_steps": 3, "lr": 0.02},
    "dafl": {"epochs": 3, "batch": 6, "codes": 5, "turns": 2, "kd_steps": 2, "lr": 0.02},
}


def study(of: Federation, name: str, **changes: Any) -> Study:
    return tiny.study(of, method=name, **{"rounds": 1, **changes})


def method(name: str, **changes: Any) -> Any:
    kind = KINDS[name]
    return kind(checked(kind.Settings, {**OWN[name], **changes}, prefix=name))


@cache
def data() -> Federation:
    return federation((9, 6))


def uploads(ctx: Context, of: Federation) -> dict[str, Bundle]:
    """What the sites really send."""
    asked = method(ctx.study.settings.method)
    requests = asked.ask(ctx, State())
    return {site.name: drive(ctx, asked.answer(ctx, site, requests[site.name], State())).bundle for site in of.sites}


@cache
def usual(name: str) -> dict[str, Bundle]:
    return uploads(context(study(data(), name)), data())


def begin(name: str, **changes: Any) -> tuple[Context, dict[str, Bundle]]:
    ctx = context(study(data(), name, **changes))
    return ctx, uploads(ctx, data()) if changes else usual(name)


def members(ctx: Context, sent: dict[str, Bundle]) -> list[Member]:
    return [
        Member(
            ctx.study.spec(site),
            {n: t for kind, group in sent[site].groups.items() if kind != "size" for n, t in group.items()},
        )
        for site in sorted(sent)
    ]


# Plain loops ----------------------------------------------------------------------------------------------------------


def network(of: Member) -> StagedNet:
    net = build(of.spec)
    net.load_state_dict(of.weights)
    return net.eval()


def plain_generator() -> nn.Sequential:
    """For eight colour pixels out of five numbers; its weights are drawn below."""
    return nn.Sequential(
        nn.Linear(5, 128 * 2 * 2),
        nn.Unflatten(1, (128, 2, 2)),
        nn.BatchNorm2d(128),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 128, 3, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 3, 3, padding=1),
        nn.Sigmoid(),
    )


def drawn(draw: torch.Generator) -> tuple[nn.Sequential, Tensor]:
    """A generator with weights from N(0, 0.02) and batch norm from N(1, 0.02), then six codes."""
    net = plain_generator()
    for name, p in net.named_parameters():
        is_norm = p.dim() == 1 and name.endswith("weight")
        p.data = torch.zeros_like(p) if name.endswith("bias") else torch.empty_like(p)
        if name.endswith("weight"):
            p.data.normal_(float(is_norm), 0.02, generator=draw)
    return net, torch.randn(6, 5, generator=draw).requires_grad_(True)


def mean_logits(teachers: list[StagedNet], x: Tensor) -> Tensor:
    return sum((teacher(x) for teacher in teachers), torch.zeros(())) / len(teachers)


def statistics_distance(teacher: StagedNet, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for stage in teacher.stages.values():
        for layer in stage.children() if isinstance(stage, nn.Sequential) else [stage]:
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.running_mean is not None
                assert layer.running_var is not None
                total = total + (x.mean(dim=(0, 2, 3)) - layer.running_mean).norm()
                total = total + (x.var(dim=(0, 2, 3), unbiased=False) - layer.running_var).norm()
            x = layer(x.clone())
    return total


def kl(teacher: Tensor, student: Tensor, t: float) -> Tensor:
    p, q = (teacher / t).softmax(dim=1), (student / t).softmax(dim=1)
    return t * t * (p * (p.log() - q.log())).sum(dim=1)


def learner(ctx: Context, decay: float) -> tuple[StagedNet, torch.optim.SGD]:
    spec = ctx.study.student_spec
    net = network(Member(spec, ctx.study.fresh_weights(spec, "student"))).train()
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=decay)


def descend(optimiser: torch.optim.Optimizer, loss: Tensor, clip: Any = None) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(clip.parameters(), 10)
    optimiser.step()


def unpooled(pool: list[Tensor], index: Tensor, crops: Tensor) -> Tensor:
    return augment(torch.cat(pool)[index], crops).float() / 127.5 - 1


def pass_over(pool: list[Tensor], draw: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    count = 6 * len(pool)
    order = torch.randperm(count, generator=draw)
    crops = draw_augmentation(count, draw)
    yield from zip(order.view(-1, 6), crops.view(-1, 6, 3), strict=True)


def snapshot(net: nn.Module) -> Weights:
    return {name: t.clone() for name, t in net.state_dict().items()}


def plain_dense(ctx: Context, of: list[Member], bn_weight: float) -> Iterator[tuple[Weights, Tensor]]:
    teachers = [network(m) for m in of]
    student, sgd = learner(ctx, 0.0)
    pool: list[Tensor] = []
    for epoch in range(3):
        draw = ctx.streams.torch("synthesis", index=epoch)
        labels = torch.randint(4, (6,), generator=draw)
        crops = draw_augmentation(18, draw).view(3, 6, 3)
        generator, z = drawn(draw)
        adam = torch.optim.Adam([*generator.parameters(), z], lr=1e-3, betas=(0.5, 0.999))
        best, lowest = torch.empty(0), math.inf
        for crop in crops:
            images = generator(z) * 2 - 1
            seen = augment(images, crop)
            student.eval()
            t, s = mean_logits(teachers, seen), student(seen)
            student.train()
            differ = (t.argmax(dim=1) != s.argmax(dim=1)).float()
            loss = F.cross_entropy(t, labels) - (kl(t, s, 1.0) * differ).mean()
            loss = loss + bn_weight * sum(statistics_distance(net, seen) for net in teachers) / 2
            if loss.item() < lowest:
                best, lowest = images.detach().clone(), loss.item()
            descend(adam, loss)
        pool.append(((best + 1) / 2 * 255).round().to(torch.uint8))
        for index, crop in pass_over(pool, ctx.streams.torch("distillation", index=epoch)):
            x = unpooled(pool, index, crop)
            with torch.no_grad():
                target = mean_logits(teachers, x)
            descend(sgd, kl(target, student(x), 20.0).mean())
        yield snapshot(student), torch.cat(pool)


def plain_coboosting(ctx: Context, of: list[Member]) -> Iterator[tuple[Weights, Tensor, Tensor]]:
    teachers = [network(m) for m in of]
    student, sgd = learner(ctx, 1e-4)
    pool: list[Tensor] = []
    known_labels = torch.empty(0, dtype=torch.int64)
    w = torch.full((2,), 0.5)

    def ensemble(x: Tensor, weights: Tensor) -> Tensor:
        both: Tensor = (weights[0] * teachers[0](x) + weights[1] * teachers[1](x)) / weights.sum()
        return both

    for epoch in range(3):
        draw = ctx.streams.torch("synthesis", index=epoch)
        labels = torch.randint(4, (6,), generator=draw)
        generator, z = drawn(draw)
        adam = torch.optim.Adam([*generator.parameters(), z], lr=1e-3, betas=(0.5, 0.999))
        best, lowest = torch.empty(0), math.inf
        for _ in range(3):
            images = generator(z) * 2 - 1
            student.eval()
            t, s = ensemble(images, w), student(images)
            student.train()
            p = t.softmax(dim=1)[torch.arange(6), labels].detach()
            loss = ((1 - p) * F.cross_entropy(t, labels, reduction="none")).mean() - kl(t, s, 3.0).mean()
            if loss.item() < lowest:
                best, lowest = images.detach().clone(), loss.item()
            descend(adam, loss, clip=generator)
        if epoch > 0:
            for index, crop in pass_over(pool, ctx.streams.torch("weights", index=epoch)):
                free = w.clone().requires_grad_(True)
                loss = F.cross_entropy(ensemble(unpooled(pool, index, crop), free), known_labels[index])
                loss.backward()  # type: ignore[no-untyped-call]
                assert free.grad is not None
                w = (w - 0.01 * 0.99**epoch * free.grad.sign()).clamp(0, 1)
        pool.append(((best + 1) / 2 * 255).round().to(torch.uint8))
        known_labels = torch.cat([known_labels, labels])
        order = ctx.streams.torch("distillation", index=epoch)
        batches = list(pass_over(pool, order))
        directions = torch.rand(len(batches), 6, 4, generator=order) * 2 - 1
        sgd.param_groups[0]["lr"] = 0.02 * (1 + math.cos(math.pi * epoch / 3)) / 2
        for (index, crop), u in zip(batches, directions, strict=True):
            x = unpooled(pool, index, crop).requires_grad_(True)
            (u * (ensemble(x, w) / 4).softmax(dim=1)).sum().backward()
            assert x.grad is not None
            moved = (x + 8 / 255 * x.grad.sign()).detach()
            with torch.no_grad():
                target = ensemble(moved, w)
            descend(sgd, kl(target, student(moved), 4.0).mean(), clip=student)
        yield snapshot(student), torch.cat(pool), w


def plain_dafl(ctx: Context, of: list[Member]) -> Iterator[tuple[Weights, Tensor]]:
    teachers = [network(m) for m in of]
    student, sgd = learner(ctx, 1e-4)
    generator, first = plain_generator(), ctx.streams.torch("generator")
    for layer in generator:
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.data.fill_(1)
            layer.bias.data.zero_()
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            for parameter in layer.parameters():
                parameter.data.uniform_(-bound, bound, generator=first)
    adam = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for epoch in range(3):
        draw = ctx.streams.torch("synthesis", index=epoch)
        sgd.param_groups[0]["lr"] = (0.02, 0.02, 0.002)[epoch]  # 2/3 of the epochs are over 60 %
        for _ in range(2):
            z = torch.randn(3, 6, 5, generator=draw)
            x = generator(z[0]) * 2 - 1
            t = mean_logits(teachers, x)
            p = t.softmax(dim=1).mean(dim=0)
            active = sum(net.features(x).abs().mean() for net in teachers) / 2
            descend(adam, F.cross_entropy(t, t.argmax(dim=1)) + 20 * (p * p.log()).sum() - 1e-3 * active)
            for codes in z[1:]:
                with torch.no_grad():
                    x = generator(codes) * 2 - 1
                    target = mean_logits(teachers, x)
                descend(sgd, kl(target, student(x), 20.0).mean())
        yield snapshot(student), snapshot(generator)["0.weight"]


def assert_close(found: Any, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=5e-3, atol=5e-4)


def assert_same_pictures(found: Tensor, expected: Tensor) -> None:
    """But for one level here and there, which rounding may shift."""
    assert found.shape == expected.shape
    assert found.dtype == torch.uint8
    away = (found.int() - expected.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 0.01


@pytest.mark.parametrize("bn_weight", [1.0, 0.0])
def test_dense_is_a_plain_loop(bn_weight: float) -> None:
    ctx, sent = begin("dense")
    states = method("dense", bn_weight=bn_weight).absorb(ctx, State(), sent)
    for state, (weights, pool) in zip(states, plain_dense(ctx, members(ctx, sent), bn_weight), strict=True):
        assert_same_pictures(state.groups["pool"]["images"], pool)
        assert_close(state.groups["student"], weights)


def test_coboosting_is_a_plain_loop() -> None:
    ctx, sent = begin("coboosting")
    states = method("coboosting").absorb(ctx, State(), sent)
    for state, (weights, pool, w) in zip(states, plain_coboosting(ctx, members(ctx, sent)), strict=True):
        assert_same_pictures(state.groups["pool"]["images"], pool)
        torch.testing.assert_close(state.groups["ensemble_weights"]["weights"], w)
        assert_close(state.groups["student"], weights)


def test_dafl_is_a_plain_loop() -> None:
    ctx, sent = begin("dafl")
    states = method("dafl").absorb(ctx, State(), sent)
    for state, (weights, start) in zip(states, plain_dafl(ctx, members(ctx, sent)), strict=True):
        torch.testing.assert_close(state.groups["generator"]["start.weight"], start, rtol=1e-3, atol=1e-4)
        assert_close(state.groups["student"], weights)


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_any_state_but_the_last_can_be_continued_from(name: str) -> None:
    """Through a file, which keeps neither memory layout nor identity."""
    ctx, sent = begin(name)
    (*between, last) = method(name).absorb(ctx, State(), sent)
    assert len(between) == 2
    for state in between[1:]:
        (*_, again) = method(name).absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        assert again.groups.keys() == last.groups.keys()
        assert State(again.groups).to_bytes() == State(last.groups).to_bytes()


@pytest.mark.parametrize(
    ("name", "stops"),
    [("coboosting", [(0, 1), (1, 2), (2, 3)]), ("dafl", [(2,), (2,), (2,)]), ("dense", [(1,), (2,), (3,)])],
)
def test_a_stop_after_any_step_changes_nothing(name: str, stops: list[tuple[int, ...]]) -> None:
    """From every state to the next alone, and from every state to the end; an epoch may take longer than a minute."""
    ctx, sent = begin(name)
    own = {"turns": 3} if name == "dafl" else {}
    *_, expected = method(name, **own).absorb(ctx, State(), sent)
    often = replace(ctx, due=lambda: True)
    states = list(method(name, **own).absorb(often, State(), sent))
    assert [state.facts.get("midway") is None for state in states] == [
        last for steps in stops for last in (*(False for _ in range(sum(steps))), True)
    ]
    state = State()
    for following in states:
        *_, end = method(name, **own).absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        state = next(method(name, **own).absorb(often, State.from_bytes(state.to_bytes()), sent))
        assert timeless(state) == timeless(following)
        assert timeless(end) == timeless(expected)
        assert steps_of(end) == steps_of(expected)
    assert timeless(state) == timeless(expected)


def timeless(state: State) -> bytes:
    """All of a state but how long it took."""
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


def steps_of(state: State) -> dict[str, float]:
    return {part: found["steps"] for part, found in state.facts["work"].items()}


@pytest.mark.parametrize("name", ALL)
def test_states_are_values_and_leave_the_global_generator_alone(name: str) -> None:
    ctx, sent = begin(name)
    before = torch.get_rng_state()
    kept, later = [], []
    for state in method(name).absorb(ctx, State(), sent):
        kept.append(State(state.groups).to_bytes())
        later.append(state)
    assert [State(state.groups).to_bytes() for state in later] == kept
    assert [state.facts["epoch"] for state in later] == [1, 2, 3]
    assert len(set(kept)) == 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("changes", "steps"), [({}, 1 + 2 + 3), ({"kd_steps": 2}, 1 + 2 + 2)])
@pytest.mark.parametrize("name", ["coboosting", "dense"])
def test_a_pass_over_the_pool_may_be_capped(name: str, changes: dict[str, Any], steps: int) -> None:
    ctx, sent = begin(name)
    (*_, last) = method(name, **changes).absorb(ctx, State(), sent)
    assert last.groups["student"]["stages.conv1.2.num_batches_tracked"].item() == steps
    assert last.groups["pool"]["images"].shape == (18, 3, 8, 8)
    assert last.groups["pool"]["labels"].shape == (18,)


@pytest.mark.parametrize("name", ALL)
def test_a_run_of_it_deploys_the_student_everywhere(name: str, tmp_path: Path) -> None:
    tiny.coordinate(tmp_path / "run", method(name), data(), rounds=1)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert member.spec == study(data(), name).student_spec
    assert all(bool(t.isfinite().all()) for t in member.weights.values())


@pytest.mark.parametrize("name", ALL)
def test_two_rounds_begin_the_images_anew(name: str, tmp_path: Path) -> None:
    """Sites go on from the student; what the first round made is not in the second one's state."""
    ctx, sent = begin(name, rounds=2)
    (*_, last) = method(name).absorb(ctx, State(), sent)
    (*_, later) = method(name).absorb(replace(ctx, round=1), last, sent)
    assert later.facts["epoch"] == 3
    assert all(later.groups[g][n].shape == t.shape for g, group in last.groups.items() for n, t in group.items())
    tiny.coordinate(tmp_path / "run", method(name), data(), rounds=2)
    assert len(deployed(tmp_path / "run", "site-1").members) == 1


@pytest.mark.parametrize("name", ALL)
def test_two_classes_one_channel_and_nine_pixels(name: str, tmp_path: Path) -> None:
    coloured = federation((8, 6), classes=2, size=9)

    def grey(of: ImageSet) -> ImageSet:
        return replace(of, images=of.images[:, :1].contiguous())

    test = grey(coloured.test)
    sites = tuple(
        replace(s, train=grey(s.train), val=grey(s.val), test=replace(s.test, images=test)) for s in coloured.sites
    )
    tiny.coordinate(tmp_path / "run", method(name), replace(coloured, sites=sites, test=test), rounds=1)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert (member.spec.channels, member.spec.classes, member.spec.size) == (1, 2, 9)


@pytest.mark.parametrize("name", ALL)
def test_one_site_alone(name: str) -> None:
    ctx = context(study(federation((8,)), name))
    (*_, last) = method(name).absorb(ctx, State(), uploads(ctx, federation((8,))))
    assert all(bool(t.isfinite().all()) for t in last.groups["student"].values())


@pytest.mark.parametrize("name", ALL)
def test_sites_may_differ_in_architecture_from_each_other_and_from_the_student(name: str) -> None:
    model = {"name": "cnn4", "width": 2, "per_site": {"site-1": "small", "site-2": "wrn16-2"}}
    ctx, sent = begin(name, model=model)
    method(name).check(ctx.study)
    (state, *_) = method(name, epochs=1).absorb(ctx, State(), sent)
    assert "stages.conv1.0.weight" in state.groups["student"]
    assert all(bool(t.isfinite().all()) for t in state.groups["student"].values())


@pytest.mark.parametrize(("name", "changes"), [("dafl", {}), ("coboosting", {}), ("dense", {"bn_weight": 0.0})])
def test_networks_without_batch_norm_will_do_where_it_is_not_matched(name: str, changes: dict[str, Any]) -> None:
    ctx, sent = begin(name, model={"name": "cnn4", "width": 2})
    found = method(name, **changes)
    found.check(ctx.study)
    (*_, last) = found.absorb(ctx, State(), sent)
    assert all(bool(t.isfinite().all()) for t in last.groups["student"].values())


@pytest.mark.parametrize("name", ALL)
def test_bf16_is_honoured(name: str) -> None:
    wide, sent = begin(name)
    narrow = context(study(data(), name, train={"precision": "bf16"}))
    found = []
    for ctx in (wide, narrow):
        (*_, last) = method(name, epochs=1).absorb(ctx, State(), sent)
        found.append(last.groups["student"]["head.weight"])
    assert found[1].isfinite().all()
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.2, atol=0.1)


@pytest.mark.parametrize("output", ["sigmoid", "tanh"])
def test_dafls_own_generator_makes_another_student(output: str) -> None:
    ctx, sent = begin("dafl")
    (*_, last) = method("dafl", output=output, beta=0.9, generator_lr=0.02).absorb(ctx, State(), sent)
    assert last.groups["student"]["head.weight"].isfinite().all()
    other = "tanh" if output == "sigmoid" else "sigmoid"
    (*_, else_) = method("dafl", output=other, beta=0.9, generator_lr=0.02).absorb(ctx, State(), sent)
    assert not torch.equal(last.groups["student"]["head.weight"], else_.groups["student"]["head.weight"])


def test_coboostings_weights_stay_equal_without_a_step_and_in_the_first_epoch() -> None:
    ctx, sent = begin("coboosting")
    found = [s.groups["ensemble_weights"]["weights"].tolist() for s in method("coboosting").absorb(ctx, State(), sent)]
    assert found[0] == [0.5, 0.5]
    assert found[1] != found[0]
    (*_, last) = method("coboosting", weight_step=0.0).absorb(ctx, State(), sent)
    assert last.groups["ensemble_weights"]["weights"].tolist() == [0.5, 0.5]


def test_coboostings_student_takes_clipped_steps() -> None:
    """Six steps of at most 1e-8 · 0.02, each going on with momentum."""
    ctx, sent = begin("coboosting")
    (*_, last) = method("coboosting", clip_norm=1e-8, weight_decay=0.0).absorb(ctx, State(), sent)
    start = ctx.study.fresh_weights(ctx.study.student_spec, "student")
    torch.testing.assert_close(last.groups["student"]["head.weight"], start["head.weight"], rtol=0, atol=1e-7)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_the_registry_knows_them() -> None:
    assert {name: known()[name] for name in ALL} == {name: KINDS[name] for name in ALL}


@pytest.mark.parametrize(("name", "changes"), [("dense", {}), ("coboosting", {"bn_weight": 1.0})])
@pytest.mark.parametrize("model", [{"name": "cnn4"}, {"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}}])
def test_matching_statistics_needs_batch_norm(name: str, changes: dict[str, Any], model: dict[str, Any]) -> None:
    with pytest.raises(
        BadInput, match=rf"^{name} matches .* and cnn4 has none; .* set {name}\.bn_weight to 0$"
    ) as said:
        method(name, **changes).check(study(data(), name, model=model))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 0), ("batch", 1), ("codes", 0), ("generator_lr", 0), ("temperature", 0), ("momentum", 1), ("steps", 5)],
)
def test_settings_out_of_range_are_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(BadInput, match=key):
        method(name, **{key: value})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 1, "generator_lr": 1e30}, "the generator diverged: .* use a smaller generator_lr"),
        ({"lr": 1e30}, "diverged.* a smaller lr$"),  # by its weights, or first by what it does to the generator's loss
    ],
)
def test_divergence_fails_the_run_and_says_which(name: str, changes: dict[str, Any], words: str) -> None:
    ctx, sent = begin(name)
    with pytest.raises(RunFailed, match=words):
        list(method(name, **changes).absorb(ctx, State(), sent))


@pytest.mark.parametrize("name", ALL)
def test_one_image_of_each_class_in_every_epoch_is_kept_for_the_report(name: str) -> None:
    ctx = context(study(data(), name))
    sent = uploads(ctx, data())
    *_, last = method(name).absorb(ctx, State(), sent)
    assert last.facts["gallery"]["steps"] == [1, 2, 3]
    assert last.groups["gallery"]["images"].shape == (3, 4, 3, 8, 8)
