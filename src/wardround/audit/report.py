"""The record of an audit: for every payload group the attacks that ran, and every figure with its meaning in words.

A record holds no picture and no patient's pixels, so it may be shown to an ethics board; pictures are tensors that the
attacks hand out apart, and stay at the site.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from wardround.errors import BadInput

T = TypeVar("T")
SCHEMA = 1
CLOSED = ConfigDict(extra="forbid")  # a field that this version does not know is refused, not dropped
Points = tuple[tuple[float, float], ...]
FIRST = (  # figures that one looks at first
    *("auc", "tpr_at_fpr_0.001", "max_ssim", "min_l2", "frechet", "identified", "believed", "classmates_closer"),
    *("images", "few", "absent", "prototypes_of_one_image"),
)


@dataclass(frozen=True)
class Figure:
    """One number, what it is in words, and over how many cases; None where it is not defined for these images."""

    name: str
    value: float | None
    definition: str
    n: int
    __pydantic_config__ = CLOSED

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"{self.name} is {self.value}, which no record can hold")


@dataclass(frozen=True)
class Attack:
    """One attack as it ran. `findings` are sentences about single cases or limits of the figures."""

    name: str
    what: str
    seed: int
    figures: tuple[Figure, ...]
    findings: tuple[str, ...] = ()
    roc: Points = ()  # (false positive rate, true positive rate), where the attack has a threshold
    __pydantic_config__ = CLOSED

    def figure(self, name: str) -> Figure:
        """The figure of this name."""
        return next(figure for figure in self.figures if figure.name == name)

    def in_short(self) -> str:
        """The figures that one looks at first, in one line."""
        known = [f"{f.name} {f.value:.3g}" for f in self.figures if f.name in FIRST and f.value is not None]
        return ", ".join(known) or self.what


@dataclass(frozen=True)
class GroupAudit:
    """What was tried with one payload group, such as "embeddings" or "parameters"."""

    group: str
    attacks: tuple[Attack, ...]
    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Audit:
    """The audit of what one site sends in one study; `images` is how many of its images were used."""

    study: str
    method: str
    site: str
    seed: int
    images: int
    groups: tuple[GroupAudit, ...]
    __pydantic_config__ = CLOSED

    def to_json(self) -> str:
        """Readable text; `from_json` is its inverse."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> Audit:
        """The record, or a `BadInput` that names what does not fit."""
        return _parsed(_AUDIT, text)


@dataclass(frozen=True)
class AuditRecord:
    """`audit.json`: the audits of several sites, what is averaged over them, and how it was done.

    `effort` is how hard the attacks tried, `notes` what a reader of the figures must know, by site.
    """

    schema_version: int
    version: str
    source: str  # the name of the run or parcel, without its folder
    effort: dict[str, int]
    sites: tuple[Audit, ...]
    averaged: tuple[GroupAudit, ...]
    notes: dict[str, tuple[str, ...]]
    privacy: dict[str, dict[str, float]]  # by site, what was promised: epsilon and delta
    __pydantic_config__ = CLOSED

    def to_json(self) -> str:
        """Readable text; `from_json` is its inverse."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> AuditRecord:
        """The record, or a `BadInput` that names what does not fit."""
        return _parsed(_RECORD, text)


def _parsed(kind: TypeAdapter[T], text: str | bytes) -> T:
    try:
        return kind.validate_json(text, strict=True)
    except (ValidationError, ValueError) as error:
        found = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(map(str, found["loc"])) or "the text"
        raise BadInput(f"no record of an audit: {where}: {found['msg']}; run the audit again") from error


_AUDIT = TypeAdapter(Audit)
_ATTACK = TypeAdapter(Attack)
_RECORD = TypeAdapter(AuditRecord)


def attack_from_json(text: str | bytes) -> Attack:
    """One attack's part of a record, as an unfinished audit keeps it."""
    return _parsed(_ATTACK, text)


def attack_to_json(attack: Attack) -> str:
    """The inverse."""
    return json.dumps(asdict(attack), ensure_ascii=False, allow_nan=False)


def averaged(audits: Sequence[Audit]) -> tuple[GroupAudit, ...]:
    """Every figure's mean over sites, each site counting alike, as FedMP's Table 5 averages over its clients.

    A figure that some sites lack is averaged over those that have it, and its definition says how many those are.
    Findings and curves belong to single sites and are left out.
    """
    order: dict[tuple[str, str], Attack] = {}
    values: dict[tuple[str, str, str], list[Figure]] = {}
    for audit in audits:
        for group in audit.groups:
            for attack in group.attacks:
                order.setdefault((group.group, attack.name), attack)
                for figure in attack.figures:
                    values.setdefault((group.group, attack.name, figure.name), []).append(figure)
    found: dict[str, list[Attack]] = {}
    for (group_name, attack_name), attack in order.items():
        figures = tuple(_mean(of, len(audits)) for key, of in values.items() if key[:2] == (group_name, attack_name))
        found.setdefault(group_name, []).append(replace(attack, figures=figures, findings=(), roc=()))
    return tuple(GroupAudit(name, tuple(attacks)) for name, attacks in found.items())


def _mean(figures: Sequence[Figure], sites: int) -> Figure:
    known = [figure for figure in figures if figure.value is not None]
    values = [figure.value for figure in known if figure.value is not None]
    return Figure(
        figures[0].name,
        math.fsum(values) / len(values) if values else None,
        f"{figures[0].definition}; mean over {len(known)} of {sites} sites, each counting alike",
        sum(figure.n for figure in known),
    )
