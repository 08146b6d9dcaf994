"""Rows that name a file and its label, as a data set: splits, ids, and the pictures in one store.

A table and a folder of DICOM files both become rows first. Rows are ordered by part before anything is decoded, so
that each part is one stretch of the store and a set larger than memory is never copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.cache import read_images
from wardround.data.imageset import Dataset, ImageSet
from wardround.data.reading import Source
from wardround.data.slices import SliceRule
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent
from wardround.streams import Streams

PARTS = ("train", "val", "test")
TEST_SHARE, DATA_SEED = 0.2, 0  # of the test share that is drawn where nobody named one; the same in every study
ALONE = "\0alone "  # how the patient of a row begins whose file does not say whose it is, while others do

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """A file and what is known of it. `site`, `patient` and `part` are empty where nothing is; `where` is for messages.

    A patient is whatever keeps images together; nothing here shows or stores it but as a number of the run's own.
    """

    path: Path
    label: str
    site: str = ""
    patient: str = ""
    part: str = ""
    rule: SliceRule | None = None
    where: str = ""


def read_rows(
    name: str,
    rows: Sequence[Row],
    size: int | None,
    cache_folder: Path,
    progress: Silent = NO_PROGRESS,
    by_patient: bool = True,
) -> Dataset:
    """All pictures that the rows name, in parts; a test share is drawn where the rows have none.

    With `by_patient` a share that is drawn splits no patient.
    """
    plan = plan_rows(name, rows, by_patient)
    sets = read_plan(name, plan, size, cache_folder, progress)
    sites = tuple(sorted({row.site for row in rows} - {""}))
    provenance = _provenance(name, sets, len(rows), plan.how, sites)
    return Dataset(name, sets["train"], sets.get("val"), sets["test"], provenance, site_names=sites)


@dataclass(frozen=True)
class Plan:
    """Rows before anything is decoded: for each its class, part, patient and site as numbers, and who decided."""

    classes: tuple[str, ...]
    labels: Integers
    parts: Integers  # places in `PARTS`
    patients: Integers | None
    sites: Integers | None
    order: Integers  # of the rows in the store: one part after the other
    sources: list[Source]  # in that order
    how: str


def plan_rows(name: str, rows: Sequence[Row], by_patient: bool = True) -> Plan:
    """Decide what follows from the rows alone."""
    classes = _classes(rows)
    labels = np.array([classes.index(row.label) for row in rows])
    patients, sites = _numbers([row.patient for row in rows]), _sorted_numbers([row.site for row in rows])
    kept_whole = patients if by_patient else None
    parts, how = _parts(name, rows, labels, classes, kept_whole, sites)
    return plan_of(rows, classes, labels, parts, how, patients, sites)


def plan_of(
    rows: Sequence[Row],
    classes: tuple[str, ...],
    labels: Integers,
    parts: Integers,
    how: str,
    patients: Integers | None = None,
    sites: Integers | None = None,
) -> Plan:
    """What was decided of every row, and the order in the store that follows from it."""
    order = np.concatenate([np.flatnonzero(parts == part) for part in range(len(PARTS))])
    sources = [Source(rows[i].path, rows[i].rule) for i in order]
    return Plan(classes, labels, parts, patients, sites, order, sources, how)


def read_plan(
    name: str, plan: Plan, size: int | None, cache_folder: Path | None, progress: Silent
) -> dict[str, ImageSet]:
    """The pictures of each part; without a `cache_folder` all in memory, however many they are."""
    images, counts = read_images(name, plan.sources, size, cache_folder, progress)
    row_of = np.repeat(plan.order, counts)
    patients = plan.patients
    if patients is None and max(counts) > 1:
        patients = np.arange(len(plan.order))  # slices of one volume belong together whoever the patient is
    sets = {}
    for place, part in enumerate(PARTS):
        held = np.flatnonzero(plan.parts[row_of] == place)
        if len(held):
            here = row_of[held[0] : held[-1] + 1]
            sets[part] = ImageSet(
                images[held[0] : held[-1] + 1],
                torch.from_numpy(plan.labels[here]),
                plan.classes,
                sites=_ids(plan.sites, here),
                patients=_ids(patients, here),
            )
    return sets


def _classes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Class names in order; numbers in the order of numbers."""
    found = {row.label for row in rows}
    numbers = all(re.fullmatch(r"[0-9]{1,9}", label) for label in found)
    return tuple(sorted(found, key=lambda label: (int(label), label)) if numbers else sorted(found))


def _numbers(names: Sequence[str]) -> Integers | None:
    """Names as numbers in the order in which they come, so that a secret hash among them leaves no trace."""
    if not names[0]:
        return None
    first = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([first[name] for name in names])


def _sorted_numbers(names: Sequence[str]) -> Integers | None:
    return np.unique(names, return_inverse=True)[1].astype(np.int64) if names[0] else None


def _ids(numbers: Integers | None, rows: Integers) -> Tensor | None:
    return None if numbers is None else torch.from_numpy(numbers[rows])


def _parts(
    name: str,
    rows: Sequence[Row],
    labels: Integers,
    classes: tuple[str, ...],
    patients: Integers | None,
    sites: Integers | None,
) -> tuple[Integers, str]:
    """For each row its place in `PARTS`, and in words who decided."""
    if rows[0].part:
        parts = np.array([PARTS.index(row.part) for row in rows])
        for place in (0, 2):
            if place not in parts:
                raise BadInput(f"{name} has no {PARTS[place]} images; mark some as {PARTS[place]}, or leave split out")
        return parts, "parts as the table has them"
    units = np.arange(len(rows)) if patients is None else patients
    tested = _test_units(name, units, labels, classes, sites, TEST_SHARE, DATA_SEED, patients is not None)
    alone = sum(row.patient.startswith(ALONE) for row in rows)
    but = f" (files that do not say whose they are: {alone})" if alone else ""
    whole = f"no patient in two parts{but}, " if patients is not None else ""
    return np.where(np.isin(units, tested), 2, 0), f"test share {TEST_SHARE:g} drawn, {whole}data seed {DATA_SEED}"


def _test_units(
    name: str,
    units: Integers,
    labels: Integers,
    classes: tuple[str, ...],
    sites: Integers | None,
    share: float,
    seed: int,
    by_patient: bool,
) -> Integers:
    """The same share of the patients (or images) of each class, spread over the sites: at least one and never all.

    A patient with images of several classes counts for the rarest of them, so that rare classes are shared out first.
    """
    ids, first, unit_of = np.unique(units, return_index=True, return_inverse=True)
    has = np.zeros((len(ids), len(classes)), bool)
    has[unit_of, labels] = True
    rarest_first = np.argsort(np.bincount(labels, minlength=len(classes)), kind="stable")
    label_of = rarest_first[has[:, rarest_first].argmax(axis=1)]
    site_of = np.zeros(len(ids), np.int64) if sites is None else sites[first]
    tested = np.zeros(len(ids), bool)
    for c in range(len(classes)):
        rng = Streams(seed).numpy("table test share", index=c)
        members = rng.permutation(np.flatnonzero(label_of == c))
        members = members[np.argsort(site_of[members], kind="stable")]
        take = min(max(int(share * len(members) + 0.5), 1), len(members) - 1)
        if take > 0:
            tested[members[((np.arange(take) + rng.random()) * len(members) / take).astype(np.int64)]] = True
    for c, label in enumerate(classes):
        if not (has[tested, c].any() and has[~tested, c].any()):
            kind = "patient" if by_patient else "file"
            what = "add some, or name the parts" + (", or set data.by_patient=false" if by_patient else "")
            why = "two are needed, one to train on and one to test on"
            raise BadInput(f"{name} has too few {kind}s of class {label}: {why}; {what}")
    return ids[tested]


def counted_parts(name: str, sets: Mapping[str, ImageSet]) -> str:
    """How many images of which size each part has, in words."""
    counts = ", ".join(f"{len(part)} {part_name}" for part_name, part in sets.items())
    side = sets["train"].size
    return f"{name}: {counts} images of {side}x{side}"


def _provenance(name: str, sets: Mapping[str, ImageSet], files: int, how: str, named: Sequence[str]) -> str:
    sites = "; sites " + ", ".join(f"{i} = {site}" for i, site in enumerate(named)) if named else ""
    return f"{counted_parts(name, sets)} from {files} files; {how}{sites}"
