"""From a source of images to the sites of a study, with the definitions in words that every result prints.

The order of steps is fixed: deal the official training images to sites, put each site's images through its
acquisition shift, hold out its own test share (where the protocol has one), then its validation share of what remains.
Who holds which image and how it was acquired follow from the partition and its seed; only the hold-outs follow from
`seed_for_splits`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wardround.data.federation import Federation, LocalTest, Site
from wardround.data.imageset import Dataset, ImageSet, merge
from wardround.data.partition import Integers, Partition, check_patients_apart, count, partition
from wardround.data.shifts import Shift, drawn_shifts, fixed_shifts
from wardround.data.splits import Splits
from wardround.errors import BadInput
from wardround.streams import Streams

SHIFTS = ("none", "fixed", "drawn")


def federate(
    dataset: Dataset,
    *,
    rule: str,
    sites: int,
    alpha: float = 0.3,
    capped: bool = True,
    classes_per_site: int = 2,
    min_size: int = 10,
    by_patient: bool | None = None,
    partition_seed: int = 0,
    seed_for_splits: int = 0,
    merge_val: bool = True,
    val_share: float = 0.1,
    test: str = "weighted",
    test_share: float = 0.2,
    shift: str = "none",
    shift_strength: float = 1.0,
    partition_file: Path | None = None,
) -> tuple[Federation, Partition]:
    """Deal one dataset to sites, by a rule or as `partition_file` says.

    `test` is what a site is tested on: `weighted`, the official test set weighted to the label mix of its training
    images; `own`, a random `test_share` of its own images; `balanced`, FedKPer's class-balanced share; `natural`, the
    official test images with its site id. Without a shift all sites under `weighted` share one ImageSet, which is also
    the global test set, so that a shared model is evaluated once; sites with equal shifts share one likewise.

    `by_patient` None means: where there are patient ids, no patient is in two sites that are drawn, nor in two parts.
    Natural sites and a partition file are facts: patients whom they split are then counted in a note, not refused.
    """
    _refuse_one_class(dataset)
    _refuse_unlike(f"{dataset.name}'s training part", dataset.train, f"{dataset.name}'s test part", dataset.test)
    if len(dataset.test) == 0:
        raise BadInput(f"{dataset.name} has no official test images, so nothing can be measured; add a test part")
    pool, pooled = _training_pool(dataset, merge_val)
    is_drawn = rule != "natural" and partition_file is None
    must_be_apart = is_drawn and pool.patients is not None if by_patient is None else by_patient
    splits = Splits(test, test_share, val_share, by_patient, seed_for_splits)
    if rule == "natural" and partition_file is None:
        _refuse_untrained(dataset, pool, test)
    if partition_file is None:
        dealt = partition(
            pool,
            rule,
            sites,
            partition_seed,
            alpha=alpha,
            capped=capped,
            classes_per_site=classes_per_site,
            min_size=min_size,
            by_patient=must_be_apart,
        )
    else:
        dealt = _loaded(partition_file, pool, sites, must_be_apart)
    n = len(dealt.sites)
    names = [f"site-{i:0{len(str(n))}d}" for i in range(1, n + 1)]
    holdings = (pool.take(torch.from_numpy(index)) for index in dealt.sites)
    official = _official_of_site(names, pool, dealt, dataset.test) if test == "natural" else [dataset.test] * n
    shifts, shift_words = _shifts(shift, n, dealt.seed, shift_strength, pool.channels)
    whole = f"the official test set of {len(dataset.test):,} images"
    global_words = f"accuracy on {whole}"
    if shift != "none":
        global_words += f", image i (from 0) under the acquisition shift of site number i mod {n} (from 0)"
    built = _sites(splits, names, holdings, official, shifts, Streams(dealt.seed))
    federation = Federation(
        sites=built,
        test=_under_shifts(dataset.test, np.arange(len(dataset.test)) % n, shifts, Streams(dealt.seed)),
        classes=pool.classes,
        partition_rule=dealt.rule,
        partition_hash=dealt.sha256,
        local_protocol=_local_words(splits, built, whole, "the official test images with its site id", shift != "none"),
        global_protocol=global_words,
        provenance="; ".join([dataset.provenance, pooled, _val_words(splits, built), *shift_words]),
        notes=(*dataset.notes, *_class_notes([pool], dataset.test), *patient_notes(pool, dataset.test, dealt)),
    )
    return federation, dealt


def federate_files(
    named: Mapping[str, Dataset],
    *,
    by_patient: bool | None = None,
    partition_seed: int = 0,
    seed_for_splits: int = 0,
    merge_val: bool = True,
    val_share: float = 0.1,
    test: str = "natural",
    test_share: float = 0.2,
    shift: str = "none",
    shift_strength: float = 1.0,
) -> tuple[Federation, Partition]:
    """One source per site, in the order of site names.

    The global test set is all official test parts merged; a site's own test is by default (`natural`) its own part of
    it, otherwise as in `federate`. The partition's indices count through the sites' images one site after the other.
    """
    names = sorted(named)
    _refuse_bad_sources(names, named, test)
    pools, pooled = zip(*(_training_pool(named[name], merge_val) for name in names), strict=True)
    splits = Splits(test, test_share, val_share, by_patient, seed_for_splits)
    parts = [named[name].test for name in names]
    merged = merge(parts)
    edges = np.cumsum([0, *map(len, pools)])
    ranges = tuple(np.arange(start, stop) for start, stop in pairwise(edges))
    dealt = Partition(ranges, f"one source per site, {count(len(names))}", partition_seed)
    shifts, shift_words = _shifts(shift, len(names), partition_seed, shift_strength, merged.channels)
    whole = f"the official test parts of all sites merged ({len(merged):,} images)"
    global_words = f"accuracy on {whole}"
    if shift != "none":
        global_words += ", each part under its site's acquisition shift"
    owner = np.repeat(np.arange(len(names)), [len(part) for part in parts])
    official = parts if test == "natural" else [merged] * len(names)
    built = _sites(splits, names, pools, official, shifts, Streams(partition_seed))
    sources = [f"{name}: {named[name].provenance}, {use}" for name, use in zip(names, pooled, strict=True)]
    federation = Federation(
        sites=built,
        test=_under_shifts(merged, owner, shifts, Streams(partition_seed)),
        classes=merged.classes,
        partition_rule=dealt.rule,
        partition_hash=dealt.sha256,
        local_protocol=_local_words(splits, built, whole, "its own official test part", shift != "none"),
        global_protocol=global_words,
        provenance="; ".join([*sources, _val_words(splits, built), *shift_words]),
        notes=(
            *_class_notes(pools, merged),
            *(
                f"{name}: {text}"
                for name, pool in zip(names, pools, strict=True)
                for text in (*named[name].notes, *patient_notes(pool, named[name].test))
            ),
        ),
    )
    return federation, dealt


def _sites(
    splits: Splits,
    names: Sequence[str],
    holdings: Iterable[ImageSet],
    official: Sequence[ImageSet],
    shifts: Sequence[Shift],
    noise: Streams,
) -> tuple[Site, ...]:
    """Every site from what it holds; `official[i]` are the official test images that concern site i."""
    built = []
    shared: dict[tuple[int, Shift], ImageSet] = {}
    for name, holding, test, shift in zip(names, holdings, official, shifts, strict=True):
        train, val, held = splits.split(name, _under_shift(holding, shift, noise.torch("shift own", name)))
        if held is not None:
            built.append(Site(name, train, val, LocalTest(held, None)))
            continue
        key = (id(test), shift)
        if key not in shared:
            shared[key] = _under_shift(test, shift, noise.torch("shift test", name))
        weights = _label_mix(name, train, test) if splits.test == "weighted" else None
        built.append(Site(name, train, val, LocalTest(shared[key], weights)))
    return tuple(built)


def _local_words(splits: Splits, sites: Sequence[Site], whole: str, natural: str, shifted: bool) -> str:
    """How local accuracy is measured, in one sentence, given what to call all official test images and a site's."""
    sizes = [len(site.test.images) for site in sites]
    each = (
        f"{min(sizes):,} to {max(sizes):,} images a site" if min(sizes) < max(sizes) else f"{sizes[0]:,} images a site"
    )
    share = f"{100 * splits.test_share:g} %"
    apart = "no patient in both parts, " if _keeps_patients(splits, sites) else ""
    words = {
        "weighted": f"{whole}, as the sum over classes of recall times the class's share of the site's training images "
        "(classes without test images left out)",
        "own": f"a random {share} of the site's own images, held out before training ({apart}{each})",
        "balanced": f"FedKPer's roughly class-balanced {share} of the site's own images, held out before training "
        f"({each})",
        "natural": f"{natural} ({each})",
    }[splits.test]
    return f"accuracy of each site on {words}{', under its own acquisition shift' if shifted else ''}"


def _val_words(splits: Splits, sites: Sequence[Site]) -> str:
    if splits.val_share == 0:
        return "no validation share"
    rest = " left after its test share" if splits.tests_on_own_images else ""
    apart = ", no patient in both parts" if _keeps_patients(splits, sites) else ""
    return f"each site keeps {100 * splits.val_share:g} % of its images{rest} for validation{apart}"


def _keeps_patients(splits: Splits, sites: Sequence[Site]) -> bool:
    """Whether no site splits a patient: asked for, or left open while all images have patient ids."""
    if splits.by_patient is None:
        return all(site.train.patients is not None for site in sites)
    return splits.by_patient


def patient_notes(pool: ImageSet, test: ImageSet, dealt: Partition | None = None) -> Iterator[str]:
    """What sharing of patients there is, however it came about; figures on it are better than on new patients."""
    if pool.patients is None:
        return
    own = pool.patients.numpy()
    if test.patients is not None:
        both = np.intersect1d(own, test.patients.numpy())
        images = int(np.isin(test.patients.numpy(), both).sum())
        if len(both):
            yield (
                f"{len(both):,} patients (or lesions) are in both training and test, with {images:,} of the "
                f"{len(test):,} test images: accuracies on these parts are too good"
            )
    if dealt is not None:
        places = np.concatenate([np.unique(own[index]) for index in dealt.sites])
        several = int((np.unique(places, return_counts=True)[1] > 1).sum())
        if several:
            yield f"{several:,} patients (or lesions) have images at several sites"


def _class_notes(pools: Sequence[ImageSet], test: ImageSet) -> Iterator[str]:
    """Which classes nobody can learn, and of which no figure says anything."""
    trained = torch.stack([pool.counts() for pool in pools]).sum(dim=0)
    for counts, where, therefore in (
        (trained, "training", "no model can know"),
        (test.counts(), "test", "global accuracy says nothing about"),
    ):
        empty = [name for name, n in zip(test.classes, counts.tolist(), strict=True) if n == 0]
        them = "it" if len(empty) == 1 else "them"
        if empty:
            yield f"there are no {where} images of {', '.join(empty)}; {therefore} {them}"


def _training_pool(dataset: Dataset, merge_val: bool) -> tuple[ImageSet, str]:
    """The images that sites train on, and what was done with the official validation part."""
    if dataset.val is None or len(dataset.val) == 0:
        return dataset.train, f"official training part ({len(dataset.train):,} images), no official validation part"
    if not merge_val:
        unused = f"the official validation part ({len(dataset.val):,} images) is not used"
        return dataset.train, f"official training part ({len(dataset.train):,} images); {unused}"
    pool = merge([dataset.train, dataset.val])
    return pool, f"official training and validation parts merged ({len(pool):,} images)"


def _refuse_one_class(dataset: Dataset) -> None:
    """In a whole study; a hospital that reads its own images (`sitedata.py`) may have one class of many."""
    if len(dataset.train.classes) < 2:
        held = ", ".join(dataset.train.classes)
        raise BadInput(f"{dataset.name} holds the one class {held}; a classifier needs at least two")


def _refuse_untrained(dataset: Dataset, pool: ImageSet, test: str) -> None:
    """A natural site that only tests or validates could not take part, and would be missing without a word.

    Where sites are not tested on official images of their own, those of other hospitals may be a test for all.
    """
    if pool.sites is None:
        return
    validated, tested = (
        [] if part is None or part.sites is None else part.sites.tolist() for part in (dataset.val, dataset.test)
    )
    lacking = sorted({*validated, *(tested if test == "natural" else ())} - {*pool.sites.tolist()})
    if lacking:
        named = [dataset.site_names[i] if dataset.site_names else f"id {i}" for i in lacking[:8]]
        listed = ", ".join(named) + (", ..." if len(lacking) > 8 else "")
        who, has, its = ("site", "has", "its") if len(lacking) == 1 else ("sites", "have", "their")
        other = "or set data.merge_val=true" if {*lacking} <= {*validated} else "or set data.test=weighted or own"
        raise BadInput(f"{who} {listed} {has} no training images; add some, remove {its} images, {other}")


def _loaded(path: Path, pool: ImageSet, sites: int, by_patient: bool) -> Partition:
    dealt = Partition.load(path)
    dealt.check_fits(len(pool), sites, path)
    if by_patient:
        check_patients_apart(pool, dealt)
    return dealt


def _official_of_site(names: Sequence[str], pool: ImageSet, dealt: Partition, test: ImageSet) -> list[ImageSet]:
    """For each site the official test images that carry its id."""
    if test.sites is None:
        raise BadInput("the official test part has no site ids; use test weighted or own")
    parts = []
    for name, index in zip(names, dealt.sites, strict=True):
        ids = [] if pool.sites is None else np.unique(pool.sites.numpy()[index]).tolist()
        if len(ids) != 1:
            raise BadInput(f"{name} holds images of {len(ids)} site ids; test natural needs the partition rule natural")
        part = test.take(torch.nonzero(test.sites == ids[0]).flatten())
        if len(part) == 0:
            raise BadInput(f"{name} (site id {ids[0]}) has no official test images; use test weighted or own")
        parts.append(part)
    return parts


def _label_mix(name: str, train: ImageSet, test: ImageSet) -> Tensor:
    """The class shares of the site's training images over the classes that the test set has."""
    counts = train.counts().double() * (test.counts() > 0)
    if counts.sum() == 0:
        raise BadInput(f"none of the classes {name} trains on is in the official test set; use test own")
    return counts / counts.sum()


def _shifts(kind: str, n: int, seed: int, strength: float, channels: int) -> tuple[tuple[Shift, ...], list[str]]:
    """Each site's shift, and the words for it (none where there is none)."""
    if kind == "none":
        return (Shift(),) * n, []
    if kind == "fixed":
        shifts = fixed_shifts(n, channels)
        listed = ", ".join(f"({i}) {shift.describe()}" for i, shift in enumerate(dict.fromkeys(shifts), 1))
        return shifts, [f"fixed acquisition shifts, sites in turn: {listed}"]
    if kind == "drawn":
        shifts = drawn_shifts(n, seed, strength, channels)
        return shifts, [f"acquisition shifts drawn per site, strength {strength:g}, partition seed {seed}"]
    raise BadInput(f"unknown shift {kind!r}; choose one of {', '.join(SHIFTS)}")


def _under_shift(images: ImageSet, shift: Shift, noise: torch.Generator) -> ImageSet:
    return images if shift == Shift() else replace(images, images=shift.apply(images.images, noise))


def _under_shifts(test: ImageSet, owner: Integers, shifts: Sequence[Shift], noise: Streams) -> ImageSet:
    """The global test set with every image under the shift of its owner; the very same set where no site has one."""
    if all(shift == Shift() for shift in shifts):
        return test
    pixels = test.images.clone()
    for site, shift in enumerate(shifts):
        index = torch.from_numpy(np.flatnonzero(owner == site))
        pixels[index] = shift.apply(test.images[index], noise.torch("shift global test", index=site))
    return replace(test, images=pixels)


def _refuse_unlike(one: str, a: ImageSet, other: str, b: ImageSet) -> None:
    if a.classes != b.classes:
        raise BadInput(
            f"{one} and {other} have different classes ({_difference(a.classes, b.classes)}); give both the same "
            "classes in the same order"
        )
    if a.images.shape[1:] != b.images.shape[1:]:
        raise BadInput(
            f"{one} has images {_shape(a)} and {other} {_shape(b)}; convert them to one size and number of channels"
        )


def _difference(one: Sequence[str], other: Sequence[str]) -> str:
    """Where two lists of classes differ first."""
    if len(one) != len(other):
        return f"{len(one)} and {len(other)}"
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return f"number {place + 1} is {one[place]!r} and {other[place]!r}"


def _shape(images: ImageSet) -> str:
    return f"of {images.size}×{images.size} pixels with {images.channels} channel{'s' * (images.channels != 1)}"


def _refuse_bad_sources(names: Sequence[str], named: Mapping[str, Dataset], test: str) -> None:
    if not names:
        raise BadInput("no site was named; give at least one file or folder")
    for name in names:
        source = named[name]
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise BadInput(f"site name {name!r} may hold only letters, digits, '-', '_' and '.'; rename it")
        if len(source.train) == 0:
            raise BadInput(f"site {name} has no training images; add some or leave the site out")
        if test == "natural" and len(source.test) == 0:
            raise BadInput(f"site {name} has no official test images; add some, or use test weighted or own")
        _refuse_one_class(source)
        _refuse_unlike(f"site {names[0]}", named[names[0]].train, f"site {name}", source.train)
        _refuse_unlike(f"site {name}'s training part", source.train, "its test part", source.test)
    if not any(len(named[name].test) for name in names):
        raise BadInput("no site has official test images, so nothing can be measured; add a test part")
