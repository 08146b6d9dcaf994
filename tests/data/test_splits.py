"""What a site holds out: exact numbers, and no patient on both sides."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from wardround.data.imageset import ImageSet
from wardround.data.splits import Splits, hold_out, hold_out_balanced
from wardround.errors import BadInput


def rng(seed: int = 0) -> Generator:
    return np.random.default_rng(seed)


def site(labels: list[int], patients: list[int] | None = None) -> ImageSet:
    """A site whose image i has the pixel value i."""
    n = len(labels)
    pixels = torch.arange(n, dtype=torch.uint8).reshape(n, 1, 1, 1)
    ids = None if patients is None else torch.tensor(patients)
    return ImageSet(pixels, torch.tensor(labels, dtype=torch.int64), ("a", "b", "c"), None, ids)


def numbers(images: ImageSet) -> list[int]:
    return [int(x) for x in images.images.flatten()]


@pytest.mark.parametrize(
    ("n", "share", "held"),
    [
        (100, 0.1, 10),
        (109, 0.1, 10),
        (100, 0.29, 29),
        (30, 0.1, 3),
        (2, 0.1, 1),
        (9, 0.1, 1),
        (1, 0.1, 0),
        (0, 0.1, 0),
        (50, 0.0, 0),
        (2, 0.99, 1),
        (3, 0.999, 2),
        (10, 1 - 1e-12, 9),
    ],
)
def test_the_held_part_is_the_share_at_least_one_and_never_all(n: int, share: float, held: int) -> None:
    kept, out = hold_out(n, share, rng())
    assert (len(kept), len(out)) == (n - held, held)
    assert sorted([*kept, *out]) == list(range(n))


def test_the_held_part_is_the_first_of_the_shuffled_list() -> None:
    _, out = hold_out(50, 0.1, rng(4))
    assert out.tolist() == sorted(rng(4).permutation(50)[:5].tolist())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.floats(0.01, 0.9), st.integers(0, 99))
def test_no_patient_is_in_both_parts(patients: list[int], share: float, seed: int) -> None:
    kept, out = hold_out(len(patients), share, rng(seed), np.array(patients))
    inside, outside = ({patients[i] for i in part} for part in (kept, out))
    assert not inside & outside
    assert sorted([*kept, *out]) == list(range(len(patients)))
    assert len(kept) > 0
    assert (len(out) > 0) == (len(set(patients)) > 1)


def test_patients_are_held_only_while_they_fit() -> None:
    patients = np.array([0] * 15 + [1] * 3 + [2] * 2)  # a share of 5 holds patients 1 and 2, in any order
    for seed in range(5):
        assert hold_out(20, 0.25, rng(seed), patients)[1].tolist() == [15, 16, 17, 18, 19]
        assert hold_out(20, 0.05, rng(seed), patients)[1].tolist() == [18, 19]  # none fits: the smallest


def test_balanced_takes_the_same_number_of_each_class_or_a_share_of_a_small_one() -> None:
    labels = np.array([0] * 60 + [1] * 35 + [2] * 5)  # 20 % is 20, so 6 a class; class 2 has 5 and gives 1
    kept, out = hold_out_balanced(labels, 0.2, rng())
    assert np.bincount(labels[out]).tolist() == [6, 6, 1]
    assert sorted([*kept, *out]) == list(range(100))


def test_balanced_takes_all_of_a_class_that_has_exactly_the_number() -> None:
    labels = np.array([0] * 60 + [1] * 34 + [2] * 6)
    assert np.bincount(labels[hold_out_balanced(labels, 0.2, rng())[1]]).tolist() == [6, 6, 6]


def test_balanced_counts_only_classes_that_are_present() -> None:
    labels = np.array([0] * 50 + [7] * 50)
    assert np.bincount(labels[hold_out_balanced(labels, 0.2, rng())[1]])[[0, 7]].tolist() == [10, 10]


def test_balanced_falls_back_to_a_random_share_where_classes_give_nothing() -> None:
    labels = np.arange(12)  # 20 % is 2, less than one per class
    assert len(hold_out_balanced(labels, 0.2, rng())[1]) == 2
    assert len(hold_out_balanced(np.array([0, 1, 1]), 0.2, rng())[1]) == 1
    assert len(hold_out_balanced(np.array([0]), 0.2, rng())[1]) == 0


def test_a_site_without_an_own_test_keeps_a_tenth_for_validation() -> None:
    for protocol in ("weighted", "natural"):
        train, val, test = Splits(protocol).split("site-1", site([0, 1] * 20))
        assert (len(train), len(val), test) == (36, 4, None)


def test_an_own_test_comes_first_and_validation_from_what_remains() -> None:
    own = site([0] * 80 + [1] * 20)
    train, val, test = Splits("own").split("site-1", own)
    assert test is not None
    assert (len(train), len(val), len(test)) == (72, 8, 20)
    assert sorted(numbers(train) + numbers(val) + numbers(test)) == list(range(100))
    balanced = Splits("balanced").split("site-1", own)[2]
    assert balanced is not None
    assert balanced.counts().tolist() == [10, 10, 0]


def test_splits_depend_on_the_seed_and_the_site_alone() -> None:
    own = site([0] * 50)
    first, again = (numbers(Splits("own", seed=1).split("site-1", own)[1]) for _ in range(2))
    assert first == again
    assert first != numbers(Splits("own", seed=2).split("site-1", own)[1])
    assert first != numbers(Splits("own", seed=1).split("site-2", own)[1])


def test_by_patient_holds_in_every_part() -> None:
    patients = [i // 4 for i in range(80)]
    train, val, test = Splits("own", by_patient=True).split("site-1", site([0] * 80, patients))
    assert test is not None
    seen = [{n // 4 for n in numbers(part)} for part in (train, val, test)]
    assert [len(part) for part in (train, val, test)] == [60, 4, 16]  # of 64 left a tenth is 6: one patient of 4
    assert sum(map(len, seen)) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": "mine"}, "unknown test protocol 'mine'"),
        ({"val_share": 1.0}, "val_share must be from 0 to below 1"),
        ({"val_share": float("nan")}, "val_share"),
        ({"test_share": 0.0}, "test_share must be between 0 and 1"),
        ({"test_share": float("nan")}, "test_share"),
        ({"test": "balanced", "by_patient": True}, "splits patients"),
    ],
)
def test_bad_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Splits(**change)  # type: ignore[arg-type]


def test_sites_that_cannot_be_split_as_asked() -> None:
    for protocol in ("own", "balanced"):
        with pytest.raises(BadInput, match="site-3 has a single image"):
            Splits(protocol).split("site-3", site([0]))
    with pytest.raises(BadInput, match="site-3 has a single patient"):
        Splits("own", by_patient=True).split("site-3", site([0] * 9, [5] * 9))
    with pytest.raises(BadInput, match="site-3 has no patient ids"):
        Splits(by_patient=True).split("site-3", site([0] * 9))
    assert len(Splits().split("site-3", site([0]))[0]) == 1
