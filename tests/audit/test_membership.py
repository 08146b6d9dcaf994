"""Membership attacks: scores by hand, and both attacks against a network that learned its images by heart."""

import math
from functools import cache
from typing import NamedTuple

import pytest
import torch

import tiny
from wardround.audit.membership import (
    Membership,
    Shadows,
    confidence,
    lira_offline,
    loss_threshold,
    losses,
    offline_scores,
    shadow_fits,
    train_shadows,
)
from wardround.audit.roc import roc
from wardround.data.imageset import ImageSet, merge
from wardround.data.phantoms import phantoms
from wardround.errors import BadInput, SiteFailed
from wardround.learn.device import Device
from wardround.learn.fit import Fit, Recipe, weights_hash
from wardround.learn.predictor import Member, Predictor
from wardround.learn.trainer import train_one
from wardround.models import NetSpec, fresh
from wardround.streams import Streams

CPU = Device(torch.device("cpu"), 1)
SPEC = NetSpec("small", 3, 4, 8, width=2)


# Scores by hand -------------------------------------------------------------------------------------------------------


def test_confidence_is_the_logit_of_the_true_class() -> None:
    """Scores ln 6, ln 3, ln 1: probabilities 0.6, 0.3, 0.1; odds 6/4 and 3/7."""
    scores = torch.tensor([[6.0, 3.0, 1.0]]).log().repeat(2, 1)
    found = confidence(scores, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([math.log(6 / 4), math.log(3 / 7)], rel=1e-6)


def test_confidence_survives_certainty() -> None:
    """1 − p is e⁻²⁰⁰ here, and a softmax would have rounded it to 0."""
    assert confidence(torch.tensor([[200.0, 0.0]]), torch.tensor([0])).tolist() == [200.0]


def test_offline_scores_by_hand() -> None:
    """Shadows 1 and 3 (mean 2, variance 2), and 0 and 8 (mean 4, variance 32)."""
    shadows = torch.tensor([[1.0, 0.0], [3.0, 8.0]], dtype=torch.float64)
    target = torch.tensor([4.0, 4.0], dtype=torch.float64)
    assert offline_scores(target, shadows, "each").tolist() == pytest.approx([2 / math.sqrt(2), 0.0])
    assert offline_scores(target, shadows, "shared").tolist() == pytest.approx([2 / math.sqrt(17), 0.0])


def test_one_shadow_has_no_spread_and_still_ranks() -> None:
    found = offline_scores(torch.tensor([1.0, 5.0]), torch.tensor([[0.0, 1.0]]))
    assert found.tolist() == [1.0, 4.0]


def test_shadows_that_agree_do_not_divide_by_zero() -> None:
    found = offline_scores(torch.tensor([1.0, 2.0]), torch.ones(3, 2), "each")
    assert found.isfinite().all()
    assert found[0] == 0 < found[1]


def constant(probabilities: list[float]) -> Predictor:
    return Predictor(4, log_prior=torch.tensor(probabilities).log())


def test_losses_and_yeoms_advantage_by_hand() -> None:
    """A constant predictor: classes 0 to 3 lose ln 2, ln 4, ln 8, ln 8.

    Members 0, 0, 0, 1 lose 5/4 ln 2 in the mean, so that three of four are called members; of others 0, 1, 2, 3 one.
    """
    target = constant([0.5, 0.25, 0.125, 0.125])
    members, others = tiny.images(4, labels=[0, 0, 0, 1]), tiny.images(4, seed=1, labels=[0, 1, 2, 3])
    assert losses(target, others, CPU).tolist() == pytest.approx([math.log(x) for x in (2, 4, 8, 8)])
    found = loss_threshold(target, members, others, CPU)
    assert found.advantage == pytest.approx(3 / 4 - 1 / 4)
    assert found.curve.auc == pytest.approx((3 * (0.5 + 3) + (0.5 + 2)) / 16)


def test_lira_against_constant_shadows_by_hand() -> None:
    """A target that is surer of class 0 than the shadow is, and less sure of class 1."""
    target, shadow = constant([0.7, 0.1, 0.1, 0.1]), constant([0.25] * 4)
    members, others = tiny.images(2, labels=[0, 0]), tiny.images(3, seed=1, labels=[1, 1, 1])
    found = lira_offline(target, members, others, [shadow, shadow], CPU)
    assert found.curve.auc == 1.0
    assert found.curve.thresholds[1] > 0 > found.curve.thresholds[-1]


# The record -----------------------------------------------------------------------------------------------------------


def test_few_others_are_said_to_be_few() -> None:
    record = Membership("loss-threshold", "words", roc(torch.tensor([2.0, 0.0]), torch.tensor([1.0] * 50))).attack(7)
    assert (record.seed, record.figure("auc").n, record.figure("smallest_fpr").value) == (7, 52, 0.02)
    assert record.figure("tpr_at_fpr_0.001").value == 0.5
    assert "smallest false positive rate above 0 is 2.00%" in record.findings[0]
    assert record.roc == ((0.0, 0.0), (0.0, 0.5), (1.0, 0.5), (1.0, 1.0))
    assert [figure.name for figure in record.figures] == ["auc", "tpr_at_fpr_0.001", "smallest_fpr"]


def test_a_thousand_others_need_no_excuse() -> None:
    assert Membership("x", "words", roc(torch.ones(1), torch.zeros(1000)), 0.5).attack(0).findings == ()


# Shadows --------------------------------------------------------------------------------------------------------------


def test_shadow_fits_belong_to_the_seed() -> None:
    auxiliary, how = tiny.images(20), Shadows(3, 8)
    one, again = (shadow_fits(SPEC, Recipe(1), auxiliary, how, Streams(5)) for _ in range(2))
    other = shadow_fits(SPEC, Recipe(1), auxiliary, how, Streams(6))
    assert [fit.ingredients() for fit in one] == [fit.ingredients() for fit in again]
    assert one[0].ingredients() != other[0].ingredients()
    assert len({fit.data.sha256() for fit in one}) == len({weights_hash(fit.start) for fit in one}) == 3
    for fit in one:
        assert len(fit.data) == len({image.numpy().tobytes() for image in fit.data.images}) == 8


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (Shadows(0, 8), "0 shadow models of 8 images cannot be trained; ask for more"),
        (Shadows(1, 1), "1 shadow models of 1 images cannot be trained; ask for more"),
        (Shadows(1, 21), "want 21 auxiliary images each, and there are 20; give more"),
    ],
)
def test_impossible_shadows_are_refused(how: Shadows, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        shadow_fits(SPEC, Recipe(1), tiny.images(20), how, Streams(0))


def test_shadows_that_saw_an_audited_image_are_refused() -> None:
    auxiliary, audited = tiny.images(10, seed=1), tiny.images(10, seed=2)
    both = merge([audited, auxiliary.take(torch.tensor([3, 4]))])
    with pytest.raises(BadInput, match="2 auxiliary images are among the audited ones"):
        train_shadows(SPEC, Recipe(1), auxiliary, both, Shadows(1, 5), Streams(0), CPU)


def test_a_shadow_that_diverges_says_so() -> None:
    with pytest.raises(SiteFailed, match="shadow 1"):
        train_shadows(SPEC, Recipe(3, lr=1e30), tiny.images(8), tiny.images(8, 1), Shadows(1, 8), Streams(0), CPU)


def test_attacks_without_images_or_shadows_are_refused() -> None:
    target, none, some = constant([0.25] * 4), tiny.images(4).take(torch.arange(0)), tiny.images(4)
    for attack in (lambda: loss_threshold(target, none, some, CPU), lambda: lira_offline(target, some, none, [], CPU)):
        with pytest.raises(BadInput, match="hold some images out"):
            attack()
    with pytest.raises(BadInput, match="0 shadow models are too few"):
        lira_offline(target, some, some, [], CPU)
    with pytest.raises(BadInput, match="1 shadow models are too few"):
        lira_offline(target, some, some, [target], CPU, "each")


def test_images_of_another_study_are_refused() -> None:
    target = Predictor(4, (Member(SPEC, fresh(SPEC, torch.Generator().manual_seed(0))),))
    small, large = tiny.images(4), tiny.images(4, size=9)
    message = (
        "the network takes 3×8×8 images of 4 classes, and these are 3×9×9 of 4; give the images of the network's own"
    )
    for attack in (
        lambda: loss_threshold(target, small, large, CPU),
        lambda: lira_offline(target, large, small, [target], CPU),
        lambda: train_shadows(SPEC, Recipe(1), large, small, Shadows(1, 2), Streams(0), CPU),
    ):
        with pytest.raises(BadInput, match=message):
            attack()


# From end to end ------------------------------------------------------------------------------------------------------


class Overtrained(NamedTuple):
    target: Predictor
    spec: NetSpec
    recipe: Recipe
    members: ImageSet
    strangers: ImageSet
    auxiliary: ImageSet
    others: ImageSet


@cache
def overtrained() -> Overtrained:
    """A small network that knows 500 phantoms by heart."""
    drawn = phantoms(1400, 0, 500)
    parts = [drawn.train.take(torch.arange(*ends)) for ends in ((0, 500), (500, 1000), (1000, 1400))]
    spec, recipe, streams = NetSpec("cnn4", 3, 8, 28, width=8), Recipe(30, batch=32, lr=0.02), Streams(0)
    fit = Fit("local", spec, fresh(spec, streams.torch("start")), parts[0], recipe, streams.number("fit"))
    weights = train_one(fit, CPU.torch).weights
    return Overtrained(Predictor(8, (Member(spec, weights),)), spec, recipe, *parts, drawn.test)


def test_a_model_that_learned_by_heart_is_caught_by_its_losses() -> None:
    run = overtrained()
    found = loss_threshold(run.target, run.members, run.others, CPU)
    assert found.curve.auc >= 0.7
    assert found.advantage is not None
    assert found.advantage > 0.3


def test_images_it_never_saw_are_not() -> None:
    """The deviation of the area is about 0.018 with 500 images on each side."""
    run = overtrained()
    assert 0.45 < loss_threshold(run.target, run.strangers, run.others, CPU).curve.auc < 0.55


def test_lira_catches_it_with_two_shadows() -> None:
    run = overtrained()
    audited = merge([run.members, run.strangers, run.others])
    shadows = train_shadows(run.spec, run.recipe, run.auxiliary, audited, Shadows(2, 250), Streams(1), CPU)
    found = lira_offline(run.target, run.members, run.others, shadows, CPU)
    assert found.curve.auc >= 0.7
    assert 0.45 < lira_offline(run.target, run.strangers, run.others, shadows, CPU).curve.auc < 0.55
