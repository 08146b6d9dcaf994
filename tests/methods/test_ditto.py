"""Ditto: the personal objective against autograd, an anchor that is what was received, and a v that never leaves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from methods.personal_runs import FEW, names_in, odd_sites, straight_and_killed
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
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import Fit, weights_hash
from wardround.learn.trainer import train_one
from wardround.methods.base import Context, join_groups
from wardround.methods.ditto import Ditto
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedprox import Proximal
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import Weights, build, fresh, spec_layout
from wardround.streams import Streams


def ditto(**own: Any) -> Any:
    return make("ditto", own)


def asked(method: Any, round: int = 0, **changes: Any) -> tuple[Context, Bundle, Weights]:
    """A round's context, site-1's request in it, and the model that it was sent: another one in every round."""
    ctx = context(study(method="ditto", **changes), round)
    model = fresh(ctx.study.common_spec, Streams(round).torch("a model"))
    return ctx, method.ask(ctx, State({"model": model}))["site-1"], model


def test_the_default_pull_is_one() -> None:
    assert (Ditto().settings.lam, Ditto().settings.personal) == (1.0, True)


# The personal model ---------------------------------------------------------------------------------------------------


def test_three_steps_against_autograd_of_the_objective() -> None:
    """F(v) + (λ/2)‖v − w‖² differentiated by PyTorch, from a stale v, in plain steps of SGD over the whole site."""
    lam, rate, site = 0.7, 0.1, federation((6,)).sites[0]
    train = {"epochs": 3, "batch": 6, "lr": rate, "momentum": 0.0, "weight_decay": 0.0, "round_decay": 1.0}
    ctx, request, received = asked(ditto(lam=lam), 1, train=train, model={"name": "cnn4"})
    stale = fresh(ctx.study.common_spec, Streams(9).torch("v"))
    answer = drive(ctx, ditto(lam=lam).answer(ctx, site, request, State({"personal": stale})))

    net = build(ctx.study.common_spec)
    net.load_state_dict(stale)
    pixels = site.train.images.float() / 127.5 - 1
    for _ in range(3):
        pull = sum(((p - received[name]) ** 2).sum() for name, p in net.named_parameters())
        loss = F.cross_entropy(net(pixels), site.train.labels) + lam / 2 * pull
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(rate * gradient)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(answer.memory.groups["personal"][name], tensor, rtol=1e-5, atol=1e-6)


def fits_of(method: Any, ctx: Context, request: Bundle, memory: State) -> tuple[list[Fit], Any]:
    fits, work = [], method.answer(ctx, federation().sites[0], request, memory)
    try:
        fits.append(next(work))
        while True:
            fits.append(work.send(train_one(fits[-1], CPU)))
    except StopIteration as end:
        return fits, end.value


def test_the_anchor_is_what_was_received_in_this_round_and_v_goes_on_from_itself() -> None:
    """Neither the model just trained, which would pull v to the site's own, nor that of the first round."""
    method, memory = ditto(), State()
    for round in (0, 1):
        ctx, request, received = asked(method, round)
        (shared, personal), answer = fits_of(method, ctx, request, memory)
        assert isinstance(personal.objective, Proximal)
        assert personal.objective.mu == 1.0
        assert weights_hash(personal.objective.anchor) == weights_hash(received) == weights_hash(shared.start)
        expected = received if round == 0 else dict(memory.groups["personal"])
        assert weights_hash(personal.start) == weights_hash(expected)
        assert (personal.seed, personal.recipe) == (shared.seed, shared.recipe)
        memory = answer.memory


def test_what_is_measured_in_a_round_is_v_and_what_is_sent_is_w() -> None:
    method = ditto()
    ctx, request, _ = asked(method)
    (shared, personal), answer = fits_of(method, ctx, request, State())
    (member,) = answer.trained.members
    v, w = train_one(personal, CPU).weights, train_one(shared, CPU).weights
    assert weights_hash(member.weights) == weights_hash(v) == weights_hash(dict(answer.memory.groups["personal"]))
    assert weights_hash(join_groups(answer.bundle)) == weights_hash(w) != weights_hash(v)


def test_which_part_runs_first_does_not_matter() -> None:
    """Each of the two fits is given in full before the other is trained, so their order changes neither."""
    method = ditto()
    ctx, request, received = asked(method)
    (shared, personal), answer = fits_of(method, ctx, request, State())
    v = train_one(personal, CPU).weights
    w = train_one(shared, CPU).weights
    assert weights_hash(received) == weights_hash(shared.start)  # neither fit wrote into what both start from
    assert weights_hash(dict(answer.memory.groups["personal"])) == weights_hash(v)
    assert weights_hash(join_groups(answer.bundle)) == weights_hash(w)


def test_without_a_pull_v_is_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """λ = 0: two rounds of plain training, one after the other, that no other site has a part in."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", ditto(lam=0))
    own = [fit for fit in fits if fit.label.startswith("site-2,") and fit.label.endswith("personal")]
    first = train_one(own[0], CPU).weights
    assert weights_hash(own[1].start) == weights_hash(first)
    assert [fit.objective.key for fit in own] == ["cross-entropy"] * 2
    (member,) = deployed(tmp_path / "run", "site-2").members
    assert weights_hash(member.weights) == weights_hash(train_one(own[1], CPU).weights)


def test_a_strong_pull_keeps_v_near_the_model_received() -> None:
    def distance(lam: float) -> float:
        method = ditto(lam=lam)
        ctx, request, received = asked(method, model={"name": "cnn4"}, train={"momentum": 0.0, "epochs": 4})
        v = drive(ctx, method.answer(ctx, federation().sites[0], request, State())).memory.groups["personal"]
        return float(sum(((v[name] - received[name]) ** 2).sum() for name in v) ** 0.5)

    assert distance(10.0) < 0.7 * distance(1.0) < 0.7 * distance(0.0)


def test_batch_norm_statistics_of_v_are_its_own(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", ditto())
    one, two = (deployed(tmp_path / "run", f"site-{i}").members[0].weights for i in (1, 2))
    for name in spec_layout(study().common_spec).in_group("statistics"):
        assert not torch.equal(one[name], two[name])
    counters = {name: int(one[name]) for name in spec_layout(study().common_spec).in_group("counters")}
    assert set(counters.values()) == {6}  # 3 steps in each of 2 rounds


# Memory and participation ---------------------------------------------------------------------------------------------


def test_a_site_that_is_not_asked_keeps_a_stale_v_and_one_never_asked_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", ditto(), **FEW)
    personal = [fit for fit in fits if fit.label.endswith("personal")]
    assert len(fits) == 2 * len(personal) == 2 * FEW["rounds"]  # nothing is trained at sites that were not asked
    left: dict[str, Weights] = {}
    for fit in personal:
        site = fit.label.partition(",")[0]
        assert isinstance(fit.objective, Proximal)
        expected = left.get(site, fit.objective.anchor)
        assert weights_hash(fit.start) == weights_hash(expected)
        left[site] = train_one(fit, CPU).weights
    assert set(left) == {"site-1", "site-2"}
    for site, v in left.items():
        assert weights_hash(deployed(tmp_path / "run", site).members[0].weights) == weights_hash(v)
    assert "shared.safetensors" in predictor_bytes(tmp_path / "run")  # what site-3 deploys


def test_v_is_in_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not under a name of its own, nor in the place of w."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", ditto())
    assert names_in(crossed) == {*spec_layout(study().common_spec).names, "images"}
    sent = {weights_hash(join_groups(bundle)) for bundle in crossed}
    for i in (1, 2, 3):
        assert weights_hash(deployed(tmp_path / "run", f"site-{i}").members[0].weights) not in sent


def test_a_resumed_run_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, killed = straight_and_killed(monkeypatch, tmp_path, "ditto", {})
    assert killed == straight


# FedAvg ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, FEW, {"init": "own"}], ids=["all", "few", "own"])
def test_without_personal_models_it_is_fedavg_bit_for_bit(how: dict[str, Any], tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg(), **how)
    coordinate(tmp_path / "ditto", ditto(personal=False), **how)
    assert predictor_bytes(tmp_path / "ditto") == predictor_bytes(tmp_path / "fedavg")


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_what_travels_is_fedavgs_bit_for_bit_at_any_pull(
    lam: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "fedavg", FedAvg())
    plain = [weights_hash(join_groups(bundle)) for bundle in crossed]
    crossed.clear()
    coordinate(tmp_path / "ditto", ditto(lam=lam))
    assert [weights_hash(join_groups(bundle)) for bundle in crossed] == plain


def test_the_default_is_not_fedavg(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "ditto", ditto())
    (fedavg,), (own,) = (deployed(tmp_path / name, "site-1").members for name in ("fedavg", "ditto"))
    assert not torch.equal(own.weights["head.weight"], fedavg.weights["head.weight"])


@pytest.mark.parametrize("model", ["small", "cnn4"])
def test_odd_sites(model: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", ditto(), odd_sites(), model={"name": model})
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}
    assert ("shared.safetensors" in predictor_bytes(tmp_path / "run")) == (model == "small")  # one image, no v


@pytest.mark.parametrize("own", [{"lam": -1.0}, {"lam": "strong"}, {"lam": float("inf")}, {"personal": 3}])
def test_refuses_settings_that_are_none(own: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"^ditto\.(lam|personal) = "):
        ditto(**own)
