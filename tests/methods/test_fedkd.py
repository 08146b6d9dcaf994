"""FedKD: a mentor that never leaves, a mentee that all hold alike, updates in few numbers, and the public bugs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tiny import (
    CPU,
    context,
    coordinate,
    deployed,
    drive,
    federation,
    predictor_bytes,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.coordinator import Coordinator
from wardround.data.federation import Federation, LocalTest
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import PARAMETERS, SIZE, Bundle
from wardround.learn.lowrank import Packed, pack, unpack
from wardround.learn.trainer import train_one
from wardround.methods.base import Context, join_groups, layout_groups
from wardround.methods.fedkd import MENTEE, MENTOR, PROJECTION, UPDATE, _drawn
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import fresh, spec_layout


def method(**own: Any) -> Any:
    return make("fedkd", own)


def sizes(bundle: Bundle) -> int:
    """Numbers sent for parameters, in whatever form."""
    return sum(t.numel() for name in (PARAMETERS, *UPDATE) for t in bundle.group(name).values())


# What travels ---------------------------------------------------------------------------------------------------------


def test_the_mentor_is_in_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mentee of another width no tensor of the mentor's shape but the head's bias could even be meant."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(mentee_width=1), rounds=3)
    allowed = {PARAMETERS, *UPDATE, "statistics", "counters", SIZE}
    assert all(set(bundle.groups) <= allowed for bundle in crossed)
    kept = [deployed(tmp_path / "run", f"site-{i}").members[0] for i in (1, 2, 3)]
    assert [member.spec.width for member in kept] == [2, 2, 2]
    private = {t.numpy().tobytes() for member in kept for t in member.weights.values() if t.is_floating_point()}
    sent = {t.numpy().tobytes() for b in crossed for group in b.groups.values() for t in group.values()}
    assert not private & sent


def test_the_whole_mentee_comes_once_and_then_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=3)
    for bundle in crossed:
        kind, whole = bundle.envelope.kind, PARAMETERS in bundle.groups
        assert whole == (kind == "delivery" or (kind == "request" and bundle.envelope.round == 0))
        assert whole != ("update" in bundle.groups)


def test_a_site_that_missed_a_round_gets_the_whole_mentee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed, fits = watch_bundles(monkeypatch), watch_fits(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=6, participants=0.67)
    asked = [set(study(participants=0.67).participants(r)) for r in range(6)]
    requests = [b for b in crossed if b.envelope.kind == "request"]
    kinds = set()
    for bundle in requests:
        number, site = bundle.envelope.round, bundle.envelope.site
        whole = number == 0 or site not in asked[number - 1]
        assert (PARAMETERS in bundle.groups) == whole
        kinds.add(whole)
    assert kinds == {True, False}
    for number in range(6):  # however it came, all asked sites begin a round from the same mentee
        starts = [fit.start for fit in fits if fit.label.endswith(f"round {number + 1}")]
        assert len(starts) == 2
        assert all(torch.equal(starts[0][name], tensor) for name, tensor in starts[1].items())


def test_the_coordinators_mentee_is_the_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves by what it sends, not by the mean that it truncates."""
    fits, crossed = watch_fits(monkeypatch), watch_bundles(monkeypatch)
    coordinate(tmp_path / "long", method(energy_start=0.5, energy_end=0.5), rounds=2)
    second = fits[-1].start
    crossed.clear()
    coordinate(tmp_path / "short", method(energy_start=0.5, energy_end=0.5), rounds=1)
    (delivered,) = (b for b in crossed if b.envelope.kind == "delivery" and b.envelope.site == "site-1")
    assert all(torch.equal(second[name], tensor) for name, tensor in join_groups(delivered).items())


def test_with_all_its_energy_the_mentee_is_the_mean_of_the_trained_ones() -> None:
    """Two rounds of 11, 8 and 6 images: what was received and the update sent make up what was trained."""
    how, data = method(energy_start=1.0, energy_end=1.0), federation()
    state, memories = how.begin(context(study(method="fedkd"))), {site.name: State() for site in data.sites}
    for number in range(2):
        ctx = context(study(method="fedkd"), number)
        requests, answers, trained = how.ask(ctx, state), {}, []
        for site in data.sites:
            work = how.answer(ctx, site, requests[site.name], memories[site.name])
            fitted = train_one(next(work), CPU)
            with pytest.raises(StopIteration) as end:
                work.send(fitted)
            answers[site.name], memories[site.name] = end.value.value.bundle, end.value.value.memory
            trained.append((len(site.train) / 25, fitted.weights))
        (state,) = how.absorb(ctx, state, answers)
        for name, tensor in state.groups["model"].items():
            if tensor.is_floating_point():
                mean = sum(share * weights[name] for share, weights in trained)
                torch.testing.assert_close(tensor, mean, rtol=1e-4, atol=1e-5)


def test_the_mean_update_is_truncated_again_to_the_energy_of_the_round() -> None:
    """A mean of thin updates is thicker than they are; what is sent of it holds no more than this round's share."""
    agreed, data = study(method="fedkd", model={"name": "cnn4", "width": 2}), federation()
    ctx, how = context(agreed), method(energy_start=0.5, energy_end=0.7)
    begun = how.begin(ctx)
    requests = how.ask(ctx, begun)
    answers = {s.name: drive(ctx, how.answer(ctx, s, requests[s.name], State())).bundle for s in data.sites}
    (state,) = how.absorb(ctx, begun, answers)
    layout = spec_layout(agreed.common_spec)
    shapes = {name: layout.shapes[name] for name in layout.in_group(PARAMETERS)}
    parts = [unpack(Packed(*(dict(a.group(g)) for g in UPDATE)), shapes, "here") for a in answers.values()]
    weights = [int(a.group(SIZE)["images"]) / 25 for a in answers.values()]
    mean = {name: sum(w * p[name] for w, p in zip(weights, parts, strict=True)) for name in shapes}
    expected = pack(mean, 0.6)
    assert expected.left
    assert {n: t.shape for n, t in state.groups["update_left"].items()} == {
        n: t.shape for n, t in expected.left.items()
    }
    assert {n: t.shape for n, t in pack(mean, 1.0).left.items()} != {n: t.shape for n, t in expected.left.items()}


def test_less_energy_is_fewer_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)

    def sent(energy: float) -> int:
        crossed.clear()
        own = {"energy_start": energy, "energy_end": energy}
        coordinate(tmp_path / str(energy), method(**own), rounds=2, model={"name": "cnn4", "width": 2})
        return sum(sizes(b) for b in crossed if b.envelope.kind == "answer")

    whole = 2 * 3 * spec_layout(replace(study().common_spec, name="cnn4")).parameter_count
    assert sent(0.5) < sent(0.95) < sent(1.0) <= whole


def test_energy_grows_along_a_line() -> None:
    agreed = study(method="fedkd", rounds=3)
    found = [method().energy(context(agreed, number)) for number in range(3)]
    assert found == pytest.approx([0.96, 0.97, 0.98])
    assert method(energy_start=0.5, energy_end=1.0).energy(context(study(rounds=1))) == 1.0


def test_the_defaults_are_the_papers_and_clip() -> None:
    s = method().settings
    assert (s.energy_start, s.energy_end, s.mentee_width, s.clip_norm) == (0.95, 0.98, None, 1.0)


def test_gradients_are_clipped_unless_the_study_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "own", method(), rounds=1)
    coordinate(tmp_path / "study", method(), rounds=1, train={"clip_norm": 7.0})
    assert {fit.recipe.clip_norm for fit in fits[:3]} == {1.0}
    assert {fit.recipe.clip_norm for fit in fits[3:]} == {7.0}


# One step by hand -----------------------------------------------------------------------------------------------------


def answered(ctx: Context, site: str, images: int, change: Callable[[str], float]) -> Bundle:
    """An answer whose update is the same number throughout each tensor."""
    spec = ctx.study.common_spec
    layout = spec_layout(spec)
    groups: dict[str, Any] = layout_groups(spec, fresh(spec, torch.Generator().manual_seed(1)))
    del groups[PARAMETERS]
    for name, counter in groups["counters"].items():
        groups["counters"][name] = counter + images
    whole = {n: torch.full(layout.shapes[n], change(n)) for n in layout.in_group(PARAMETERS)}
    return ctx.bundle("answer", site, {**groups, "update": whole, SIZE: {"images": torch.tensor(images)}})


def test_the_mean_update_by_hand() -> None:
    """(1·0.4 + 3·0.8)/4 = 0.7 is added to every parameter: of rank one, so no energy is lost."""
    agreed = study(method="fedkd")
    ctx, how = context(agreed), method()
    state = how.begin(ctx)
    answers = {"site-1": answered(ctx, "site-1", 1, lambda n: 0.4), "site-2": answered(ctx, "site-2", 3, lambda n: 0.8)}
    (after,) = how.absorb(ctx, state, answers)
    for name in spec_layout(agreed.common_spec).in_group(PARAMETERS):
        before = state.groups["model"][name]
        torch.testing.assert_close(after.groups["model"][name], before + 0.7, rtol=1e-5, atol=1e-5)
    assert after.facts["current"] == ["site-1", "site-2"]
    counters = [t for n, t in after.groups["model"].items() if n.endswith("num_batches_tracked")]
    assert counters
    assert all(int(t) == 3 for t in counters)  # the largest; a mean would be 2.5


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_the_head_of_few_classes_moves(classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A well-known version zeroes the head of two to eleven classes before it starts, another takes three biases for
    factors."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", method(), federation((8, 6), classes=classes), rounds=3)
    heads = [fit.start["head.weight"] for fit in fits[::2]]
    biases = [fit.start["head.bias"] for fit in fits[::2]]
    assert all(head.abs().sum(dim=1).min() > 0 for head in heads)
    assert not torch.equal(heads[1], heads[0])
    assert not torch.equal(biases[1], biases[0])
    assert torch.linalg.matrix_rank(heads[1]) > 1


# Two networks ---------------------------------------------------------------------------------------------------------


def test_mentor_and_mentee_start_apart(tmp_path: Path) -> None:
    """Two equal networks have nothing to teach each other."""
    agreed = study(method="fedkd")
    mentee = method().begin(context(agreed)).groups["model"]
    assert not torch.equal(mentee["head.weight"], agreed.initial()["head.weight"])


def test_a_file_of_weights_is_for_both_where_they_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = fresh(study().common_spec, torch.Generator().manual_seed(7))
    save_file(weights, tmp_path / "w.safetensors")
    agreed = study(method="fedkd", model={"weights": str(tmp_path / "w.safetensors")})
    assert torch.equal(method().begin(context(agreed)).groups["model"]["head.weight"], weights["head.weight"])
    narrow = method(mentee_width=1).begin(context(agreed)).groups["model"]
    assert narrow["head.weight"].shape == (4, 4)


def test_the_shared_model_is_the_mentee_and_a_site_deploys_its_mentor(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", method(mentee_width=1), rounds=2)
    mentors = [deployed(tmp_path / "run", f"site-{i}").members[0].weights["head.weight"] for i in (1, 2, 3)]
    assert not torch.equal(mentors[0], mentors[1])
    assert {row["model"] for row in result["rows"]} >= {"shared", "personal"}


def test_a_mentor_learns_from_round_to_round(tmp_path: Path) -> None:
    """What was trained is the mentor that goes on, and what is measured after the round."""
    agreed = study(method="fedkd")
    how, site = method(), federation().sites[0]
    ctx, state = context(agreed), method().begin(context(agreed))
    answer = drive(ctx, how.answer(ctx, site, how.request(ctx, site.name, state), State()))
    assert set(answer.memory.groups) == {MENTOR, MENTEE, PROJECTION}
    (member,) = answer.trained.members
    assert all(torch.equal(member.weights[n], t) for n, t in answer.memory.groups[MENTOR].items())
    assert not torch.equal(member.weights["head.weight"], agreed.initial()["head.weight"])
    assert all(torch.equal(state.groups["model"][n], t) for n, t in answer.memory.groups[MENTEE].items())
    (state,) = how.absorb(ctx, state, {site.name: answer.bundle})
    later = context(agreed, 1)
    work = how.answer(later, site, how.request(later, site.name, state), answer.memory)
    assert torch.equal(next(work).objective.mentor["head.weight"], member.weights["head.weight"])


def test_a_site_that_was_never_asked_deploys_the_mentee(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", method(mentee_width=1), rounds=1, participants=0.34)
    (asked,) = study(participants=0.34).participants(0)
    widths = {f"site-{i}": deployed(tmp_path / "run", f"site-{i}").members[0].spec.width for i in (1, 2, 3)}
    assert widths == {site: 2 if site == asked else 1 for site in widths}


def test_no_work_is_done_for_sites_that_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=4, participants=0.34)
    assert len(fits) == 4


def test_the_mentor_teaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mentee learns something else than under cross-entropy alone."""
    fits = watch_fits(monkeypatch)
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=1)
    (kept,) = (b for b in crossed if b.envelope.kind == "answer" and b.envelope.site == "site-1")
    alone = replace(fits[0], objective=type(fits[0]).__dataclass_fields__["objective"].default_factory())
    plain = context(study()).train([alone])[0].weights
    sent = kept.group("update")["head.bias"]
    assert not torch.allclose(sent, plain["head.bias"] - alone.start["head.bias"], atol=1e-5)


# Studies of every kind ------------------------------------------------------------------------------------------------


def grey(data: Federation) -> Federation:
    def cut(part: ImageSet) -> ImageSet:
        return replace(part, images=part.images[:, :1])

    sites = tuple(
        replace(s, train=cut(s.train), val=cut(s.val), test=LocalTest(cut(s.test.images), s.test.class_weights))
        for s in data.sites
    )
    return replace(data, sites=sites, test=cut(data.test))


@pytest.mark.parametrize("name", ["small", "cnn4"])
def test_two_classes_grey_images_one_class_and_one_image(name: str, tmp_path: Path) -> None:
    data = grey(federation((5, 4, 1), classes=2))
    one = replace(data.sites[1].train, labels=torch.zeros(4, dtype=torch.int64))
    data = replace(data, sites=(data.sites[0], replace(data.sites[1], train=one), data.sites[2]))
    for own in ({}, {"mentee_width": 1}):
        path = tmp_path / f"{name}{len(own)}"
        coordinate(path, method(**own), data, rounds=3, model={"name": name, "width": 2})
        assert len(predictor_bytes(path)) == 3  # three mentors; all of them stay at their sites


def test_how_many_work_at_once_changes_nothing(tmp_path: Path) -> None:
    for workers in (1, 3):
        coordinate(tmp_path / str(workers), method(), workers=workers)
    assert predictor_bytes(tmp_path / "1") == predictor_bytes(tmp_path / "3")


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(BaseException):
        pass

    coordinate(tmp_path / "straight", method(), rounds=4, participants=0.67)
    proceed = Coordinator._round

    def stop(self: Coordinator, ctx: Context, *rest: Any) -> State | None:
        if ctx.round == 2:
            raise Stopped
        return proceed(self, ctx, *rest)

    monkeypatch.setattr(Coordinator, "_round", stop)
    with pytest.raises(Stopped):
        coordinate(tmp_path / "stopped", method(), rounds=4, participants=0.67)
    monkeypatch.setattr(Coordinator, "_round", proceed)
    coordinate(tmp_path / "stopped", method(), rounds=4, participants=0.67)
    assert predictor_bytes(tmp_path / "stopped") == predictor_bytes(tmp_path / "straight")


def test_the_projection_is_drawn_as_pytorch_draws_a_linear_layer() -> None:
    """Evenly between −1/√inputs and 1/√inputs."""
    w = _drawn(64, 200, torch.Generator().manual_seed(0))
    assert w.shape == (200, 64)
    assert 0.124 < float(w.max()) <= 0.125
    assert -0.125 <= float(w.min()) < -0.124
    assert float(w.std()) == pytest.approx(0.125 / 3**0.5, rel=0.02)


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_wrong_update_is_refused_by_name() -> None:
    agreed = study(method="fedkd")
    ctx, how = context(agreed), method()
    answer = answered(ctx, "site-2", 3, lambda n: 0.1)
    wrong = {**answer.group("update"), "head.bias": torch.zeros(9)}
    answers = {"site-2": replace(answer, groups={**answer.groups, "update": wrong})}
    with pytest.raises(BadInput, match=r"^the answer of site-2 in round 1: what was sent for head\.bias"):
        list(how.absorb(ctx, how.begin(ctx), answers))


def test_an_update_of_nan_is_refused_by_name() -> None:
    agreed = study(method="fedkd")
    ctx, how = context(agreed), method()
    answers = {s: answered(ctx, s, 3, lambda n, s=s: float("nan") if s == "site-2" else 0.1) for s in agreed.sites}  # type: ignore[misc]
    with pytest.raises(RunFailed, match="not finite; site-2 sent NaN"):
        list(how.absorb(ctx, how.begin(ctx), answers))


def test_an_update_to_a_site_that_has_nothing_is_refused() -> None:
    agreed = study(method="fedkd")
    ctx, how, site = context(agreed), method(), federation().sites[0]
    (state,) = how.absorb(ctx, how.begin(ctx), {"site-1": answered(ctx, "site-1", 3, lambda n: 0.1)})
    later = context(agreed, 1)
    request = how.request(later, "site-1", state)
    with pytest.raises(BadInput, match=r"^the request of site-1 in round 2 is an update, and this site has no mentee"):
        drive(later, how.answer(later, site, request, State()))


def test_half_a_mentee_is_refused() -> None:
    agreed = study(method="fedkd")
    ctx, how, site = context(agreed), method(), federation().sites[0]
    request = how.request(ctx, "site-1", how.begin(ctx))
    left = {name: t for name, t in request.group(PARAMETERS).items() if name != "head.bias"}
    request = replace(request, groups={**request.groups, PARAMETERS: left})
    with pytest.raises(BadInput, match="lacks a part of the mentee"):
        drive(ctx, how.answer(ctx, site, request, State()))


@pytest.mark.parametrize(
    ("key", "value"), [("energy_start", 0.0), ("energy_end", 1.01), ("mentee_width", 0), ("clip_norm", 0.0)]
)
def test_settings_that_mean_nothing_are_refused(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^fedkd\.{key} = "):
        method(**{key: value})


def test_the_declared_bytes_are_a_whole_update_at_most() -> None:
    agreed = study(method="fedkd")
    whole = 4 * spec_layout(agreed.common_spec).parameter_count
    declared = {group.name: group.max_bytes for group in method().payload(agreed, "site-1").up}
    assert {declared[name] for name in UPDATE} == {whole}
    assert not {"parameters", "mentor"} & set(declared)
