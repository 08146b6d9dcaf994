"""FedCurv: the pull by hand, the Fisher information image by image, whose sums a site gets, and its limits."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import CPU, context, coordinate, drive, federation, images, predictor_bytes, study, watch_bundles, watch_fits
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, SiteFailed
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.fit import Fit, Objective, Recipe
from wardround.learn.trainer import train_one
from wardround.methods import fedcurv
from wardround.methods.base import join_groups
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedcurv import ANCHORED, FISHER, OTHERS, OTHERS_ANCHORED, Curved, FedCurv, fisher_diagonal
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, Weights, build, fresh

SLOW = 1e-9  # a learning rate at which no pull is cut


def curv(**own: Any) -> Any:
    return make("fedcurv", own)


def pulled(objective: Curved, value: list[float], grad: list[float]) -> list[float]:
    """The gradient of one parameter `w` after the correction."""
    live = torch.tensor(value, requires_grad=True)
    live.grad = torch.tensor(grad)
    objective.correct({"w": live})
    assert live.tolist() == value
    return live.grad.tolist()


# The pull -------------------------------------------------------------------------------------------------------------


def test_the_gradient_by_hand() -> None:
    """g + 2λ(U·v − V): 1 + 2·0.5·(2·3 − 4) = 3 and −1 + 2·0.5·(0·7 − 0) = −1."""
    objective = Curved(0.5, {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([4.0, 0.0])}, SLOW)
    assert pulled(objective, [3.0, 7.0], [1.0, -1.0]) == [3.0, -1.0]


def test_at_the_point_it_is_pulled_to_there_is_no_pull() -> None:
    objective = Curved(1.0, {"w": torch.tensor([4.0])}, {"w": torch.tensor([6.0])}, SLOW)
    assert pulled(objective, [1.5], [0.25]) == [0.25]


def test_a_pull_that_would_go_beyond_its_point_ends_there() -> None:
    """λ = 1, η = 0.1: U = 20 is cut to 1/(2·0.1) = 5, V = 60 to 15, so 2(5·1 − 15) = −20 and one step makes 1 into 3.

    U = 2 is below 5 and stays: 2(2·1 − 6) = −8. Both are pulled to V/U = 3.
    """
    objective = Curved(1.0, {"w": torch.tensor([20.0, 2.0])}, {"w": torch.tensor([60.0, 6.0])}, 0.1)
    assert pulled(objective, [1.0, 1.0], [0.0, 0.0]) == pytest.approx([-20.0, -8.0])


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 1e6), st.floats(-10, 10), st.floats(-10, 10), st.floats(1e-3, 10), st.floats(1e-4, 1))
def test_no_step_goes_beyond_the_point(u: float, start: float, point: float, lam: float, rate: float) -> None:
    objective = Curved(lam, {"w": torch.tensor([u])}, {"w": torch.tensor([u * point])}, rate)
    (gradient,) = pulled(objective, [torch.tensor(start).item()], [0.0])
    after = start - rate * gradient
    slack = 1e-3 * (1 + abs(start) + abs(point))
    assert min(start, point) - slack <= after <= max(start, point) + slack


def test_what_has_no_gradient_is_not_pulled() -> None:
    still = torch.tensor([3.0], requires_grad=True)
    live = torch.tensor([2.0], requires_grad=True)
    live.grad = torch.tensor([0.0])
    ones = {"still": torch.tensor([1.0]), "live": torch.tensor([1.0])}
    Curved(1.0, ones, {name: torch.zeros(1) for name in ones}, SLOW).correct({"still": still, "live": live})
    assert still.grad is None
    assert live.grad.tolist() == [4.0]


def test_three_steps_against_autograd_of_the_penalty() -> None:
    """CE + λ·Σ_j (v − w_j)ᵀ diag(F_j) (v − w_j) over two other sites, differentiated by PyTorch, in plain SGD."""
    spec, lam, rate, data = NetSpec("cnn4", 3, 4, 8, width=2), 0.3, 0.1, images(6, seed=5)
    start, *theirs = (fresh(spec, torch.Generator().manual_seed(seed)) for seed in (3, 4, 5))
    fishers = [fisher_diagonal(spec, weights, images(5, seed=9), CPU) for weights in theirs]
    total = {name: fishers[0][name] + fishers[1][name] for name in start}
    anchored = {name: fishers[0][name] * theirs[0][name] + fishers[1][name] * theirs[1][name] for name in start}
    recipe = Recipe(epochs=3, batch=6, lr=rate, momentum=0.0, weight_decay=0.0)
    fit = Fit("x", spec, start, data, recipe, seed=1, objective=Curved(lam, total, anchored, rate))
    found = train_one(fit, CPU).weights

    net = build(spec)
    net.load_state_dict(start)
    pixels = data.images.float() / 127.5 - 1
    for _ in range(3):
        loss = F.cross_entropy(net(pixels), data.labels)
        for fisher, weights in zip(fishers, theirs, strict=True):
            loss = loss + lam * sum((fisher[n] * (p - weights[n]) ** 2).sum() for n, p in net.named_parameters())
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(rate * gradient)
    plain = train_one(Fit("plain", spec, start, data, recipe, seed=1), CPU).weights
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain["head.bias"], found["head.bias"], atol=1e-4)


# The Fisher information -----------------------------------------------------------------------------------------------


def slow_fisher(spec: NetSpec, weights: Weights, data: ImageSet) -> dict[str, Tensor]:
    """One backward pass per image."""
    net = build(spec)
    net.load_state_dict(weights)
    net.eval()
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for image, label in zip(data.images, data.labels, strict=True):
        loss = F.cross_entropy(net(image[None].float() / 127.5 - 1), label[None])
        for name, gradient in zip(total, torch.autograd.grad(loss, list(net.parameters())), strict=True):
            total[name] += gradient**2 / len(data)
    return total


def trained(spec: NetSpec) -> Weights:
    """Weights with running statistics that are not those of a new network."""
    start = fresh(spec, torch.Generator().manual_seed(1))
    return train_one(Fit("x", spec, start, images(12), Recipe(epochs=2, batch=6, lr=0.05), seed=0), CPU).weights


@pytest.mark.parametrize("name", ["cnn4", "small", "resnet18", "wrn16-2"])
def test_it_is_the_mean_of_squared_gradients_image_by_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, data = NetSpec(name, 3, 4, 8, width=2), images(7, seed=2)
    weights = trained(spec)
    monkeypatch.setattr(fedcurv, "LARGEST_CHUNK", 3)
    found, expected = fisher_diagonal(spec, weights, data, CPU), slow_fisher(spec, weights, data)
    assert found.keys() == expected.keys()
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-4, atol=1e-8)


def test_it_is_not_the_square_of_the_mean_gradient() -> None:
    """Of the head's bias the gradient is p − y. At weights of 0 it is 1/4 and −3/4 for one image of each class.

    Squared and averaged: (3·1/16 + 9/16)/4 = 3/16. The mean gradient is 0, and so would be its square.
    """
    spec = NetSpec("cnn4", 3, 4, 8, width=2)
    weights = {name: torch.zeros_like(tensor) for name, tensor in build(spec).state_dict().items()}
    assert fisher_diagonal(spec, weights, images(4), CPU)["head.bias"].tolist() == [3 / 16] * 4


def test_measuring_changes_nothing() -> None:
    spec = NetSpec("small", 3, 4, 8, width=2)
    weights = trained(spec)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    one, two = (fisher_diagonal(spec, weights, images(5), CPU) for _ in range(2))
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_a_site_sends_is_of_the_network_it_trained() -> None:
    """u and u·w of the very weights that it sends, not of those it received."""
    method, ctx, site = curv(), context(study()), federation().sites[0]
    answer = drive(ctx, method.answer(ctx, site, method.ask(ctx, method.begin(ctx))["site-1"], State()))
    weights = join_groups(answer.bundle)
    expected = slow_fisher(ctx.study.common_spec, weights, site.train)
    assert answer.bundle.group(FISHER).keys() == answer.bundle.group(ANCHORED).keys() == expected.keys()
    for name, u in answer.bundle.group(FISHER).items():
        torch.testing.assert_close(u, expected[name], rtol=1e-4, atol=1e-8)
        assert torch.equal(answer.bundle.group(ANCHORED)[name], u * weights[name])


def test_at_most_so_many_images_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ImageSet] = []
    measure = fedcurv.fisher_diagonal
    monkeypatch.setattr(fedcurv, "fisher_diagonal", lambda s, w, d, v: seen.append(d) or measure(s, w, d, v))  # type: ignore[func-returns-value]
    data = federation((9,))

    def chosen(round: int, most: int) -> ImageSet:
        method, ctx = curv(images=most), context(study(data, rounds=3), round)
        requests = method.ask(ctx, method.begin(ctx))
        drive(ctx, method.answer(ctx, data.sites[0], requests["site-1"], State()))
        return seen.pop()

    assert chosen(0, 9) is data.sites[0].train
    drawn = [chosen(round, 4) for round in (0, 0, 1)]
    assert {len(part) for part in drawn} == {4}
    assert torch.equal(drawn[0].images, drawn[1].images)
    assert not torch.equal(drawn[0].images, drawn[2].images)
    assert len({image.numpy().tobytes() for image in drawn[0].images}) == 4


def test_what_is_not_finite_does_not_leave_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedcurv, "fisher_diagonal", lambda *_: {"head.bias": torch.tensor([float("nan")])})
    method, ctx = curv(), context(study())
    requests = method.ask(ctx, method.begin(ctx))
    with pytest.raises(SiteFailed, match="its fisher would hold NaN or infinite values; use a smaller"):
        drive(ctx, method.answer(ctx, federation().sites[0], requests["site-1"], State()))


# Who gets what --------------------------------------------------------------------------------------------------------


def sent(site: str, u: float, w: float) -> Bundle:
    groups = {
        "parameters": {"w": torch.tensor([w])},
        "size": {"images": torch.tensor(1)},
        FISHER: {"w": torch.tensor([u])},
        ANCHORED: {"w": torch.tensor([u * w])},
    }
    return Bundle(Envelope("answer", "study", "fedcurv", site, 0), groups)


def absorbed(state: State, *answers: Bundle) -> State:
    ctx = context(study())
    (after,) = curv().absorb(ctx, state, {answer.envelope.site: answer for answer in answers})
    assert isinstance(after, State)
    return after


def sums(state: State) -> dict[str, tuple[list[float], list[float]]]:
    """U and V as each site would be sent them, in the order of the sites."""
    ctx, found = context(study()), {}
    for site in ctx.study.sites:
        down = FedCurv().more_down(ctx, site, state)
        found[site] = tuple(down[group]["w"].tolist() if down[group] else [] for group in (OTHERS, OTHERS_ANCHORED))
    return found  # type: ignore[return-value]


def test_every_site_gets_the_sums_of_the_others() -> None:
    """U without own: 2 + 4, 1 + 4, 1 + 2. V: 2·10 + 4·(−1), 1·3 + 4·(−1), 1·3 + 2·10.

    Where a total is made less one's own in place, the second and third site would get less than this.
    """
    state = absorbed(State({"model": {}}), sent("site-1", 1, 3), sent("site-2", 2, 10), sent("site-3", 4, -1))
    expected = {"site-1": ([6.0], [16.0]), "site-2": ([5.0], [-1.0]), "site-3": ([3.0], [23.0])}
    assert sums(state) == expected
    assert sums(state) == expected


def test_the_latest_counts_and_who_was_not_asked_still_does() -> None:
    state = absorbed(State({"model": {}}), sent("site-1", 1, 3), sent("site-2", 2, 10))
    assert sums(state)["site-3"] == ([3.0], [23.0])
    state = absorbed(State.from_bytes(state.to_bytes()), sent("site-2", 5, 1))
    assert sums(state) == {"site-1": ([5.0], [5.0]), "site-2": ([1.0], [3.0]), "site-3": ([6.0], [8.0])}


@pytest.mark.parametrize("missing", [FISHER, ANCHORED])
def test_one_of_the_two_alone_says_nothing(missing: str) -> None:
    """Else the coordinator would look for the other in every later round, and end."""
    answer = sent("site-1", 2.0, 3.0)
    half = replace(answer, groups={name: tensors for name, tensors in answer.groups.items() if name != missing})
    assert sums(absorbed(State({"model": {}}), half))["site-2"] == ([], [])


def test_a_site_alone_is_never_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "one", curv(), federation((9,)), rounds=3)
    coordinate(tmp_path / "fedavg", FedAvg(), federation((9,)), rounds=3)
    assert predictor_bytes(tmp_path / "one") == predictor_bytes(tmp_path / "fedavg")
    assert not [bundle for bundle in crossed if OTHERS in bundle.groups]


def test_a_site_too_small_to_train_sends_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", curv(), federation((9, 1)), rounds=2)
    answers = [bundle for bundle in crossed if bundle.envelope.kind == "answer"]
    assert {bundle.envelope.site for bundle in answers if FISHER in bundle.groups} == {"site-1"}
    asked = [bundle for bundle in crossed if bundle.envelope.kind == "request" and OTHERS in bundle.groups]
    assert [(bundle.envelope.site, bundle.envelope.round) for bundle in asked] == [("site-2", 1)]


def nbytes(groups: Mapping[str, Mapping[str, Tensor]], name: str) -> int:
    return sum(tensor.nbytes for tensor in groups.get(name, {}).values())


def test_traffic_is_three_models_up_and_from_the_second_round_on_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", curv(), rounds=2)
    model = nbytes(crossed[0].groups, "parameters")
    for bundle in crossed:
        kind, round = bundle.envelope.kind, bundle.envelope.round
        more = [nbytes(bundle.groups, name) for name in (FISHER, ANCHORED, OTHERS, OTHERS_ANCHORED)]
        up, down = kind == "answer", kind == "request" and round > 0
        assert more == [model * up, model * up, model * down, model * down]


# Limits ---------------------------------------------------------------------------------------------------------------


def test_lambda_zero_is_fedavg_bit_for_bit_and_sends_what_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = coordinate(tmp_path / "fedavg", FedAvg())
    crossed = watch_bundles(monkeypatch)
    two = coordinate(tmp_path / "fedcurv", curv(lam=0))
    assert predictor_bytes(tmp_path / "fedcurv") == predictor_bytes(tmp_path / "fedavg")
    sizes = [[{**row["groups"]} for row in run["ledger"]["rows"]] for run in (one, two)]
    assert sizes[0] == sizes[1]
    assert {group for bundle in crossed for group in bundle.groups} == {"parameters", "statistics", "counters", "size"}


def test_the_default_acts_from_the_second_round_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FedCurv().settings.lam == 1.0
    assert FedCurv().settings.images == 500
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "fedavg", FedAvg(), rounds=2)
    coordinate(tmp_path / "fedcurv", curv(), rounds=2)
    assert predictor_bytes(tmp_path / "fedcurv") != predictor_bytes(tmp_path / "fedavg")
    assert [type(fit.objective) for fit in fits[6:]] == [Objective] * 3 + [Curved] * 3
    assert all(
        torch.equal(a.start["head.bias"], b.start["head.bias"]) for a, b in zip(fits[:3], fits[6:9], strict=True)
    )


def test_the_pull_is_cut_by_the_rate_of_the_round() -> None:
    """At 0.05 and 0.05·0.5 no pull is stronger than 1/(2·λ·rate): 10 and 20."""
    method = curv()
    for round, most in ((0, 10.0), (1, 20.0)):
        ctx = context(study(train={"round_decay": 0.5}), round)
        model = ctx.study.initial()
        large = {name: torch.full_like(t, 1e4) for name, t in model.items() if t.is_floating_point()}
        parameters = {name: large[name] for name in FedCurv().more_up_groups(ctx.study)[1].tensors or {}}
        state = State({"model": model, f"{FISHER} of site-2": parameters, f"{ANCHORED} of site-2": parameters})
        requests = method.ask(ctx, state)
        fit = next(method.answer(ctx, federation().sites[0], requests["site-1"], State()))
        assert fit.objective.fisher["head.bias"].tolist() == pytest.approx([most] * 4)
        assert fit.objective.anchored["head.bias"].tolist() == pytest.approx([most] * 4)


@pytest.mark.parametrize(("key", "value"), [("lam", -1.0), ("lam", float("nan")), ("images", 0), ("images", 1.5)])
def test_refuses_settings_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^fedcurv\.{key} = "):
        curv(**{key: value})
