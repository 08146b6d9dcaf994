"""Partitions: disjoint, exhaustive, seed-stable, never an endless loop, and a file that cannot lie."""

import json
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from wardround.data import partition as subject
from wardround.data.imageset import ImageSet
from wardround.data.partition import Partition, partition
from wardround.errors import BadInput


def images(labels: list[int], sites: list[int] | None = None, patients: list[int] | None = None) -> ImageSet:
    n = len(labels)
    ids = [None if x is None else torch.tensor(x, dtype=torch.int64) for x in (sites, patients)]
    classes = tuple(f"class {c}" for c in range(max(labels, default=0) + 1))
    return ImageSet(torch.zeros(n, 1, 2, 2, dtype=torch.uint8), torch.tensor(labels, dtype=torch.int64), classes, *ids)


def lists(result: Partition) -> list[list[int]]:
    return [part.tolist() for part in result.sites]


def counts(result: Partition, of: ImageSet) -> NDArray[np.int64]:
    """Images of each class (columns) at each site (rows)."""
    return np.stack([np.bincount(of.labels.numpy()[part], minlength=len(of.classes)) for part in result.sites])


many_labels = st.lists(st.integers(0, 5), min_size=40, max_size=200)
draws = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(["iid", "dirichlet", "shards"]),
        "sites": st.integers(1, 6),
        "seed": st.integers(0, 10**6),
        "alpha": st.floats(0.05, 100),
        "capped": st.booleans(),
        "classes_per_site": st.integers(1, 6),
        "min_size": st.integers(1, 4),
    }
)


@settings(deadline=None, max_examples=100)
@given(many_labels, draws)
def test_every_image_is_in_one_site_and_the_same_one_each_time(labels: list[int], settings: dict[str, object]) -> None:
    data = images(labels)
    try:
        first = partition(data, **settings)  # type: ignore[arg-type]
    except BadInput:
        assert settings["rule"] != "iid"
        return
    np.random.seed(3)  # noqa: NPY002  a partition must not look at global state
    again = partition(data, **settings)  # type: ignore[arg-type]
    assert lists(first) == lists(again)
    assert first.sha256 == again.sha256
    assert sorted(chain.from_iterable(lists(first))) == list(range(len(labels)))
    assert len(first.sites) == settings["sites"]
    assert min(map(len, first.sites)) >= settings["min_size"]  # type: ignore[operator]
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in first.sites)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 20), min_size=30, max_size=100), st.sampled_from(["iid", "dirichlet"]), st.data())
def test_by_patient_keeps_every_patient_in_one_site(patients: list[int], rule: str, data: st.DataObject) -> None:
    labels = data.draw(st.lists(st.integers(0, 3), min_size=len(patients), max_size=len(patients)))
    sites = data.draw(st.integers(1, max(1, len(set(patients)) // 3)))
    try:
        dealt = partition(images(labels, None, patients), rule, sites, 1, alpha=5, min_size=1, by_patient=True)
    except BadInput:
        assert rule == "dirichlet"
        return
    where = [{patients[i] for i in part} for part in lists(dealt)]
    assert sum(map(len, where)) == len(set(patients))
    assert sorted(chain.from_iterable(lists(dealt))) == list(range(len(patients)))


lists_of_sites = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4)


@settings(deadline=None, max_examples=100)
@given(lists_of_sites, lists_of_sites)
def test_the_hash_changes_exactly_when_the_lists_do(one: list[list[int]], other: list[list[int]]) -> None:
    a, b = (Partition(tuple(np.array(x, np.int64) for x in y), "any", 0) for y in (one, other))
    assert (a.sha256 == b.sha256) == (one == other)
    assert a.sha256 == Partition(a.sites, "other words", 7).sha256


def test_the_hash_is_that_of_the_lists_as_compact_json() -> None:
    known = "bb8bfd012cead4feda132268c59b45440da98e238ce0cb1e182e708cdaa52495"
    assert Partition((np.array([0, 2]), np.array([1])), "", 0).sha256 == known


def test_another_seed_is_another_partition() -> None:
    data = images([0, 1] * 50)
    for rule in ("iid", "dirichlet", "shards"):
        one, other = (partition(data, rule, 4, seed, classes_per_site=1) for seed in (0, 1))
        assert one.sha256 != other.sha256, rule


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert sorted(map(len, partition(images([0] * 23), "iid", 4, 0, min_size=1).sites)) == [5, 6, 6, 6]


def test_iid_by_patient_gives_large_patients_whole_and_levels_the_rest() -> None:
    patients = [0] * 10 + list(range(1, 11))
    dealt = partition(images([0] * 20, None, patients), "iid", 2, 0, min_size=1, by_patient=True)
    assert sum(0 in part for part in lists(dealt)) == 1
    assert abs(len(dealt.sites[0]) - len(dealt.sites[1])) <= 10
    assert dealt.rule == "IID, no patient in two sites, 2 sites, partition seed 0"


def test_a_large_alpha_is_nearly_even_and_a_small_one_is_not() -> None:
    data = images([0] * 500 + [1] * 500)
    even = counts(partition(data, "dirichlet", 5, 0, alpha=1e6, capped=False), data)
    assert np.abs(even - 100).max() <= 2
    uneven = counts(partition(data, "dirichlet", 5, 0, alpha=0.05, capped=False, min_size=1), data)
    assert uneven.max() > 300


def shares(values: list[list[float]], reverse: bool = False) -> np.random.Generator:
    """A generator whose Dirichlet draws are these, in turn, and whose permutations change nothing, or turn round."""

    class Scripted:
        def __init__(self) -> None:
            self.rows = iter(values)

        def dirichlet(self, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.array(next(self.rows))

        def permutation(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
            return x[::-1] if reverse else x

    return Scripted()  # type: ignore[return-value]


def deal(
    labels: list[int], sizes: list[int], sites: int, drawn: list[list[float]], capped: bool, least: int
) -> list[int]:
    arrays = np.array(labels), np.array(sizes)
    site_of = subject.dirichlet(*arrays, sites, shares(drawn), alpha=1, capped=capped, min_size=least)
    return list(map(int, site_of))


def test_dirichlet_plain_cuts_each_class_at_the_running_shares() -> None:
    drawn = [[0.25, 0.55, 0.2], [0.5, 0.0, 0.5]]  # cuts of 8 at 2 and 6.4; of 4 at 2 and 2
    assert deal([0] * 8 + [1] * 4, [1] * 12, 3, drawn, False, 1) == [0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 2, 2]


def test_dirichlet_capped_gives_nothing_more_to_a_full_site() -> None:
    drawn = [[0.75, 0.25, 0.0], [0.8, 0.1, 0.1]]  # n/N is 4: site 0 holds 6 of class 0, so class 1 goes half and half
    assert deal([0] * 8 + [1] * 4, [1] * 12, 3, drawn, True, 2) == [0] * 6 + [1] * 2 + [1, 1, 2, 2]
    assert deal([0] * 8 + [1] * 4, [1] * 12, 3, drawn, False, 0) == [0] * 6 + [1] * 2 + [0, 0, 0, 2]


def test_a_site_with_exactly_its_even_share_is_full() -> None:
    assert deal([0] * 4 + [1] * 4, [1] * 8, 2, [[1.0, 0.0], [0.5, 0.5]], True, 1) == [0] * 4 + [1] * 4


def test_dirichlet_redraws_until_every_site_is_large_enough() -> None:
    drawn = [[1.0, 0.0], [0.9, 0.1], [0.5, 0.5]]
    assert deal([0] * 10, [1] * 10, 2, drawn, False, 2) == [0] * 5 + [1] * 5


def test_dirichlet_capped_spreads_evenly_where_every_share_with_room_is_zero() -> None:
    drawn = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert deal([0] * 4 + [1] * 4, [1] * 8, 3, drawn, True, 1) == [0] * 4 + [1, 1, 2, 2]


def test_dirichlet_cuts_between_patients_and_counts_their_images() -> None:
    halves, most = [[0.5, 0.5]], [[0.65, 0.35]]  # of 10 images: cuts at 5 and 6 inside the patient whose middle is 5.5
    assert deal([0] * 4, [3, 1, 3, 3], 2, halves, False, 1) == [0, 0, 1, 1]
    assert deal([0] * 4, [3, 1, 3, 3], 2, most, False, 1) == [0, 0, 0, 1]
    assert deal([0] * 2, [2, 2], 2, [[0.25, 0.75]], False, 1) == [0, 1]  # a middle on the cut stays before it


def test_a_redraw_takes_patients_in_another_order() -> None:
    """A large patient who comes first leaves the first site empty whatever the shares; coming last, not."""
    rng = shares([[0.3, 0.7]] * 2, reverse=True)
    sizes = np.array([1, 1, 8])
    dealt = subject.dirichlet(np.zeros(3, np.int64), sizes, 2, rng, alpha=1, capped=False, min_size=2)
    assert dealt.tolist() == [0, 0, 1]


def test_capped_sites_stay_below_the_cap_plus_one_class() -> None:
    labels = [c for c in range(8) for _ in range(100)]
    data = images(labels)
    for seed in range(5):
        sizes = [len(part) for part in partition(data, "dirichlet", 5, seed, alpha=0.1).sites]
        assert max(sizes) < 800 / 5 + 100


@pytest.mark.parametrize("alpha", [1e-300, 1e-4, 1e300, 1.7e308])
def test_extreme_alphas_are_dealt_or_refused_but_never_nan(alpha: float) -> None:
    labels = [c for c in range(12) for _ in range(10)]
    try:
        dealt = partition(images(labels), "dirichlet", 4, 0, alpha=alpha)
    except BadInput:
        assert alpha < 1
    else:
        assert sum(map(len, dealt.sites)) == 120


def test_the_group_label_is_the_majority_and_the_lowest_of_a_tie() -> None:
    data = images([2, 2, 0, 1, 0, 1], None, [7, 7, 7, 5, 5, 9])
    unit_of, sizes, labels = subject._units(data, data.patients)
    assert unit_of.tolist() == [1, 1, 1, 0, 0, 2]
    assert sizes.tolist() == [2, 3, 1]
    assert labels.tolist() == [0, 2, 1]


@pytest.mark.parametrize(("sites", "k"), [(4, 2), (2, 4), (8, 1), (3, 8), (5, 3)])
def test_shards_give_every_site_k_classes_and_every_class_a_site(sites: int, k: int) -> None:
    data = images([c for c in range(8) for _ in range(20)])
    table = counts(partition(data, "shards", sites, 3, classes_per_site=k, min_size=1), data)
    assert ((table > 0).sum(axis=1) == k).all()
    holders = (table > 0).sum(axis=0)
    assert holders.min() >= 1
    assert holders.max() - holders.min() <= 1
    for c in range(8):
        held = table[table[:, c] > 0, c]
        assert held.max() - held.min() <= 1


def test_natural_sites_come_in_the_order_of_their_ids_whatever_their_size() -> None:
    data = images([0, 1, 0, 1], sites=[9, 2, 9, 5])
    for asked in (0, 3):
        dealt = partition(data, "natural", asked, 0)
        assert lists(dealt) == [[1], [3], [0, 2]]
        assert dealt.rule == "natural, 3 sites by site id (2, 5, 9)"


def test_natural_by_patient_refuses_a_patient_in_two_sites() -> None:
    with pytest.raises(BadInput, match="patient 4 has images in sites 1 and 3"):
        partition(images([0] * 4, [0, 1, 2, 2], [4, 1, 3, 4]), "natural", 0, 0, by_patient=True)
    assert len(partition(images([0] * 2, [0, 1], [4, 1]), "natural", 0, 0, by_patient=True).sites) == 2


def test_the_rule_in_words() -> None:
    data = images([0, 1] * 50)
    words = "Dirichlet(0.3), capped, 5 sites, partition seed 7"
    assert partition(data, "dirichlet", 5, 7).rule == words
    assert partition(data, "dirichlet", 1, 7, alpha=1, capped=False).rule == (
        "Dirichlet(1), plain, 1 site, partition seed 7"
    )
    assert partition(data, "shards", 2, 0, classes_per_site=1).rule == (
        "shards of 1 class a site, 2 sites, partition seed 0"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sites": 0}, "at least 1 site, not 0"),
        ({"sites": -3}, "at least 1 site, not -3"),
        ({"sites": 41, "min_size": 1}, "41 sites are more than the 40 images"),
        ({"alpha": 0.0}, "alpha must be a positive number, not 0.0"),
        ({"alpha": -1.0}, "alpha must be a positive number"),
        ({"alpha": float("nan")}, "alpha must be a positive number, not nan"),
        ({"alpha": float("inf")}, "alpha must be a positive number, not inf"),
        ({"rule": "dirichelt"}, "unknown partition rule 'dirichelt'; did you mean dirichlet"),
        ({"rule": "zzz"}, "unknown partition rule 'zzz'; choose one of iid, dirichlet, shards, natural"),
        ({"min_size": 0}, "min_size must be at least 1"),
        ({"min_size": 11}, "40 images cannot give 4 sites min_size = 11 each; .* at most 10"),
        ({"by_patient": True}, "no patient ids"),
        ({"rule": "natural"}, "no site ids"),
        ({"rule": "shards", "classes_per_site": 5}, "classes_per_site is 5 but the images have 4 classes"),
        ({"rule": "shards", "classes_per_site": 0}, "classes_per_site is 0"),
        ({"rule": "shards", "sites": 3, "classes_per_site": 1}, "3 sites of 1 class leave some of the 4 classes"),
    ],
)
def test_bad_settings_are_one_line_that_says_what_to_do(change: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"rule": "dirichlet", "sites": 4, "seed": 0} | change
    with pytest.raises(BadInput, match=message) as caught:
        partition(images([0, 1, 2, 3] * 10), **settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_bad_ids_are_refused() -> None:
    with pytest.raises(BadInput, match="3 site ids but 2 sites"):
        partition(images([0] * 3, [0, 1, 2]), "natural", 2, 0)
    with pytest.raises(BadInput, match="no images"):
        partition(images([], []), "natural", 0, 0)
    few = images([0] * 40, None, [i % 3 for i in range(40)])
    with pytest.raises(BadInput, match="4 sites are more than the 3 patients"):
        partition(few, "iid", 4, 0, by_patient=True)
    lopsided = images([0] * 40, None, [0] * 38 + [1, 2])
    with pytest.raises(BadInput, match="a site got fewer than min_size = 10"):
        partition(lopsided, "iid", 2, 0, by_patient=True)
    with pytest.raises(BadInput, match="shards deal classes, which splits patients"):
        partition(lopsided, "shards", 2, 0, by_patient=True)


@pytest.mark.parametrize("capped", [True, False])
def test_an_impossible_minimum_ends_soon_with_what_to_change(capped: bool) -> None:
    data = images([0] * 50_000)
    start = time.perf_counter()
    with pytest.raises(
        BadInput, match=r"no Dirichlet\(0.001\) split over 20 sites .* larger alpha, fewer sites or a smaller"
    ):
        partition(data, "dirichlet", 20, 0, alpha=0.001, capped=capped, min_size=100)
    assert time.perf_counter() - start < 20


def test_shards_that_cannot_fill_every_site_end_too() -> None:
    with pytest.raises(BadInput, match="no deal of 1 class to each of 3 sites gave every site 5 images"):
        partition(images([0] * 30 + [1, 2]), "shards", 3, 0, classes_per_site=1, min_size=5)


def test_a_saved_partition_loads_as_it_was(tmp_path: Path) -> None:
    dealt = partition(images([0, 1] * 50), "dirichlet", 3, 5)
    path = tmp_path / "partition.json"
    dealt.save(path)
    dealt.save(path)
    loaded = Partition.load(path)
    assert lists(loaded) == lists(dealt)
    assert (loaded.rule, loaded.seed, loaded.sha256) == (dealt.rule, 5, dealt.sha256)
    assert [p.name for p in tmp_path.iterdir()] == ["partition.json"]
    loaded.check_fits(100, 3, path)
    loaded.check_fits(100, 0, path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("sites", [[0, 1], [3, 2]]), ("sites", [[0, 1.5], [2, 3]]), ("rule", "IID, honest"), ("seed", 4), ("sha256", "0")],
)
def test_an_edited_file_is_refused(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "p.json"
    Partition((np.array([0, 1]), np.array([2, 3])), "IID", 0).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(BadInput, match="was edited or damaged"):
        Partition.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "is not a partition file"),
        (b"{}", "is not a partition file"),
        (b'{"format": "other"}', "has format 'other'"),
        (b'{"format": "wardround partition 1", "sites": [[[0]], 3]}', "is not a partition file"),
        (b'{"format": "wardround partition 1", "sites": [[99999999999999999999]]}', "is not a partition file"),
    ],
)
def test_a_corrupt_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        Partition.load(path)


def test_a_missing_file_and_a_missing_folder_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read the partition"):
        Partition.load(tmp_path / "none.json")
    with pytest.raises(BadInput, match="cannot be written"):
        Partition((np.array([0]),), "IID", 0).save(tmp_path / "none" / "p.json")


@pytest.mark.parametrize(
    ("parts", "images", "sites", "message"),
    [
        ([[0, 1], [2]], 3, 4, "has 2 sites but the study asks for 4"),
        ([[0, 1], [2]], 4, 2, "deals 3 images and the data has 4"),
        ([[0, 1], [1]], 3, 2, "exactly one site"),
        ([[0, 1, 2], []], 3, 2, "no site empty"),
    ],
)
def test_a_partition_of_other_data_does_not_fit(parts: list[list[int]], images: int, sites: int, message: str) -> None:
    loaded = Partition(tuple(np.array(part, np.int64) for part in parts), "IID", 0)
    with pytest.raises(BadInput, match=message):
        loaded.check_fits(images, sites, Path("p.json"))
