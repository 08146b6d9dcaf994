"""FRAug: a generator that is averaged, a transformation and statistics that stay, its schedule, and its limits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import (
    context,
    coordinate,
    deployed,
    drive,
    federation,
    images,
    predictor_bytes,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.coordinator import Coordinator
from wardround.data.federation import Federation, LocalTest
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, RunFailed, SiteFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.representation import Augmented
from wardround.methods.base import Context
from wardround.methods.fedavg import FedAvg
from wardround.methods.fraug import GENERATOR, MEANS, TRANSFORM
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import spec_layout


def method(**own: Any) -> Any:
    return make("fraug", own)


def answers_of(agreed: Any, how: Any, state: State) -> tuple[dict[str, Bundle], dict[str, State]]:
    ctx, bundles, memories = context(agreed), {}, {}
    requests = how.ask(ctx, state) or {}
    for site in federation().sites:
        answer = drive(ctx, how.answer(ctx, site, requests[site.name], State()))
        bundles[site.name], memories[site.name] = answer.bundle, answer.memory
    return bundles, memories


def test_the_share_grows_to_its_limit() -> None:
    """E^(0.1·(t − 4)) = 0.67, 0.74, 0.82, 0.90, each at most 0.8."""
    agreed = study(method="fraug", rounds=4)
    how = method(gamma=0.1, q_max=0.8)
    assert [round(how.share(context(agreed, t)), 2) for t in range(4)] == [0.67, 0.74, 0.8, 0.8]
    assert method().share(context(agreed)) == 0.5


def test_the_generator_travels_and_what_is_the_sites_own_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed, fits = watch_bundles(monkeypatch), watch_fits(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=2)
    private = set()
    for fit in fits:
        assert isinstance(fit.objective, Augmented)
        tensors = (*fit.objective.transform.values(), fit.objective.means.means)
        private |= {t.detach().numpy().tobytes() for t in tensors}
    sent = {t.numpy().tobytes() for b in crossed for group in b.groups.values() for t in group.values()}
    assert not private & sent
    assert all((GENERATOR in b.groups) == (b.envelope.kind != "delivery") for b in crossed)
    assert not {TRANSFORM, MEANS} & {name for b in crossed for name in b.groups}


def test_the_generator_is_averaged_by_images() -> None:
    agreed, how = study(method="fraug"), method()
    state = how.begin(context(agreed))
    bundles, _ = answers_of(agreed, how, state)
    (after,) = how.absorb(context(agreed), state, bundles)
    for name, tensor in after.groups[GENERATOR].items():
        mean = sum(n / 25 * bundles[f"site-{i}"].group(GENERATOR)[name] for i, n in ((1, 11), (2, 8), (3, 6)))
        torch.testing.assert_close(tensor, mean)
        assert not torch.equal(tensor, state.groups[GENERATOR][name])


def test_a_site_goes_on_from_its_own_and_the_averaged_generator() -> None:
    agreed, how = study(method="fraug"), method()
    state = how.begin(context(agreed))
    bundles, memories = answers_of(agreed, how, state)
    (after,) = how.absorb(context(agreed), state, bundles)
    ctx, site = context(agreed, 1), federation().sites[0]
    fit = next(how.answer(ctx, site, (how.ask(ctx, after) or {})["site-1"], memories["site-1"]))
    own = memories["site-1"].groups
    assert set(own) == {"own", TRANSFORM, MEANS}
    assert torch.equal(fit.objective.transform["out.bias"], own[TRANSFORM]["out.bias"])
    assert torch.equal(fit.objective.means.means, own[MEANS]["means"])
    assert torch.equal(fit.objective.generator["out.bias"], after.groups[GENERATOR]["out.bias"])
    statistics = spec_layout(agreed.common_spec).in_group("statistics")
    assert all(torch.equal(fit.start[name], own["own"][name]) for name in statistics)


def test_running_statistics_stay_and_parameters_are_common(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", method())
    one, two = (deployed(tmp_path / "run", f"site-{i}").members[0].weights for i in (1, 2))
    layout = spec_layout(study().common_spec)
    for name in one:
        assert torch.equal(one[name], two[name]) == (layout.groups[name] == "parameters")


def test_statistics_may_stay_entirely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no statistics travel and there is no shared model; what sites learn is the same to the bit."""
    crossed = watch_bundles(monkeypatch)
    private = coordinate(tmp_path / "private", method(statistics="private"))
    assert not any({"statistics", "counters"} & set(bundle.groups) for bundle in crossed)
    assert "shared" not in {row["model"] for row in private["rows"]}
    averaged = coordinate(tmp_path / "averaged", method())
    assert "shared" in {row["model"] for row in averaged["rows"]}
    for i in (1, 2, 3):
        a, b = (deployed(tmp_path / name, f"site-{i}").members[0].weights for name in ("private", "averaged"))
        assert all(torch.equal(a[name], tensor) for name, tensor in b.items())


def test_it_acts_by_default(tmp_path: Path) -> None:
    model = {"name": "cnn4", "width": 2}  # without statistics of its own a site deploys the shared model
    coordinate(tmp_path / "fraug", method(), model=model)
    coordinate(tmp_path / "fedavg", FedAvg(), model=model)
    assert predictor_bytes(tmp_path / "fraug") != predictor_bytes(tmp_path / "fedavg")


def test_the_defaults_are_the_public_codes() -> None:
    s = method().settings
    assert (s.q_max, s.gamma, s.generator_lr, s.momentum, s.means_momentum) == (0.5, 0.01, 0.05, 0.5, 0.3)


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
    data = federation((5, 4, 1), classes=2)
    one = images(4, 8, [1, 1, 1, 1], classes=2)
    data = grey(replace(data, sites=(data.sites[0], replace(data.sites[1], train=one), data.sites[2])))
    result = coordinate(tmp_path / name, method(), data, rounds=3, model={"name": name, "width": 2})
    assert result["rows"]
    skipped = [note for note in result["notes"] if "not trained" in note["text"]]
    assert bool(skipped) == (name == "small")


def test_no_work_is_done_for_sites_that_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=4, participants=0.34)
    assert len(fits) == 4


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


def test_a_generator_of_another_form_is_refused_at_the_boundary() -> None:
    agreed, how = study(method="fraug"), method()
    bundles, _ = answers_of(agreed, how, how.begin(context(agreed)))
    wrong = {**bundles["site-2"].group(GENERATOR), "out.bias": torch.zeros(3)}
    bad = replace(bundles["site-2"], groups={**bundles["site-2"].groups, GENERATOR: wrong})
    with pytest.raises(BadInput, match=r"site-2 in round 1: generator/out\.bias is \(\(3,\), 'float32'\)"):
        how.payload(agreed, "site-2").check(bad)


def test_a_generator_of_nan_is_refused_by_name() -> None:
    agreed, how = study(method="fraug"), method()
    state = how.begin(context(agreed))
    bundles, _ = answers_of(agreed, how, state)
    wrong = {**bundles["site-2"].group(GENERATOR), "out.bias": torch.full((8,), torch.nan)}
    bundles["site-2"] = replace(bundles["site-2"], groups={**bundles["site-2"].groups, GENERATOR: wrong})
    with pytest.raises(RunFailed, match=r"out\.bias is not finite; site-2 sent NaN"):
        list(how.absorb(context(agreed), state, bundles))


def test_a_generator_that_diverges_is_the_sites_failure() -> None:
    """In the last step, say, of which the network's own loss tells nothing any more."""
    agreed, how = study(method="fraug"), method()
    ctx, site = context(agreed), federation().sites[0]
    work = how.answer(ctx, site, (how.ask(ctx, how.begin(ctx)) or {})["site-1"], State())
    fit = next(work)
    (fitted,) = ctx.train([fit])
    fit.objective.transform["out.bias"] = torch.full((8,), torch.inf)
    with pytest.raises(SiteFailed, match="its generator diverged; use a smaller generator_lr"):
        work.send(fitted)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("q_max", 1.0),
        ("gamma", -1),
        ("generator_lr", 0),
        ("transform_lr", 1e9),
        ("means_momentum", 0),
        ("noise", 0),
        ("statistics", "some"),
    ],
)
def test_settings_that_mean_nothing_are_refused(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^fraug\.{key} = "):
        method(**{key: value})
