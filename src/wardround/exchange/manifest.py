"""What a parcel says about itself: a closed record, in one canonical form.

A manifest is small and signed, and it fixes everything that follows it in the file: the size, the hash, and the form of
every tensor. Whoever made one, it is checked here field by field, so that what is read can be printed, compared and
used in names of files without a second thought: names are plain letters and digits, numbers are finite, and nothing is
in it that is not listed here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import cached_property
from typing import Any

import torch

from wardround.errors import BadInput
from wardround.exchange.bundle import KINDS, NAME, Bundle, Envelope, Kind
from wardround.exchange.keys import FINGERPRINT
from wardround.tensorfile import DTYPE_NAMES, canonical

Form = tuple[tuple[int, ...], str]  # a tensor's shape and type
Table = dict[str, dict[str, Form]]

# The types of tensors that travel, as torch and as safetensors call them.
TYPES = {name: DTYPE_NAMES[dtype] for name, dtype in sorted((str(t).removeprefix("torch."), t) for t in DTYPE_NAMES)}
MOST_DIMENSIONS, MOST_ELEMENTS, MOST_ROUNDS = 16, 2**40, 2**31
MOST_FIGURES = 100  # each is printed, and kept in the hub's record
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._/+-]{0,199}")  # tensors and metrics; never a path of anything
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA256_OR_NOTHING = re.compile(r"([0-9a-f]{64})?")
_MADE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|\+00:00)")


@dataclass(frozen=True)
class Manifest:
    """Where a parcel belongs, who signed it, what is in it, and what it answers. A wrong one cannot be made."""

    kind: Kind
    study: str
    method: str
    site: str
    round: int
    program: str  # the version that made it
    sender: str  # the fingerprint of the key that signed it
    groups: Table
    bytes: int  # of the body
    sha256: str  # of the body
    metrics: dict[str, float]
    answers: str  # the SHA-256 of the body of the request that this answers, or nothing
    privacy: dict[str, float]  # what was spent, such as epsilon and delta
    made: str  # an ISO date and time in UTC

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}", self.kind)
        for field in ("study", "method", "site"):
            _match(NAME, field, "a name of letters, digits, '.', '_' and '-'", getattr(self, field))
        _match(_PROGRAM, "program", "a version", self.program)
        _match(FINGERPRINT, "sender", "a fingerprint", self.sender)
        _match(_SHA256, "sha256", "a SHA-256", self.sha256)
        _match(_SHA256_OR_NOTHING, "answers", "a SHA-256 or nothing", self.answers)
        _match(_MADE, "made", "a date and time in UTC", self.made)
        _require(_is_date(self.made), "made", "a date and time in UTC", self.made)
        _require(_is_count(self.round, MOST_ROUNDS), "round", "a whole number from 0", self.round)
        _require(_is_count(self.bytes, 2**63), "bytes", "a whole number from 0", self.bytes)
        _check_numbers("metrics", self.metrics)
        _check_numbers("privacy", self.privacy)
        _check_table(self.groups)

    @property
    def envelope(self) -> Envelope:
        """Where it belongs."""
        return Envelope(self.kind, self.study, self.method, self.site, self.round)

    @cached_property
    def id(self) -> str:
        """What this parcel is called for short: the beginning of the manifest's SHA-256."""
        return hashlib.sha256(pack(self)).hexdigest()[:16]

    def outline(self) -> Bundle:
        """The bundle without its numbers, to check against a declaration before a byte of the body is read."""
        return Bundle(
            self.envelope,
            {
                group: {
                    name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    for name, (shape, dtype) in tensors.items()
                }
                for group, tensors in self.groups.items()
            },
        )


def table_of(bundle: Bundle) -> Table:
    """The form of every tensor; a group without tensors leaves no trace in a file, and none here."""
    return {
        group: {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        for group, tensors in bundle.groups.items()
        if tensors
    }


def tensor_bytes(form: Form) -> int:
    """How many bytes a tensor of this form has."""
    shape, dtype = form
    size: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * size


def pack(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON: equal manifests are equal bytes."""
    return canonical(asdict(manifest)).encode()


def unpack(data: bytes) -> Manifest:
    """The inverse of `pack`; bytes that `pack` would not have made are refused."""
    record = strict_json(data, "manifest")
    expected = {field.name for field in fields(Manifest)}
    if not isinstance(record, dict):
        raise BadInput("the manifest is not a JSON object")
    if record.keys() != expected:
        one = min(record.keys() ^ expected)
        raise BadInput(f"the manifest {'lacks' if one in expected else 'has an unknown'} field {_shown(one)}")
    manifest = Manifest(**{**record, "groups": _table(record["groups"])})
    if pack(manifest) != data:
        raise BadInput("the manifest is not in its canonical form")
    return manifest


def strict_json(data: bytes, where: str) -> Any:
    """JSON in which no key comes twice and no number is NaN or infinite: readers of it cannot disagree on what it says.

    A message never quotes the data, which is a stranger's.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise BadInput(f"the {where} has a key twice")
        return found

    try:
        return json.loads(data.decode(), object_pairs_hook=once, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadInput(f"the {where} is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the {where} is not valid JSON") from error


def _no_constant(text: str) -> float:
    raise ValueError(text)


def _table(found: Any) -> Table:
    """Lists, which are all that JSON has, as tuples; what they hold is checked with the rest of the manifest."""
    _require(isinstance(found, dict) and all(isinstance(group, dict) for group in found.values()), "groups", "tables")
    for name, form in ((name, form) for group in found.values() for name, form in group.items()):
        good = isinstance(form, list) and len(form) == 2 and isinstance(form[0], list)
        _require(good, f"tensor {_shown(name)}", "a shape and a type")
    return {group: {name: (tuple(shape), dtype) for name, (shape, dtype) in t.items()} for group, t in found.items()}


def _check_table(groups: Table) -> None:
    for group, tensors in groups.items():
        _match(NAME, "group", "a name of letters, digits, '.', '_' and '-'", group)
        _require(bool(tensors), f"group {group}", "at least one tensor")
        for name, (shape, dtype) in tensors.items():
            _match(_LABEL, "tensor", "a plain name", name)
            where = f"tensor {group}/{name}"
            _require(isinstance(dtype, str) and dtype in TYPES, where, f"one of {', '.join(TYPES)}", dtype)
            sides = len(shape) <= MOST_DIMENSIONS and all(_is_count(side, MOST_ELEMENTS) for side in shape)
            # An empty tensor's other sides count, too: torch multiplies them.
            _require(
                sides and math.prod(side or 1 for side in shape) <= MOST_ELEMENTS,
                where,
                "a shape that a tensor can have",
            )


def _check_numbers(field: str, values: Any) -> None:
    _require(isinstance(values, Mapping), field, "a table of numbers", values)
    _require(len(values) <= MOST_FIGURES, field, f"a table of at most {MOST_FIGURES} numbers")
    for name, value in values.items():
        _match(_LABEL, f"key in {field}", "a plain name", name)
        _require(isinstance(value, float) and math.isfinite(value), f"{field} {name}", "a finite number", value)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_date(text: str) -> bool:
    try:
        return bool(datetime.fromisoformat(text))
    except ValueError:
        return False


def _match(pattern: re.Pattern[str], field: str, wanted: str, value: Any) -> None:
    _require(isinstance(value, str) and pattern.fullmatch(value) is not None, field, wanted, value)


def _require(good: bool, field: str, wanted: str, *found: Any) -> None:
    if not good:
        instead = f", not {_shown(found[0])}" if found else ""
        raise BadInput(f"the manifest's {field} is not right: it should be {wanted}{instead}")


def _shown(value: Any) -> str:
    """A value in a few printable characters; what may be large or deep is named by its type alone."""
    return ascii(value[:40]) if isinstance(value, str) else f"something of type {type(value).__name__}"
