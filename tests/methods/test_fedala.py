"""FedALA: the weights of the mix by hand and against whole networks, when they are learned, and FedAvg without them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from methods.personal_runs import FEW, names_in, odd_sites, straight_and_killed
from tiny import context, coordinate, deployed, drive, federation, images, predictor_bytes, study, watch_bundles
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.learn.fit import weights_hash
from wardround.methods import fedala as module
from wardround.methods.fedala import FedALA, Problem, converged, cut_below, drawn, mixed
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedper import layers_of
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, StagedNet, Weights, build, fresh, spec_layout
from wardround.streams import Streams

SMALL, CNN4 = NetSpec("small", 3, 4, 8, width=2), NetSpec("cnn4", 3, 4, 8, width=2)


def fedala(**own: Any) -> Any:
    return make("fedala", own)


# The mix --------------------------------------------------------------------------------------------------------------


def test_the_mix_by_hand() -> None:
    """1 + (3 − 1)·0.25 = 1.5; at weight 0 the site's own, at 1 the received. What is not mixed is the received."""
    memory = State({"local": {"w": torch.tensor([1.0, 1.0, 1.0])}, "mix": {"w": torch.tensor([0.25, 0.0, 1.0])}})
    found = mixed({"w": torch.tensor([3.0, 3.0, 3.0]), "below": torch.tensor([7.0])}, memory)
    assert {name: t.tolist() for name, t in found.items()} == {"w": [1.5, 1.0, 3.0], "below": [7.0]}


def test_without_weights_the_received_model_is_taken() -> None:
    received = {"w": torch.tensor([3.0])}
    assert mixed(received, State({"local": {"w": torch.tensor([1.0])}})) == received


def pixel(label: int) -> ImageSet:
    """One white pixel, which a network sees as 1."""
    return ImageSet(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8), torch.tensor([label]), ("a", "b"))


def one_step(label: int, eta: float) -> tuple[Weights, Tensor]:
    """One step from W = 1 with own weights (0, 0) and received (½, −½), no bias; then what is in the network."""
    net = StagedNet({"flat": nn.Flatten()}, 1, 2)
    local = {"head.weight": torch.zeros(2, 1), "head.bias": torch.zeros(2)}
    gap = {"head.weight": torch.tensor([[0.5], [-0.5]]), "head.bias": torch.zeros(2)}
    mix = {name: torch.ones_like(t) for name, t in local.items()}
    found = Problem(net, "flat", pixel(label), 1).solve(local, gap, mix, eta, passes=1, threshold=0.0)
    return found, net.head.weight.detach()


def test_one_step_by_hand() -> None:
    """Logits ½ and −½ give p = σ(1). With label b, ∂L/∂θ = (p, −p), times (w − θ): p/2 for both, so W = 1 − p/2.

    Where own and received agree (the bias) W has no gradient.
    """
    found, seen = one_step(label=1, eta=1.0)
    p = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(found["head.weight"], torch.full((2, 1), 1 - p / 2))
    assert found["head.bias"].tolist() == [1.0, 1.0]
    assert seen.flatten().tolist() == [0.5, -0.5]  # the loss was taken at the received weights, as W was 1


@pytest.mark.parametrize(("label", "bound"), [(0, 1.0), (1, 0.0)])
def test_weights_stay_between_0_and_1(label: int, bound: float) -> None:
    """With label a the received head is better still beyond 1; with b a step of 10 goes far below 0."""
    assert one_step(label, eta=10.0)[0]["head.weight"].flatten().tolist() == [bound, bound]


def two_networks(spec: NetSpec) -> tuple[Weights, Weights]:
    """An own and a received network; in the latter batch norm has statistics that matter."""
    own, received = (fresh(spec, Streams(seed).torch("net")) for seed in (1, 2))
    draw = torch.Generator().manual_seed(0)
    for name in spec_layout(spec).in_group("statistics"):
        received[name] = torch.rand(received[name].shape, generator=draw) + 0.5
    return own, received


def by_whole_networks(
    spec: NetSpec, own: Weights, received: Weights, names: list[str], data: ImageSet, batch: int, passes: int
) -> dict[str, Tensor]:
    """The plain reference: W as the leaves of autograd, the whole network on every batch, nothing cached."""
    net = build(spec).eval()
    pixels = data.images.float() / 127.5 - 1
    mix = {name: torch.ones_like(own[name]) for name in names}
    for _ in range(passes):
        for start in range(0, len(data), batch):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in mix.items()}
            layers = {name: own[name] + (received[name] - own[name]) * leaves[name] for name in names}
            logits = functional_call(net, {**received, **layers}, (pixels[start : start + batch],))
            F.cross_entropy(logits, data.labels[start : start + batch]).backward()  # type: ignore[no-untyped-call]
            mix = {name: (w.detach() - 1.0 * w.grad).clamp(0, 1) for name, w in leaves.items() if w.grad is not None}
    return mix


@pytest.mark.parametrize(("spec", "layers"), [(SMALL, 1), (SMALL, 2), (SMALL, 5), (CNN4, 1), (CNN4, 4)])
def test_cached_outputs_against_whole_networks(spec: NetSpec, layers: int) -> None:
    """Three passes over 11 images in batches of 4, whatever part of the network is mixed."""
    own, received = two_networks(spec)
    last = frozenset().union(*layers_of(spec)[-layers:])
    names = [name for name in spec_layout(spec).in_group("parameters") if name in last]
    local = {name: own[name] for name in names}
    gap = {name: received[name] - own[name] for name in names}
    ones = {name: torch.ones_like(tensor) for name, tensor in local.items()}
    net, data = build(spec), images(11, seed=3)
    net.load_state_dict(received)
    found = Problem(net, cut_below(spec, layers), data, 4).solve(local, gap, ones, 1.0, passes=3, threshold=0.0)
    expected = by_whole_networks(spec, own, received, names, data, batch=4, passes=3)
    assert found.keys() == expected.keys()
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert any((tensor < 0.99).any() for tensor in found.values())


@pytest.mark.parametrize("passes", [1, 3])
def test_a_site_begins_at_the_received_head_and_goes_towards_its_own(passes: int) -> None:
    """W of a whole site: from 1 on, by its own head, the received one, its images in the order drawn."""
    own, received = two_networks(SMALL)
    names = ["head.weight", "head.bias"]
    ctx, site = context(study()), federation().sites[0]
    memory = State({"local": {name: own[name] for name in names}})
    learned = fedala(passes=passes, threshold=0, share=1.0).learn(ctx, site, received, memory, "mixing")
    data = drawn(site.train, 1.0, ctx.streams.torch("mixing", site.name, 0))
    expected = by_whole_networks(SMALL, own, received, names, data, batch=4, passes=passes)
    for name in names:
        torch.testing.assert_close(learned.groups["mix"][name], expected[name], rtol=1e-4, atol=1e-5)
    assert learned.groups["local"] == memory.groups["local"]


def test_what_converges_is_the_mean_over_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches of 4, 4 and 3, each with as much say as it has images; own and received are one, so W stands still."""
    _, received = two_networks(SMALL)
    net, data, seen = build(SMALL), images(11, seed=3), []

    def look(losses: list[float], threshold: float) -> bool:
        seen.append(list(losses))
        return False

    monkeypatch.setattr(module, "converged", look)
    net.load_state_dict(received)
    local = {name: received[name] for name in ("head.weight", "head.bias")}
    still = {name: torch.zeros_like(tensor) for name, tensor in local.items()}
    Problem(net, cut_below(SMALL, 1), data, 4).solve(local, still, still, 1.0, passes=2, threshold=0.0)
    with torch.no_grad():
        mean = float(F.cross_entropy(net.eval()(data.images.float() / 127.5 - 1), data.labels))
    assert seen[-1] == pytest.approx([mean], rel=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(0.01, 100), st.integers(1, 4))
def test_every_weight_is_a_share(seed: int, eta: float, passes: int) -> None:
    own, received = (fresh(CNN4, Streams(seed).torch(name)) for name in ("own", "received"))
    local = {name: own[name] for name in ("head.weight", "head.bias")}
    gap = {name: received[name] - tensor for name, tensor in local.items()}
    ones = {name: torch.ones_like(tensor) for name, tensor in local.items()}
    net = build(CNN4)
    net.load_state_dict(received)
    found = Problem(net, "fc", images(5, seed=seed), 2).solve(local, gap, ones, eta, passes, threshold=0.0)
    assert all(0 <= float(t.min()) <= float(t.max()) <= 1 for t in found.values())


def test_where_the_network_is_cut() -> None:
    assert [cut_below(SMALL, n) for n in (1, 2, 4, 5)] == ["pool", "conv3", "conv1", None]
    assert [cut_below(CNN4, n) for n in (1, 2, 4)] == ["fc", "conv2", None]


def test_converged_by_hand() -> None:
    """Five ones and five threes have a standard deviation of 1; only the last ten losses count."""
    losses = [1.0] * 5 + [3.0] * 5
    assert converged(losses, 1.01)
    assert not converged(losses, 1.0)
    assert not converged(losses[1:], 1.01)
    assert converged([50.0, *losses], 1.01)
    assert not converged([1.0] * 30, 0.0)
    assert not converged([*losses[1:], math.inf], 1e9)
    assert not converged([*losses[1:], math.nan], 1e9)


def test_a_share_of_the_images_is_drawn_without_repeats() -> None:
    data = images(10)
    data = ImageSet(data.images, data.labels, data.classes, patients=torch.arange(10))
    first, again, other = (drawn(data, 0.8, Streams(seed).torch("x")) for seed in (0, 0, 1))
    assert len(set(first.patients.tolist())) == len(first) == 8  # type: ignore[union-attr]
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert len(drawn(data.take(torch.tensor([3])), 0.1, Streams(0).torch("x"))) == 1


# At the site ----------------------------------------------------------------------------------------------------------


def test_the_defaults() -> None:
    own = FedALA().settings
    assert (own.layers, own.eta, own.share, own.threshold, own.passes) == (1, 1.0, 0.8, 0.01, 20)


def watch_solutions(patch: pytest.MonkeyPatch) -> list[int]:
    """The most passes that each problem was given from now on."""
    seen: list[int] = []
    solve = Problem.solve

    def watched(
        self: Problem, local: Weights, gap: Weights, mix: Mapping[str, Tensor], eta: float, passes: int, least: float
    ) -> Weights:
        seen.append(passes)
        return solve(self, local, gap, mix, eta, passes, least)

    patch.setattr(Problem, "solve", watched)
    return seen


def site_rounds(method: Any, rounds: int, site: int = 0, **changes: Any) -> list[Any]:
    """(start of the fit, received, memory before, answer) of a site that is asked round after round."""
    seen, memory = [], State()
    for round in range(rounds):
        ctx = context(study(method="fedala", rounds=9, **changes), round)
        model = fresh(ctx.study.common_spec, Streams(round).torch("a model"))
        request = method.ask(ctx, State({"model": model}))[f"site-{site + 1}"]
        fit = next(method.answer(ctx, federation().sites[site], request, memory))
        answer = drive(ctx, method.answer(ctx, federation().sites[site], request, memory))
        seen.append((fit.start, model, memory, answer))
        memory = answer.memory
    return seen


def test_off_at_first_then_to_convergence_then_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = watch_solutions(monkeypatch)
    rounds = site_rounds(fedala(), 4)
    assert passes == [20, 20, 1, 1, 1, 1]  # each round's work is begun twice: once to look at its fit
    start, received, _, answer = rounds[0]
    assert weights_hash(start) == weights_hash(received)
    assert answer.memory.groups.keys() == {"local"}
    for start, received, before, answer in rounds[1:]:
        mix, own = answer.memory.groups["mix"], before.groups["local"]
        for name, tensor in start.items():
            if name in ("head.weight", "head.bias"):
                expected = own[name] + (received[name] - own[name]) * mix[name]
                assert torch.equal(tensor, expected)
            else:
                assert torch.equal(tensor, received[name])
        assert any((weight < 1).any() for weight in mix.values())
    assert not torch.equal(
        rounds[1][3].memory.groups["mix"]["head.weight"], rounds[3][3].memory.groups["mix"]["head.weight"]
    )


def test_a_threshold_that_is_never_met_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven passes of 9 images in batches of 4."""
    calls = 0
    above = Problem._above

    def counted(self: Problem, below: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return above(self, below)

    first = site_rounds(fedala(), 1)[0][3].memory
    monkeypatch.setattr(Problem, "_above", counted)
    ctx = context(study(method="fedala"), 1)
    received = ctx.study.initial()
    fedala(threshold=0, passes=7).learn(ctx, federation().sites[0], received, first, "mixing")
    assert calls == 7 * 3


def test_what_a_site_remembers_is_its_last_layers_after_training() -> None:
    for layers, names in ((1, {"head.weight", "head.bias"}), (5, set(spec_layout(SMALL).in_group("parameters")))):
        _, _, _, answer = site_rounds(fedala(layers=layers), 2)[1]
        (trained,) = answer.trained.members
        assert answer.memory.groups["local"].keys() == answer.memory.groups["mix"].keys() == names
        for name in names:
            assert torch.equal(answer.memory.groups["local"][name], trained.weights[name])


def test_statistics_and_counters_are_the_received_ones() -> None:
    start, received, _, _ = site_rounds(fedala(layers=5), 2)[1]
    layout = spec_layout(SMALL)
    for name in (*layout.in_group("statistics"), *layout.in_group("counters")):
        assert torch.equal(start[name], received[name])
    assert not torch.equal(start["stages.conv1.2.weight"], received["stages.conv1.2.weight"])


def test_a_site_smaller_than_a_batch_learns_its_mix() -> None:
    """Public versions drop the last batch, so that such a site has none and stops there."""
    answer = site_rounds(fedala(), 2, site=2, train={"batch": 64})[1][3]
    assert any((weight < 1).any() for weight in answer.memory.groups["mix"].values())


def test_interleaved_sites_are_as_sites_apart() -> None:
    """Weights and phase are a site's own: where workers share them, each site starts with another's."""
    method = fedala()
    apart = [[answer.memory.to_bytes() for _, _, _, answer in site_rounds(method, 3, site)] for site in (0, 1)]
    together: list[list[bytes]] = [[], []]
    memories = [State(), State()]
    for round in range(3):
        ctx = context(study(method="fedala", rounds=9), round)
        model = fresh(ctx.study.common_spec, Streams(round).torch("a model"))
        requests = method.ask(ctx, State({"model": model}))
        for site in (0, 1):
            work = method.answer(ctx, federation().sites[site], requests[f"site-{site + 1}"], memories[site])
            memories[site] = drive(ctx, work).memory
            together[site].append(memories[site].to_bytes())
    assert together == apart
    assert apart[0] != apart[1]


# Runs -----------------------------------------------------------------------------------------------------------------


def test_only_for_sites_that_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two sites' first round is free; at the end they mix once more, and the third site has nothing to."""
    passes = watch_solutions(monkeypatch)
    coordinate(tmp_path / "run", fedala(), **FEW)
    assert len(passes) == (FEW["rounds"] - 2) + 2
    assert sorted(predictor_bytes(tmp_path / "run")) == [
        "shared.safetensors",
        "site-1.safetensors",
        "site-2.safetensors",
    ]


def test_what_a_site_deploys_is_the_delivered_model_with_a_mixed_head(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", fedala())
    sites = [deployed(tmp_path / "run", f"site-{i}").members[0].weights for i in (1, 2, 3)]
    for name in sites[0]:
        alike = all(torch.equal(sites[0][name], other[name]) for other in sites[1:])
        assert alike == (name not in ("head.weight", "head.bias"))


def test_weights_and_own_layers_are_in_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedala(), rounds=3)
    assert names_in(crossed) == {*spec_layout(SMALL).names, "images"}
    assert {group for bundle in crossed for group in bundle.groups} == {"parameters", "statistics", "counters", "size"}
    counters = [t for b in crossed if b.envelope.kind == "delivery" for t in b.groups["counters"].values()]
    assert {(t.dtype, int(t)) for t in counters} == {(torch.int64, 9)}


@pytest.mark.parametrize("how", [{}, FEW, {"init": "own"}], ids=["all", "few", "own"])
def test_no_layers_is_fedavg_bit_for_bit(how: dict[str, Any], tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg(), **how)
    coordinate(tmp_path / "fedala", fedala(layers=0), **how)
    assert predictor_bytes(tmp_path / "fedala") == predictor_bytes(tmp_path / "fedavg")


def test_the_default_is_not_fedavg(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "fedala", fedala())
    (fedavg,), (own,) = (deployed(tmp_path / name, "site-1").members for name in ("fedavg", "fedala"))
    for name in ("head.weight", "stages.conv1.0.weight"):
        assert not torch.equal(own.weights[name], fedavg.weights[name])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("model", ["small", "cnn4"])
def test_odd_sites(model: str, layers: int, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", fedala(layers=layers), odd_sites(), rounds=3, model={"name": model})
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}
    assert ("shared.safetensors" in predictor_bytes(tmp_path / "run")) == (model == "small")  # one image, no training


def test_a_resumed_run_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, killed = straight_and_killed(monkeypatch, tmp_path, "fedala", {})
    assert killed == straight


def test_refuses_more_layers_than_there_are() -> None:
    fedala(layers=5).check(study(method="fedala"))
    with pytest.raises(BadInput, match=r"fedala\.layers = 6 is too many: small has 5 layers; use 0 to 5"):
        fedala(layers=6).check(study(method="fedala"))


@pytest.mark.parametrize(
    "own", [{"layers": -1}, {"eta": 0}, {"share": 0}, {"share": 1.1}, {"threshold": -1}, {"passes": 0}]
)
def test_refuses_settings_that_are_none(own: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=rf"^fedala\.{next(iter(own))} = "):
        fedala(**own)


def test_training_goes_on_where_the_mix_began(tmp_path: Path) -> None:
    """The borrowed network is given back as it was lent: a run after a mix is a run before it."""
    coordinate(tmp_path / "before", FedAvg())
    coordinate(tmp_path / "fedala", fedala())
    coordinate(tmp_path / "after", FedAvg())
    assert predictor_bytes(tmp_path / "before") == predictor_bytes(tmp_path / "after")
