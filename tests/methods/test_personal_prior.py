"""From a shared predictor to a site's own: its prior, what its validation images ask for, and honest probabilities."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import federation, images
from wardround.data.federation import Site
from wardround.learn.predictor import Member, Predictor
from wardround.measure import calibration_gap
from wardround.methods import personal_prior
from wardround.methods.personal_prior import (
    NUDGE,
    SHARPER,
    Judge,
    Offer,
    Trial,
    best_factor,
    lowering,
    lowest_familiar,
    right_answers,
    sharpened,
    surely_right,
)
from wardround.models import NetSpec, fresh

SPEC = NetSpec("small", 3, 2, 8, width=2)
OWN = Member(SPEC, fresh(SPEC, torch.Generator().manual_seed(0)))
SHARED = Predictor(2, (OWN, OWN))


def double(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def many(*rows: object) -> Tensor:
    """Ten times these: as few images as may judge."""
    return double(*rows).repeat(10, 1)


def site(labels: list[int], train: list[int]) -> Site:
    """A site with these validation and training labels, two classes."""
    of = federation((2,), classes=2).sites[0]
    own = [images(len(y), labels=y, classes=2) for y in (train, labels)]
    return Site("site-1", *own, of.test)


FAR = torch.full((4,), 99.0, dtype=torch.float64)


def labelled(*labels: int) -> Tensor:
    return torch.tensor(labels)


# What is taken off a class --------------------------------------------------------------------------------------------


def test_a_class_is_lowered_no_further_than_it_must_be() -> None:
    """All images are of class 0. One is called 1 by a margin of 1, one by 3; one more answer is needed, then two."""
    scores, labels = double([2, 0], [0, 1], [0, 3]), labelled(0, 0, 0)
    assert lowering(scores, labels, 1, FAR).tolist() == [0, 0]
    assert lowering(scores, labels, 2, FAR).tolist() == pytest.approx([0, 1 + NUDGE])
    assert lowering(scores, labels, 3, FAR).tolist() == pytest.approx([0, 3 + NUDGE])
    assert right_answers(scores - lowering(scores, labels, 3, FAR), labels) == 3


def test_the_class_that_gains_most_for_what_is_taken_off_is_lowered_first() -> None:
    """Class 1 costs one answer by a margin of 1; class 2 two, by 0.4 and 1.5: 1/0.4 is more than 1/1 and 2/1.5.

    For two answers class 2 goes down by 0.4 and class 1 by 1, not class 2 by 1.5: after the first step that is 1/1.1.
    """
    scores, labels = double([0, 1, -9], [0, -9, 0.4], [0, -9, 1.5]), labelled(0, 0, 0)
    assert lowering(scores, labels, 1, FAR).tolist() == pytest.approx([0, 0, 0.4 + NUDGE])
    assert lowering(scores, labels, 2, FAR).tolist() == pytest.approx([0, 1 + NUDGE, 0.4 + NUDGE])
    assert lowering(scores, labels, 3, FAR).tolist() == pytest.approx([0, 1 + NUDGE, 1.5 + 2 * NUDGE], abs=2 * NUDGE)


def test_answers_that_would_be_lost_count_against_those_that_are_won() -> None:
    """Two are called 1 wrongly, by 1 and by 2; one rightly, by 1.5: at 2 one answer is won for twice what 1 costs."""
    scores, labels = double([0, 1], [0, 2], [0, 1.5]), labelled(0, 0, 1)
    assert lowering(scores, labels, 2, FAR).tolist() == pytest.approx([0, 1 + NUDGE])
    stuck = lowering(scores, labels, 3, FAR)  # no step gains an answer any more
    assert stuck.tolist() == pytest.approx([0, 1 + NUDGE])
    first = double([0, 1], [0, 0.5])  # to lose one for one is no gain, however near
    assert lowering(first, labelled(0, 1), 2, FAR).tolist() == [0, 0]
    third = double([0, 1, 2])  # its own class comes third: not by one class alone
    assert lowering(third, labelled(0), 1, FAR).tolist() == [0, 0, 0]


def test_no_more_answers_are_won_than_are_missing() -> None:
    """One by a margin of 0.1, a hundred by 5: for one answer the first is enough, whatever the others' rate is."""
    scores = torch.cat([double([0, 0.1]), double([0, 5]).repeat(100, 1)])
    labels = torch.zeros(101, dtype=torch.int64)
    assert lowering(scores, labels, 1, FAR).tolist() == pytest.approx([0, 0.1 + NUDGE])
    assert lowering(scores, labels, 2, FAR).tolist() == pytest.approx([0, 5 + NUDGE])


def test_an_answer_that_rounding_could_take_is_not_counted() -> None:
    """Right by less than single precision keeps is no answer; of one class there is nothing to lead."""
    assert surely_right(double([1, 1], [1 + 1e-6, 1], [1.01, 1]), labelled(0, 0, 0)) == 1
    assert surely_right(double([1], [2]), labelled(0, 0)) == 2


def test_no_class_is_lowered_further_than_allowed() -> None:
    """Class 1 may lose 1.2: enough for a margin of 1, not for another of 3 after it, nor for 3 at once."""
    scores, labels, most = double([0, 1], [0, 3]), labelled(0, 0), double(0, 1.2)
    assert lowering(scores, labels, 2, most).tolist() == pytest.approx([0, 1 + NUDGE])
    assert lowering(scores[1:], labels[1:], 1, most).tolist() == [0, 0]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 25), st.integers(2, 4))
def test_lowering_is_enough_or_there_is_no_single_step_that_helps(seed: int, n: int, classes: int) -> None:
    """Against plain loops: each step from where it ended, of any class and to any margin, gains nothing."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=draw)
    scores = torch.randn(n, classes, generator=draw, dtype=torch.float64)
    before = right_answers(scores, labels)
    for needed in (before, before + 1, n):
        taken = lowering(scores, labels, needed, FAR)
        reached = right_answers(scores - taken, labels)
        assert bool((taken >= 0).all())
        assert reached >= before
        if needed <= before:
            assert not taken.any()
        if reached < needed:
            now = scores - taken
            for d in range(classes):
                for row in now.tolist():
                    step = torch.zeros(classes, dtype=torch.float64)
                    step[d] = max(row[d] - max(row[:d] + row[d + 1 :]), 0) + NUDGE
                    assert right_answers(now - step, labels) <= reached


# What a site takes ----------------------------------------------------------------------------------------------------


def test_a_site_lowers_the_class_that_is_named_too_readily() -> None:
    """Training images 5:1, so π = (5.5, 1.5)/7, log odds 1.2993: a quarter is 0.3248 of the margin of 1, the rest

    is taken off class 1."""
    judge = Judge(site([0, 0] * 10, [0] * 5 + [1]), None, calibrate=False, least=0.25)
    found = judge.choose([Offer(SHARED, many([2, 0], [0, 1]))], (OWN, many([1, 0], [1, 0])))
    prior = double(5.5 / 7, 1.5 / 7).log()
    rest = 1 - 0.25 * math.log(5.5 / 1.5) + NUDGE
    assert found.predictor.members == SHARED.members
    assert found.predictor.log_prior is not None
    torch.testing.assert_close(found.predictor.log_prior, 0.25 * prior - double(0, rest))
    assert found.words == (
        "takes the shared predictor with its own prior, tempered by 0.25, with which every site begins; it expects "
        f"less of {judge.site.val.classes[1]}, to be as good as its own model (100.0% of 20 validation images, its own "
        "model 100.0%)"
    )
    assert found.accuracy == 1
    assert found.predictor.least_familiar is None  # nobody said how familiar these images are


def test_more_of_the_prior_is_taken_where_no_class_can_be_lowered() -> None:
    """Of class 0, called 2 by 0.1 before 1 and by 1.1 before 0: no class alone helps, and the prior lowers both.

    π of 8, 0 and 0 images is (8.5, 0.5, 0.5)/9.5, log odds log 17 = 2.833: with t = 0.25 class 1 is still ahead of 0 by
    1 − 0.708, with 0.5 it is not, nor is class 2.
    """
    own_images = [images(len(y), labels=y, classes=3) for y in ([0] * 8, [0] * 20)]
    here = Site("site-1", *own_images, federation((2,)).sites[0].test)
    offer = Offer(Predictor(3, (OWN, OWN)), double([0, 1, 1.1]).repeat(20, 1))
    found = Judge(here, None, calibrate=False).choose([offer], (OWN, double([1, 0, 0]).repeat(20, 1)))
    assert "tempered by 0.50, the least that is as good as its own model (100.0% of 20" in found.words
    assert found.predictor.log_prior is not None
    torch.testing.assert_close(found.predictor.log_prior, 0.5 * double(8.5 / 9.5, 0.5 / 9.5, 0.5 / 9.5).log())


def test_no_class_is_expected_less_than_three_times_the_prior_would() -> None:
    """3·log(11/3) = 3.898 off class 1 is too little against 3.91, and so is the prior itself; 3.88 is not too much."""
    for margin, kept in ((3.88, False), (3.91, True)):
        judge = Judge(site([0] * 20, [0] * 5 + [1]), None, calibrate=False)
        found = judge.choose([Offer(SHARED, double([0, margin]).repeat(20, 1))], (OWN, double([1, 0]).repeat(20, 1)))
        assert found.words.startswith("keeps its own model") == kept


def test_of_several_forms_the_one_that_needs_the_least_is_taken() -> None:
    """As above the first form needs 1 less of class 1; the second, by a margin of ½, 0.5; the third the same."""
    forms = [
        Offer(SHARED, many([2, 0], [0, 1])),
        Offer(SHARED, many([2, 0], [0, 0.5]), ", louder,"),
        Offer(replace(SHARED, combine="softmax"), many([2, 0], [0, 0.5]), ", loudest,"),
    ]
    judge = Judge(site([0, 0] * 10, [0] * 5 + [1]), None, calibrate=False)
    own = OWN, many([1, 0], [1, 0])
    found = judge.choose(forms, own)
    assert found.words.startswith("takes the shared predictor, louder; it expects less of")
    assert found.predictor.log_prior is not None
    torch.testing.assert_close(found.predictor.log_prior, double(0, -0.5 - NUDGE))
    assert found.predictor.combine == "logits"
    fixed = Judge(judge.site, 0.5, calibrate=False).choose(forms, own)
    assert fixed.words.startswith("takes the shared predictor with its own prior, tempered by 0.50, as set (50.0% of")
    free = judge.choose([forms[0], Offer(SHARED, many([2, 0], [1, 0]), ", louder")], own)
    assert free.words.startswith("takes the shared predictor, louder (100.0%")


def test_of_forms_that_need_equally_little_the_one_that_is_most_often_right() -> None:
    """The own model is right on half of the images; the forms, as they are, on half, all, and all of them."""
    here, own = site([0, 1] * 10, [0, 1]), (OWN, many([1, 0], [1, 0]))
    scores = [many([1, 0], [1, 0]), many([1, 0], [0, 1]), many([1, 0], [0, 1])]
    forms = [Offer(SHARED, said, how) for said, how in zip(scores, (", taught", ", new", ""), strict=True)]
    right = Judge(here, None, calibrate=False).choose(forms, own)
    assert right.words.startswith("takes the shared predictor, new (100.0% of 20")
    less = [Offer(SHARED, many([1, 0], [0.4, 0]), ", early"), *forms[:1]]  # both right on half
    assert Judge(here, None, False).choose(less, own).words.startswith("takes the shared predictor, early (50")


def test_its_own_prior_takes_the_place_of_what_the_shared_predictor_expected() -> None:
    """That expects class 1 by 0.4, of which (1 − t) stays, and t of π = (5.5, 1.5)/7 comes."""
    shared = replace(SHARED, log_prior=double(-0.2, 0.2))
    judge = Judge(site([0, 0] * 10, [0] * 5 + [1]), None, calibrate=False, least=0.6)
    own, prior = (OWN, many([1, 0], [1, 0])), double(5.5 / 7, 1.5 / 7).log()
    offer = Offer(shared, many([2, 0], [0, 1]))
    found = judge.choose([offer], own)
    assert "tempered by 0.60, with which every site begins (100.0%" in found.words  # 0.6 + 0.4·0.4 is below 0.6·1.2993
    assert found.predictor.log_prior is not None
    torch.testing.assert_close(found.predictor.log_prior, 0.6 * prior + 0.4 * double(-0.2, 0.2))
    for t in (1.0, 2.0):
        fixed = Judge(judge.site, t, calibrate=False).choose([offer], own).predictor
        assert fixed.log_prior is not None
        torch.testing.assert_close(fixed.log_prior, t * prior)
    assert Judge(judge.site, 0.0, calibrate=False).choose([offer], own).predictor == shared


def test_a_site_that_needs_nothing_of_its_prior() -> None:
    judge = Judge(site([0, 1] * 10, [0] * 5 + [1]), None, calibrate=False)
    found = judge.choose([Offer(SHARED, many([2, 0], [0, 1]))], (OWN, many([1, 0], [1, 0])))
    assert found.words == "takes the shared predictor as it is (100.0% of 20 validation images, its own model 50.0%)"
    assert replace(found.predictor, least_familiar=None) == SHARED  # and its card does not speak of class shares


def test_a_site_keeps_its_own_model_where_nothing_is_enough() -> None:
    """What is called 1 rightly by 1 is lost before what is called 1 wrongly by 99 is won."""
    judge = Judge(site([0, 1] * 10, [0] * 5 + [1]), None, calibrate=False)
    found = judge.choose([Offer(SHARED, many([0, 99], [0, 1]))], (OWN, many([1, 0], [0, 1])))
    assert replace(found.predictor, least_familiar=None) == Predictor(2, (OWN,))
    assert found.words == (
        "keeps its own model: the shared predictor, whatever the site expects, is right on 50.0% at most, its own on "
        "more (100.0% of 20 validation images)"
    )


@pytest.mark.parametrize(("more", "taken"), [([[1, 0], [0, 1]], "both"), ([[1, 0], [2, 0]], "keeps")])
def test_before_that_it_tries_what_else_there_is(more: list[list[float]], taken: str) -> None:
    """As above, with other forms for the case that none of the first is enough: right about all, or about half."""
    judge = Judge(site([0, 1] * 10, [0] * 5 + [1]), None, calibrate=False)
    of, own = [Offer(SHARED, many([0, 99], [0, 1]))], (OWN, many([1, 0], [0, 1]))
    found = judge.choose(of, own, [Offer(SHARED, many(*more), ", both,")])
    starts = {"both": "takes the shared predictor, both (100.0% of 20", "keeps": "keeps its own model"}
    assert found.words.startswith(starts[taken])
    good = [Offer(SHARED, many([1, 0], [0, 1]))]  # where one is enough, they are not asked
    assert judge.choose(good, own, [Offer(SHARED, many([9, 0], [0, 9]), ", both,")]).words.startswith(
        "takes the shared predictor as it is ("
    )


@pytest.mark.parametrize(
    ("margin", "other", "taken"),
    [
        (1.0, 0.0, "both"),  # 1.001 off class 1 is 1.33 of ¾, the mean of how far 2 is above 1 and 1 above ½
        (0.1, 0.0, "one"),  # 0.101 is 0.19 of (1 + 0.05)/2: little
        (1.0, 1.5, "one"),  # the others need 1.501 of (1 + ¾)/2, 1.72
    ],
)
def test_where_much_must_be_taken_off_what_else_there_is_may_need_less(margin: float, other: float, taken: str) -> None:
    judge = Judge(site([0, 0] * 10, [0] * 5 + [1]), None, calibrate=False)
    of, own = [Offer(SHARED, many([2, 0], [0, margin]))], (OWN, many([1, 0], [1, 0]))
    found = judge.choose(of, own, [Offer(SHARED, many([2, 0], [0, other] if other else [1, 0]), ", both,")])
    starts = {
        "both": "takes the shared predictor, both (100.0% of 20",
        "one": "takes the shared predictor as it is; it",
    }
    assert found.words.startswith(starts[taken])


def test_what_a_form_lacks_by_hand() -> None:
    """Half of the prior where a site begins with a quarter, 0.25·log(11/3) off class 1, and 0.2 besides: of ½."""
    judge = Judge(site([0, 0] * 10, [0] * 5 + [1]), None, calibrate=False, least=0.25)
    trial = Trial(Offer(SHARED, many([1, 0], [0, 1])), 0.5, double(0, 0.2), 18)
    missing, moved = judge._lacks(trial, 20)
    assert missing == 2
    assert moved == pytest.approx((0.25 * math.log(11 / 3) + 0.2) / 0.5)
    assert judge._lacks(trial, 18)[0] == judge._lacks(trial, 0)[0] == 0


def test_a_fixed_share_is_taken_whatever_it_does() -> None:
    judge = Judge(site([0, 0], [0] * 5 + [1]), 0.5, calibrate=False)
    found = judge.choose([Offer(SHARED, double([2, 0], [0, 99]))], (OWN, double([1, 0], [1, 0])))
    assert found.words.startswith("takes the shared predictor with its own prior, tempered by 0.50, as set (50.0% of 2")
    assert found.accuracy == 0.5
    none = Judge(judge.site, 0.0, calibrate=False).choose([Offer(SHARED, double([2, 0], [0, 99]))], None)
    assert none.words == "takes the shared predictor as it is, as set (50.0% of 2 validation images)"
    assert none.predictor == SHARED


def test_a_site_without_a_model_of_its_own_has_no_bar() -> None:
    found = Judge(site([1] * 20, []), None, calibrate=False).choose([Offer(SHARED, many([1, 0], [1, 0]))], None)
    words = "takes the shared predictor as it is; it has no model of its own to be held against"
    assert found.words == f"{words} (0.0% of 20 validation images)"


def test_a_handful_of_images_begins_with_the_whole_prior() -> None:
    """19 images of class 0, the last called 1 by 1.5: of 1.2993, the log odds, and something off class 1; or by 1."""
    judge = Judge(site([0] * 19, [0] * 5 + [1]), None, calibrate=False, least=0.25)
    own = OWN, double([1, 0]).repeat(19, 1)
    start = "takes the shared predictor with its own prior, tempered by 1.00, with so few validation images"
    for margin, lowered in ((1.0, 0.0), (1.5, 1.5 - math.log(5.5 / 1.5) + NUDGE)):
        scores = torch.cat([double([2, 0]).repeat(18, 1), double([0, margin])])
        found = judge.choose([Offer(SHARED, scores)], own)
        assert found.words.startswith(f"{start}{'; it expects less of' if lowered else ' (100.0% of 19'}")
        assert found.predictor.log_prior is not None
        torch.testing.assert_close(found.predictor.log_prior, double(5.5 / 7, 1.5 / 7).log() - double(0, lowered))
    twenty = Judge(site([0] * 20, [0] * 5 + [1]), None, calibrate=False, least=0.25)
    assert "0.25, with which every site begins" in twenty.choose([Offer(SHARED, many([2, 0], [2, 0]))], None).words


def test_a_site_that_has_trained_on_nothing_has_no_prior_to_begin_with() -> None:
    """What the shared predictor expects stays, with and without images to judge by."""
    shared = replace(SHARED, log_prior=double(-0.2, -2.0))
    found = Judge(site([1], []), None, calibrate=False).choose([Offer(shared, double([1, 0]))], None)
    assert found.predictor == shared
    unjudged, words = Judge(site([], []), None, calibrate=False).unjudged(Offer(shared, double()))
    assert unjudged == shared
    assert words == "has no validation images: it takes the shared predictor as it is"


@pytest.mark.parametrize(("prior", "share", "why"), [(None, 1.0, "as nothing can be measured"), (0.25, 0.25, "as set")])
def test_a_site_without_validation_images_takes_the_whole_prior_or_what_is_fixed(
    prior: float | None, share: float, why: str
) -> None:
    found, words = Judge(site([], [0] * 5 + [1]), prior, calibrate=True).unjudged(Offer(SHARED, double()))
    assert found.log_prior is not None
    torch.testing.assert_close(found.log_prior, share * double(5.5 / 7, 1.5 / 7).log())
    start = "has no validation images: it takes the shared predictor with its own prior, tempered by"
    assert words == f"{start} {share:.2f}, {why}"
    found, words = Judge(site([], [0]), 0.0, calibrate=True).unjudged(Offer(SHARED, double()))
    assert found == SHARED
    assert words == "has no validation images: it takes the shared predictor as it is, as set"


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(2, 4), st.booleans())
def test_it_is_never_below_the_sites_own_model_on_these_images(
    seed: int, n: int, classes: int, calibrate: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=draw)
    scores, own = (torch.randn(n, classes, generator=draw, dtype=torch.float64) for _ in range(2))
    train = torch.randint(classes, (9,), generator=draw)
    own_images = [images(len(y), labels=y.tolist(), classes=classes) for y in (train, labels)]
    here = Site("site-1", *own_images, federation((2,)).sites[0].test)
    found = Judge(here, None, calibrate, 0.25).choose([Offer(Predictor(classes, (OWN, OWN)), scores)], (OWN, own))
    bar = float((own.argmax(dim=1) == labels).double().mean())
    assert found.accuracy >= bar
    said = own if len(found.predictor.members) == 1 else scores
    whole = said if found.predictor.sharpness is None else said * found.predictor.sharpness
    whole = whole if found.predictor.log_prior is None else whole + found.predictor.log_prior
    assert float((whole.argmax(dim=1) == labels).double().mean()) == found.accuracy  # the predictor is what was judged


# Probabilities --------------------------------------------------------------------------------------------------------


def test_calibration_error_by_hand() -> None:
    """Confidences 0.9, 0.9, 0.6 and 0.5 in ten bins: (0.9, 0.9) half right, 0.6 right, 0.5 (a tie: class 0) wrong.

    |1.8 − 1| + |0.6 − 1| + |0.5 − 0| = 1.7, over four images.
    """
    scores = double([0.9, 0.1], [0.1, 0.9], [0.6, 0.4], [0.5, 0.5]).log()
    labels = torch.tensor([0, 0, 0, 1])
    assert calibration_gap(scores, labels, bins=10) == pytest.approx(1.7 / 4)
    assert calibration_gap(double([50, 0]), torch.tensor([0])) == pytest.approx(0)  # sure of 1 is in the last bin
    assert calibration_gap(double([0.9, 0.1], [0.1, 0.9]).log(), torch.tensor([0, 0]), bins=1) == pytest.approx(0.4)


def test_the_factor_with_the_lowest_loss() -> None:
    """Odds of e^4 that are right three times in four: log-odds of log 3 are honest, a factor of 0.275."""
    scores, labels = double([4, 0], [4, 0], [4, 0], [4, 0]), torch.tensor([0, 0, 0, 1])
    losses = [math.log(1 + math.exp(-4 * f)) * 0.75 + math.log(1 + math.exp(4 * f)) * 0.25 for f in SHARPER.tolist()]
    factor = best_factor(scores, labels)
    assert factor == SHARPER.tolist()[losses.index(min(losses))]
    assert factor == pytest.approx(math.log(3) / 4, rel=0.05)
    assert SHARPER[20] == pytest.approx(1.0)
    assert (float(SHARPER[0]), float(SHARPER[-1])) == (0.25, 4.0)


def test_sharpening_multiplies_all_of_the_scores() -> None:
    before = Predictor(2, sharpness=torch.tensor(5.0), log_prior=double(-1, -2))
    after = sharpened(before, 2.0)
    assert after.sharpness is not None
    assert after.log_prior is not None
    assert (float(after.sharpness), after.log_prior.tolist()) == (10.0, [-2, -4])
    plain = sharpened(Predictor(2), 0.5)
    assert plain.sharpness is not None
    assert (float(plain.sharpness), plain.log_prior) == (0.5, None)


def test_calibration_is_told_before_and_after_and_changes_no_answer() -> None:
    labels = [0, 0, 0, 1] * 10
    scores = double([4, 0], [4, 0], [4, 0], [4, 0]).repeat(10, 1)
    found = Judge(site(labels, [0, 1]), None, calibrate=True).choose([Offer(SHARED, scores)], None)
    factor = best_factor(scores, torch.tensor(labels))
    before, after = (abs(1 / (1 + math.exp(-4 * f)) - 0.75) for f in (1.0, factor))
    assert found.words.endswith(f"; calibration error {before:.1%} before, {after:.1%} after")
    assert found.accuracy == 0.75
    assert after < 0.02 < before


def test_what_is_well_calibrated_is_not_flattened_for_one_surprise() -> None:
    """29 answers at odds of e^4 are right, and one at e^20 is wrong: its likelihood outweighs all others'."""
    labels = [0] * 29 + [1]
    scores = double([4, 0]).repeat(30, 1)
    scores[29] = double(20, 0)
    found = Judge(site(labels, [0, 1]), None, calibrate=True).choose([Offer(SHARED, scores)], None)
    factor = best_factor(scores, torch.tensor(labels))
    assert factor < 0.5
    before, after = (calibration_gap(f * scores, torch.tensor(labels)) for f in (1.0, factor))
    assert before < after
    words = f"; calibration error {before:.1%}, left as it is: what is likeliest would make it {after:.1%}"
    assert found.words.endswith(words)
    assert found.predictor.sharpness is None


@pytest.mark.parametrize("n", [1, 19])
def test_a_handful_of_images_is_not_calibrated_on(n: int) -> None:
    """All of them are right, so the largest factor would fit best: on one image, certainty for every other."""
    found = Judge(site([0] * n, [0, 1]), None, calibrate=True).choose(
        [Offer(SHARED, double([1, 0]).repeat(n, 1))], None
    )
    assert found.words.endswith(f"of {n} validation image{'s' if n > 1 else ''}); too few of them to calibrate on")
    assert found.predictor.sharpness is None
    enough = Judge(site([0] * 20, [0, 1]), None, calibrate=True).choose(
        [Offer(SHARED, double([1, 0]).repeat(20, 1))], None
    )
    assert enough.predictor.sharpness == 4


def test_from_where_on_an_image_is_familiar() -> None:
    """Of 21 right answers the 5 % quantile is the second least familiar; 19 cannot tell."""
    familiarity = double(9, *range(20, 40))
    least = lowest_familiar(familiarity)
    assert least is not None
    assert float(least) == pytest.approx(20)
    assert float(least) < 20
    assert lowest_familiar(familiarity[2:]) is None


def test_a_site_finds_what_is_familiar_on_what_it_answers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers score 1 to 21 before the prior, one wrong one scores 0.5: the second lowest right one is 2."""
    scores = double(*([float(n), 0.0] for n in range(1, 22)), [0.5, 0.0])
    labels = [0] * 21 + [1]
    offer = Offer(SHARED, scores, familiar=SHARED.familiarity([scores]))
    found = Judge(site(labels, [0] * 5 + [1]), 1.0, calibrate=False).choose([offer], None).predictor
    assert found.least_familiar is not None
    assert float(found.least_familiar) == pytest.approx(2, rel=1e-5)
    marks = found.unfamiliar([scores])
    assert marks is not None
    assert marks.tolist() == [True, *[False] * 20, True]
    assert SHARED.unfamiliar([scores]) is None
    monkeypatch.setattr(personal_prior, "calibrated", lambda predictor, *_: (sharpened(predictor, 2.0), ""))
    sharp = Judge(site(labels, [0] * 5 + [1]), 1.0, calibrate=True).choose([offer], None).predictor
    assert sharp.sharpness is not None
    assert float(sharp.sharpness) == 2
    assert sharp.least_familiar == found.least_familiar  # whatever its sharpness
