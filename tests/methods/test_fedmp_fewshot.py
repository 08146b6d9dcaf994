"""Few-shot FedMP: its schedule, its last answer, its ensemble; and the bytes of FedMP's Table 4 for both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import context, coordinate, deployed, federation, images, predictor_bytes, study, watch_bundles, watch_fits
from wardround.coordinator import Coordinator
from wardround.data.federation import Site
from wardround.errors import BadInput
from wardround.exchange.bundle import SIZE, Bundle
from wardround.exchange.inprocess import InProcess
from wardround.exchange.ledger import Entry, totals
from wardround.learn.device import Device
from wardround.learn.predictor import Member, Predictor
from wardround.methods.base import Answer, Context, Work, join_groups
from wardround.methods.fedmp import BANK, BANK_LABELS, EMBEDDINGS, PROTOTYPES, FedMP
from wardround.methods.fedmp_fewshot import FedMPFewShot
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import spec_layout
from wardround.settings import Settings
from wardround.study import Study, agree

NETWORK = {"parameters", "statistics", "counters"}


def method(**own: Any) -> Any:
    return make("fedmp-fewshot", own)


# The schedule ---------------------------------------------------------------------------------------------------------


def schedule(how: Any, **changes: Any) -> list[int]:
    """Epochs of each exchange, of a study that says nothing but this."""
    agreed = agree(Settings.model_validate(changes), federation())
    return [how.epochs(context(agreed, number)) for number in range(how.rounds(agreed))]


def test_three_exchanges_of_30_60_and_60_epochs_by_default() -> None:
    assert schedule(method()) == [30, 60, 60]


def test_what_a_study_says_wins() -> None:
    assert schedule(method(), rounds=2) == [30, 60]
    assert schedule(method(), rounds=4) == [30, 60, 60, 60]
    assert schedule(method(), train={"epochs": 5}) == [5, 5, 5]
    assert schedule(method(), train={"epochs": [3, 6]}) == [3, 6, 6]


def test_what_the_method_is_told_wins_over_the_study() -> None:
    assert schedule(method(shots=2, epochs=[1, 4]), rounds=9, train={"epochs": 5}) == [1, 4]
    assert schedule(method(epochs=7)) == [7, 7, 7]


def test_the_schedule_does_not_depend_on_how_settings_were_read() -> None:
    """Settings that a run wrote name every key; read again they must mean what they meant."""
    written = Settings().model_dump(mode="json")
    assert schedule(method(), **written) == [30, 60, 60]


def test_the_fits_are_as_long_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", method(epochs=[3, 1, 2], shots=3))
    assert [fit.recipe.epochs for fit in fits] == [3, 3, 3, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("key", "value"), [("shots", 0), ("epochs", []), ("epochs", -1), ("epochs", "many")])
def test_schedules_that_are_none_are_refused(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^fedmp-fewshot\.{key} = "):
        method(**{key: value})


# What travels, and what comes of it -----------------------------------------------------------------------------------


def test_embeddings_travel_twice_and_models_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=3)
    more = {EMBEDDINGS, PROTOTYPES}
    for bundle in crossed:
        kind, number, groups = bundle.envelope.kind, bundle.envelope.round, set(bundle.groups)
        if kind == "request":
            assert groups == NETWORK | (more if number > 0 else set())
        elif kind == "answer":
            assert groups == NETWORK | {SIZE} | (more if number < 2 else set())
        else:
            assert groups == NETWORK
    assert [b.envelope.kind for b in crossed].count("answer") == 9


def test_the_result_is_the_mean_softmax_of_the_last_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(), rounds=3)
    last = [join_groups(b) for b in crossed if b.envelope.kind == "answer" and b.envelope.round == 2]
    found = deployed(tmp_path / "run", "site-1")
    assert found.combine == "softmax"
    assert len(found.members) == 3
    for member, weights in zip(found.members, last, strict=True):
        assert all(torch.equal(member.weights[name], tensor) for name, tensor in weights.items())
    shown, device = images(5, seed=31).images, Device(torch.device("cpu"), 1)
    each = [Predictor(4, (Member(m.spec, m.weights),)).scores(shown, device).softmax(1) for m in found.members]
    torch.testing.assert_close(found.scores(shown, device).exp(), torch.stack(each).mean(dim=0))


def test_before_the_last_exchange_it_is_fedmp(tmp_path: Path) -> None:
    """Two exchanges leave the same average; the third begins from it."""
    agreed = study(method="fedmp-fewshot", rounds=3)
    few, many = method(), make("fedmp", {})
    states = []
    for how in (few, many):
        state, ctx = how.begin(context(agreed)), context(agreed)
        requests = how.ask(ctx, state) or {}
        answers = {site: request_as_answer(ctx, site, requests[site], how) for site in requests}
        (state,) = how.absorb(ctx, state, answers)
        states.append(state.to_bytes())
        assert len(how.predictor(ctx, state).members) == 1
    assert states[0] == states[1]


def request_as_answer(ctx: Context, site: str, request: Bundle, how: Any) -> Bundle:
    (at,) = (s for s in federation().sites if s.name == site)
    return echoed(ctx, at, request, how)


def test_a_site_without_a_usable_model_is_not_in_the_ensemble(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", method(), federation((6, 5, 1)), rounds=3)
    assert len(deployed(tmp_path / "run", "site-3").members) == 2


def test_one_shot_is_an_ensemble_of_models_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(shots=1, epochs=1))
    assert not any({EMBEDDINGS, PROTOTYPES} & set(bundle.groups) for bundle in crossed)
    coordinate(tmp_path / "ensemble", make("ensemble", {}), rounds=1)
    one, other = (deployed(tmp_path / name, "site-1").members for name in ("run", "ensemble"))
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(a.weights[name], tensor) for name, tensor in b.weights.items())


def test_with_both_terms_off_the_last_models_begin_at_fedavgs_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "few", method(sfmc=False, cpgma=False), rounds=3)
    began = {name: tensor.clone() for name, tensor in fits[-1].start.items()}
    fits.clear()
    coordinate(tmp_path / "fedavg", make("fedavg", {}), rounds=3)
    assert all(torch.equal(fits[-1].start[name], tensor) for name, tensor in began.items())


def test_it_says_who_sees_the_last_models() -> None:
    agreed = study(method="fedmp-fewshot")
    assert "the last model by every other site" in method().payload(agreed, "site-1").seen_by
    assert "embeddings" in method().payload(agreed, "site-1").seen_by
    assert "embeddings" not in method(sfmc=False).payload(agreed, "site-1").seen_by


def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(BaseException):
        pass

    coordinate(tmp_path / "straight", method(), rounds=3)
    proceed = Coordinator._round
    for moment in (1, 2, 3):

        def stop(self: Coordinator, ctx: Context, *rest: Any, at: int = moment) -> Any:
            if ctx.round == at:
                raise Stopped
            return proceed(self, ctx, *rest)

        monkeypatch.setattr(Coordinator, "_round", stop)
        with pytest.raises(Stopped):
            coordinate(tmp_path / f"stopped-{moment}", method(), rounds=3)
        monkeypatch.setattr(Coordinator, "_round", proceed)
        coordinate(tmp_path / f"stopped-{moment}", method(), rounds=3)
        assert predictor_bytes(tmp_path / f"stopped-{moment}") == predictor_bytes(tmp_path / "straight")


# FedMP's Table 4 ------------------------------------------------------------------------------------------------------

TB = (255, 254, 254)  # training images; 763 in all is what the table's bytes come to


def zeros(*shape: int) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros(()).expand(shape)


def echoed(ctx: Context, site: Site, request: Bundle, how: FedMP) -> Bundle:
    """An answer with all of FedMP's traffic and none of its arithmetic."""
    groups: dict[str, Any] = {name: request.group(name) for name in NETWORK}
    groups[SIZE] = {"images": torch.tensor(len(site.train))}
    width, classes = how._width(ctx.study), len(ctx.study.classes)
    if how.exchanges(ctx):
        groups[EMBEDDINGS] = {"features": zeros(len(site.train), width), "labels": site.train.labels}
        groups[PROTOTYPES] = {"means": zeros(classes, width), "known": torch.ones(classes, dtype=torch.bool)}
    return ctx.bundle("answer", site.name, groups)


class EchoMP(FedMP):
    name = "fedmp"

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        return Answer(echoed(ctx, site, request, self), memory)
        yield


class EchoFewShot(FedMPFewShot):
    name = "fedmp-fewshot"

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        return Answer(echoed(ctx, site, request, self), memory)
        yield


def traffic(how: FedMP, rounds: int) -> list[dict[str, Any]]:
    """The ledger of the rounds: three sites, all asked, ResNet-50 with one linear head for two classes."""
    data = federation(TB, size=16, classes=2)
    model = {"name": "resnet50", "width": None, "stem": "imagenet"}
    agreed: Study = study(data, method=how.name, rounds=rounds, model=model)
    layout = spec_layout(agreed.common_spec)
    network = {n: torch.zeros((), dtype=layout.dtypes[n]).expand(layout.shapes[n]) for n in layout.names}
    bank = {site.name: zeros(len(site.train), layout.feature_size) for site in data.sites}
    labels = {site.name: site.train.labels for site in data.sites}
    known = {"means": zeros(2, layout.feature_size), "known": torch.ones(2, dtype=torch.bool)}
    rows: list[dict[str, Any]] = []
    transport = InProcess(data, lambda fits: [], lambda bundle: rows.append(Entry.of(bundle).as_row()))
    state = State({"model": network})
    for number in range(rounds):
        ctx = context(agreed, number)
        requests = how.ask(ctx, state)
        assert requests is not None
        transport.exchange(ctx, how, requests, lambda site: State(), lambda site, memory: None)
        state = State({"model": network, BANK: bank, BANK_LABELS: labels, PROTOTYPES: known})
    assert how.ask(context(agreed, rounds), state) is None
    return rows


def gigabytes(rows: list[dict[str, Any]]) -> str:
    """Parameters and features, up and down, in decimal gigabytes as the table prints them."""
    counted = ("parameters", EMBEDDINGS, PROTOTYPES)
    return f"{sum(count for (_, group), count in totals(rows).items() if group in counted) / 1e9:.2f}"


@pytest.mark.parametrize(("how", "rounds", "printed"), [(EchoMP(), 60, "34.38"), (EchoFewShot(), 3, "1.71")])
def test_table_4_of_fedmp(how: FedMP, rounds: int, printed: str) -> None:
    rows = traffic(how, rounds)
    assert gigabytes(rows) == printed
    sums = totals(rows)
    assert sums["up", "parameters"] == sums["down", "parameters"] == rounds * 3 * 4 * 23_512_130
    uploads = rounds if rounds == 60 else 2  # the few-shot variant's last answer is the model alone
    assert sums["up", EMBEDDINGS] == uploads * sum(TB) * (4 * 2048 + 8)
    assert sums["down", EMBEDDINGS] == (rounds - 1) * 3 * 100 * (4 * 2048 + 8)


def test_three_feature_exchanges_would_print_another_figure() -> None:
    """What the paper's 1.71 tells: features went up twice."""
    rows = traffic(EchoMP(), 3)
    assert gigabytes(rows) == "1.72"
