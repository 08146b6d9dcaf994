"""The bars: constants, training alone, all images in one place, one average, the mean of the logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import (
    CPU,
    context,
    coordinate,
    deployed,
    drive,
    federation,
    figures,
    images,
    predictor_bytes,
    quick,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.data.federation import Federation
from wardround.data.imageset import merge
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.device import Device
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, weights_hash
from wardround.learn.trainer import train_one
from wardround.methods.alone import local_fit
from wardround.methods.base import Context
from wardround.methods.centralised import Centralised
from wardround.methods.ensemble import Ensemble
from wardround.methods.fedavg import FedAvg
from wardround.methods.local import Local
from wardround.methods.majority import Majority
from wardround.methods.oneshot import trained_models
from wardround.methods.registry import known
from wardround.methods.single import Single
from wardround.methods.state import State
from wardround.models import spec_layout

MIXED: dict[str, Any] = {"model": {"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}}}


def with_labels(*labels: list[int]) -> Federation:
    """A federation whose sites train on images with these labels."""
    data = federation([len(site) for site in labels])
    sites = tuple(
        type(site)(site.name, images(len(own), number, own), site.val, site.test)
        for number, (site, own) in enumerate(zip(data.sites, labels, strict=True))
    )
    return Federation(**{**vars(data), "sites": sites})


# majority -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "commonest"), [([2, 2, 0], 2), ([3], 3), ([1, 0, 1, 0], 0), ([3, 2, 2, 3], 2)])
def test_majority_is_the_commonest_class_and_of_equals_the_first(labels: list[int], commonest: int) -> None:
    ctx = context(study(method="majority"))
    data = with_labels(labels)
    predictor = drive(ctx, Majority().personal(ctx, data.sites[0], None, State()))  # type: ignore[arg-type]
    scores = predictor.scores(data.test.images, ctx.device)
    assert scores.argmax(dim=1).tolist() == [commonest] * len(data.test)
    assert bool(torch.isfinite(scores).all())


def test_majority_of_a_run_by_hand(tmp_path: Path) -> None:
    """Sixteen test images, four of each class: a constant is right for a quarter, and locally for its own share."""
    result = coordinate(tmp_path / "run", Majority(), with_labels([2, 2, 0], [1, 1, 1, 1]))
    by = {(r["site"], r["split"], r["metric"]): r["value"] for r in result["rows"]}
    assert by["site-1", "global", "accuracy"] == by["site-2", "global", "accuracy"] == 0.25
    assert by["site-1", "global", "macro_auc"] == 0.5
    constant = [note["text"] for note in result["notes"]]
    assert constant == ["constant predictors (one class for every test image) at site-1, site-2"]
    assert {r["model"] for r in result["rows"]} == {"personal"}


# local ----------------------------------------------------------------------------------------------------------------


def test_local_is_training_alone_for_the_whole_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, data = watch_fits(monkeypatch), federation()
    coordinate(tmp_path / "run", Local(), data, rounds=3, train={"epochs": [2, 1]})
    assert [(fit.label, fit.recipe.epochs) for fit in fits] == [(f"site-{i}, alone", 4) for i in (1, 2, 3)]
    agreed = study(data, method="local", rounds=3, train={"epochs": [2, 1]})
    for site in data.sites:
        alone = train_one(
            Fit(
                "",
                agreed.spec(site.name),
                agreed.initial(),
                site.train,
                agreed.recipe(0, 4),
                agreed.streams.number("fit", site.name),
            ),
            CPU,
        )
        (member,) = deployed(tmp_path / "run", site.name).members
        assert weights_hash(member.weights) == weights_hash(alone.weights)


def test_local_knows_nothing_of_the_others(tmp_path: Path) -> None:
    coordinate(tmp_path / "three", Local(), federation((9, 6, 5)))
    coordinate(tmp_path / "one", Local(), federation((9,)))
    three, one = predictor_bytes(tmp_path / "three"), predictor_bytes(tmp_path / "one")
    assert three["site-1.safetensors"] == one["site-1.safetensors"]
    assert len(set(three.values())) == 3


def test_a_site_too_small_keeps_the_initial_weights(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", Local(), federation((6, 1)))
    (member,) = deployed(tmp_path / "run", "site-2").members
    assert weights_hash(member.weights) == weights_hash(study().initial())
    assert result["notes"][0]["text"] == "site-2, alone: not trained, one image is too few for batch norm"


def test_without_batch_norm_one_image_is_enough(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", Local(), federation((6, 1)), model={"name": "cnn4"})
    assert not any("not trained" in note["text"] for note in result["notes"])


def test_sites_may_draw_their_own_initial_weights() -> None:
    common, own = study(init="common"), study(init="own")
    assert weights_hash(common.initial("site-1")) == weights_hash(common.initial("site-2"))
    assert weights_hash(own.initial("site-1")) != weights_hash(own.initial("site-2"))
    assert weights_hash(own.initial()) == weights_hash(common.initial())


# single ---------------------------------------------------------------------------------------------------------------


def test_single_is_fedavg_with_one_round_of_all_epochs(tmp_path: Path) -> None:
    single = coordinate(tmp_path / "single", Single(), rounds=3, train={"epochs": 2})
    fedavg = coordinate(tmp_path / "fedavg", FedAvg(), rounds=1, train={"epochs": 6})
    assert predictor_bytes(tmp_path / "single") == predictor_bytes(tmp_path / "fedavg")
    assert [(r["metric"], r["value"]) for r in single["rows"]] == [(r["metric"], r["value"]) for r in fedavg["rows"]]
    assert {r["round"] for r in single["rows"]} == {0}


def test_single_asks_everyone_whatever_the_participation(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", Single(), participants=0.34)
    assert len([row for row in result["ledger"]["rows"] if row["kind"] == "answer"]) == 3


# centralised ----------------------------------------------------------------------------------------------------------


def test_centralised_is_a_fit_on_the_union(tmp_path: Path) -> None:
    data = federation((7, 5, 4))
    coordinate(tmp_path / "run", Centralised(), data, rounds=2)
    agreed = study(data, method="centralised", rounds=2)
    union = merge([site.train for site in data.sites])
    fit = Fit(
        "",
        agreed.common_spec,
        agreed.initial(),
        union,
        agreed.recipe(0, 2),
        agreed.streams.number("fit", "centralised"),
    )
    (member,) = deployed(tmp_path / "run", "site-3").members
    assert weights_hash(member.weights) == weights_hash(train_one(fit, CPU).weights)


def test_centralised_chooses_its_epoch_on_everyones_validation_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fits, data = watch_fits(monkeypatch), federation()
    coordinate(tmp_path / "run", Centralised(), data)
    (fit,) = fits
    assert fit.validation is not None
    assert torch.equal(fit.validation.images, torch.cat([site.val.images for site in data.sites]))


def test_the_ledger_shows_what_centralising_costs(tmp_path: Path) -> None:
    data = federation((7, 5, 4))
    result = coordinate(tmp_path / "run", Centralised(), data)
    counted = {(t["direction"], t["group"]): t["bytes"] for t in result["ledger"]["totals"]}
    pictures = sum(len(site.train) + len(site.val) for site in data.sites)
    assert counted["up", "images"] == pictures * (3 * 8 * 8 + 8)


def test_centralised_that_diverges_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="diverged"):
        coordinate(tmp_path / "run", Centralised(), train={"lr": 1e30, "epochs": 3})


# ensemble -------------------------------------------------------------------------------------------------------------


def constant_answer(ctx: Context, site: str, bias: list[float], n: int = 1) -> Bundle:
    """A network whose logits are `bias` for any image."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in ctx.study.initial(site).items()}
    weights["head.bias"] = torch.tensor(bias)
    kinds = spec_layout(ctx.study.spec(site)).groups
    groups: dict[str, dict[str, torch.Tensor]] = {"size": {"images": torch.tensor(n)}}
    for name, tensor in weights.items():
        groups.setdefault(kinds[name], {})[name] = tensor
    return ctx.bundle("answer", site, groups)


def absorbed(ctx: Context, answers: dict[str, Bundle]) -> State:
    (state,) = Ensemble().absorb(ctx, State(), answers)
    return state


def test_the_mean_of_the_logits_by_hand() -> None:
    """([4, 0, 0, 1] + [0, 2, 0, 1] + [2, 1, 6, 1]) / 3 = [2, 1, 2, 1]; however many images a site has."""
    ctx = context(study(method="ensemble"))
    answers = {
        "site-1": constant_answer(ctx, "site-1", [4.0, 0.0, 0.0, 1.0]),
        "site-2": constant_answer(ctx, "site-2", [0.0, 2.0, 0.0, 1.0], n=100),
        "site-3": constant_answer(ctx, "site-3", [2.0, 1.0, 6.0, 1.0]),
    }
    predictor = Ensemble().predictor(ctx, absorbed(ctx, answers))
    assert predictor is not None
    scores = predictor.scores(images(3).images, ctx.device)
    torch.testing.assert_close(scores, torch.tensor([[2.0, 1.0, 2.0, 1.0]]).expand(3, 4))


def test_sites_that_could_not_train_have_no_vote() -> None:
    ctx = context(study(method="ensemble"))
    answers = {
        "site-1": constant_answer(ctx, "site-1", [4.0, 0.0, 0.0, 1.0]),
        "site-2": constant_answer(ctx, "site-2", [0.0, 9.0, 9.0, 9.0], n=0),
    }
    assert list(absorbed(ctx, answers).groups) == ["site-1"]


def test_nobody_could_train() -> None:
    ctx = context(study(method="ensemble"))
    with pytest.raises(RunFailed, match="no site sent a usable model"):
        absorbed(ctx, {"site-1": constant_answer(ctx, "site-1", [0.0] * 4, n=0)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_is_refused_by_name_and_the_rest_go_on(value: float) -> None:
    said: list[str] = []
    ctx = replace(context(study(method="ensemble")), note=said.append)
    spoiled = constant_answer(ctx, "site-2", [1.0, value, 1.0, 1.0])
    found = trained_models(ctx, {"site-1": constant_answer(ctx, "site-1", [1.0] * 4), "site-2": spoiled})
    assert list(found) == ["site-1"]
    assert said == ["the model of site-2 is refused: it holds NaN or infinite values"]
    with pytest.raises(RunFailed, match="no site sent a usable model"):
        trained_models(ctx, {"site-2": spoiled})


def test_an_ensemble_of_a_run_is_the_mean_of_what_local_trains(tmp_path: Path) -> None:
    data = federation()
    coordinate(tmp_path / "local", Local(), data)
    coordinate(tmp_path / "ensemble", Ensemble(), data)
    together = deployed(tmp_path / "ensemble", "site-1").scores(data.test.images, Device(CPU, 1))
    logits = []
    for site in data.sites:
        (member,) = deployed(tmp_path / "local", site.name).members
        logits.append(network_outputs(member.spec, member.weights, data.test.images, CPU).logits)
    torch.testing.assert_close(together, sum(logits) / 3)


def test_every_site_takes_every_model_home(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", Ensemble())
    parameters = 4 * spec_layout(study().common_spec).parameter_count
    home = [row for row in result["ledger"]["rows"] if row["kind"] == "delivery"]
    assert [row["groups"]["parameters"] for row in home] == [3 * parameters] * 3
    assert list(predictor_bytes(tmp_path / "run")) == ["shared.safetensors"]


def test_a_small_site_takes_the_others_models_home(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", Ensemble(), federation((8, 1, 6)))
    assert len(deployed(tmp_path / "run", "site-2").members) == 2


# Different architectures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["local", "ensemble", "majority"])
def test_sites_may_differ_in_architecture(name: str, tmp_path: Path) -> None:
    method = known()[name]()
    method.check(study(method=name, **MIXED))
    result = coordinate(tmp_path / "run", method, **MIXED)
    assert {r["site"] for r in result["rows"] if r["model"] == "personal"} == {"site-1", "site-2", "site-3"}


def test_a_mixed_ensemble_has_both_kinds(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", Ensemble(), **MIXED)
    members = deployed(tmp_path / "run", "site-3").members
    assert [member.spec.name for member in members] == ["small", "cnn4", "small"]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "single", "centralised"])
def test_who_needs_one_architecture_says_so_by_name(name: str) -> None:
    with pytest.raises(BadInput, match=f"^{name} needs the same model at every site, but there are cnn4, small"):
        known()[name]().check(study(method=name, **MIXED))


# Sharing --------------------------------------------------------------------------------------------------------------


def test_methods_that_train_alone_share_their_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, shared = watch_fits(monkeypatch), tmp_path / "fits"
    methods = (Local(), Ensemble(), Single())
    together = {m.name: coordinate(tmp_path / "shared" / m.name, m, fits=shared) for m in methods}
    assert [fit.label for fit in fits] == ["site-1, alone", "site-2, alone", "site-3, alone"]
    apart = {m.name: coordinate(tmp_path / "apart" / m.name, m) for m in methods}
    assert len(fits) == 3 + 9
    for method in methods:
        assert figures(together[method.name]) == figures(apart[method.name])
        one, other = (predictor_bytes(tmp_path / place / method.name) for place in ("shared", "apart"))
        assert one == other


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"train": {"lr": 0.04}}, {"train": {"epochs": 2}}, {"model": {"width": 3}}, {"init": "own"}]
)
def test_a_fit_of_other_settings_is_another_fit(change: Any, tmp_path: Path) -> None:
    data = federation((4,))
    first = local_fit(context(study(data)), data.sites[0]).key()
    second = local_fit(context(study(data, **change)), data.sites[0]).key()
    assert first is not None
    assert first != second


def test_private_images_do_not_leave_in_any_method_but_centralised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No uint8 tensor leaves a site; what comes home may hold synthetic images, never a site's."""
    for name in known():
        crossed = watch_bundles(monkeypatch)
        coordinate(tmp_path / name, quick(name))
        left = [bundle for bundle in crossed if bundle.envelope.kind == "answer"]
        kinds = {t.dtype for bundle in left for group in bundle.groups.values() for t in group.values()}
        assert (torch.uint8 in kinds) == (name == "centralised")
        home = {group for bundle in crossed if bundle not in left for group in bundle.groups}
        assert "images" not in home


def test_who_is_never_asked_cannot_answer() -> None:
    ctx = context(study(method="local"))
    request = Bundle(Envelope("request", "study", "local", "site-1", 0), {})
    assert Local().ask(ctx, Local().begin(ctx)) is None
    with pytest.raises(NotImplementedError):
        Local().answer(ctx, federation().sites[0], request, State())
    with pytest.raises(NotImplementedError):
        Local().absorb(ctx, State(), {})
