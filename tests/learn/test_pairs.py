"""Votes on pairs of classes: by hand, against a plain double loop, and what no permutation may change."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.learn.device import Device
from wardround.learn.pairs import bounded, familiarity, harmonic, pair_scores, pair_wins, shares
from wardround.learn.predictor import Predictor

CPU = Device(torch.device("cpu"), 1)


def double(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def log(*rows: object) -> Tensor:
    return double(*rows).log()


# By hand --------------------------------------------------------------------------------------------------------------


def test_knowledge_of_a_pair_is_the_harmonic_mean() -> None:
    """2·30·60/90 = 40; a side of which there is no image makes it 0."""
    known = harmonic(double([30, 60, 0]))[0]
    assert known.tolist() == [[30, 40, 0], [40, 60, 0], [0, 0, 0]]


def test_none_weighs_more_than_all_others_and_the_doubt() -> None:
    """Of 90, 20, 10: 90 against 20 + 10 + 5; the others stay."""
    assert bounded(double(90, 20, 10), 5).tolist() == [35, 20, 10]
    assert bounded(double(90), 5).tolist() == [5]
    assert bounded(double([7, 0], [0, 0]), 2).tolist() == [[2, 0], [0, 0]]


def test_shares_of_a_class() -> None:
    """Class 0: 90 is held to 10 + 20 = 30, so 3/4; class 1: as told; class 2: none has seen it, so all alike."""
    assert shares(double([90, 3, 0], [10, 1, 0]), 20).tolist() == [[0.75, 0.75, 0.5], [0.25, 0.25, 0.5]]


def test_two_networks_by_hand() -> None:
    """Two classes, T = 1, m = 6. Network 1 has 6 and 3 images (h = 4), network 2 has 6 of class 0 alone (h = 0).

    Priors are even. Network 1 says 3:1 for class 0, network 2 1:4 against it. W: class 0 (1/2, 1/2), class 1 (1, 0).
    S_0 = 3/8 + 1/10 = 19/40, S_1 = 1/4, f_01 = (19/40)/(29/40) = 19/29. R_01 = (4·3/4 + 6·19/29)/(4 + 6).
    """
    logits = torch.stack([log([3 / 4, 1 / 4]), log([1 / 5, 4 / 5])])
    found = pair_scores(logits, double([6, 3], [6, 0]), log([0.5, 0.5], [0.5, 0.5]), 1.0, 6.0)
    first = (3 + 6 * 19 / 29) / 10
    assert found[0].tolist() == pytest.approx([first, 1 - first])


def test_how_familiar_an_image_is_by_hand() -> None:
    """The two networks above: S = (19/40, 1/4), the mean of all is (19/40, 21/40), so 0.475 for class 0.

    Where the second, who never saw class 1, is as loud as three: S_0 = 3/16 + 3/20. A third that has seen nothing is
    not asked, and one that answers NaN is taken to say what its site's images say.
    """
    logits, even = torch.stack([log([3 / 4, 1 / 4]), log([1 / 5, 4 / 5])]), log([0.5, 0.5], [0.5, 0.5])
    seen = double([6, 3], [6, 0])
    assert familiarity(logits, seen, even, 6.0).tolist() == pytest.approx([19 / 40])
    louder = familiarity(logits, seen, even, 100.0, double(1, 3))
    assert louder.tolist() == pytest.approx([0.75 * (3 / 16 + 3 / 20) + 0.25 * 19 / 40])
    third = torch.cat([logits, log([[1 / 100, 99 / 100]])])
    none = torch.cat([seen, double([0, 0])])
    assert familiarity(third, none, torch.cat([even, even[:1]]), 6.0).tolist() == pytest.approx([19 / 40])
    nan = torch.stack([logits[0], torch.full((1, 2), math.nan, dtype=torch.float64)])
    said = torch.stack([logits[0], log([2 / 3, 1 / 3])])
    prior = log([0.5, 0.5], [2 / 3, 1 / 3])
    torch.testing.assert_close(familiarity(nan, seen, prior, 6.0), familiarity(said, seen, prior, 6.0))


def test_the_prior_is_divided_out_and_votes_are_tempered() -> None:
    """One network with odds 8:1 under a prior of 2:1: without it 4:1, of which the square root is 2:1.

    h = 2·40·20/60 = 80/3 is held to the doubt, 4, so both weigh alike: the vote, 2/3, and the pooled odds, 8/9.
    """
    found = pair_scores(log([8 / 9, 1 / 9]).unsqueeze(0), double([40, 20]), log([2 / 3, 1 / 3]), 2.0, 4.0)
    first = (2 / 3 + 8 / 9) / 2
    assert found[0].tolist() == pytest.approx([first, 1 - first])


def test_where_nobody_knows_anything_networks_are_pooled_alike() -> None:
    """Counts of zeros: f alone, of mean probabilities 0.4 and 0.6."""
    logits = torch.stack([log([0.5, 0.5]), log([0.3, 0.7])])
    found = pair_scores(logits, torch.zeros(2, 2).double(), torch.zeros(2, 2).double(), 3.0, 100.0)
    assert found[0].tolist() == pytest.approx([0.4, 0.6])


def test_a_louder_network() -> None:
    """Two networks with 6 images of either class each, T = 1, doubt 6: h = 6, within the bound; voices 4 and 1.

    They vote 3/4 and 1/4. f = (4·3/4 + 1/4) / 5 = 0.65 for class 0. R = (24·3/4 + 6·1/4 + 6·0.65) / (24 + 6 + 6).
    """
    logits = torch.stack([log([0.75, 0.25]), log([0.25, 0.75])])
    even = log([0.5, 0.5], [0.5, 0.5])
    found = pair_scores(logits, double([6, 6], [6, 6]), even, 1.0, 6.0, torch.tensor([4.0, 1.0]))
    assert found[0].tolist() == pytest.approx([23.4 / 36, 12.6 / 36])


# Against a plain reference --------------------------------------------------------------------------------------------


def slowly(
    logits: Tensor, counts: Tensor, log_prior: Tensor, temperature: float, doubt: float, voices: Tensor
) -> Tensor:
    """The docstring of `learn/pairs.py`, one number at a time."""
    networks, n, classes = logits.shape
    z, count, prior = logits.tolist(), counts.tolist(), log_prior.tolist()

    def held(weights: list[float]) -> list[float]:
        return [loud * min(w, sum(weights) - w + doubt) for w, loud in zip(weights, voices.tolist(), strict=True)]

    def h(k: int, c: int, d: int) -> float:
        both = count[k][c] + count[k][d]
        return 2 * count[k][c] * count[k][d] / both if both else 0.0

    found = torch.zeros(n, classes, dtype=torch.float64)
    for i in range(n):
        exps = [[math.exp(v) for v in z[k][i]] for k in range(networks)]
        pooled = []
        for c in range(classes):
            seen = held([count[k][c] for k in range(networks)])
            seen = seen if sum(seen) > 0 else [1.0] * networks
            pooled.append(sum(w * e[c] / sum(e) for w, e in zip(seen, exps, strict=True)) / sum(seen))
        for c in range(classes):
            for d in range(classes):
                if c == d:
                    continue
                weights = held([h(k, c, d) for k in range(networks)])
                won = doubt * pooled[c] / (pooled[c] + pooled[d])
                for k, weight in enumerate(weights):
                    gap = (z[k][i][c] - prior[k][c] - z[k][i][d] + prior[k][d]) / temperature
                    won += weight / (1 + math.exp(-gap))
                found[i, c] += won / (sum(weights) + doubt)
    return found


Drawn = tuple[Tensor, Tensor, Tensor, float, float]


@st.composite
def panels(draw: st.DrawFn) -> Drawn:
    """Logits, counts with many zeros, priors, temperature and doubt."""
    networks, classes = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = 3 * torch.randn(networks, 3, classes, generator=generator, dtype=torch.float64)
    counts = torch.randint(-40, 100, (networks, classes), generator=generator).clamp_min(0).double()
    prior = torch.randn(networks, classes, generator=generator, dtype=torch.float64).log_softmax(dim=1)
    return logits, counts, prior, draw(st.sampled_from([0.5, 1.0, 3.0])), draw(st.sampled_from([1.0, 30.0, 500.0]))


@settings(deadline=None, max_examples=25)
@given(panels())
def test_it_is_the_rule(drawn: Drawn) -> None:
    plain = torch.ones(len(drawn[0]))
    torch.testing.assert_close(pair_scores(*drawn), slowly(*drawn, plain))
    voices = plain.index_fill(0, torch.tensor([0]), 16.0)
    torch.testing.assert_close(pair_scores(*drawn, voices), slowly(*drawn, voices))


@settings(deadline=None, max_examples=25)
@given(panels())
def test_of_two_classes_one_wins_what_the_other_loses(drawn: Drawn) -> None:
    """R_cd + R_dc = 1, so all wins together are the number of pairs, and none is below 0 or above all others."""
    scores, classes = pair_scores(*drawn), drawn[0].shape[2]
    assert scores.sum(dim=1).tolist() == pytest.approx([classes * (classes - 1) / 2] * 3)
    assert bool(((scores >= 0) & (scores <= classes - 1)).all())


@settings(deadline=None, max_examples=25)
@given(panels(), st.randoms(use_true_random=False))
def test_names_do_not_matter(drawn: Drawn, lots: object) -> None:
    """Other classes first: the scores go along. Other networks first: nothing changes."""
    logits, counts, prior, temperature, doubt = drawn
    networks, _, classes = logits.shape
    order = torch.tensor(lots.sample(range(classes), classes))  # type: ignore[attr-defined]
    moved = pair_scores(logits[..., order], counts[:, order], prior[:, order], temperature, doubt)
    torch.testing.assert_close(moved, pair_scores(*drawn)[:, order])
    order = torch.tensor(lots.sample(range(networks), networks))  # type: ignore[attr-defined]
    torch.testing.assert_close(pair_scores(logits[order], counts[order], prior[order], *drawn[3:]), pair_scores(*drawn))


def test_a_network_that_is_blind_on_a_pair_has_no_vote_there() -> None:
    """Of two classes the third network has seen the second alone; with next to no doubt the others decide."""
    counts, prior = double([50, 50], [50, 50], [0, 80]), torch.zeros(3, 2).double()
    knows = log([0.7, 0.3])

    def won(blind: Tensor) -> float:
        return float(pair_scores(torch.stack([knows, knows, blind]), counts, prior, 1.0, 1e-6)[0, 0])

    assert won(log([0.999, 0.001])) == pytest.approx(0.7, abs=1e-5)
    assert won(log([0.001, 0.999])) == pytest.approx(0.7, abs=1e-5)


@settings(deadline=None, max_examples=25)
@given(panels(), st.integers(0, 4), st.floats(-50, 50), st.floats(0, 1e9))
def test_one_network_moves_a_pair_by_a_half_and_what_the_pool_gives_it(
    drawn: Drawn, who: int, shout: float, lie: float
) -> None:
    """Whatever one network says and claims: of R it holds at most half of the votes, and f is a part of the rest."""
    logits, counts, prior, temperature, doubt = drawn
    who %= len(counts)
    logits, counts = logits.clone(), counts.clone()
    counts[who] = lie
    votes = bounded(harmonic(counts), doubt)
    assert bool((votes[who] <= (votes.sum(dim=0) + doubt) / 2 + 1e-6).all())
    honest = pair_scores(logits, counts, prior, temperature, doubt)
    logits[who, :, 0] += shout
    moved = (pair_scores(logits, counts, prior, temperature, doubt) - honest)[:, 0].abs()
    pooled = doubt / (votes.sum(dim=0) + doubt)
    half = votes[who] / (votes.sum(dim=0) + doubt)
    assert bool((moved <= (half + pooled)[0, 1:].sum() + 1e-9).all())


def test_where_nobody_else_has_seen_both_one_network_moves_more_than_a_half() -> None:
    """Two know class 0 alone, two class 1; a fifth claims 400 of both, is held to m = 100, and says all or nothing.

    R_01 = (100·σ + 100·f)/200. W of the fifth is 400/1000, and the others say 1 of what they know: f = 1/2 without its
    voice, (1)/(1 + 0.6) with all of it for class 0. So R goes from (0 + 0.6/1.6)/2 to (1 + 1/1.6)/2: by 0.625.
    """
    counts = double([300, 0], [300, 0], [0, 300], [0, 300], [400, 400])
    known = [log([1, 1e-30]), log([1, 1e-30]), log([1e-30, 1]), log([1e-30, 1])]

    def won(*said: float) -> float:
        logits = torch.stack([*known, double(said)])
        return float(pair_scores(logits, counts, torch.zeros(5, 2).double(), 1.0, 100.0)[0, 0])

    assert won(99, -99) == pytest.approx((1 + 1 / 1.6) / 2)
    assert won(-99, 99) == pytest.approx((0 + 0.6 / 1.6) / 2)


@pytest.mark.parametrize("said", [[math.nan] * 3, [math.inf, 0, 0], [0, -math.inf, math.inf], [math.nan, 1, 2]])
def test_a_network_that_answers_no_numbers_says_what_its_prior_says(said: list[float]) -> None:
    """Finite weights can give infinite outputs; the others' answers must not drown in them, image by image."""
    counts, prior = double([50, 20, 9], [20, 50, 9], [900, 900, 900]), log([0.5, 0.3, 0.2]).repeat(3, 1)
    logits = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[2, 1] = double(*said)
    found = pair_scores(logits, counts, prior, 3.0, 100.0)
    plain = logits.clone()
    plain[2, 1] = prior[2]
    torch.testing.assert_close(found, slowly(plain, counts, prior, 3.0, 100.0, torch.ones(len(plain))))


def test_no_number_is_not_a_preference() -> None:
    nothing = torch.full((1, 2), math.nan).double()
    assert pair_wins(nothing, torch.tensor([0]), double(9, 9), torch.zeros(2).double(), 1.0) == (0, 1, 1)


# Held to what it says -------------------------------------------------------------------------------------------------


def test_how_often_a_network_prefers_the_true_class() -> None:
    """It knows classes 0 and 1 (h = 20) and has 3 images of class 2 (h = 2·20·3/23 ≈ 5.2, not asked at 10).

    The prior of class 1 is so high that it takes 0.6 against 0.4 for class 0's, once it is divided out.
    """
    logits = log([0.6, 0.3, 0.1], [0.4, 0.6, 0.0001], [0.2, 0.1, 0.7])
    labels, counts = torch.tensor([0, 1, 2]), double(20, 20, 3)
    assert pair_wins(logits, labels, counts, log(0.4, 0.4, 0.2), 10.0) == (2, 2, 2)
    assert pair_wins(logits, labels, counts, log(0.1, 0.8, 0.1), 10.0) == (1, 2, 2)
    assert pair_wins(logits, labels, counts, log(0.4, 0.4, 0.2), 1.0) == (6, 6, 3)
    assert pair_wins(logits, labels, counts, log(0.4, 0.4, 0.2), 30.0) == (0, 0, 0)


def test_a_tie_is_not_a_preference() -> None:
    even = torch.zeros(1, 2).double()
    assert pair_wins(even, torch.tensor([0]), double(9, 9), torch.zeros(2).double(), 1.0) == (0, 1, 1)


# In a predictor -------------------------------------------------------------------------------------------------------


def test_a_predictor_without_its_counts_is_a_mistake_of_the_program() -> None:
    with pytest.raises(ValueError, match="votes on pairs need trust, member_log_prior and votes"):
        Predictor(2, combine="pairs").combined([torch.zeros(1, 2)], 1)


def test_scores_are_sharpened_before_the_prior_is_added() -> None:
    """Wins are 2/3 and 1/3 of one pair at a doubt that drowns the vote; times 6 they are 4 and 2, then log π comes."""
    predictor = Predictor(
        2,
        combine="pairs",
        trust=double([0, 0]),
        member_log_prior=double([0, 0]),
        votes=double(1.0, 1.0),
        sharpness=torch.tensor(6.0),
        log_prior=log(0.5, 0.25),
    )
    found = predictor.combined([log([2 / 3, 1 / 3]).float()], 1)
    assert found[0].tolist() == pytest.approx([4 + math.log(0.5), 2 + math.log(0.25)], rel=1e-6)
    one = Predictor(2, sharpness=torch.tensor(2.0), log_prior=double(1, 0))
    assert one.combined([], 1)[0].tolist() == [1, 0]  # no members: nothing to sharpen
