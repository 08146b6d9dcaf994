"""Who has seen what: counts held to what is plausible, and guessed from a model alone."""

import math
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
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
    held_to_model,
    known_classes,
    log_shares,
    plausible,
    risen,
    spread,
    still,
)
from wardround.models import NetSpec, build, fresh, names


def test_no_total_above_three_times_what_the_others_have() -> None:
    """Totals 20, 30, 1000: the last may have 3·30 (of two others the upper is the median)."""
    counts = torch.tensor([[15, 5], [10, 20], [250, 750]]).double()
    assert plausible(counts).tolist() == [[15, 5], [10, 20], [22.5, 67.5]]


def test_small_sites_do_not_make_large_ones_unbelievable() -> None:
    """A partition of skin lesions: 4476 may be three times 1060 and no more, all others are what they say."""
    counts = torch.tensor([[33], [10], [4476], [1632], [1060]]).double()
    assert plausible(counts).flatten().tolist() == [33, 10, 3180, 1632, 1060]


def test_two_large_sites_among_small_ones_are_believed() -> None:
    """3·(2000 + 10 + 12 + 15) / 4 = 1527.75 of the 3000; 2000 are less than 3·(3000 + 37) / 4."""
    counts = torch.tensor([[2000], [3000], [10], [12], [15]]).double()
    assert plausible(counts).flatten().tolist() == [2000, 1527.75, 10, 12, 15]


def test_of_two_sites_nobody_knows_which_is_out_of_line() -> None:
    counts = torch.tensor([[1, 1], [900, 900]]).double()
    assert plausible(counts) is counts


def test_sites_that_tell_of_nothing_do_not_speak_for_the_others() -> None:
    """Coarse bins make zeros of small sites: the one with images is believed, and of three with images all hold."""
    alone = torch.tensor([[0, 0], [0, 0], [100, 50]]).double()
    assert plausible(alone).tolist() == alone.tolist()
    counts = torch.tensor([[0, 0], [10, 0], [0, 10], [400, 0]]).double()
    assert plausible(counts).tolist() == [[0, 0], [10, 0], [0, 10], [30, 0]]  # zeros would make it 3·20/3


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(0, 10**15), min_size=3, max_size=3), min_size=3, max_size=6), st.integers(0, 5))
def test_a_lie_is_worth_no_more_than_the_bound(rows: list[list[int]], who: int) -> None:
    counts = torch.tensor(rows).double()
    found = plausible(counts)
    assert bool((found <= counts).all())
    totals = counts.sum(dim=1)
    others = sorted(float(t) for k, t in enumerate(totals) if k != who % len(rows) and t > 0)
    if len(others) >= 2 and totals[who % len(rows)] > 0:
        assert float(found[who % len(rows)].sum()) <= 3 * max(others[len(others) // 2], fmean(others)) * (1 + 1e-9)


def test_no_class_is_impossible() -> None:
    """(7 + 1/2, 0 + 1/2) of 8."""
    assert log_shares(torch.tensor([7, 0])).tolist() == pytest.approx([math.log(15 / 16), math.log(1 / 16)])
    assert log_shares(torch.tensor([[0, 0]])).exp().tolist() == [[0.5, 0.5]]


def with_head(*rows: list[float]) -> dict[str, Tensor]:
    """A network of which nothing matters but its head."""
    return {"head.weight": torch.tensor(rows), "head.bias": torch.full((len(rows),), 9.0)}


def test_what_weights_are_above_where_they_began() -> None:
    """Of four features they begin within ±½."""
    found = risen(with_head([0.5, 0.4, -2.0, 0.1], [1.5, 0.6, -3.0, 0.5], [-1.0, -1.0, -1.0, 0.75]))
    assert found.tolist() == pytest.approx([0, 1.1, 0.25])
    assert guessed(with_head([1.0, -1.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]), 80).tolist() == [
        20,
        0,
        60,
    ]


@pytest.mark.parametrize("name", names())
def test_no_weight_of_a_class_that_was_not_there_rises(name: str) -> None:
    """Whatever the network: it is trained on two classes of four, and the others' weights only fall."""
    spec = NetSpec(name, 3, 4, 32, width=2)
    net = build(spec).train()
    net.load_state_dict(fresh(spec, torch.Generator().manual_seed(3)))
    step = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
    pixels = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    for _ in range(8):
        step.zero_grad()
        F.cross_entropy(net(pixels), torch.tensor([0, 2] * 6)).backward()
        step.step()
    found = risen(dict(net.state_dict()))
    assert (found > 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("name", names())
def test_every_network_has_a_head_to_guess_from(name: str) -> None:
    spec = NetSpec(name, 3, 4, 32, width=2)
    found = guessed(fresh(spec, torch.Generator().manual_seed(1)), 100)
    assert float(found.sum()) == pytest.approx(100)
    assert bool((found > 0).all())


# What models show -----------------------------------------------------------------------------------------------------


SHOWS = with_head(
    [1.5, 0.5, 0.0, 0.0], [-1.0, -1.0, 0.0, 0.5], [0.0, 0.5, 0.0, 0.0], [1.5, 2.5, 0.0, 0.0]
)  # ¼, 0, 0, ¾


def test_honest_counts_are_believed() -> None:
    for counts in ([100, 0, 0, 300], [400, 0, 0, 20], [30, 50, 50, 4]):  # the last: of rare ones it may learn nothing
        told = torch.tensor(counts).double()
        assert held_to_model(told, SHOWS).equal(told)


def test_images_of_a_class_that_the_model_does_not_show_are_not_counted() -> None:
    """Of a class with a quarter of what rose 10·4,000·¼ may be told, of one with nothing 50."""
    assert held_to_model(torch.full((4,), 1000.0).double(), SHOWS).tolist() == [1000, 50, 50, 1000]
    assert held_to_model(torch.tensor([0, 900, 0, 100]).double(), SHOWS).tolist() == [0, 50, 0, 100]
    little = with_head([0.51, 0.0, 0.0, 0.0], [4.49, 0.0, 0.0, 0.0])  # 0.01 of 4
    found = held_to_model(torch.tensor([5000, 5000]).double(), little)
    assert found.tolist() == pytest.approx([10 * 10_000 * 0.0025 + 50, 5000])


def test_a_model_that_shows_nothing_is_not_asked() -> None:
    told = torch.tensor([900.0, 100.0, 0.0, 0.0]).double()
    assert held_to_model(told, with_head(*[[0.1, 0.2, -0.5, 0.5]] * 4)).equal(told)
    assert held_to_model(torch.zeros(4).double(), SHOWS).tolist() == [0, 0, 0, 0]


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
    """Risen by 4, 1, 0, 3 of 8; with one that has 0, 0, 6, 2 of 8 the shares are ¼, 1/16, 3/8, 5/16: 1/8 is the bar."""
    spec = NetSpec("small", 3, 4, 8, width=2)

    def knows(*above: float) -> Member:
        return Member(spec, with_head(*([0.5 + rise, 0.0, -1.0, 0.5] for rise in above)))

    assert known_classes([knows(4.0, 1.0, 0.0, 3.0)]).tolist() == [1, 1, 0, 1]  # 1/8 is enough
    assert known_classes([knows(4.0, 0.9, 0.0, 3.0)]).tolist() == [1, 0, 0, 1]
    both = [knows(4.0, 1.0, 0.0, 3.0), knows(0.0, 0.0, 6.0, 2.0)]
    assert guessed_shares(both).tolist() == pytest.approx([1 / 4, 1 / 16, 3 / 8, 5 / 16])
    assert known_classes(both).tolist() == [1, 0, 1, 1]
    assert known_classes([knows(0.0, 0.0, 0.0, 0.0)]).tolist() == [1, 1, 1, 1]


def test_classes_that_a_site_has_are_guessed_from_its_model() -> None:
    """Three sites with two classes each: an unseen one gets nothing, at every site."""
    seen = ((0, 1), (1, 2), (2, 3))
    base = federation((0, 0, 0))
    sites = []
    for site, classes in zip(base.sites, seen, strict=True):
        labels = [classes[i % 2] for i in range(48)]
        train = images(48, seed=classes[0], labels=labels)
        sites.append(type(site)(site.name, train, site.val, site.test))
    data = Federation(**{**vars(base), "sites": tuple(sites)})
    method = make("consult", {"counts": "none"})
    train, model = {"epochs": 10, "batch": 8, "lr": 0.05}, {"name": "small", "width": 16}
    ctx = context(study(data, method="consult", rounds=1, train=train, model=model))
    for site, classes in zip(data.sites, seen, strict=True):
        bundle = drive(ctx, method.answer(ctx, site, ctx.bundle("request", site.name, {}), State())).bundle
        assert "label_counts" not in bundle.groups
        found = guessed(join_groups(bundle), 48)
        assert [c for c in range(4) if found[c] > 0] == list(classes)
