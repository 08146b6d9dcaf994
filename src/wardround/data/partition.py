"""Which image goes to which site.

A rule deals *units* to sites: single images or, where no patient may be in two sites, all images of a patient at once.
It sees labels and sizes, never pixels, and returns the site of every unit. So every partition is disjoint and
exhaustive by construction. The list of a site is sorted: what is hashed is who holds what, not an order.
"""

from __future__ import annotations

import difflib
import hashlib
import heapq
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.streams import Streams

RULES = ("iid", "dirichlet", "shards", "natural")
TRIES = 1_000
FORMAT = "wardround partition 1"

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """One sorted list of image indices per site, in site order, with the rule that made it in words."""

    sites: tuple[Integers, ...]
    rule: str
    seed: int

    @cached_property
    def sha256(self) -> str:
        """A hash of the index lists alone, the same on any machine: two runs with one hash saw the same sites."""
        return _sha256(_compact([part.tolist() for part in self.sites]))

    @property
    def _seal(self) -> str:
        return _sha256(f"{self.sha256}|{self.seed}|{self.rule}")

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        lists = [part.tolist() for part in self.sites]
        words = {"rule": self.rule, "seed": self.seed, "sha256": self.sha256, "seal": self._seal}
        record = {"format": FORMAT, **words, "sites": lists}
        with disk_errors(path):
            write_atomically(path, json.dumps(record).encode())

    @classmethod
    def load(cls, path: Path) -> Partition:
        """Read what `save` wrote; a file that was edited or damaged is refused."""
        try:
            record = json.loads(path.read_bytes())
        except OSError as error:
            raise BadInput(f"cannot read the partition {path}: {error.strerror}; check the path") from error
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path} is not JSON, so it is no partition file or it is damaged; draw it again") from error
        try:
            if record["format"] != FORMAT:
                raise BadInput(f"{path} has format {record['format']!r}, not {FORMAT!r}; draw it with this version")
            sites = tuple(np.array(part, dtype=np.int64).reshape(len(part)) for part in record["sites"])
            found = cls(sites, str(record["rule"]), int(record["seed"]))
            intact = record["sha256"] == _sha256(_compact(record["sites"])) and record["seal"] == found._seal
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"{path} is not a partition file, or it is damaged; draw the partition again") from error
        if not intact:
            raise BadInput(f"{path} was edited or damaged: its hash does not match its lists; draw the partition again")
        return found

    def check_fits(self, images: int, sites: int, path: Path) -> None:
        """Refuse a partition made for other data: every image must be in exactly one site (0 sites: any number)."""
        if sites not in (0, len(self.sites)):
            raise BadInput(f"{path} has {len(self.sites)} sites but the study asks for {sites}; make the two agree")
        everyone = np.sort(np.concatenate([*self.sites, np.empty(0, np.int64)]))
        if not np.array_equal(everyone, np.arange(images)) or not all(map(len, self.sites)):
            raise BadInput(
                f"{path} deals {len(everyone):,} images and the data has {images:,}, but each must be in exactly one "
                "site and no site empty; use the data it was drawn for, or draw a new partition"
            )


def partition(
    images: ImageSet,
    rule: str,
    sites: int,
    seed: int,
    *,
    alpha: float = 0.3,
    capped: bool = True,
    classes_per_site: int = 2,
    min_size: int = 10,
    by_patient: bool = False,
) -> Partition:
    """Deal `images` to `sites` by one of `RULES`.

    `min_size` is the fewest images a site may get. It does not bind natural sites: those are facts, not draws. With
    `natural`, 0 sites means as many as there are ids.
    """
    if rule not in RULES:
        near = difflib.get_close_matches(rule, RULES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInput(f"unknown partition rule {rule!r}; {hint}choose one of {', '.join(RULES)}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise BadInput(f"alpha must be a positive number, not {alpha}; 0.1 is very uneven, 100 nearly even")
    if by_patient and images.patients is None:
        raise BadInput(
            "no patient ids, so patients cannot be kept together (ids count only where the train and the validation "
            "part both have them); add them to the data or turn by_patient off"
        )
    rng = Streams(seed).numpy("partition")
    if rule == "natural":
        return _natural_partition(images, sites, seed, by_patient)

    unit_of, sizes, labels = _units(images, images.patients if by_patient else None)
    _refuse_impossible(len(images), len(sizes), sites, min_size, by_patient)
    if rule == "iid":
        site_of, words = iid(sizes, sites, rng), "IID"
    elif rule == "dirichlet":
        site_of = dirichlet(labels, sizes, sites, rng, alpha=alpha, capped=capped, min_size=min_size)
        words = f"Dirichlet({alpha:g}), {'capped' if capped else 'plain'}"
    elif by_patient:
        raise BadInput("shards deal classes, which splits patients; use iid or dirichlet, or set data.by_patient=false")
    else:
        site_of = shards(labels, sites, rng, classes_per_site=classes_per_site, min_size=min_size)
        words = f"shards of {count(classes_per_site, 'class', 'classes')} a site"
    words += ", no patient in two sites" if by_patient else ""
    result = _record(site_of[unit_of], sites, f"{words}, {count(sites)}, partition seed {seed}", seed)
    if min(map(len, result.sites)) < min_size:
        raise BadInput(
            f"a site got fewer than min_size = {min_size} images since patients stay whole; use fewer sites or a "
            "smaller min_size"
        )
    return result


def count(number: int, one: str = "site", several: str = "sites") -> str:
    """A number of things in words."""
    return f"{number} {one if number == 1 else several}"


def iid(sizes: Integers, sites: int, rng: Generator) -> Integers:
    """Every unit, in random order, to the site that holds the fewest images so far: even sizes, whole patients."""
    smallest = [(0, site) for site in range(sites)]
    site_of = np.empty(len(sizes), np.int64)
    for unit in rng.permutation(len(sizes)):
        held, site = smallest[0]
        site_of[unit] = site
        heapq.heapreplace(smallest, (held + int(sizes[unit]), site))
    return site_of


def dirichlet(
    labels: Integers, sizes: Integers, sites: int, rng: Generator, *, alpha: float, capped: bool, min_size: int
) -> Integers:
    """Each class split over the sites by shares drawn from Dir(alpha·1), redrawn until every site has `min_size`.

    Plain is the draw as it is (Yurochkin et al. 2019, and most papers since). Capped is the routine of MOON, DENSE and
    FedISCA: classes in order, and a site that already holds n/N images or more gets none of the next class. A capped
    site has its `min_size` (at most n/N) already, so the cap never stands in the way of it.

    A patient goes to the site in whose share of the class's images the middle of the patient's images falls. Single
    images are shuffled once, since sizes then follow from the shares alone: a thousand tries take about a second.
    """
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    limit = int(sizes.sum()) / sites
    for attempt in range(TRIES):
        if attempt == 0 or sizes.max() > 1:
            classes = [rng.permutation(units) for units in classes]
            ends = [np.concatenate([[0], np.cumsum(sizes[units])]) for units in classes]
        held = np.zeros(sites, np.int64)
        cuts = []
        for end in ends:
            room = held < limit if capped else np.ones(sites, bool)
            cuts.append(_cut(end, _shares(rng, alpha, room)))
            held += np.diff(end[cuts[-1]])
        if held.min() >= min_size:
            site_of = np.empty(len(sizes), np.int64)
            for units, cut in zip(classes, cuts, strict=True):
                site_of[units] = np.repeat(np.arange(sites), np.diff(cut))
            return site_of
    raise BadInput(
        f"no Dirichlet({alpha:g}) split over {sites} sites gave every site {min_size} images in {TRIES:,} tries; "
        "use a larger alpha, fewer sites or a smaller min_size"
    )


def shards(labels: Integers, sites: int, rng: Generator, *, classes_per_site: int, min_size: int) -> Integers:
    """`classes_per_site` classes to every site, every class to at least one, shared evenly among its sites.

    Each site takes the classes that the fewest sites have so far, ties at random, so the number of sites a class goes
    to differs by at most one. A site ends with fewer classes only where a class has fewer images than sites.
    """
    present, totals = np.unique(labels, return_counts=True)
    if not 1 <= classes_per_site <= len(present):
        raise BadInput(f"classes_per_site is {classes_per_site} but the images have {len(present)} classes")
    each = count(classes_per_site, "class", "classes")
    if sites * classes_per_site < len(present):
        raise BadInput(
            f"{sites} sites of {each} leave some of the {len(present)} classes to nobody; "
            "use more sites or more classes_per_site"
        )
    for _ in range(TRIES):
        holds = np.zeros((sites, len(present)), bool)
        for site in range(sites):
            fewest = np.lexsort((rng.random(len(present)), holds.sum(axis=0)))[:classes_per_site]
            holds[site, fewest] = True
        holders, place = holds.sum(axis=0), holds.cumsum(axis=0) - 1
        dealt = holds * (totals // holders + (place < totals % holders))
        if dealt.sum(axis=1).min() >= min_size:
            site_of = np.empty(len(labels), np.int64)
            for c, label in enumerate(present):
                site_of[rng.permutation(np.flatnonzero(labels == label))] = np.repeat(np.arange(sites), dealt[:, c])
            return site_of
    raise BadInput(
        f"no deal of {each} to each of {sites} sites gave every site {min_size} images in "
        f"{TRIES:,} tries; use more classes_per_site, fewer sites or a smaller min_size"
    )


def _natural_partition(images: ImageSet, sites: int, seed: int, by_patient: bool) -> Partition:
    if images.sites is None:
        raise BadInput(
            "no site ids, so there are no natural sites (ids count only where the train and the validation part both "
            "have them); add them to the data or use another partition rule"
        )
    ids, site_of = np.unique(images.sites.numpy(), return_inverse=True)
    if sites not in (0, len(ids)):
        raise BadInput(f"the data has {len(ids)} site ids but {sites} sites were asked for; ask for {len(ids)} or 0")
    if len(ids) == 0:
        raise BadInput("there are no images to deal to sites; check the data")
    listed = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    result = _record(site_of.astype(np.int64), len(ids), f"natural, {count(len(ids))} by site id ({listed})", seed)
    if by_patient:
        check_patients_apart(images, result)
    return result


def check_patients_apart(images: ImageSet, dealt: Partition) -> None:
    """Refuse a partition that has one patient's images in two sites."""
    if images.patients is None:
        raise BadInput("no patient ids, so patients cannot be kept apart; add them to the data or turn by_patient off")
    first: dict[int, int] = {}
    for site, index in enumerate(dealt.sites):
        for patient in np.unique(images.patients.numpy()[index]).tolist():
            if first.setdefault(patient, site) != site:
                raise BadInput(
                    f"patient {patient} has images in sites {first[patient] + 1} and {site + 1}; correct the ids or "
                    "turn by_patient off"
                )


def _units(images: ImageSet, patients: Tensor | None) -> tuple[Integers, Integers, Integers]:
    """The unit of every image, and each unit's size and label: its most frequent one, the lowest when several tie."""
    if patients is None:
        return np.arange(len(images)), np.ones(len(images), np.int64), images.labels.numpy()
    ids, unit_of, sizes = np.unique(patients.numpy(), return_inverse=True, return_counts=True)
    votes = np.zeros((len(ids), len(images.classes)), np.int64)
    np.add.at(votes, (unit_of, images.labels.numpy()), 1)
    return unit_of.astype(np.int64), sizes.astype(np.int64), votes.argmax(axis=1).astype(np.int64)


def _refuse_impossible(images: int, units: int, sites: int, min_size: int, by_patient: bool) -> None:
    if sites < 1:
        raise BadInput(f"a study needs at least 1 site, not {sites}; set sites to 1 or more")
    if min_size < 1:
        raise BadInput(f"min_size must be at least 1, not {min_size}; a site without images cannot take part")
    if units < sites:
        kind = "patients" if by_patient else "images"
        raise BadInput(f"{sites:,} sites are more than the {units:,} {kind} there are; use fewer sites or more data")
    if min_size * sites > images:
        raise BadInput(
            f"{images:,} images cannot give {sites} sites min_size = {min_size} each; use fewer sites or a min_size of "
            f"at most {images // sites}"
        )


def _shares(rng: Generator, alpha: float, room: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A Dirichlet draw kept to the sites that have room; even among those where it underflows to nothing."""
    shares = rng.dirichlet(np.full(len(room), alpha)) * room
    return shares if shares.sum() > 0 else room.astype(np.float64)


def _cut(end: Integers, shares: NDArray[np.float64]) -> Integers:
    """Where a class is cut: site s gets units cut[s] up to cut[s+1]; `end[u]` is the images of all units before u."""
    running = np.cumsum(shares)
    targets = np.floor(running / running[-1] * end[-1])
    middles = (end[1:] + end[:-1]) / 2
    return np.concatenate([[0], np.searchsorted(middles, targets, side="right")])


def _record(site_of: Integers, sites: int, rule: str, seed: int) -> Partition:
    order = np.argsort(site_of, kind="stable")
    edges = np.searchsorted(site_of[order], np.arange(1, sites))
    return Partition(tuple(np.split(order, edges)), rule, seed)


def _compact(lists: list[list[int]]) -> str:
    return json.dumps(lists, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
