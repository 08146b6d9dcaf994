"""FedBiCross: its three stages on tiny networks, and a stop in the middle."""

import gc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import context, coordinate, deployed, drive, federation, figures, predictor_bytes, study, watch_fits
from wardround.data.federation import Federation
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import Outputs, Step, weights_hash
from wardround.methods.base import Context, join_groups
from wardround.methods.fedbicross import FedBiCross, PersonalDistillation
from wardround.methods.state import State
from wardround.synthesis import simplex

OWN: dict[str, Any] = {
    "trajectories": 2,
    "steps": 6,
    "samples": 3,
    "batch": 8,
    "probes": 4,
    "personal_epochs": 1,
    "synthesis_lr": 0.1,
}


def method(**own: Any) -> FedBiCross:
    return FedBiCross(FedBiCross.Settings(**{**OWN, **own}))


def answered(ctx: Context, data: Federation) -> dict[str, Bundle]:
    """What the sites send."""
    requests = method().ask(ctx, State()) or {}
    return {s.name: drive(ctx, method().answer(ctx, s, requests[s.name], State())).bundle for s in data.sites}


def begun(clusters: list[list[str]], cross: list[list[float]]) -> State:
    """As if Stage 1 had found these clusters."""
    weights = torch.tensor(cross, dtype=torch.float64)
    return State({"cross": {"weights": weights}}, {"trajectory": 0, "clusters": clusters, "silhouettes": {}})


@pytest.fixture(scope="module")
def three() -> tuple[Context, dict[str, Bundle]]:
    ctx = context(study(method="fedbicross"))
    return ctx, answered(ctx, federation())


PAIR = [["site-1", "site-3"], ["site-2"]]
EVEN = [[0.5, 0.5], [0.5, 0.5]]


def absorbed(of: FedBiCross, three: tuple[Context, Mapping[str, Bundle]], state: State | None = None) -> list[State]:
    ctx, answers = three
    return list(of.absorb(ctx, state or begun(PAIR, EVEN), answers))


# Stage 1 --------------------------------------------------------------------------------------------------------------


def test_every_trained_site_is_in_one_cluster(three: tuple[Context, dict[str, Bundle]]) -> None:
    ctx, answers = three
    first, *_ = method().absorb(ctx, State(), answers)
    assert sorted(site for sites in first.facts["clusters"] for site in sites) == ["site-1", "site-2", "site-3"]
    assert list(first.facts["silhouettes"]) == ["2"]
    assert len(first.facts["clusters"]) == 2
    assert first.facts["trajectory"] == 1


@pytest.mark.parametrize("clustering", ["predictions", "parameters", "hierarchical"])
def test_a_fixed_number_of_clusters(clustering: str, three: tuple[Context, dict[str, Bundle]]) -> None:
    ctx, answers = three
    for clusters in (1, 2, 3):
        state = next(method(clustering=clustering, clusters=clusters, steps=3).absorb(ctx, State(), answers))
        assert len(state.facts["clusters"]) == clusters
        assert state.groups["cross"]["weights"].shape == (clusters, clusters)


def test_identical_models_are_one_cluster_with_a_shared_model(three: tuple[Context, dict[str, Bundle]]) -> None:
    ctx, answers = three
    same = {site: Bundle(b.envelope, answers["site-1"].groups) for site, b in answers.items()}
    *_, state = method().absorb(ctx, State(), same)
    assert state.facts["clusters"] == [["site-1", "site-2", "site-3"]]
    assert state.groups["cross"]["weights"].tolist() == [[1.0]]
    shared = method().predictor(ctx, state)
    assert shared is not None
    assert weights_hash(shared.members[0].weights) == weights_hash(dict(state.groups["model-000"]))


# Stage 2 --------------------------------------------------------------------------------------------------------------


def test_the_weights_learn_and_stay_shares(three: tuple[Context, dict[str, Bundle]]) -> None:
    *_, state = absorbed(method(), three)
    cross = state.groups["cross"]["weights"]
    assert bool((cross >= 0).all())
    torch.testing.assert_close(cross.sum(dim=1), torch.ones(2, dtype=torch.float64))
    assert not torch.equal(cross, torch.tensor(EVEN, dtype=torch.float64))
    assert method().predictor(three[0], state) is None


@pytest.mark.parametrize(("cross", "expected"), [("intra", [[1.0, 0.0], [0.0, 1.0]]), ("uniform", EVEN)])
def test_fixed_weights_stay(cross: str, expected: list[list[float]], three: tuple[Context, dict[str, Bundle]]) -> None:
    ctx, answers = three
    states = list(method(cross=cross).absorb(ctx, State(), answers))
    assert [state.groups["cross"]["weights"].tolist() for state in states] == [expected] * 2


def test_similarity_weighs_the_own_cluster_most(three: tuple[Context, dict[str, Bundle]]) -> None:
    """Two clusters: the median is the one squared distance, so the shares are 1 and 1/e, normalised."""
    ctx, answers = three
    *_, state = method(cross="similarity").absorb(ctx, State(), answers)
    own = 1 / (1 + math.exp(-1))
    expected = torch.tensor([[own, 1 - own], [1 - own, own]], dtype=torch.float64)
    torch.testing.assert_close(state.groups["cross"]["weights"], expected)


def test_without_weight_another_cluster_teaches_nothing(three: tuple[Context, dict[str, Bundle]]) -> None:
    ctx, answers = three
    other = {**answers, "site-2": Bundle(answers["site-2"].envelope, answers["site-1"].groups)}
    own = begun(PAIR, [[1.0, 0.0], [0.0, 1.0]])
    one, two = (absorbed(method(cross="intra"), (ctx, sent), own)[-1] for sent in (answers, other))
    assert weights_hash(dict(one.groups["model-000"])) == weights_hash(dict(two.groups["model-000"]))
    assert weights_hash(dict(one.groups["model-001"])) != weights_hash(dict(two.groups["model-001"]))


@pytest.mark.parametrize(("inner", "updates"), [("sampled", 2 * 3), ("all", 2 * 6)])
def test_how_often_a_model_learns(
    inner: str, updates: int, three: tuple[Context, dict[str, Bundle]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update passes both clusters' images, and batch norm counts them; weights move at samples only."""
    moves: list[Tensor] = []

    def descend(weights: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
        moves.append(gradient)
        return weights

    monkeypatch.setattr(simplex, "descend", descend)
    *_, state = absorbed(method(inner=inner, recalibrate=False), three)
    counters = {int(t) for n, t in state.groups["model-000"].items() if n.endswith("tracked")}
    assert counters == {2 * updates}
    assert len(moves) == 2 * 3 * 2


def test_recalibration_changes_statistics_only(three: tuple[Context, dict[str, Bundle]]) -> None:
    literal, anew = (absorbed(method(recalibrate=on), three)[-1].groups["model-001"] for on in (False, True))
    same = {name for name in literal if torch.equal(literal[name], anew[name])}
    assert {name for name in literal if name not in same} == {n for n in literal if "running" in n or "tracked" in n}


def test_rates_step_down_at_half_and_three_quarters() -> None:
    found = [method(trajectories=4, lr=0.01).rate(number) for number in range(4)]
    assert found == pytest.approx([0.01, 0.01, 0.001, 0.0001])
    assert method(trajectories=1, lr=0.01).rate(0) == 0.01


def test_a_stop_after_any_trajectory_changes_nothing(three: tuple[Context, dict[str, Bundle]]) -> None:
    ctx, answers = three
    of = method(trajectories=3, inner="all")
    whole = [state.to_bytes() for state in of.absorb(ctx, State(), answers)]
    assert len(set(whole)) == 3
    for done in (0, 1):
        rest = of.absorb(ctx, State.from_bytes(whole[done]), answers)
        assert [state.to_bytes() for state in rest] == whole[done + 1 :]


def live_images(of: FedBiCross, three: tuple[Context, dict[str, Bundle]], monkeypatch: pytest.MonkeyPatch) -> int:
    """The most image batches that are alive at once, over a whole Stage 2."""
    counts: list[int] = []
    learn = FedBiCross._learn

    def counted(*everything: Any, **named: Any) -> None:
        learn(*everything, **named)
        found = [x for x in gc.get_objects() if type(x) is Tensor and x.shape[-3:] == (3, 8, 8)]
        counts.append(sum(x.dim() == 4 for x in found))

    with monkeypatch.context() as patch:
        patch.setattr(FedBiCross, "_learn", counted)
        absorbed(of, three)
    return max(counts)


def test_memory_does_not_grow_with_the_trajectory(
    three: tuple[Context, dict[str, Bundle]], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (
        live_images(method(steps=n, samples=3, inner="all", trajectories=1), three, monkeypatch) for n in (4, 16)
    )
    assert long <= short


@pytest.mark.parametrize("cross", ["bilevel", "uniform"])
def test_a_model_that_diverges_stops_the_run(cross: str, three: tuple[Context, dict[str, Bundle]]) -> None:
    with pytest.raises(RunFailed, match="fedbicross: a model diverged in Stage 2; use a smaller lr"):
        absorbed(method(lr=1e30, inner="all", cross=cross), three)


# Home, and Stage 3 ----------------------------------------------------------------------------------------------------


def test_each_site_gets_its_clusters_model(three: tuple[Context, dict[str, Bundle]]) -> None:
    ctx, _ = three
    state = absorbed(method(), three)[-1]
    home = {site: weights_hash(join_groups(bundle)) for site, bundle in method().deliver(ctx, state).items()}
    models = [weights_hash(dict(state.groups[f"model-00{k}"])) for k in (0, 1)]
    assert home == {"site-1": models[0], "site-2": models[1], "site-3": models[0]}


def test_stage_three_starts_at_the_clusters_model_and_keeps_to_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", method(personal_lr=0.02, personal_epochs=2))
    alone, personal = fits[:3], fits[3:]
    assert [fit.label for fit in personal] == [f"site-{i}, personal" for i in (1, 2, 3)]
    own = coordinate(tmp_path / "local", method(personal=False))
    for before, fit in zip(alone, personal, strict=True):
        assert (fit.recipe.lr, fit.recipe.epochs, fit.recipe.batch) == (0.02, 2, before.recipe.batch)
        cluster, uploaded = fit.teachers
        assert weights_hash(cluster.weights) == weights_hash(fit.start)
        assert weights_hash(uploaded.weights) not in (weights_hash(fit.start), weights_hash(before.start))
        (member,) = deployed(tmp_path / "local", fit.label.partition(",")[0]).members
        assert weights_hash(member.weights) == weights_hash(fit.start)
    assert {row["model"] for row in own["rows"]} == {"personal"}
    assert predictor_bytes(tmp_path / "run").keys() == {f"site-{i}.safetensors" for i in (1, 2, 3)}


def test_a_run_is_the_same_twice(tmp_path: Path) -> None:
    one, two = (coordinate(tmp_path / name, method()) for name in ("one", "two"))
    assert figures(one) == figures(two)
    assert predictor_bytes(tmp_path / "one") == predictor_bytes(tmp_path / "two")


def test_one_cluster_without_stage_three_is_one_shared_model(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", method(clusters=1, personal=False))
    assert list(predictor_bytes(tmp_path / "run")) == ["shared.safetensors"]


def test_two_sites_are_one_cluster(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", method(), federation((8, 6)))
    assert {row["model"] for row in result["rows"]} == {"shared", "personal"}


def test_a_site_too_small_to_train_takes_the_largest_clusters_model(tmp_path: Path) -> None:
    data = federation((8, 1, 6, 7))
    ctx = context(study(data, method="fedbicross"))
    state = absorbed(method(), (ctx, answered(ctx, data)), begun([["site-4"], ["site-1", "site-3"]], EVEN))[-1]
    home = {site: join_groups(bundle) for site, bundle in method().deliver(ctx, state).items()}
    assert weights_hash(home["site-2"]) == weights_hash(home["site-1"]) != weights_hash(home["site-4"])
    result = coordinate(tmp_path / "run", method(), data)
    assert "site-2, personal: not trained, one image is too few for batch norm" in [n["text"] for n in result["notes"]]
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {f"site-{i}" for i in (1, 2, 3, 4)}


def test_sites_may_differ_in_architecture(tmp_path: Path) -> None:
    mixed: dict[str, Any] = {"model": {"name": "small", "width": 2, "per_site": {"site-2": "wrn16-2"}}}
    data = federation((6, 6, 6))
    coordinate(tmp_path / "run", method(trajectories=1, steps=2, samples=1), data, **mixed)
    assert {deployed(tmp_path / "run", f"site-{i}").members[0].spec.name for i in (1, 2, 3)} == {"small"}


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({"samples": 7}, {}, "fedbicross.samples = 7 is more than 6 steps; use fewer samples"),
        ({"clusters": 4}, {}, "fedbicross.clusters = 4, but there are 3 sites; use fewer"),
        ({}, {"model": {"name": "cnn4"}}, "fedbicross makes images from batch-norm statistics, and cnn4 has none"),
        (
            {"clustering": "parameters"},
            {"model": {"per_site": {"site-2": "wrn16-2"}}},
            "fedbicross: parameters of different networks cannot be compared; cluster by predictions",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(own: Any, changes: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        method(**own).check(study(method="fedbicross", **changes))


def test_the_personal_loss_by_hand() -> None:
    """Equal logits, so CE = ln 2; a teacher of (3/4, 1/4) is ¾ ln 3/2 + ¼ ln 1/2 away, one that agrees 0."""
    away = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    nothing = torch.zeros(1, 2)
    sure = Outputs(nothing, torch.tensor([[math.log(3), 0.0]]))
    step = Step(
        torch.tensor([0]), nothing, torch.tensor([0]), Outputs(nothing, nothing), (sure, Outputs(nothing, nothing))
    )
    assert float(PersonalDistillation([0.5, 0.3], 1.0).loss(step)) == pytest.approx(math.log(2) + 0.5 * away)
    swapped = step._replace(teachers=step.teachers[::-1])
    assert float(PersonalDistillation([0.5, 0.3], 1.0).loss(swapped)) == pytest.approx(math.log(2) + 0.3 * away)
