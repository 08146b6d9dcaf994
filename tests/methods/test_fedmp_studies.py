"""FedMP in studies of every kind: any stage, odd sites, absent sites, stopped runs, and hostile bundles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import context, coordinate, drive, federation, images, predictor_bytes, study, watch_bundles, watch_fits
from wardround.coordinator import Coordinator
from wardround.data.federation import Federation, LocalTest, Site
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle
from wardround.learn.manifold import Manifold
from wardround.methods import fedmp
from wardround.methods.base import Context
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedmp import EMBEDDINGS, PROTOTYPES
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.study import Study


def method(**own: Any) -> Any:
    return make("fedmp", own)


def labelled(per_site: dict[str, list[int]], classes: int = 4, channels: int = 3) -> Federation:
    """Sites with these labels."""
    base = federation((2,), classes=classes)

    def cut(data: ImageSet) -> ImageSet:
        return replace(data, images=data.images[:, :channels])

    sites = tuple(
        Site(name, cut(images(len(y), i, y, classes=classes)), cut(images(2, 9, classes=classes)), base.sites[0].test)
        for i, (name, y) in enumerate(per_site.items(), 1)
    )
    sites = tuple(replace(site, test=LocalTest(cut(base.test), site.test.class_weights)) for site in sites)
    return replace(base, sites=sites, test=cut(base.test))


def test_a_class_that_nobody_has_gets_no_prototype_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    data = labelled({"a": [0, 1, 0, 1], "b": [1, 3, 1, 3]})
    result = coordinate(tmp_path / "run", method(), data, rounds=3)
    notes = [note["text"] for note in result["notes"] if "prototype" in note["text"]]
    assert notes[0].startswith("no site asked up to round 1 has images of cedar: there is no prototype")
    down = [bundle.group(PROTOTYPES) for bundle in crossed if bundle.envelope.kind == "request"][2:]
    assert all(sent["known"].tolist() == [True, True, False, True] for sent in down)
    assert all(sent["means"][2].abs().max() == 0 for sent in down)


# Studies of every kind ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_stage_works_with_and_without_batch_norm(stage: int, tmp_path: Path) -> None:
    for name in ("small", "cnn4"):
        model = {"name": name, "width": 2}
        result = coordinate(tmp_path / name, method(stage=stage), rounds=2, model=model)
        assert result["rows"]
        coordinate(tmp_path / f"{name}-last", method(), rounds=2, model=model)
        same = predictor_bytes(tmp_path / name) == predictor_bytes(tmp_path / f"{name}-last")
        assert same == (name == "cnn4" and stage == 3)  # its third stage is its last


def test_two_classes_grey_images_and_sites_of_one_class(tmp_path: Path) -> None:
    data = labelled({"a": [0, 0, 0], "b": [1, 1, 1, 1], "c": [0, 1]}, classes=2, channels=1)
    for name in ("small", "cnn4"):
        result = coordinate(tmp_path / name, method(), data, rounds=3, model={"name": name, "width": 2})
        assert not [note for note in result["notes"] if "prototype" in note["text"]]


def test_a_site_too_small_to_train_sends_nothing_of_its_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(), federation((6, 5, 1)), rounds=2)
    lone = [b for b in crossed if b.envelope.site == "site-3" and b.envelope.kind == "answer"]
    assert len(lone) == 2
    for bundle in lone:
        assert bundle.group(EMBEDDINGS)["features"].shape == (0, 8)
        assert not bundle.group(PROTOTYPES)["known"].any()


def test_one_site_alone_has_nobody_to_learn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No embeddings of others, so with SFMC alone it is FedAvg."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "fedmp", method(cpgma=False), federation((6,)))
    assert not [b for b in crossed if b.envelope.kind == "request" and EMBEDDINGS in b.groups]
    coordinate(tmp_path / "fedavg", FedAvg(), federation((6,)))
    assert predictor_bytes(tmp_path / "fedmp") == predictor_bytes(tmp_path / "fedavg")


def test_no_work_is_done_for_sites_that_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one pass for embeddings, and what they sent before stays in the bank."""
    passes: list[int] = []
    features = fedmp.stage_features

    def counted(spec: Any, weights: Any, shown: Tensor, *rest: Any) -> Tensor:
        passes.append(len(shown))
        return features(spec, weights, shown, *rest)

    monkeypatch.setattr(fedmp, "stage_features", counted)
    fits, crossed = watch_fits(monkeypatch), watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=6, participants=0.34)
    assert len(passes) == len(fits) == 6
    assert passes == [len(fit.data) for fit in fits]
    asked = [bundle.envelope.site for bundle in crossed if bundle.envelope.kind == "request"]
    for place, bundle in enumerate(b for b in crossed if b.envelope.kind == "request"):
        before = set(asked[:place]) - {asked[place]}
        sizes = {"site-1": 11, "site-2": 8, "site-3": 6}
        expected = sum(sizes[site] for site in before)
        assert len(bundle.group(EMBEDDINGS).get("labels", ())) == expected


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bank, prototypes and the sites' own means are all in what was saved."""

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


# Bad input ------------------------------------------------------------------------------------------------------------


def tampered(bundle: Bundle, group: str, **tensors: Tensor) -> Bundle:
    return replace(bundle, groups={**bundle.groups, group: {**bundle.group(group), **tensors}})


def exchanged(agreed: Study) -> tuple[State, dict[str, Bundle], dict[str, Bundle]]:
    """A state after one round, that round's answers, and the second round's requests."""
    how, ctx = method(), context(agreed)
    state = how.begin(ctx)
    requests = how.ask(ctx, state) or {}
    answers = {s.name: drive(ctx, how.answer(ctx, s, requests[s.name], State())).bundle for s in federation().sites}
    (after,) = how.absorb(ctx, state, answers)
    return state, answers, how.ask(context(agreed, 1), after) or {}


@pytest.mark.parametrize(
    ("group", "change", "complaint"),
    [
        (EMBEDDINGS, {"labels": torch.full((8,), 4)}, "labels run from 4 to 4, and the study has classes 0 to 3"),
        (EMBEDDINGS, {"labels": torch.full((8,), -1)}, "labels run from -1 to -1"),
        (EMBEDDINGS, {"features": torch.zeros(8, 7)}, "float32 of 8 numbers each"),
        (EMBEDDINGS, {"features": torch.full((8, 8), torch.nan)}, "NaN or infinite"),
        (PROTOTYPES, {"means": torch.full((4, 8), torch.inf)}, "class prototypes hold NaN or infinite"),
    ],
)
def test_a_hostile_answer_is_refused_by_name(group: str, change: dict[str, Tensor], complaint: str) -> None:
    agreed = study(method="fedmp")
    state, answers, _ = exchanged(agreed)
    answers["site-2"] = tampered(answers["site-2"], group, **change)
    with pytest.raises(BadInput, match=f"^the answer of site-2 in round 1: .*{complaint}"):
        list(method().absorb(context(agreed), state, answers))


@pytest.mark.parametrize("group", [EMBEDDINGS, PROTOTYPES])
def test_an_answer_that_lacks_a_group_is_refused_by_name(group: str) -> None:
    agreed = study(method="fedmp")
    state, answers, _ = exchanged(agreed)
    left = {name: tensors for name, tensors in answers["site-2"].groups.items() if name != group}
    answers["site-2"] = replace(answers["site-2"], groups=left)
    with pytest.raises(BadInput, match=r"^the answer of site-2 in round 1"):
        list(method().absorb(context(agreed), state, answers))


def test_a_prototype_of_another_width_is_refused_at_the_boundary() -> None:
    agreed = study(method="fedmp")
    _, answers, _ = exchanged(agreed)
    bad = tampered(answers["site-2"], PROTOTYPES, means=torch.zeros(4, 7))
    with pytest.raises(BadInput, match=r"site-2 in round 1: prototypes/means is \(\(4, 7\), 'float32'\)"):
        method().payload(agreed, "site-2").check(bad)


def test_a_hostile_request_is_refused_at_the_site() -> None:
    agreed = study(method="fedmp")
    _, _, requests = exchanged(agreed)
    bad = tampered(requests["site-1"], EMBEDDINGS, labels=torch.full((14,), 9))
    with pytest.raises(BadInput, match=r"^the request of site-1 in round 2: labels run from 9 to 9"):
        drive(context(agreed, 1), method().answer(context(agreed, 1), federation().sites[0], bad, State()))


def test_a_stage_that_is_none_is_refused_before_any_work() -> None:
    with pytest.raises(BadInput, match="small has 4 stages, not 5; choose a stage from 1 to 4"):
        method(stage=5).check(study())


@pytest.mark.parametrize(
    ("key", "value"),
    [("mu_client", 0.0), ("mu_server", 1.1), ("stage", 0), ("download", 0), ("weights", "none"), ("sfmc_weight", -1)],
)
def test_settings_that_mean_nothing_are_refused(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^fedmp\.{key} = "):
        method(**{key: value})


def test_a_site_without_prototypes_to_come_has_the_other_term() -> None:
    """With cPGMA off the objective completes only, and the other way round."""
    agreed = study(method="fedmp")
    _, _, requests = exchanged(agreed)
    ctx, site = context(agreed, 1), federation().sites[0]
    for missing in (EMBEDDINGS, PROTOTYPES):
        left = {name: tensors for name, tensors in requests["site-1"].groups.items() if name != missing}
        work = method().answer(ctx, site, replace(requests["site-1"], groups=left), State())
        objective = next(work).objective
        assert isinstance(objective, Manifold)
        assert (objective.external is None, objective.prototypes is None) == (
            missing == EMBEDDINGS,
            missing == PROTOTYPES,
        )
