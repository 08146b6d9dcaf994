"""Who has seen what: counts held to what is plausible, and guessed from a model alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import context, drive, federation, images, study
from wardround.data.federation import Federation
from wardround.learn.predictor import Member
from wardround.methods.base import join_groups
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.methods.trust import (
    guessed,
    guessed_shares,
    head_rows,
    head_strengths,
    held_to_models,
    known_classes,
    log_shares,
    plausible,
    spread,
    still,
)
from wardround.models import NetSpec, fresh, names


def test_no_total_above_three_times_the_median_of_the_others() -> None:
    """Totals 20, 30, 1000: the last may have 3·30 (of two others the upper is the median)."""
    counts = torch.tensor([[15, 5], [10, 20], [250, 750]]).double()
    assert plausible(counts).tolist() == [[15, 5], [10, 20], [22.5, 67.5]]


def test_small_sites_do_not_make_large_ones_unbelievable() -> None:
    """A partition of skin lesions: 4476 may be three times 1060 and no more, all others are what they say."""
    counts = torch.tensor([[33], [10], [4476], [1632], [1060]]).double()
    assert plausible(counts).flatten().tolist() == [33, 10, 3180, 1632, 1060]


def test_of_two_sites_nobody_knows_which_is_out_of_line() -> None:
    counts = torch.tensor([[1, 1], [900, 900]]).double()
    assert plausible(counts) is counts


def test_sites_that_tell_of_nothing_do_not_speak_for_the_others() -> None:
    """Coarse bins make zeros of small sites: the one with images is believed, and of three with images all hold."""
    alone = torch.tensor([[0, 0], [0, 0], [100, 50]]).double()
    assert plausible(alone).tolist() == alone.tolist()
    counts = torch.tensor([[0, 0], [10, 0], [0, 10], [400, 0]]).double()
    assert plausible(counts).tolist() == [[0, 0], [10, 0], [0, 10], [30, 0]]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(0, 10**15), min_size=3, max_size=3), min_size=3, max_size=6), st.integers(0, 5))
def test_a_lie_is_worth_no_more_than_the_bound(rows: list[list[int]], who: int) -> None:
    counts = torch.tensor(rows).double()
    found = plausible(counts)
    assert bool((found <= counts).all())
    totals = counts.sum(dim=1)
    others = sorted(float(t) for k, t in enumerate(totals) if k != who % len(rows) and t > 0)
    if len(others) >= 2 and totals[who % len(rows)] > 0:
        assert float(found[who % len(rows)].sum()) <= 3 * others[len(others) // 2] * (1 + 1e-9)


def test_no_class_is_impossible() -> None:
    """(7 + 1/2, 0 + 1/2) of 8."""
    assert log_shares(torch.tensor([7, 0])).tolist() == pytest.approx([math.log(15 / 16), math.log(1 / 16)])
    assert log_shares(torch.tensor([[0, 0]])).exp().tolist() == [[0.5, 0.5]]


def test_the_rows_of_a_head() -> None:
    spec = NetSpec("small", 3, 2, 8, width=2)
    weights = fresh(spec, torch.Generator().manual_seed(0))
    weights["head.weight"] = torch.arange(weights["head.weight"].numel()).reshape_as(weights["head.weight"]).float()
    weights["head.bias"] = torch.tensor([100.0, -3.0])
    width = weights["head.weight"].shape[1]
    first = width * (width - 1) / 2
    assert head_rows(weights).tolist() == [first + 100, first + width * width - 3]
    weights["head.weight"] = torch.zeros_like(weights["head.weight"])
    weights["head.weight"][:, :3] = torch.tensor([[3.0, -5.0, 4.0], [-1.0, -2.0, 0.0]])
    assert head_strengths(weights).tolist() == [5, 0]


@pytest.mark.parametrize("name", names())
def test_every_network_has_a_head_to_guess_from(name: str) -> None:
    spec = NetSpec(name, 3, 4, 32, width=2)
    found = guessed(fresh(spec, torch.Generator().manual_seed(1)), 100)
    assert float(found.sum()) == pytest.approx(100)
    assert bool((found > 0).all())


# What models show -----------------------------------------------------------------------------------------------------


def line(shares: Tensor, steep: float = 20.0, level: float = -1.0) -> Tensor:
    """Rows along a line of the shares, as those of most sites are."""
    return level + steep * shares


HONEST = torch.tensor([[900, 100, 0, 0], [0, 600, 400, 0], [100, 0, 0, 300], [30, 0, 10, 160]], dtype=torch.float64)
ROWS = torch.stack([line(row / row.sum()) for row in HONEST])


def held(counts: Tensor, rows: Tensor) -> Tensor:
    """Held by the sums alone: nothing but the class of the highest sum has weights that speak for it."""
    return held_to_models(counts, rows, (rows == rows.amax(dim=1, keepdim=True)).double())


def test_honest_counts_are_believed() -> None:
    assert held(HONEST, ROWS).equal(HONEST)
    some = torch.randn(ROWS.shape, generator=torch.Generator().manual_seed(0))
    assert held(HONEST, ROWS + some).equal(HONEST)  # rows are no more than near the line
    assert held(HONEST, -ROWS).equal(HONEST)  # of such networks rows say nothing


def test_images_of_a_class_that_the_model_does_not_show_are_not_counted() -> None:
    """The third site has shares (¼, 0, 0, ¾) and claims 1,000 of each class: 10·4,000·¼ are more, of 0 20."""
    told = HONEST.clone()
    told[2] = 1000.0
    expected = told.clone()
    expected[2, 1:3] = 20.0
    torch.testing.assert_close(held(told, ROWS), expected)
    told[2] = torch.tensor([0.0, 900.0, 0.0, 100.0])  # another class than it has
    expected[2] = torch.tensor([0.0, 20.0, 0.0, 100.0])
    torch.testing.assert_close(held(told, ROWS), expected)


def test_a_class_that_weights_speak_for_was_there_whatever_its_sum() -> None:
    """Of the strongest class's 3 a third is enough, and less is not."""
    told = HONEST.clone()
    told[2] = 1000.0
    strengths = torch.ones(4, 4, dtype=torch.float64)
    strengths[2] = torch.tensor([3.0, 1.0, 0.99, 3.0])
    expected = told.clone()
    expected[2, 2] = 20.0
    torch.testing.assert_close(held_to_models(told, ROWS, strengths), expected)


def test_a_steeper_line_of_its_own_is_a_sites_own() -> None:
    """Half as long a training or another network: rows of the first site twice as steep or half, and none is held."""
    for steep in (40.0, 10.0):
        rows = ROWS.clone()
        rows[0] = line(HONEST[0] / 1000, steep)
        assert held(HONEST, rows).equal(HONEST)


def test_where_sites_have_all_classes_alike_models_show_nothing() -> None:
    """One site with uneven shares does not make a line; with another one it does, and even shares are no lie by it."""
    even = torch.tensor([[250, 240, 260, 250]] * 3, dtype=torch.float64)
    some = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    liar = torch.full((1, 4), 500.0, dtype=torch.float64)
    told, rows = torch.cat([even, liar, HONEST[1:2]]), torch.cat([some, ROWS[:1], ROWS[1:2]])
    assert held(told, rows).equal(told)
    found = held(torch.cat([told, HONEST[2:3]]), torch.cat([rows, ROWS[2:3]]))
    assert found[:3].equal(even)
    assert found[3].tolist() == pytest.approx([500, 500, 20, 20])  # 10·2,000·0.1 are enough
    assert found[4:].equal(HONEST[1:3])


def test_of_two_sites_and_of_one_without_images_nothing_is_held() -> None:
    told = torch.tensor([[900, 100, 0, 0], [500, 500, 500, 500]], dtype=torch.float64)
    assert held(told, ROWS[:2]).equal(told)
    nothing = torch.cat([HONEST, torch.zeros(1, 4, dtype=torch.float64)])
    assert held(nothing, torch.cat([ROWS, ROWS[:1]])).equal(nothing)


def test_how_far_answers_differ() -> None:
    """Centred, (−1, 1) and (1, −1): deviations √2 (by n − 1) in both classes. What all classes share says nothing."""
    assert float(spread(torch.tensor([[0.0, 2.0], [7.0, 5.0]]))) == pytest.approx(math.sqrt(2))
    assert float(spread(torch.tensor([[3.0, 1.0], [13.0, 11.0]]))) == pytest.approx(0, abs=1e-12)


def test_a_network_that_says_the_same_of_every_image() -> None:
    """Less than 0.02 of the upper median, which is 5 and 6: 0.1 and 0.12."""
    assert still(torch.tensor([0.099, 0.11, 5.0, 6.0, 7.0])).tolist() == [True, False, False, False, False]
    assert still(torch.tensor([0.099, 5.0, 6.0, 7.0])).tolist() == [True, False, False, False]
    assert not bool(still(torch.zeros(4)).any())
    assert not bool(still(torch.tensor([1e-6, 5.0])).any())


def test_classes_that_are_known_to_networks_together() -> None:
    """Rows (2, 1, −1, −2), of deviation √(10/3): shares softmax(4·row/1.826) = 0.899, 0.100, 0.001, 0.0001.

    With one that has it the other way round every class but the middle two has 0.45, these 0.05: 1/8 is the bar.
    """
    spec = NetSpec("small", 3, 4, 8, width=2)

    def knows(*rows: float) -> Member:
        weights = fresh(spec, torch.Generator().manual_seed(0))
        weights["head.weight"] = torch.zeros_like(weights["head.weight"])
        return Member(spec, {**weights, "head.bias": torch.tensor(rows)})

    assert known_classes([knows(2.0, 1.0, -1.0, -2.0)]).tolist() == [1, 0, 0, 0]
    assert known_classes([knows(2.0, 1.9, -1.0, -2.0)]).tolist() == [1, 1, 0, 0]
    assert known_classes([knows(2.0, 1.0, -1.0, -2.0), knows(-2.0, -1.0, 1.0, 2.0)]).tolist() == [1, 0, 0, 1]
    assert known_classes([knows(1.0, 1.0, 1.0, 1.0)]).tolist() == [1, 1, 1, 1]
    shares = guessed_shares([knows(2.0, 1.0, -1.0, -2.0), knows(-2.0, -1.0, 1.0, 2.0)])
    assert shares.tolist() == pytest.approx([0.4498, 0.0508, 0.0508, 0.4498], abs=2e-3)
    assert float(shares.sum()) == pytest.approx(1)


def test_classes_that_a_site_has_are_guessed_from_its_model() -> None:
    """Three sites with two classes each: a seen class gets more than an unseen one, at every site."""
    seen = ((0, 1), (1, 2), (2, 3))
    base = federation((0, 0, 0))
    sites = []
    for site, classes in zip(base.sites, seen, strict=True):
        labels = [classes[i % 2] for i in range(48)]
        train = images(48, seed=classes[0], labels=labels)
        sites.append(type(site)(site.name, train, site.val, site.test))
    data = Federation(**{**vars(base), "sites": tuple(sites)})
    method = make("consult", {"counts": "none"})
    ctx = context(study(data, method="consult", rounds=1, train={"epochs": 10, "batch": 8, "lr": 0.05}))
    for site, classes in zip(data.sites, seen, strict=True):
        bundle = drive(ctx, method.answer(ctx, site, ctx.bundle("request", site.name, {}), State())).bundle
        assert "label_counts" not in bundle.groups
        found = guessed(join_groups(bundle), 48)
        unseen = [float(found[c]) for c in range(4) if c not in classes]
        assert min(float(found[c]) for c in classes) > 2 * max(unseen)
