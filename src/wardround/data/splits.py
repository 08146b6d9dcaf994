"""What a site keeps back from its own images: first a part for testing where it has one, then a part for validation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.streams import Streams

TESTS = ("weighted", "own", "balanced", "natural")

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Splits:
    """How every site splits what it holds.

    `test` is one of `TESTS`; only `own` (a plain `test_share`) and `balanced` (FedKPer's) take a test from the site's
    images, the others test on official images. `val_share` is of what remains. With `by_patient` no patient is in two
    parts; None means: wherever a site has patient ids.
    """

    test: str = "weighted"
    test_share: float = 0.2
    val_share: float = 0.1
    by_patient: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.test not in TESTS:
            raise BadInput(f"unknown test protocol {self.test!r}; choose one of {', '.join(TESTS)}")
        if not 0 <= self.val_share < 1:
            raise BadInput(f"val_share must be from 0 to below 1, not {self.val_share}; 0.1 keeps a tenth")
        if not 0 < self.test_share < 1:
            raise BadInput(f"test_share must be between 0 and 1, not {self.test_share}; 0.2 keeps a fifth")
        if self.by_patient:
            self._refuse_balanced()

    @property
    def tests_on_own_images(self) -> bool:
        """Whether a site's test comes out of its own images."""
        return self.test in ("own", "balanced")

    def split(self, name: str, own: ImageSet) -> tuple[ImageSet, ImageSet, ImageSet | None]:
        """The images site `name` trains on, validates on and, where the protocol holds some out, is tested on."""
        streams = Streams(self.seed)
        test, patients = None, self._patients(name, own)
        if self.tests_on_own_images:
            rng = streams.numpy("own test", name)
            if self.test == "balanced":
                if patients is not None:
                    self._refuse_balanced()
                kept, held = hold_out_balanced(own.labels.numpy(), self.test_share, rng)
            else:
                kept, held = hold_out(len(own), self.test_share, rng, patients)
            if len(held) == 0:
                kind = "image" if patients is None else "patient"
                raise BadInput(
                    f"{name} has a single {kind} and cannot hold out a test of its own; use test weighted, fewer "
                    "sites or a larger min_size"
                )
            test = own.take(torch.from_numpy(held))
            own = own.take(torch.from_numpy(kept))
        kept, held = hold_out(len(own), self.val_share, streams.numpy("validation", name), self._patients(name, own))
        return own.take(torch.from_numpy(kept)), own.take(torch.from_numpy(held)), test

    def _refuse_balanced(self) -> None:
        if self.test == "balanced":
            raise BadInput("a class-balanced test share splits patients; use test own, or set data.by_patient=false")

    def _patients(self, name: str, own: ImageSet) -> Integers | None:
        if self.by_patient is False or (self.by_patient is None and own.patients is None):
            return None
        if own.patients is None:
            raise BadInput(f"{name} has no patient ids to keep together; add them or turn by_patient off")
        return own.patients.numpy()


def hold_out(n: int, share: float, rng: Generator, patients: Integers | None = None) -> tuple[Integers, Integers]:
    """Split 0..n-1 at random into what is kept and a `share` that is held out, both sorted.

    The held part is the first ⌊share·n⌋ of the shuffled list, as in FedISCA's code; at least one image where the site
    has two or more and the share is not 0, and never all of them. With `patients` (one id per image) no patient is in
    both parts: patients come in random order and are held while they fit in the share, or the smallest one alone
    where none does. A site with one patient holds out nothing.
    """
    count = _count(n, share)
    if count == 0:
        return np.arange(n), np.empty(0, np.int64)
    if patients is None:
        return _both_parts(n, rng.permutation(n)[:count])
    ids, unit_of, sizes = np.unique(patients, return_inverse=True, return_counts=True)
    held = np.zeros(len(ids), bool)
    free = count
    for unit in rng.permutation(len(ids)):
        if sizes[unit] <= free:
            held[unit] = True
            free -= sizes[unit]
    if not held.any() and len(ids) > 1:
        held[sizes.argmin()] = True
    return _both_parts(n, np.flatnonzero(held[unit_of]))


def hold_out_balanced(labels: Integers, share: float, rng: Generator) -> tuple[Integers, Integers]:
    """FedKPer's roughly class-balanced share: what is kept and what is held out, both sorted.

    Read from the authors' code (olivesgatech/FedKPer, `datasetter.py`, `create_local`): with n images of C present
    classes, every class gives ⌊⌊share·n⌋/C⌋ images; a class that has fewer than that gives ⌊share·m⌋ of its m; where
    this comes to nothing at all, ⌊share·n⌋ images are taken at random regardless of class. A class with exactly the
    asked number gives all it has. Not in that code: at least one image is held where the site has two or more.
    """
    n = len(labels)
    present = np.unique(labels)
    each = math.floor(_floor(share * n) / max(1, len(present)))
    held = []
    for c in present:
        members = np.flatnonzero(labels == c)
        number = each if each <= len(members) else _floor(share * len(members))
        held.append(rng.permutation(members)[:number])
    chosen = np.concatenate([*held, np.empty(0, np.int64)])
    if len(chosen) == 0:
        return hold_out(n, share, rng)
    return _both_parts(n, chosen)


def _count(n: int, share: float) -> int:
    return 0 if n < 2 or share == 0 else min(max(1, _floor(share * n)), n - 1)


def _floor(x: float) -> int:
    """The floor of a product such as 0.29·100, which floating point puts a hair below 29."""
    return math.floor(x + 1e-9)


def _both_parts(n: int, held: Integers) -> tuple[Integers, Integers]:
    kept = np.ones(n, bool)
    kept[held] = False
    return np.flatnonzero(kept), np.flatnonzero(~kept)
