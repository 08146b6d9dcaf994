"""FedMR: both terms by hand and against plain loops, prototypes weighted by counts, and what travels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import (
    CPU,
    context,
    coordinate,
    drive,
    federation,
    images,
    predictor_bytes,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.data.federation import Federation, Site
from wardround.errors import BadInput, SiteFailed
from wardround.exchange.bundle import LABEL_COUNTS, Bundle, Envelope
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Objective, Outputs, Recipe, Step
from wardround.learn.prototypes import Prototypes
from wardround.learn.trainer import train_one
from wardround.methods import fedmr as module
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedmr import PROTOTYPES, FedMR, Reshaped, inter, intra, mean_prototypes
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, fresh

PLAIN = {"parameters", "statistics", "counters", "size"}


def fedmr(**own: Any) -> Any:
    return make("fedmr", own)


# Within a class -------------------------------------------------------------------------------------------------------


def test_the_correlation_by_hand() -> None:
    """Three images, features (1, 2, 3) and (1, 3, 2): the correlation is 1/2, its square 1/4."""
    features = torch.tensor([[1.0, 1.0], [2.0, 3.0], [3.0, 2.0]])
    assert intra(features, torch.zeros(3, dtype=torch.int64), 4).item() == pytest.approx(0.25, rel=1e-4)


def test_classes_are_looked_at_one_by_one_and_averaged() -> None:
    """Class 0 as above, class 2 with the perfectly correlated (0, 1, 2) and (0, −2, −4): (1/4 + 1)/2."""
    features = torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 3.0], [1.0, -2.0], [3.0, 2.0], [2.0, -4.0]])
    labels = torch.tensor([0, 2, 0, 2, 0, 2])
    assert intra(features, labels, 4).item() == pytest.approx(0.625, rel=1e-4)


def test_a_class_with_one_image_contributes_nothing() -> None:
    features = torch.tensor([[1.0, 1.0], [2.0, 3.0], [3.0, 2.0], [50.0, -7.0]])
    assert intra(features, torch.tensor([0, 0, 0, 1]), 4).item() == pytest.approx(0.25, rel=1e-4)


def test_a_batch_of_single_images_gives_zero_and_no_nan() -> None:
    """Where the public code returns a number that is no tensor, and stops."""
    features = torch.rand(3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = intra(features, torch.tensor([0, 1, 2]), 4)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.item() == 0
    assert gradient.abs().max() == 0


def test_dead_features_have_no_correlation_and_a_finite_gradient() -> None:
    features = torch.tensor([[1.0, 0.0, 1.0], [2.0, 0.0, 3.0], [3.0, 0.0, 2.0]], requires_grad=True)
    loss = intra(features, torch.zeros(3, dtype=torch.int64), 1)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.item() == pytest.approx(0.25 / 3, rel=1e-4)
    assert torch.isfinite(gradient).all()


def slow_intra(features: Tensor, labels: Tensor) -> Tensor:
    """Class by class, with the d × d matrix."""
    found = []
    for label in range(int(labels.max()) + 1):
        own = features[labels == label]
        if len(own) < 2:
            continue
        standard = (own - own.mean(dim=0)) / (own.var(dim=0) + module.EPSILON).sqrt()
        matrix = standard.T @ standard / (len(own) - 1)
        off = matrix[~torch.eye(len(matrix), dtype=torch.bool)]
        found.append(off.square().mean())
    return torch.stack(found).mean() if found else torch.zeros(())


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 16), st.integers(2, 7), st.integers(1, 4), st.integers(0, 1000))
def test_the_products_of_images_give_what_the_matrix_gives(n: int, width: int, classes: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(n, width, generator=draw).requires_grad_()
    labels = torch.randint(0, classes, (n,), generator=draw)
    found, expected = intra(features, labels, classes), slow_intra(features, labels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert -1e-5 <= found.item() <= 1 + 1e-5
    if expected.requires_grad:
        gradients = [torch.autograd.grad(loss, features)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-3)


# Between classes ------------------------------------------------------------------------------------------------------

CORNERS = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
ALL = Prototypes(CORNERS, torch.tensor([True, True, True]))
WITHOUT_ONE = Prototypes(CORNERS, torch.tensor([True, False, True]))


def test_the_margin_by_hand() -> None:
    """An image of class 0 at (3, 0): 3 from its own, 0 from the second, 5 from the third.

    max(0, 3 − 0) and max(0, 3 − 5): 3/2 on average; with a margin of 3 it is 6 and 1, 7/2.
    """
    feature, label = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
    assert inter(feature, label, ALL, 0.0).item() == pytest.approx(1.5, abs=1e-5)
    assert inter(feature, label, ALL, 3.0).item() == pytest.approx(3.5, abs=1e-5)


def test_an_image_at_its_own_prototype_is_left_alone() -> None:
    feature = torch.tensor([[3.0, 0.0]], requires_grad=True)
    loss = inter(feature, torch.tensor([1]), ALL, 0.0)
    (gradient,) = torch.autograd.grad(loss, feature)
    assert loss.item() == 0
    assert gradient.tolist() == [[0.0, 0.0]]


def test_a_class_without_a_prototype_is_left_out_on_both_sides() -> None:
    """The image of before, with the nearer class unknown: max(0, 3 − 5), and with a margin of 3 it is 1.

    The second image is of the unknown class, and would otherwise count by where no prototype is.
    """
    features, labels = torch.tensor([[3.0, 0.0], [9.0, 9.0]]), torch.tensor([0, 1])
    assert inter(features, labels, WITHOUT_ONE, 0.0).item() == 0
    assert inter(features, labels, WITHOUT_ONE, 3.0).item() == pytest.approx(1.0, abs=1e-5)


def test_without_prototypes_it_is_zero_and_has_no_nan() -> None:
    features = torch.zeros(2, 2, requires_grad=True)
    loss = inter(features, torch.tensor([0, 1]), Prototypes.none(3, 2), 1.0)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.item() == 0
    assert gradient.abs().max() == 0


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.floats(0, 2), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 1000))
def test_inter_against_a_plain_loop(n: int, margin: float, known: list[bool], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    features, prototypes = torch.randn(n, 3, generator=draw), torch.randn(4, 3, generator=draw)
    labels = torch.randint(0, 4, (n,), generator=draw)
    terms = [
        max(0.0, margin + (z - prototypes[y]).norm().item() - (z - prototypes[c]).norm().item())
        for z, y in zip(features, labels.tolist(), strict=True)
        for c in range(4)
        if c != y and known[y] and known[c]
    ]
    found = inter(features, labels, Prototypes(prototypes, torch.tensor(known)), margin).item()
    assert found == pytest.approx(sum(terms) / len(terms) if terms else 0.0, abs=1e-4)


def test_the_loss_is_the_sum_of_three() -> None:
    draw = torch.Generator().manual_seed(0)
    features, logits = torch.randn(6, 3, generator=draw), torch.randn(6, 4, generator=draw)
    labels = torch.arange(6) % 4
    prototypes = Prototypes(torch.randn(4, 3, generator=draw), torch.ones(4, dtype=torch.bool))
    step = Step(torch.arange(6), torch.zeros(6), labels, Outputs(features, logits), ())
    expected = (
        F.cross_entropy(logits, labels)
        + 2 * slow_intra(features, labels)
        + 3 * inter(features, labels, prototypes, 0.5)
    )
    torch.testing.assert_close(Reshaped(2.0, 3.0, 0.5, prototypes).loss(step), expected, rtol=1e-4, atol=1e-5)


def test_training_decorrelates() -> None:
    """What the term is for: after the same steps, features of a class are less correlated with it than without."""
    spec, data = NetSpec("cnn4", 3, 4, 8, width=2), images(24, seed=3)
    start = fresh(spec, torch.Generator().manual_seed(1))

    def correlation(mu1: float) -> float:
        objective = Reshaped(mu1, 0.0, 0.0, Prototypes.none(4, 32))
        fit = Fit("x", spec, start, data, Recipe(epochs=10, batch=24, lr=0.05), seed=0, objective=objective)
        features = network_outputs(spec, train_one(fit, CPU).weights, data.images, CPU).features
        return float(slow_intra(features, data.labels))

    assert correlation(5.0) < 0.8 * correlation(0.0)


# Prototypes -----------------------------------------------------------------------------------------------------------


def sent(site: str, counts: list[int], *means: float) -> Bundle:
    """An answer with features of one number; of classes without images it says nothing."""
    known = torch.tensor(counts) > 0
    groups = {
        "parameters": {"w": torch.zeros(1)},
        "size": {"images": torch.tensor(sum(counts))},
        LABEL_COUNTS: {"counts": torch.tensor(counts)},
        PROTOTYPES: Prototypes(torch.tensor(means).unsqueeze(1), known).tensors(),
    }
    return Bundle(Envelope("answer", "study", "fedmr", site, 0), groups)


def numbers(prototypes: Prototypes) -> list[float | None]:
    pairs = zip(prototypes.means.flatten().tolist(), prototypes.known.tolist(), strict=True)
    return [mean if known else None for mean, known in pairs]


def test_prototypes_weigh_by_counts_of_the_class() -> None:
    """(1·2 + 3·6)/4 = 5 for the first class, whatever the sites' sizes; the next two come from one site each."""
    one, two = sent("site-1", [1, 90, 0, 0], 2.0, 8.0, 0.0, 0.0), sent("site-2", [3, 0, 1, 0], 6.0, 0.0, -1.0, 0.0)
    assert numbers(mean_prototypes({"site-1": one, "site-2": two})) == [5.0, 8.0, -1.0, None]


def test_a_class_that_nobody_has_this_time_keeps_its_prototype() -> None:
    """And one that nobody ever had has none."""
    before = mean_prototypes({"a": sent("a", [1, 1, 0, 0], 2.0, 8.0, 0.0, 0.0)})
    state = State.from_bytes(State({"model": {}, PROTOTYPES: before.tensors()}).to_bytes())
    now = sent("site-2", [4, 0, 0, 0], 6.0, 0.0, 0.0, 0.0)
    (after,) = fedmr().absorb(context(study()), state, {"site-2": now})
    assert numbers(Prototypes.of(after.groups[PROTOTYPES])) == [6.0, 8.0, None, None]


def test_a_mean_of_a_class_of_which_a_site_counts_no_image_has_no_say() -> None:
    """Whatever it says: a prototype needs an image that it was made from."""
    false = sent("site-1", [2, 0, 0, 0], 3.0, 99.0, 0.0, 0.0)
    false.group(PROTOTYPES)["known"][1] = True
    assert numbers(mean_prototypes({"site-1": false})) == [3.0, None, None, None]


@pytest.mark.parametrize("missing", [PROTOTYPES, LABEL_COUNTS])
def test_means_without_counts_say_nothing(missing: str) -> None:
    whole, answer = sent("a", [2, 0, 0, 0], 3.0, 0.0, 0.0, 0.0), sent("b", [2, 0, 0, 0], 5.0, 0.0, 0.0, 0.0)
    half = replace(answer, groups={name: tensors for name, tensors in answer.groups.items() if name != missing})
    assert numbers(mean_prototypes({"a": whole, "b": half})) == [3.0, None, None, None]
    assert mean_prototypes({"b": half}) is None


def test_a_round_in_which_nobody_tells_its_means_keeps_the_prototypes() -> None:
    before, answer = Prototypes(torch.rand(4, 1), torch.ones(4, dtype=torch.bool)), sent("b", [2, 0, 0, 0], 0, 0, 0, 0)
    silent = replace(answer, groups={name: answer.groups[name] for name in ("parameters", "size")})
    state = State({"model": {}, PROTOTYPES: before.tensors()})
    (after,) = fedmr().absorb(context(study()), state, {"b": silent})
    assert torch.equal(after.groups[PROTOTYPES]["means"], before.means)


def skewed() -> Federation:
    """Classes 0 and 1 at one site, 1 and 2 at another; nobody has class 3."""
    base = federation((6, 6))
    trains = images(6, seed=1, labels=[0, 1, 0, 1, 0, 1]), images(6, seed=2, labels=[1, 2, 1, 2, 1, 2])
    sites = [Site(s.name, train, s.val, s.test) for s, train in zip(base.sites, trains, strict=True)]
    return Federation(**{**vars(base), "sites": tuple(sites)})


def test_what_goes_up_and_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and means of a site's own classes go up; from round 2 on, prototypes of all classes come down but one."""
    crossed, fits = watch_bundles(monkeypatch), watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedmr(), skewed(), rounds=2)
    answers = {b.envelope.site: b for b in crossed if b.envelope.kind == "answer" and b.envelope.round == 0}
    one, two = (Prototypes.of(answers[site].group(PROTOTYPES)) for site in ("site-1", "site-2"))
    assert one.known.tolist() == [True, True, False, False]
    assert two.known.tolist() == [False, True, True, False]
    assert one.means[2:].abs().max() == 0
    assert answers["site-1"].group(LABEL_COUNTS)["counts"].tolist() == [3, 3, 0, 0]
    requests = [b for b in crossed if b.envelope.kind == "request"]
    assert [PROTOTYPES in b.groups for b in requests] == [False, False, True, True]
    known: list[list[bool]] = [fit.objective.prototypes.known.tolist() for fit in fits]  # type: ignore[attr-defined]
    assert known == [[False] * 4] * 2 + [[True, True, True, False]] * 2
    shared = Prototypes.of(requests[-1].group(PROTOTYPES)).means
    torch.testing.assert_close(
        shared, torch.stack([one.means[0], (one.means[1] + two.means[1]) / 2, two.means[2], 0 * one.means[3]])
    )
    assert torch.equal(fits[-1].objective.prototypes.means, shared)  # type: ignore[attr-defined]


def test_means_are_those_of_the_trained_network() -> None:
    data, method = federation((9,)), fedmr()
    ctx = context(study(data))
    requests = method.ask(ctx, method.begin(ctx))
    answer = drive(ctx, method.answer(ctx, data.sites[0], requests["site-1"], State()))
    (member,) = answer.trained.members
    features = network_outputs(member.spec, member.weights, data.sites[0].train.images, CPU).features
    for label in range(4):
        expected = features[data.sites[0].train.labels == label].mean(dim=0)
        torch.testing.assert_close(answer.bundle.group(PROTOTYPES)["means"][label], expected)


def test_a_site_too_small_to_train_sends_no_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedmr(), federation((9, 1)), rounds=2)
    small = [b for b in crossed if b.envelope.kind == "answer" and b.envelope.site == "site-2"]
    assert [set(b.groups) for b in small] == [PLAIN, PLAIN]


def test_what_is_not_finite_does_not_leave_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = Outputs(torch.full((11, 8), float("nan")), torch.zeros(11, 4))
    monkeypatch.setattr(module, "network_outputs", lambda *_: nan)
    method, ctx = fedmr(), context(study())
    requests = method.ask(ctx, method.begin(ctx))
    with pytest.raises(SiteFailed, match="its prototypes would hold NaN or infinite values; use a smaller"):
        drive(ctx, method.answer(ctx, federation().sites[0], requests["site-1"], State()))


# Limits ---------------------------------------------------------------------------------------------------------------


def test_without_weights_it_is_fedavg_bit_for_bit_and_nothing_more_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    crossed, fits = watch_bundles(monkeypatch), watch_fits(monkeypatch)
    coordinate(tmp_path / "fedmr", fedmr(mu1=0, mu2=0))
    assert predictor_bytes(tmp_path / "fedmr") == predictor_bytes(tmp_path / "fedavg")
    assert {group for bundle in crossed for group in bundle.groups} == PLAIN
    assert {type(fit.objective) for fit in fits} == {Objective}


def test_without_the_inter_term_nothing_more_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedmr(mu2=0))
    assert {group for bundle in crossed for group in bundle.groups} == PLAIN


def test_each_term_acts_by_default(tmp_path: Path) -> None:
    assert (FedMR().settings.mu1, FedMR().settings.mu2, FedMR().settings.margin) == (0.1, 0.1, 0.0)
    runs = {"fedavg": FedAvg(), "both": fedmr(), "intra": fedmr(mu2=0), "inter": fedmr(mu1=0)}
    for name, method in runs.items():
        coordinate(tmp_path / name, method, rounds=3)
    assert len({next(iter(predictor_bytes(tmp_path / name).values())) for name in runs}) == 4


@pytest.mark.parametrize("key", ["mu1", "mu2", "margin"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), "strong"])
def test_refuses_settings_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"^fedmr\.{key} = "):
        fedmr(**{key: value})
