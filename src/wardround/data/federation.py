"""The sites of a study and what each holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wardround.data.imageset import ImageSet


@dataclass(frozen=True)
class LocalTest:
    """What a site is tested on, and how.

    With `class_weights` (float64 `(classes,)`, summing to 1) accuracy is Σ_c weight_c · recall_c: the official test set
    weighted to the site's label mix. Without them it is the plain share of right answers.
    """

    images: ImageSet
    class_weights: Tensor | None


@dataclass(frozen=True)
class Site:
    """One hospital: its name, its own images, and its test."""

    name: str
    train: ImageSet
    val: ImageSet
    test: LocalTest


@dataclass(frozen=True)
class Federation:
    """All sites of a study, the global test set, and the definitions in words that every result prints."""

    sites: tuple[Site, ...]
    test: ImageSet
    classes: tuple[str, ...]
    partition_rule: str  # in words, such as "Dirichlet(0.3), capped, 5 sites, partition seed 0"
    partition_hash: str  # SHA-256 over the index lists
    local_protocol: str  # how local accuracy is measured, in words
    global_protocol: str  # how global accuracy is measured, in words
    provenance: str
    notes: tuple[str, ...] = ()  # what of the data a reader of the figures must know
