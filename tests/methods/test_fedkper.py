"""FedKPer: Eq. 3 to 6 by hand, what travels and what does not, both components off, and sites without a score."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from tiny import (
    CPU,
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
from wardround.data.federation import Federation, Site
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn import evaluate
from wardround.learn.fit import Fit, Outputs, Recipe, Step, Teacher
from wardround.learn.trainer import train_one
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedkper import KnowledgePersonalisation, diversity
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, build, fresh

LN4 = math.log(4)
SPEC = NetSpec("cnn4", 3, 4, 8, width=2)


def fedkper(**own: Any) -> Any:
    return make("fedkper", own)


def step(student: Any, teacher: Any, labels: list[int]) -> Step:
    ours, theirs = torch.tensor(student, requires_grad=True), torch.tensor(teacher)
    nothing = torch.zeros(len(labels), 0)
    told = Outputs(nothing, ours)
    return Step(torch.arange(len(labels)), nothing, torch.tensor(labels), told, (Outputs(nothing, theirs),))


# Eq. 3 ----------------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand() -> None:
    """Two classes, the student at 1/2 : 1/2, the teacher at 3/4 : 1/4 and right.

    CE(q_k) = ln 2, CE(q_g) = ln 4/3, so λ = 1 / ln 4/3 = 3.476; KL(q_g ‖ q_k) = ln 2 − H(3/4) = 0.1308.
    """
    found = KnowledgePersonalisation(10.0, 1.0).loss(step([[0.0, 0.0]], [[math.log(3.0), 0.0]], [0]))
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert found.item() == pytest.approx(math.log(2) + kl / math.log(4 / 3), abs=1e-6)


def test_a_teacher_that_is_wrong_is_hardly_trusted() -> None:
    """The same teacher on the other label: λ = 1 / ln 4."""
    found = KnowledgePersonalisation(10.0, 1.0).loss(step([[0.0, 0.0]], [[math.log(3.0), 0.0]], [1]))
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert found.item() == pytest.approx(math.log(2) + kl / LN4, abs=1e-6)


@pytest.mark.parametrize("cap", [0.5, 10.0])
def test_trust_is_capped_also_in_a_teacher_that_is_never_wrong(cap: float) -> None:
    """A cross-entropy of exactly 0 makes λ infinite before the cap."""
    sure = step([[0.0, 0.0]], [[200.0, 0.0]], [0])
    assert F.cross_entropy(sure.teachers[0].logits, sure.labels).item() == 0
    found = KnowledgePersonalisation(cap, 1.0).loss(sure)
    assert found.item() == pytest.approx(math.log(2) + cap * math.log(2), rel=1e-6)


def test_lambda_is_of_the_batch_and_not_of_each_image() -> None:
    """CE(q_g) over both images is (ln 4/3 + ln 4) / 2, and one λ goes with both divergences."""
    found = KnowledgePersonalisation(10.0, 1.0).loss(step([[0.0, 0.0]] * 2, [[math.log(3.0), 0.0]] * 2, [0, 1]))
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert found.item() == pytest.approx(math.log(2) + kl / ((math.log(4 / 3) + LN4) / 2), abs=1e-6)


def test_the_gradient_flows_to_the_student_alone_and_not_through_lambda() -> None:
    """d/dz = (q_k − onehot) + λ·(q_k − q_g), by hand."""
    batch = step([[0.0, 0.0]], [[math.log(3.0), 0.0]], [0])
    KnowledgePersonalisation(10.0, 1.0).loss(batch).backward()  # type: ignore[no-untyped-call]
    trust = 1 / math.log(4 / 3)
    found = batch.outputs.logits.grad
    assert found is not None
    assert found[0].tolist() == pytest.approx([-0.5 - 0.25 * trust, 0.5 + 0.25 * trust], rel=1e-5)


def test_lambda_over_the_epoch_so_far() -> None:
    """Batches of 2 and 1 image with teacher losses ln 4/3 and ln 4: then λ is of their mean, and starts anew."""
    objective = KnowledgePersonalisation(100.0, 1.0, epoch=3)
    right = step([[0.0, 0.0]] * 2, [[math.log(3.0), 0.0]] * 2, [0, 0])
    wrong = step([[0.0, 0.0]], [[math.log(3.0), 0.0]], [1])
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)

    def trust(batch: Step) -> float:
        return (objective.loss(batch).item() - math.log(2)) / kl

    for _ in range(2):
        assert trust(right) == pytest.approx(1 / math.log(4 / 3), rel=1e-5)
        assert trust(wrong) == pytest.approx(3 / (2 * math.log(4 / 3) + LN4), rel=1e-5)


def test_the_temperature_softens_the_distillation_alone() -> None:
    batch = step([[0.0, 1.0]], [[2.0, 0.0]], [0])
    teacher, student = torch.tensor([1.0, 0.0]).softmax(0), torch.tensor([0.0, 0.5]).softmax(0)
    kl = float((teacher * (teacher / student).log()).sum())
    wrong = F.cross_entropy(torch.tensor([[2.0, 0.0]]), torch.tensor([0])).item()
    own = F.cross_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([0])).item()
    found = KnowledgePersonalisation(10.0, 2.0).loss(batch)
    assert found.item() == pytest.approx(own + min(10, 1 / wrong) * 4 * kl, rel=1e-5)


def test_two_epochs_against_a_plain_loop() -> None:
    """The cached teacher against one that is asked at every step, and autograd of Eq. 3 as it is written."""
    data, start = images(6, seed=5), fresh(SPEC, torch.Generator().manual_seed(3))
    other = fresh(SPEC, torch.Generator().manual_seed(4))
    recipe = Recipe(epochs=2, batch=6, lr=0.1, momentum=0.0, weight_decay=0.0, clip_norm=5.0)
    objective = KnowledgePersonalisation(10.0, 1.0)
    fit = Fit("x", SPEC, start, data, recipe, seed=1, objective=objective, teachers=(Teacher(SPEC, other),))
    found = train_one(fit, CPU).weights

    net, teacher = build(SPEC), build(SPEC)
    net.load_state_dict(start)
    teacher.load_state_dict(other)
    pixels = data.images.float() / 127.5 - 1
    for _ in range(2):
        with torch.no_grad():
            theirs = teacher(pixels).softmax(1)
        ours = net(pixels).log_softmax(1)
        wrong = -theirs.log()[torch.arange(6), data.labels].mean()
        divergence = (theirs * (theirs.log() - ours)).sum(1).mean()
        loss = -ours[torch.arange(6), data.labels].mean() + min(10.0, 1 / float(wrong)) * divergence
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient * min(1.0, 5.0 / norm))
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


# Eq. 4 to 6 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([5, 5, 5, 5], 1.0), ([4, 4, 0, 0], 0.5), ([0, 7, 0, 0], 0.0), ([2, 1, 1, 0], 0.75), ([0, 0, 0, 0], 0.0)],
)
def test_diversity_by_hand(counts: list[int], expected: float) -> None:
    """Of four classes: even 1, two of them 1/2, one 0, and 1/2 : 1/4 : 1/4 is 1.5 bits of 2."""
    assert diversity(torch.tensor(counts)) == pytest.approx(expected, abs=1e-9)


def test_a_site_with_one_of_two_classes_has_no_negative_diversity() -> None:
    """Eq. 5 as printed gives −1e-12 / ln 2 there, and Eq. 6 with its ε a negative weight."""
    printed = -1.0 * math.log(1 + 1e-12) / math.log(2)
    assert 1e-12 + printed < 0
    assert diversity(torch.tensor([9, 0])) == 0.0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
@examples(deadline=None, max_examples=25)
def test_diversity_lies_in_0_to_1_and_does_not_know_classes_apart(counts: list[int]) -> None:
    found = diversity(torch.tensor(counts))
    assert 0 <= found <= 1
    assert found == pytest.approx(diversity(torch.tensor(counts[::-1])), abs=1e-12)


def site_of(labels: list[int]) -> Federation:
    """One site with these labels and a second one that is large and even."""
    data = federation((8, 8))
    first = replace(data.sites[0], train=images(len(labels), seed=1, labels=labels))
    return replace(data, sites=(first, data.sites[1]))


def answered(method: Any, data: Federation, **changes: Any) -> tuple[Site, Any]:
    """The first site and its answer in the first round."""
    ctx = context(study(data, method=method.name, **changes))
    requests = method.ask(ctx, method.begin(ctx))
    site = data.sites[0]
    return site, drive(ctx, method.answer(ctx, site, requests[site.name], State()))


@pytest.mark.parametrize(("profile", "epsilon"), [("paper", 1e-12), ("code", 1e-6)])
@pytest.mark.parametrize("labels", [[0, 1, 2, 3] * 3, [0, 0, 1, 1, 1, 0], [2, 2, 2, 2]])
def test_the_score_is_accuracy_after_training_times_diversity(profile: str, epsilon: float, labels: list[int]) -> None:
    site, answer = answered(fedkper(profile=profile), site_of(labels), train={"epochs": 3})
    (member,) = answer.trained.members
    net = build(member.spec)
    net.load_state_dict(member.weights)
    with torch.no_grad():
        right = net.eval()(site.train.images.float() / 127.5 - 1).argmax(1) == site.train.labels
    share = {12: 1.0, 6: 0.5, 4: 0.0}[len(labels)]
    assert answer.bundle.groups["score"]["score"].dtype == torch.float64
    assert float(answer.bundle.groups["score"]["score"]) == pytest.approx(
        float(right.float().mean()) * (epsilon + share)
    )


def test_no_count_and_no_accuracy_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedkper())
    up = [bundle for bundle in crossed if bundle.envelope.kind == "answer"]
    assert {tuple(sorted(bundle.groups)) for bundle in up} == {("counters", "parameters", "score", "statistics")}
    assert {tuple(bundle.groups["score"]) for bundle in up} == {("score",)}
    assert all("score" not in bundle.groups for bundle in crossed if bundle.envelope.kind != "answer")


def test_the_declaration_says_what_the_score_reveals() -> None:
    (score,) = (g for g in fedkper().payload(study(), "site-1").up if g.name == "score")
    assert "training images that the site's model gets right" in score.what
    assert "holds almost one class alone" in score.what
    assert score.max_bytes == 8


# The average ----------------------------------------------------------------------------------------------------------


def answer(site: str, score: float, w: float) -> Bundle:
    groups: dict[str, dict[str, Tensor]] = {
        "parameters": {"w": torch.tensor([w])},
        "score": {"score": torch.tensor(score, dtype=torch.float64)},
    }
    return Bundle(Envelope("answer", "study", "fedkper", site, 0), groups)


def absorbed(*scores_and_weights: tuple[float, float]) -> tuple[float, list[str]]:
    notes: list[str] = []
    ctx = replace(context(study(method="fedkper")), note=notes.append)
    answers = {f"site-{i}": answer(f"site-{i}", *pair) for i, pair in enumerate(scores_and_weights)}
    (state,) = fedkper().absorb(ctx, State({"model": {"w": torch.tensor([9.0])}}), answers)
    return float(state.groups["model"]["w"]), notes


def test_scores_are_the_weights() -> None:
    """(0.75·4 + 0.25·8) / 1 = 5, and images have no say."""
    assert absorbed((0.75, 4.0), (0.25, 8.0)) == (5.0, [])


def test_a_site_with_one_class_has_next_to_no_say() -> None:
    found, notes = absorbed((0.5, 4.0), (1e-12, 8.0))
    assert found == pytest.approx(4.0, abs=1e-6)
    assert notes == []


@pytest.mark.parametrize("score", [0.0, math.nan, -1.0, math.inf])
def test_where_no_score_says_anything_all_count_alike(score: float) -> None:
    """0/0 would be NaN weights, as in the public code; sizes are not known here."""
    found, notes = absorbed((score, 4.0), (0.0, 8.0))
    assert found == 6.0
    assert notes == ["no site has a score above 0 in round 1: all that answered count alike in its average"]


def test_one_score_that_is_no_number_counts_as_none() -> None:
    assert absorbed((math.nan, 4.0), (0.5, 8.0)) == (8.0, [])


def test_a_site_too_small_to_train_has_score_0(tmp_path: Path) -> None:
    """Batch norm cannot train on one image: the average is as without that site."""
    _, skipped = answered(fedkper(), site_of([1]))
    assert float(skipped.bundle.groups["score"]["score"]) == 0
    coordinate(tmp_path / "with", fedkper(), federation((10, 1)))
    coordinate(tmp_path / "without", fedkper(), federation((10,)))
    assert predictor_bytes(tmp_path / "with") == predictor_bytes(tmp_path / "without")


@pytest.mark.parametrize("over", ["batch", "epoch", "site"])
def test_a_site_without_images_answers(over: str) -> None:
    _, empty = answered(fedkper(lambda_over=over), federation((0, 8)))
    assert float(empty.bundle.groups["score"]["score"]) == 0


# Components and profiles ----------------------------------------------------------------------------------------------


def test_both_components_off_is_fedavg_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "off", fedkper(knowledge=False, score=False))
    assert {"size"} == {n for b in crossed for n in b.groups} - {"parameters", "statistics", "counters"}
    coordinate(tmp_path / "fedavg", FedAvg())
    assert predictor_bytes(tmp_path / "off") == predictor_bytes(tmp_path / "fedavg")


def test_each_component_and_the_default_act(tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "default": {},
        "knowledge": {"score": False},
        "score": {"knowledge": False},
        "none": {"knowledge": False, "score": False},
        "code": {"profile": "code"},
        "cap": {"cap": 0.1},
        "epoch": {"lambda_over": "epoch"},
        "site": {"lambda_over": "site"},
    }
    found = []
    for name, own in variants.items():
        coordinate(tmp_path / name, fedkper(**own), train={"epochs": 2, "lr": 0.2})
        found.append(predictor_bytes(tmp_path / name)["shared.safetensors"])
    assert len(set(found)) == len(variants)


@pytest.mark.parametrize(
    ("own", "train", "clip"),
    [
        ({}, {}, 5.0),
        ({"profile": "code"}, {}, None),
        ({"knowledge": False}, {}, None),
        ({"score": False}, {}, 5.0),
        ({}, {"clip_norm": 2.0}, 2.0),
        ({"profile": "code"}, {"clip_norm": 2.0}, 2.0),
    ],
)
def test_what_is_clipped(
    own: dict[str, Any], train: dict[str, Any], clip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedkper(**own), rounds=1, train=train)
    assert {fit.recipe.clip_norm for fit in fits} == {clip}


def test_the_teacher_is_the_received_model_and_looks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per site and round: one pass of the teacher and one of the trained model, however many epochs."""
    fits = watch_fits(monkeypatch)
    passes: list[int] = []
    outputs = evaluate.batch_outputs

    def counted(net: Any, pixels: Tensor, precision: str) -> Outputs:
        passes.append(len(pixels))
        return outputs(net, pixels, precision)

    monkeypatch.setattr(evaluate, "batch_outputs", counted)
    ctx = context(study(federation((8,)), method="fedkper", train={"epochs": 4}))
    method, site = fedkper(), federation((8,)).sites[0]
    requests = method.ask(ctx, method.begin(ctx))
    drive(ctx, method.answer(ctx, site, requests["site-1"], State()))
    assert passes == [8, 8]
    coordinate(tmp_path / "run", fedkper())
    for fit in fits:
        (teacher,) = fit.teachers
        assert teacher.weights.keys() == fit.start.keys()
        assert all(torch.equal(teacher.weights[name], fit.start[name]) for name in fit.start)


def test_only_those_asked_work_and_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedkper(), participants=0.34, rounds=3)
    asked = [site for round in range(3) for site in study(participants=0.34).participants(round)]
    assert [fit.label.partition(",")[0] for fit in fits] == asked
    assert not list((tmp_path / "run" / "checkpoint").glob("memory-*"))


def test_counters_are_the_largest_and_whole_numbers(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", fedkper(), federation((11, 8, 6)), rounds=1)
    weights = deployed(tmp_path / "run", "site-1").members[0].weights
    counters = [t for name, t in weights.items() if name.endswith("num_batches_tracked")]
    assert counters
    assert {(t.dtype, int(t)) for t in counters} == {(torch.int64, 3)}  # ⌈11 / 4⌉ steps


def test_defaults() -> None:
    assert fedkper().settings.model_dump() == {
        "profile": "paper",
        "knowledge": True,
        "score": True,
        "cap": 10.0,
        "lambda_over": "batch",
        "temperature": 1.0,
    }


@pytest.mark.parametrize(
    ("own", "key"), [({"profile": "both"}, "profile"), ({"cap": 0}, "cap"), ({"lambda_over": "client"}, "lambda_over")]
)
def test_refuses_what_is_none(own: dict[str, Any], key: str) -> None:
    with pytest.raises(BadInput, match=rf"^fedkper\.{key} = "):
        fedkper(**own)
