"""FedBiCross: its three stages on tiny networks, and a stop in the middle."""

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import context, coordinate, deployed, drive, federation, figures, predictor_bytes, study, watch_fits
from wardround.data.federation import Federation, Site
from wardround.errors import BadInput, Diverged, RunFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import weights_hash
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member
from wardround.learn.statistics import retaken
from wardround.methods.base import Context, join_groups, layout_groups
from wardround.methods.cross_cluster import StageTwo
from wardround.methods.fedbicross import FedBiCross, PersonalDistillation
from wardround.methods.state import State
from wardround.models import Weights, fresh, spec_layout
from wardround.record.rundir import RunDir
from wardround.synthesis import clusters, simplex, subspaces
from wardround.synthesis.inversion import Synthesis

SHORT = {"trajectories": 2, "steps": 6, "samples": 3, "batch": 8, "probes": 4}
OWN: dict[str, Any] = {**SHORT, "personal_epochs": 1, "synthesis_lr": 0.1}


def method(**own: Any) -> FedBiCross:
    return FedBiCross(FedBiCross.Settings(**{**OWN, **own}))


def answered(ctx: Context, data: Federation) -> dict[str, Bundle]:
    """What the sites send."""
    requests = method().ask(ctx, State()) or {}
    return {s.name: drive(ctx, method().answer(ctx, s, requests[s.name], State())).bundle for s in data.sites}


def begun(found: list[list[str]], cross: list[list[float]]) -> State:
    """As if Stage 1 had found these clusters."""
    weights = torch.tensor(cross, dtype=torch.float64)
    return State({"cross": {"weights": weights}}, {"trajectory": 0, "clusters": found, "silhouettes": {}})


Three = tuple[Context, dict[str, Bundle]]


@pytest.fixture(scope="module")
def three() -> Three:
    ctx = context(study(method="fedbicross"))
    return ctx, answered(ctx, federation())


PAIR = [["site-1", "site-3"], ["site-2"]]
EVEN = [[0.5, 0.5], [0.5, 0.5]]


def absorbed(of: FedBiCross, three: Three, state: State | None = None) -> list[State]:
    ctx, answers = three
    return list(of.absorb(ctx, state or begun(PAIR, EVEN), answers))


# Stage 1 --------------------------------------------------------------------------------------------------------------


def test_every_trained_site_is_in_one_cluster(three: Three) -> None:
    ctx, answers = three
    first, *_ = method().absorb(ctx, State(), answers)
    assert sorted(site for sites in first.facts["clusters"] for site in sites) == ["site-1", "site-2", "site-3"]
    assert list(first.facts["silhouettes"]) == ["2"]
    assert len(first.facts["clusters"]) == 2
    assert first.facts["trajectory"] == 1


@pytest.mark.parametrize("clustering", ["predictions", "parameters", "hierarchical", "subspaces"])
def test_a_fixed_number_of_clusters(clustering: str, three: Three) -> None:
    ctx, answers = three
    if clustering == "subspaces":
        sites = federation().sites
        directions = {site.name: subspaces.signature(site.train.images) for site in sites}
        answers = {
            site: Bundle(bundle.envelope, {**bundle.groups, "subspace": {"directions": directions[site]}})
            for site, bundle in answers.items()
        }
    for k in (1, 2, 3):
        state = next(method(clustering=clustering, clusters=k, steps=3).absorb(ctx, State(), answers))
        assert len(state.facts["clusters"]) == k
        assert state.groups["cross"]["weights"].shape == (k, k)


def test_more_clusters_than_models_are_noted_as_that(three: Three) -> None:
    ctx, answers = three
    notes: list[str] = []
    two = {site: answers[site] for site in ("site-1", "site-2")}
    state = next(method(clusters=3, steps=3).absorb(replace(ctx, note=notes.append), State(), two))
    assert len(state.facts["clusters"]) == 2
    assert notes == ["3 clusters were asked for, but there are only 2 models"]


def test_identical_models_are_one_cluster_with_a_shared_model(three: Three) -> None:
    ctx, answers = three
    same = {site: Bundle(b.envelope, answers["site-1"].groups) for site, b in answers.items()}
    *_, state = method().absorb(ctx, State(), same)
    assert state.facts["clusters"] == [["site-1", "site-2", "site-3"]]
    assert state.groups["cross"]["weights"].tolist() == [[1.0]]
    shared = method().predictor(ctx, state)
    assert shared is not None
    assert weights_hash(shared.members[0].weights) == weights_hash(dict(state.groups["model-000"]))


# Stage 2 --------------------------------------------------------------------------------------------------------------


def test_a_model_may_begin_as_the_central_member(three: Three) -> None:
    """At a rate that moves nothing, what comes out of Stage 2 is what went in."""
    ctx, answers = three
    own = {"begin": "member", "lr": 1e-30, "recalibrate": "none", "steps": 3}
    for k, expected in ((3, ["site-1", "site-2", "site-3"]), (1, None)):
        *_, state = method(**own, clusters=k).absorb(ctx, State(), answers)
        found = [dict(state.groups[f"model-{c:03d}"]) for c in range(k)]
        sent = {site: join_groups(bundle) for site, bundle in answers.items()}
        for c, model in enumerate(found):
            of = [site for site, weights in sent.items() if torch.equal(weights["head.weight"], model["head.weight"])]
            assert of == ([expected[c]] if expected else of[:1])
            assert len(of) == 1


@pytest.mark.parametrize(("targets", "asks"), [("known", "known_classes"), ("shares", "guessed_shares")])
def test_labels_may_be_drawn_from_what_a_cluster_knows(
    targets: str, asks: str, three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a resume knows them still, though it asks no network again. Of eight images six are of class 3."""
    ctx, answers = three
    asked: list[list[int]] = []

    def synthesis(teachers: Any, labels: torch.Tensor, *rest: Any) -> Synthesis:
        asked.append(labels.tolist())
        return Synthesis(teachers, labels, *rest)

    monkeypatch.setattr("wardround.methods.cross_cluster.Synthesis", synthesis)
    mixes = {1: [0.0, 0.25, 0.0, 0.75], 2: [0.0, 0.0, 0.25, 0.75]}
    monkeypatch.setattr(f"wardround.methods.fedbicross.{asks}", lambda members: torch.tensor(mixes[len(members)]))
    of = method(targets=targets, clusters=2, steps=3, trajectories=2, batch=8)
    first, *_ = of.absorb(ctx, State(), answers)
    sizes = [len(sites) for sites in first.facts["clusters"]]
    assert first.facts["mix"] == [mixes[n] for n in sizes]
    expected = [[3, n, 3, 3, 3, n, 3, 3] for n in sizes]
    assert asked == expected
    *_, last = of.absorb(ctx, State.from_bytes(first.to_bytes()), answers)
    assert asked == 2 * expected
    assert last.facts["mix"] == first.facts["mix"]
    assert "mix" not in next(method(clusters=2, steps=3, batch=8).absorb(ctx, State(), answers)).facts
    assert asked[-1] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_model_begins_at_random_where_no_member_is_like_it(three: Three) -> None:
    ctx, answers = three
    wider = {site: replace(ctx.study.spec(site), width=3) for site in ctx.study.sites}
    members = {site: Member(spec, fresh(spec, torch.Generator())) for site, spec in wider.items()}
    state = method(begin="member", clusters=1).clustered(ctx, members, answers)
    assert state.facts["central"] == [None]


def test_the_weights_learn_and_stay_shares(three: Three) -> None:
    *_, state = absorbed(method(), three)
    cross = state.groups["cross"]["weights"]
    assert bool((cross >= 0).all())
    torch.testing.assert_close(cross.sum(dim=1), torch.ones(2, dtype=torch.float64))
    assert not torch.equal(cross, torch.tensor(EVEN, dtype=torch.float64))
    assert method().predictor(three[0], state) is None


@pytest.mark.parametrize(("cross", "expected"), [("intra", [[1.0, 0.0], [0.0, 1.0]]), ("uniform", EVEN)])
def test_fixed_weights_stay(cross: str, expected: list[list[float]], three: Three) -> None:
    ctx, answers = three
    states = list(method(cross=cross).absorb(ctx, State(), answers))
    assert [state.groups["cross"]["weights"].tolist() for state in states] == [expected] * 2


def test_similarity_weighs_the_own_cluster_most(three: Three) -> None:
    """Two clusters: the median is the one squared distance, so the shares are 1 and 1/e, normalised."""
    ctx, answers = three
    *_, state = method(cross="similarity").absorb(ctx, State(), answers)
    own = 1 / (1 + math.exp(-1))
    expected = torch.tensor([[own, 1 - own], [1 - own, own]], dtype=torch.float64)
    torch.testing.assert_close(state.groups["cross"]["weights"], expected)


def test_without_weight_another_cluster_teaches_nothing(three: Three) -> None:
    ctx, answers = three
    other = {**answers, "site-2": Bundle(answers["site-2"].envelope, answers["site-1"].groups)}
    own = begun(PAIR, [[1.0, 0.0], [0.0, 1.0]])
    one, two = (absorbed(method(cross="intra"), (ctx, sent), own)[-1] for sent in (answers, other))
    assert weights_hash(dict(one.groups["model-000"])) == weights_hash(dict(two.groups["model-000"]))
    assert weights_hash(dict(one.groups["model-001"])) != weights_hash(dict(two.groups["model-001"]))


@pytest.mark.parametrize(("inner", "updates"), [("sampled", 2 * 3), ("all", 2 * 6)])
def test_how_often_a_model_learns(inner: str, updates: int, three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update passes both clusters' images, and batch norm counts them; weights move at samples only."""
    moves: list[Tensor] = []

    def descend(weights: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
        moves.append(gradient)
        return weights

    monkeypatch.setattr(simplex, "descend", descend)
    *_, state = absorbed(method(inner=inner, recalibrate="none"), three)
    counters = {int(t) for n, t in state.groups["model-000"].items() if n.endswith("tracked")}
    assert counters == {2 * updates}
    assert len(moves) == 2 * 3 * 2


def test_recalibration_takes_statistics_anew_from_the_last_images(three: Three) -> None:
    """Before going home, `site` is `synthetic`. The shares 3/4 and 1/4 of eight images are six and two."""
    ctx, answers = three
    uneven = begun(PAIR, [[0.75, 0.25], [0.0, 1.0]])
    literal, anew, same = (
        absorbed(method(cross="uniform", recalibrate=how), three, uneven)[-1] for how in ("none", "synthetic", "site")
    )
    assert timeless(anew) == timeless(same)
    often = replace(ctx, due=lambda: True)
    *_, stopped, _ = method(cross="uniform", recalibrate="none").absorb(often, uneven, answers)
    one, two = (stopped.groups[f"images-00{k}"]["images"] for k in (0, 1))
    for k, batch in enumerate((torch.cat([one[:6], two[:2]]), two)):
        before = dict(literal.groups[f"model-00{k}"])
        expected = retaken(ctx.study.student_spec, before, [batch], ctx.device.torch)
        assert weights_hash(dict(anew.groups[f"model-00{k}"])) == weights_hash(expected) != weights_hash(before)


def test_rates_step_down_at_half_and_three_quarters() -> None:
    found = [method(trajectories=4, lr=0.01).rate(number) for number in range(4)]
    assert found == pytest.approx([0.01, 0.01, 0.001, 0.0001])
    assert method(trajectories=1, lr=0.01).rate(0) == 0.01


def timeless(state: State) -> bytes:
    """All of a state but how long it took."""
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


def test_a_stop_after_any_trajectory_changes_nothing(three: Three) -> None:
    ctx, answers = three
    of = method(trajectories=3, inner="all")
    whole = list(of.absorb(ctx, State(), answers))
    assert len({timeless(state) for state in whole}) == 3
    for done in (0, 1):
        rest = of.absorb(ctx, State.from_bytes(whole[done].to_bytes()), answers)
        assert [timeless(state) for state in rest] == [timeless(state) for state in whole[done + 1 :]]


def test_a_stop_after_any_step_changes_nothing(three: Three) -> None:
    """With a checkpoint due after every step there is a state for each; any of them leads to the same end."""
    ctx, answers = three
    of = method(trajectories=2)
    *_, expected = of.absorb(ctx, State(), answers)
    often = replace(ctx, due=lambda: True)
    states = list(of.absorb(often, State(), answers))
    assert len(states) == 2 * (6 + 1)
    assert timeless(states[-1]) == timeless(expected)
    for state in states[:-1]:
        *_, last = of.absorb(ctx, State.from_bytes(state.to_bytes()), answers)
        assert timeless(last) == timeless(expected)
        assert {part: done["steps"] for part, done in last.facts["work"].items()} == {"synthesis": 12}


def live_images(steps: int, three: Three, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many image batches are alive after the last step of Stage 2, every step of which was learned from."""
    counts: list[int] = []
    learn = StageTwo._learn

    def counted(*everything: Any, **named: Any) -> None:
        learn(*everything, **named)
        counts.append(0)
        if len(counts) == steps:
            gc.collect()
            found = [x for x in gc.get_objects() if type(x) is Tensor and x.shape[-3:] == (3, 8, 8)]
            counts[-1] = sum(x.dim() == 4 for x in found)

    with monkeypatch.context() as patch:
        patch.setattr(StageTwo, "_learn", counted)
        absorbed(method(steps=steps, samples=3, inner="all", trajectories=1), three)
    return counts[steps - 1]


def test_memory_does_not_grow_with_the_trajectory(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (live_images(steps, three, monkeypatch) for steps in (8, 16))
    assert 0 < long <= short


def test_a_model_whose_numbers_explode_stops_the_run(three: Three) -> None:
    """Batch norm keeps its answers finite; its statistics tell."""
    of = method(lr=10.0, inner="all", cross="uniform")
    with pytest.raises(RunFailed, match="fedbicross: a model diverged in Stage 2; use a smaller lr"):
        absorbed(of, three)


def test_what_there_is_to_look_at_is_kept_though_no_trajectory_was_done(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="fedbicross: a model diverged in Stage 2"):
        coordinate(tmp_path / "run", method(lr=1e30, inner="all"), federation((8, 6, 7)))
    assert (tmp_path / "run" / "gallery.safetensors").is_file()
    kinds = {event["kind"]: event for event in RunDir(tmp_path / "run").events.rows()}
    assert sum(len(sites) for sites in kinds["clusters"]["clusters"]) == 3


@pytest.mark.parametrize("cross", ["bilevel", "uniform"])
def test_a_model_that_diverges_stops_the_run(cross: str, three: Three) -> None:
    with pytest.raises(RunFailed, match="fedbicross: a model diverged in Stage 2; use a smaller lr"):
        absorbed(method(lr=1e30, inner="all", cross=cross), three)


def test_images_that_diverge_are_not_blamed_on_a_model(three: Three) -> None:
    """Samples may come before the synthesis looks at its loss."""
    with pytest.raises(RunFailed, match=r"the synthesis diverged: what teachers say .* use a smaller synthesis_lr"):
        absorbed(method(synthesis_lr=1e30, samples=6), three)


# Home, and Stage 3 ----------------------------------------------------------------------------------------------------


def test_each_site_gets_its_clusters_model(three: Three) -> None:
    ctx, _ = three
    state = absorbed(method(), three)[-1]
    home = {site: weights_hash(join_groups(bundle)) for site, bundle in method().deliver(ctx, state).items()}
    models = [weights_hash(dict(state.groups[f"model-00{k}"])) for k in (0, 1)]
    assert home == {"site-1": models[0], "site-2": models[1], "site-3": models[0]}


def test_stage_three_starts_at_the_clusters_model_and_keeps_to_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = watch_fits(monkeypatch)
    near = {"gamma": 0.7, "delta": 0.2, "personal_temperature": 5.0}
    coordinate(tmp_path / "run", method(personal_lr=0.02, personal_epochs=2, **near), train={"keep": "best"})
    alone, personal = fits[:3], fits[3:]
    assert [fit.label for fit in personal] == [f"site-{i}, personal" for i in (1, 2, 3)]
    own = coordinate(tmp_path / "local", method(personal=False), train={"keep": "best"})
    for before, fit in zip(alone, personal, strict=True):
        assert (fit.recipe.lr, fit.recipe.epochs, fit.recipe.batch) == (0.02, 2, before.recipe.batch)
        assert (fit.recipe.keep, fit.validation) == ("last", None)
        assert isinstance(fit.objective, PersonalDistillation)
        assert (fit.objective.shares, fit.objective.temperature) == ([0.7, 0.2], 5.0)
        cluster, uploaded = fit.teachers
        assert weights_hash(cluster.weights) == weights_hash(fit.start)
        assert weights_hash(uploaded.weights) not in (weights_hash(fit.start), weights_hash(before.start))
        (member,) = deployed(tmp_path / "local", fit.label.partition(",")[0]).members
        assert weights_hash(member.weights) == weights_hash(fit.start)
    assert {row["model"] for row in own["rows"]} == {"personal"}
    assert predictor_bytes(tmp_path / "run").keys() == {f"site-{i}.safetensors" for i in (1, 2, 3)}


def home(ctx: Context, of: FedBiCross, site: Site) -> tuple[Any, Weights]:
    """What a site begins Stage 3 with, its first fit or else its predictor; and the model that came."""
    spec = ctx.study.student_spec
    groups = layout_groups(spec, ctx.study.fresh_weights(spec, "came"))
    groups["statistics"] = {name: torch.full_like(t, 0.3) for name, t in groups["statistics"].items()}
    delivered = ctx.bundle("delivery", site.name, groups)
    try:
        return next(of.personal(ctx, site, delivered, State())), join_groups(delivered)
    except StopIteration as end:
        return end.value, join_groups(delivered)


@pytest.mark.parametrize("personal", [True, False])
@pytest.mark.parametrize("sizes", [(9,), (257,), (258,)])
def test_at_the_site_statistics_are_those_of_its_images(personal: bool, sizes: tuple[int, ...]) -> None:
    """In as few equal batches of 256 at most, in the site's own random order. Parameters stay."""
    data = federation(sizes)
    (site,) = data.sites
    ctx = context(study(data, method="fedbicross"))
    spec = ctx.study.student_spec
    found, came = home(ctx, method(personal=personal), site)
    start = found.start if personal else found.members[0].weights
    order = torch.randperm(len(site.train), generator=ctx.streams.torch("statistics", site.name))
    pixels = normalise(site.train.images[order])
    batches = [pixels] if len(pixels) <= 256 else [pixels[:129], pixels[129:]]
    assert weights_hash(start) == weights_hash(retaken(spec, came, batches, ctx.device.torch))
    groups = spec_layout(spec).groups
    for name in came:
        assert torch.equal(start[name], came[name]) == (groups[name] == "parameters")
    if personal:
        assert weights_hash(found.teachers[0].weights) == weights_hash(start)


@pytest.mark.parametrize(("size", "recalibrate"), [(1, "site"), (0, "site"), (9, "synthetic"), (9, "none")], ids=str)
def test_what_came_is_kept_where_there_is_nothing_to_take_statistics_from(size: int, recalibrate: str) -> None:
    data = federation((9, size))
    ctx = context(study(data, method="fedbicross"))
    fit, came = home(ctx, method(recalibrate=recalibrate), data.sites[1])
    assert weights_hash(fit.start) == weights_hash(came)
    assert [weights_hash(teacher.weights) for teacher in fit.teachers] == [weights_hash(came)]


def test_a_site_does_not_learn_from_a_model_of_its_own_that_is_not_finite(three: Three) -> None:
    """Its upload was refused; Stage 3 is then from the cluster's model and its images alone."""
    ctx, answers = three
    notes: list[str] = []
    ctx, site = replace(ctx, note=notes.append), federation().sites[1]
    own = join_groups(answers["site-2"])
    spoilt = {name: torch.full_like(t, torch.nan) if t.is_floating_point() else t for name, t in own.items()}
    delivered = ctx.bundle("delivery", "site-2", answers["site-1"].groups)
    for weights, teachers in ((own, 2), (spoilt, 1)):
        fit = next(method().personal(ctx, site, delivered, State({"own": weights})))
        assert isinstance(fit.objective, PersonalDistillation)
        assert len(fit.teachers) == len(fit.objective.shares) == teachers
    assert notes == ["site-2 does not learn from its own model: it holds NaN or infinite values"]


def test_subspaces_are_declared_and_sent_and_only_where_they_cluster(tmp_path: Path) -> None:
    agreed, own = study(method="fedbicross"), {"directions": 2, "personal": False}
    ways = {how: method(clustering=how, **own) for how in ("predictions", "subspaces")}
    plain, further = (of.payload(agreed, "site-1") for of in ways.values())
    assert further == replace(plain, up=(*plain.up, further.up[-1]))
    group = further.up[-1]
    assert (group.name, group.max_bytes) == ("subspace", 4 * 192 * 2)
    assert group.tensors == {"directions": ((192, 2), "float32")}
    results = {how: coordinate(tmp_path / how, of) for how, of in ways.items()}
    network = {"parameters", "statistics", "counters"}
    for how, bytes_ in (("predictions", None), ("subspaces", 4 * 192 * 2)):
        rows = results[how]["ledger"]["rows"]
        up, home = ([row["groups"] for row in rows if row["kind"] == kind] for kind in ("answer", "delivery"))
        assert [set(groups) - {"subspace"} for groups in up] == [network | {"size"}] * 3
        assert [groups.get("subspace") for groups in up] == [bytes_] * 3
        assert [set(groups) for groups in home] == [network] * 3

    signatures = [subspaces.signature(site.train.images, 2) for site in federation().sites]
    expected = clusters.group(subspaces.proximity(signatures), "subspaces", 0, 0)
    (found,) = results["subspaces"]["clusters"]
    place = {site: k for k, sites in enumerate(found["clusters"]) for site in sites}
    assert tuple(place[f"site-{i}"] for i in (1, 2, 3)) == expected.labels
    assert found["silhouettes"] == {str(k): value for k, value in expected.silhouettes.items()}


def test_a_run_is_the_same_twice(tmp_path: Path) -> None:
    one, two = (coordinate(tmp_path / name, method()) for name in ("one", "two"))
    assert figures(one) == figures(two)
    assert predictor_bytes(tmp_path / "one") == predictor_bytes(tmp_path / "two")


def test_one_cluster_without_stage_three_is_one_shared_model(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", method(clusters=1, personal=False, recalibrate="synthetic"))
    assert list(predictor_bytes(tmp_path / "run")) == ["shared.safetensors"]


def test_fewer_clusters_than_asked_for_are_told(three: Three) -> None:
    """Two of three models are the same, so no clustering can tell them apart."""
    ctx, answers = three
    first, second, third = sorted(answers)
    notes: list[str] = []
    same = {first: answers[first], second: replace(answers[first], envelope=answers[second].envelope)}
    told = replace(ctx, note=notes.append)
    for own in ({"clusters": 2}, {"clusters": 3}, {"clusters": 3, "clustering": "parameters"}):
        state = next(method(**own, steps=3).absorb(told, State(), {**same, third: answers[third]}))
        assert sorted(state.facts["clusters"]) == [[first, second], [third]]
    by_answers, by_parameters = notes
    assert by_answers.startswith("3 clusters were asked for, but only 2 models differ in their softmax answers")
    assert by_parameters.endswith("only 2 models differ by parameters")


def test_models_that_are_all_the_same_are_one_cluster_and_that_is_told(three: Three) -> None:
    ctx, answers = three
    notes: list[str] = []
    same = {site: replace(answers[min(answers)], envelope=answers[site].envelope) for site in answers}
    for count in (0, 1, 2):
        state = next(method(clusters=count, steps=3).absorb(replace(ctx, note=notes.append), State(), same))
        assert state.facts["clusters"] == [sorted(answers)]
    by_silhouette, by_number = notes  # of one that was asked for nothing is to be said
    assert by_silhouette.startswith("all sites are one cluster: there is nothing to choose from with no two models")
    assert by_number.startswith("2 clusters were asked for, but no two models differ in their softmax answers")


def test_two_sites_are_one_cluster_and_that_is_told(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", method(), federation((8, 6)))
    told = "all sites are one cluster: there is nothing to choose from with fewer than three models"
    assert told in [note["text"] for note in result["notes"]]
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
        (
            {},
            {"model": {"name": "cnn4"}},
            r"fedbicross makes images from batch-norm statistics, and cnn4 \(site-1\) has none",
        ),
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


def test_how_the_site_personalises() -> None:
    agreed = study(method="fedbicross", train={"schedule": "step"})
    usual = method(personal_epochs=3, personal_lr=0.2).personal_recipe(agreed)
    assert (usual.epochs, usual.lr, usual.schedule, usual.batch) == (3, 0.2, "step", 4)
    assert method(personal_schedule="cosine").personal_recipe(agreed).schedule == "cosine"
