"""What is wrong with a set, or might be: a list of findings, each with how bad it is and the images that show it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wardround.data.check.inspected import Inspected
from wardround.data.check.odd import odd_ones
from wardround.data.likeness import NEAR, described, near_pairs
from wardround.data.listing import PARTS

Severity = Literal["spoils", "look", "note"]
SEVERITIES: dict[Severity, str] = {
    "spoils": "would spoil a result",
    "look": "look at it",
    "note": "good to know",
}
FLAT = 2.0  # grey levels of deviation: less is a blank picture
FEW = 10  # images of a class in training
UNEVEN = 20  # times as many images of one class as of another
MOST_NAMED = 1000  # images that a finding keeps the names of


@dataclass(frozen=True)
class Finding:
    """One thing: `names` are of the files or groups of files concerned, `places` of the images, `count` of all."""

    severity: Severity
    kind: str
    text: str
    count: int
    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


def find(seen: Inspected) -> list[Finding]:
    """Everything, the worst first."""
    found = [*_unusable(seen), *_classes(seen), *_same(seen), *_alike(seen), *_patients(seen), *_plain(seen)]
    found += [
        Finding("look", odd.kind, odd.text, len(odd.places), _names(seen, odd.places), tuple(odd.places[:MOST_NAMED]))
        for odd in odd_ones(seen)
    ]
    return sorted(found, key=lambda finding: list(SEVERITIES).index(finding.severity))


def _names(seen: Inspected, places: Iterable[int]) -> tuple[str, ...]:
    return tuple(seen.items[place].name for place in list(places)[:MOST_NAMED])


def _unusable(seen: Inspected) -> Iterator[Finding]:
    if seen.trouble:
        yield Finding("spoils", "no study can use it", seen.trouble, 1)
    if seen.refused:
        names = tuple(f"{name}: {reason}" for name, reason in seen.refused[:MOST_NAMED])
        yield Finding("spoils", "unreadable files", "these stop a run that reads the set", len(seen.refused), names)


def _classes(seen: Inspected) -> Iterator[Finding]:
    counts = np.zeros((len(PARTS), len(seen.classes)), np.int64)
    np.add.at(counts, (seen.parts, seen.labels), 1)
    train, test = counts[0] + counts[1], counts[2]
    if len(seen.classes) < 2 and not seen.trouble:
        yield Finding(
            "spoils", "one class", "a study needs two or more; one of its sites may have one", 1, seen.classes
        )
    if test.sum():
        for part, held in (("training", train), ("test", test)):
            missing = tuple(name for name, n in zip(seen.classes, held, strict=True) if n == 0)
            if missing:
                yield Finding(
                    "spoils", f"classes without {part} images", "no accuracy means them", len(missing), missing
                )
    few = tuple(f"{name}: {n}" for name, n in zip(seen.classes, train, strict=True) if 0 < n < FEW)
    if few:
        yield Finding("look", "tiny classes", f"fewer than {FEW} training images", len(few), few)
    present = train[train > 0]
    if len(present) > 1 and present.max() > UNEVEN * present.min():
        ratio = f"the largest class has {present.max() / present.min():.0f} times as many images as the smallest"
        yield Finding("note", "uneven classes", f"{ratio}; read balanced accuracy, too", 1)


def _groups(seen: Inspected) -> list[list[int]]:
    """Images with the very same pixels."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(seen.items):
        if item.look.low < item.look.high:  # blank pictures are all the same, and a finding of their own
            found[item.look.sha256].append(place)
    return [places for places in found.values() if len(places) > 1]


def _same(seen: Inspected) -> Iterator[Finding]:
    groups = _groups(seen)
    conflicting = [g for g in groups if len(set(seen.labels[g].tolist())) > 1]
    across = [g for g in groups if len(set(seen.is_test[g].tolist())) > 1]
    yield from _of_groups(seen, "spoils", "conflicting labels", "the same picture under two classes", conflicting)
    yield from _of_groups(
        seen, "spoils", "duplicates across training and test", "trained on, and tested on again", across
    )
    within = [g for g in groups if len(set(seen.is_test[g].tolist())) == 1]
    yield from _of_groups(seen, "look", "duplicates on one side", "counted more than once", within)


def _of_groups(
    seen: Inspected, severity: Severity, kind: str, text: str, groups: Sequence[Sequence[int]], sign: str = " = "
) -> Iterator[Finding]:
    if groups:
        names = tuple(sign.join(_described(seen, place) for place in group[:8]) for group in groups[:MOST_NAMED])
        places = tuple(place for group in groups for place in group)[:MOST_NAMED]
        yield Finding(severity, kind, text, len(groups), names, places)


def _described(seen: Inspected, place: int) -> str:
    item = seen.items[place]
    return f"{item.name} ({PARTS[item.part]}, {seen.classes[item.label]})"


def _alike(seen: Inspected) -> Iterator[Finding]:
    """Near duplicates that are not the very same, and not slices of one file: those look alike by nature."""
    hashes = [item.look.sha256 for item in seen.items]
    pairs = [
        (i, j)
        for i, j in near_pairs(described(seen.thumbs)).tolist()
        if hashes[i] != hashes[j] and (seen.data is not None or seen.items[i].source[0] != seen.items[j].source[0])
    ]
    across = [pair for pair in pairs if seen.is_test[pair[0]] != seen.is_test[pair[1]]]
    within = [pair for pair in pairs if seen.is_test[pair[0]] == seen.is_test[pair[1]]]
    how = f"small grey versions correlate by {NEAR:g} or more"
    yield from _of_groups(seen, "spoils", "near duplicates across training and test", how, across, " ~ ")
    yield from _of_groups(seen, "note", "near duplicates on one side", how, within, " ~ ")
    other = [pair for pair in pairs if seen.labels[pair[0]] != seen.labels[pair[1]]]
    yield from _of_groups(seen, "look", "near duplicates of two classes", how, other, " ~ ")


def _patients(seen: Inspected) -> Iterator[Finding]:
    """Who is in two parts, by files only: a patient's own name or id never leaves the reader."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, item in enumerate(seen.items):
        if item.patient >= 0:
            places[item.patient].append(place)
    groups = [group for group in places.values() if len(set(seen.parts[group].tolist())) > 1]
    across = [group for group in groups if len(set(seen.is_test[group].tolist())) > 1]
    within = [group for group in groups if len(set(seen.is_test[group].tolist())) == 1]
    text = "accuracies on new patients would be lower; leave them out of one of the two"
    yield from _of_groups(seen, "spoils", "patients in training and test", text, across, " + ")
    text = 'do not choose an epoch by these images (train.keep = "best")'
    yield from _of_groups(seen, "look", "patients in training and validation", text, within, " + ")


def _plain(seen: Inspected) -> Iterator[Finding]:
    looks = [item.look for item in seen.items]
    constant = [place for place, look in enumerate(looks) if look.low == look.high]
    blank = [place for place, look in enumerate(looks) if look.low < look.high and look.spread < FLAT]
    for kind, places in (("constant pictures", constant), ("blank pictures", blank)):
        if places:
            text = "one value only" if places is constant else f"grey levels deviate by less than {FLAT:g}"
            yield Finding("look", kind, text, len(places), _names(seen, places), tuple(places[:MOST_NAMED]))
    for kind, values in (
        ("sizes", Counter(f"{look.width}×{look.height}" for look in looks)),
        ("bit depths", Counter(f"{look.bits} bits" for look in looks)),
        ("grey and colour", Counter("grey" if look.channels == 1 else "colour" for look in looks)),
    ):
        if len(values) > 1:
            listed = ", ".join(f"{value}: {n:,}" for value, n in values.most_common(6))
            yield Finding("note", f"several {kind}" if kind != "grey and colour" else kind, listed, len(values))
    if any(look.width != look.height for look in looks):
        yield Finding("note", "not square", "a study cuts the central square: set data.size", 1)
