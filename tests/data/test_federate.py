"""From a dataset to sites: who trains on what, who is tested on what, and whether the words say so."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from wardround.data.federate import federate, federate_files
from wardround.data.federation import Federation
from wardround.data.imageset import Dataset, ImageSet
from wardround.data.partition import Partition
from wardround.data.shifts import Shift, drawn_shifts, fixed_shifts
from wardround.errors import BadInput
from wardround.streams import Streams


def images(
    labels: list[int],
    *,
    first: int = 0,
    sites: list[int] | None = None,
    patients: list[int] | None = None,
    classes: int = 3,
    size: int = 4,
    channels: int = 1,
) -> ImageSet:
    """Images that are all of one value: `first`, `first` + 1 and so on, so that each can be told from the others."""
    n = len(labels)
    values = torch.arange(first, first + n, dtype=torch.uint8).reshape(n, 1, 1, 1)
    ids = [None if x is None else torch.tensor(x) for x in (sites, patients)]
    names = tuple("abcdefgh"[:classes])
    return ImageSet(values.repeat(1, channels, size, size), torch.tensor(labels, dtype=torch.int64), names, *ids)


def dataset(train: ImageSet, val: ImageSet | None, test: ImageSet, name: str = "toy") -> Dataset:
    return Dataset(name, train, val, test, f"{name} images")


def toy() -> Dataset:
    """80 training, 20 validation and 12 test images of three classes; the values 0 to 99, and 100 to 111."""
    return dataset(images([0, 0, 1, 2] * 20), images([0, 1] * 10, first=80), images([0, 1, 2] * 4, first=100))


def values(of: ImageSet) -> list[int]:
    return [int(x) for x in of.images[:, 0, 0, 0]]


def own_values(federation: Federation) -> list[int]:
    return sorted(v for site in federation.sites for part in (site.train, site.val) for v in values(part))


def test_train_and_val_are_merged_dealt_and_a_tenth_kept_for_validation() -> None:
    federation, dealt = federate(toy(), rule="iid", sites=4)
    assert [site.name for site in federation.sites] == ["site-1", "site-2", "site-3", "site-4"]
    assert [(len(site.train), len(site.val)) for site in federation.sites] == [(23, 2)] * 4
    assert own_values(federation) == list(range(100))
    for site, index in zip(federation.sites, dealt.sites, strict=True):
        assert sorted(values(site.train) + values(site.val)) == index.tolist()
    assert (federation.partition_rule, federation.partition_hash) == (dealt.rule, dealt.sha256)
    assert federation.partition_rule == "IID, 4 sites, partition seed 0"
    assert federation.classes == ("a", "b", "c")
    assert federation.provenance == (
        "toy images; official training and validation parts merged (100 images); "
        "each site keeps 10 % of its images for validation"
    )


def test_classes_without_images_are_noted() -> None:
    """Two of four classes have no test image, and one no training image."""
    some = dataset(images([0, 1, 2] * 10, classes=4), None, images([0, 3] * 3, classes=4, first=60))
    untrained, untested = (
        "there are no training images of d; no model can know it",
        "there are no test images of b, c; global accuracy says nothing about them",
    )
    assert federate(some, rule="iid", sites=3, min_size=1)[0].notes == (untrained, untested)
    assert federate(toy(), rule="iid", sites=4)[0].notes == ()
    other = dataset(images([3] * 6, classes=4), None, images([1, 2], classes=4), "other")
    notes = federate_files({"north": some, "south": some}, test="own")[0].notes
    assert notes == (untrained, untested)
    assert federate_files({"north": some, "south": other}, test="own")[0].notes == ()


def test_without_merging_the_official_validation_part_is_left_out_and_said_to_be() -> None:
    federation, _ = federate(toy(), rule="iid", sites=4, merge_val=False, val_share=0)
    assert own_values(federation) == list(range(80))
    assert all(len(site.val) == 0 for site in federation.sites)
    assert "the official validation part (20 images) is not used; no validation share" in federation.provenance
    alone = dataset(toy().train, None, toy().test)
    assert "(80 images), no official validation part" in federate(alone, rule="iid", sites=4)[0].provenance


def test_the_default_test_is_the_official_set_shared_by_all_and_weighted_to_the_label_mix() -> None:
    data = toy()
    federation, _ = federate(data, rule="dirichlet", sites=3)
    assert federation.test is data.test
    for site in federation.sites:
        assert site.test.images is data.test
        assert site.test.class_weights is not None
        assert site.test.class_weights.dtype == torch.float64
        assert torch.allclose(site.test.class_weights, site.train.counts().double() / len(site.train))
    assert federation.local_protocol == (
        "accuracy of each site on the official test set of 12 images, as the sum over classes of recall times the "
        "class's share of the site's training images (classes without test images left out)"
    )
    assert federation.global_protocol == "accuracy on the official test set of 12 images"


def test_classes_absent_from_the_test_set_are_left_out_of_the_weights() -> None:
    data = dataset(images([0] * 20 + [1] * 60 + [2] * 20), None, images([0, 1], first=200))
    federation, _ = federate(data, rule="iid", sites=1, val_share=0)
    weights = federation.sites[0].test.class_weights
    assert weights is not None
    assert weights.tolist() == [0.25, 0.75, 0.0]
    stranger = dataset(images([2] * 20), None, images([0, 1], first=200))
    with pytest.raises(BadInput, match="none of the classes site-1 trains on is in the official test set"):
        federate(stranger, rule="iid", sites=1)


def test_an_own_test_is_held_out_of_the_sites_images() -> None:
    federation, dealt = federate(toy(), rule="iid", sites=4, test="own")
    for site, index in zip(federation.sites, dealt.sites, strict=True):
        assert (len(site.train), len(site.val), len(site.test.images)) == (18, 2, 5)
        assert sorted(values(site.train) + values(site.val) + values(site.test.images)) == index.tolist()
        assert site.test.class_weights is None
    assert federation.local_protocol == (
        "accuracy of each site on a random 20 % of the site's own images, held out before training (5 images a site)"
    )
    assert "10 % of its images left after its test share for validation" in federation.provenance


def test_fedkpers_test_is_balanced_over_classes() -> None:
    data = dataset(images([0] * 70 + [1] * 30), None, images([0, 1], first=200))
    federation, _ = federate(data, rule="iid", sites=1, test="balanced")
    assert federation.sites[0].test.images.counts().tolist() == [10, 10, 0]
    assert federation.local_protocol == (
        "accuracy of each site on FedKPer's roughly class-balanced 20 % of the site's own images, held out before "
        "training (20 images a site)"
    )


def hospitals(test_ids: list[int] | None) -> Dataset:
    test = images([0, 1, 2, 0], first=200, sites=test_ids)
    return dataset(images([0, 1, 2] * 4, sites=[7, 7, 3] * 4), None, test)


def test_natural_sites_are_tested_on_the_official_images_of_their_id() -> None:
    federation, _ = federate(hospitals([7, 3, 7, 7]), rule="natural", sites=0, test="natural")
    assert [site.name for site in federation.sites] == ["site-1", "site-2"]
    assert [values(site.test.images) for site in federation.sites] == [[201], [200, 202, 203]]
    assert [site.test.class_weights for site in federation.sites] == [None, None]
    assert federation.partition_rule == "natural, 2 sites by site id (3, 7)"
    assert federation.local_protocol == (
        "accuracy of each site on the official test images with its site id (1 to 3 images a site)"
    )


def test_natural_tests_need_ids_in_the_test_part_and_one_id_a_site() -> None:
    with pytest.raises(BadInput, match="the official test part has no site ids"):
        federate(hospitals(None), rule="natural", sites=0, test="natural")
    with pytest.raises(BadInput, match=r"site-1 \(site id 3\) has no official test images"):
        federate(hospitals([7, 7, 7, 7]), rule="natural", sites=0, test="natural")
    with pytest.raises(BadInput, match="site-1 holds images of 2 site ids; test natural needs the partition rule"):
        federate(hospitals([7, 3, 7, 7]), rule="iid", sites=1, min_size=1, test="natural")


def test_a_natural_site_without_training_images_is_refused_by_name() -> None:
    train, test = images([0, 1] * 4, sites=[2] * 8), images([0, 1], first=200, sites=[2, 2])
    beyond = images([0, 1, 0], first=100, sites=[2, 1, 0])
    cases = [
        (
            dataset(train, None, beyond),
            "sites id 0, id 1 have no training images; add some, remove their images, or set data.test=weighted or own",
        ),
        (
            dataset(train, beyond, test),
            "sites id 0, id 1 have no training images; add some, remove their images, or set data.merge_val=true",
        ),
        (
            replace(dataset(train, None, beyond.take(torch.tensor([0, 1]))), site_names=("east", "south", "west")),
            "site south has no training images; add some, remove its images, or set data.test=weighted or own",
        ),
        (
            dataset(train, None, images([0] * 10, first=100, sites=[*range(3, 12), 2])),
            "sites id 3, id 4, id 5, id 6, id 7, id 8, id 9, id 10, ... have no training images; add some, remove "
            "their images, or set data.test=weighted or own",
        ),
    ]
    for data, message in cases:
        for sites in (0, 2):  # and never a wrong count of sites
            with pytest.raises(BadInput) as caught:
                federate(data, rule="natural", sites=sites, merge_val=False, test="natural")
            assert str(caught.value) == message
    assert len(federate(dataset(train, beyond, test), rule="natural", sites=0)[0].sites) == 3
    unseen, _ = federate(dataset(train, None, beyond), rule="natural", sites=0, test="own")
    assert (len(unseen.sites), len(unseen.test)) == (1, 3)  # hospitals that none trains at are a test for all
    assert len(federate(dataset(train, None, beyond), rule="iid", sites=2, min_size=1)[0].sites) == 2


def test_one_class_is_not_enough_for_a_study() -> None:
    alone = images([0, 0, 0], classes=1)
    with pytest.raises(BadInput, match=r"^toy holds the one class a; a classifier needs at least two$"):
        federate(dataset(alone, None, alone), rule="iid", sites=1, min_size=1)
    with pytest.raises(BadInput, match=r"^toy holds the one class a; a classifier needs at least two$"):
        federate_files({"a": dataset(alone, None, alone)})


def test_site_names_sort_in_site_order() -> None:
    names = [site.name for site in federate(toy(), rule="iid", sites=10)[0].sites]
    assert names[0] == "site-01"
    assert names[-1] == "site-10"
    assert names == sorted(names)


def test_a_site_of_one_image_is_allowed_where_min_size_is_one() -> None:
    data = dataset(images([0, 1, 2]), None, images([0, 1, 2], first=100))
    federation, _ = federate(data, rule="iid", sites=3, min_size=1)
    assert [(len(site.train), len(site.val)) for site in federation.sites] == [(1, 0)] * 3


def test_the_two_seeds_are_apart() -> None:
    def drawn(partition_seed: int, seed_for_splits: int) -> tuple[str, list[list[int]]]:
        settings = {"partition_seed": partition_seed, "seed_for_splits": seed_for_splits}
        federation, dealt = federate(toy(), rule="iid", sites=2, **settings)  # type: ignore[arg-type]
        return dealt.sha256, [values(site.val) for site in federation.sites]

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0)[0] == drawn(0, 1)[0]
    assert drawn(0, 0)[1] != drawn(0, 1)[1]
    assert drawn(0, 0)[0] != drawn(1, 0)[0]


def test_by_patient_no_patient_is_in_two_sites_or_two_parts() -> None:
    patients = [i // 4 for i in range(100)]
    data = dataset(images([0, 1, 2, 0] * 25, patients=patients), None, toy().test)
    federation, _ = federate(data, rule="iid", sites=4, by_patient=True, test="own")
    parts = [p for site in federation.sites for p in (site.train, site.val, site.test.images)]
    seen = [{value // 4 for value in values(part)} for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 25
    assert "no patient in both parts" in federation.local_protocol


def test_fixed_shifts_reach_every_image_of_a_site_and_its_copy_of_the_test_set() -> None:
    data = toy()
    plain, _ = federate(data, rule="iid", sites=6)
    federation, _ = federate(data, rule="iid", sites=6, shift="fixed")
    seven, _ = federate(data, rule="iid", sites=7, shift="fixed")
    assert seven.sites[1].test.images is seven.sites[6].test.images
    assert plain.partition_hash == federation.partition_hash
    gamma, noise = Shift(gamma=0.6), torch.Generator()
    assert values(federation.sites[0].train) == values(plain.sites[0].train)
    for part in ("train", "val"):
        before, after = (getattr(f.sites[1], part) for f in (plain, federation))
        assert torch.equal(after.images, gamma.apply(before.images, noise))
    assert torch.equal(federation.sites[1].test.images.images, gamma.apply(data.test.images, noise))
    assert federation.sites[0].test.images is data.test
    assert federation.sites[5].test.images is data.test  # shift number 6 is number 1 again
    assert federation.local_protocol.endswith("(classes without test images left out), under its own acquisition shift")
    assert "fixed acquisition shifts, sites in turn: (1) none, (2) gamma 0.6," in federation.provenance


def test_image_i_of_the_global_test_is_under_the_shift_of_site_i_mod_n() -> None:
    data = toy()
    federation, _ = federate(data, rule="iid", sites=4, shift="fixed")
    for i in range(12):
        expected = fixed_shifts(4)[i % 4].apply(data.test.images[i : i + 1], torch.Generator())
        assert torch.equal(federation.test.images[i : i + 1], expected)
    assert torch.equal(federation.test.labels, data.test.labels)
    assert federation.global_protocol == (
        "accuracy on the official test set of 12 images, image i (from 0) under the acquisition shift of site number "
        "i mod 4 (from 0)"
    )


def test_an_own_test_is_shifted_once() -> None:
    plain, shifted = (federate(toy(), rule="iid", sites=3, test="own", shift=s)[0] for s in ("none", "fixed"))
    expected = Shift(brightness=1.3, contrast=0.7).apply(plain.sites[2].test.images.images, torch.Generator())
    assert torch.equal(shifted.sites[2].test.images.images, expected)


def test_drawn_shifts_follow_the_partition_seed_and_its_strength() -> None:
    data = toy()
    settings = {"rule": "iid", "sites": 3, "shift": "drawn", "partition_seed": 5}
    first, again, other = (federate(data, seed_for_splits=s, **settings)[0] for s in (0, 0, 1))  # type: ignore[arg-type]
    for a, b, c in zip(first.sites, again.sites, other.sites, strict=True):
        assert torch.equal(a.train.images, b.train.images)
        assert torch.equal(a.test.images.images, c.test.images.images)
    assert torch.equal(first.test.images, other.test.images)
    expected = drawn_shifts(3, 5, 1.0, channels=1)[1].apply(data.test.images, Streams(5).torch("shift test", "site-2"))
    assert torch.equal(first.sites[1].test.images.images, expected)
    assert "acquisition shifts drawn per site, strength 1, partition seed 5" in first.provenance
    whole, dealt = federate(dataset(data.train, None, data.test), val_share=0, **settings)  # type: ignore[arg-type]
    own = data.train.images[torch.from_numpy(dealt.sites[1])]
    expected = drawn_shifts(3, 5, 1.0, channels=1)[1].apply(own, Streams(5).torch("shift own", "site-2"))
    assert torch.equal(whole.sites[1].train.images, expected)
    still, _ = federate(data, shift_strength=0.0, **settings)  # type: ignore[arg-type]
    assert still.test is data.test


def test_a_saved_partition_is_used_instead_of_drawing(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    federation, dealt = federate(toy(), rule="dirichlet", sites=3, partition_seed=4, shift="drawn")
    dealt.save(path)
    for sites in (0, 3):
        same, loaded = federate(toy(), rule="iid", sites=sites, shift="drawn", partition_file=path)
        assert loaded.sha256 == dealt.sha256
        assert same.partition_rule == "Dirichlet(0.3), capped, 3 sites, partition seed 4"
        assert torch.equal(same.sites[2].train.images, federation.sites[2].train.images)
    with pytest.raises(BadInput, match="has 3 sites but the study asks for 4"):
        federate(toy(), rule="iid", sites=4, partition_file=path)
    with pytest.raises(BadInput, match="deals 100 images and the data has 80"):
        federate(toy(), rule="iid", sites=3, partition_file=path, merge_val=False)


def test_a_saved_partition_must_keep_patients_apart_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    Partition((np.array([0, 1]), np.array([2, 3])), "by hand", 0).save(path)
    data = dataset(images([0, 1, 2, 0], patients=[5, 6, 6, 7]), None, toy().test)
    with pytest.raises(BadInput, match="patient 6 has images in sites 1 and 2"):
        federate(data, rule="iid", sites=2, by_patient=True, partition_file=path)
    with pytest.raises(BadInput, match="no patient ids"):
        federate(toy(), rule="iid", sites=2, by_patient=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shift": "rotated"}, "unknown shift 'rotated'; choose one of none, fixed, drawn"),
        ({"shift": "drawn", "shift_strength": -1.0}, "shift strength must be"),
        ({"test": "other"}, "unknown test protocol 'other'"),
        ({"val_share": 2.0}, "val_share must be"),
        ({"sites": 101, "min_size": 1}, "101 sites are more than the 100 images"),
    ],
)
def test_bad_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        federate(toy(), **({"rule": "iid", "sites": 2} | change))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_parts_that_do_not_match_are_refused() -> None:
    train = images([0, 1, 2] * 10)
    with pytest.raises(BadInput, match="toy has no official test images"):
        federate(dataset(train, None, images([])), rule="iid", sites=2)
    with pytest.raises(BadInput, match="toy's training part and toy's test part have different classes"):
        federate(dataset(train, None, images([0], classes=4)), rule="iid", sites=2)
    with pytest.raises(BadInput, match=r"4×4 pixels with 1 channel and .* 5×5 pixels with 3 channels"):
        federate(dataset(train, None, images([0], size=5, channels=3)), rule="iid", sites=2)


def two_hospitals() -> dict[str, Dataset]:
    return {
        "west": dataset(images([0, 1] * 10, first=40), None, images([0, 1], first=90), "W"),
        "east": dataset(images([0, 2] * 15), images([1] * 10, first=30), images([0, 2, 2], first=80), "E"),
    }


def test_one_file_per_site_in_the_order_of_names() -> None:
    federation, dealt = federate_files(two_hospitals())
    east, west = federation.sites
    assert (east.name, west.name) == ("east", "west")
    assert (len(east.train), len(east.val), len(west.train), len(west.val)) == (36, 4, 18, 2)
    assert sorted(values(east.train) + values(east.val)) == list(range(40))
    assert [part.tolist() for part in dealt.sites] == [list(range(40)), list(range(40, 60))]
    assert values(east.test.images) == [80, 81, 82]
    assert values(west.test.images) == [90, 91]
    assert values(federation.test) == [80, 81, 82, 90, 91]
    assert federation.partition_rule == "one source per site, 2 sites"
    assert federation.local_protocol == "accuracy of each site on its own official test part (2 to 3 images a site)"
    assert federation.global_protocol == "accuracy on the official test parts of all sites merged (5 images)"
    assert federation.provenance.startswith(
        "east: E images, official training and validation parts merged (40 images); west: W images, official training "
        "part (20 images), no official validation part; each site keeps 10 %"
    )


def test_one_file_per_site_with_the_merged_test_weighted_or_a_share_of_its_own() -> None:
    weighted, _ = federate_files(two_hospitals(), test="weighted")
    assert all(site.test.images is weighted.test for site in weighted.sites)
    assert "on the official test parts of all sites merged (5 images), as the sum" in weighted.local_protocol
    assert weighted.sites[1].test.class_weights is not None
    assert weighted.sites[1].test.class_weights[2] == 0
    own, _ = federate_files(two_hospitals(), test="own")
    assert [len(site.test.images) for site in own.sites] == [8, 4]


def test_one_file_per_site_under_shifts() -> None:
    federation, _ = federate_files(two_hospitals(), shift="fixed")
    assert values(federation.test)[:3] == [80, 81, 82]
    assert torch.equal(federation.test.images[3:], federation.sites[1].test.images.images)
    assert values(federation.sites[1].test.images) == [137, 137]  # 255·(90/255)^0.6 = 136.51, and 137.42
    assert federation.global_protocol.endswith("(5 images), each part under its site's acquisition shift")


def test_bad_sources_are_named() -> None:
    good = two_hospitals()
    train, test = images([0, 1]), images([0, 1])
    two, four, large = images([0, 1], classes=2), images([0], classes=4), images([0], size=6)
    cases = {
        "site east and site north have different classes": dataset(two, None, two),
        "site east has images of 4×4 pixels with 1 channel and site north of 6×6": dataset(large, None, large),
        "site north's training part and its test part have different classes": dataset(train, None, four),
        "site north has no official test images": dataset(train, None, images([])),
        "site north has no training images": dataset(images([]), None, test),
    }
    for message, bad in cases.items():
        with pytest.raises(BadInput, match=message):
            federate_files(good | {"north": bad})
    with pytest.raises(BadInput, match="no site was named"):
        federate_files({})
    for name in ("", "../up", "a b", "x/y"):
        with pytest.raises(BadInput, match="may hold only letters"):
            federate_files(good | {name: dataset(train, None, test)})
    with pytest.raises(BadInput, match="no site has official test images"):
        federate_files({"a": dataset(train, None, images([]))}, test="own")
    with pytest.raises(BadInput, match="east has no patient ids"):
        federate_files(good, by_patient=True)
