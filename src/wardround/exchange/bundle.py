"""The only thing that crosses a site's boundary: named tensors in named groups, and a small closed record.

The same type is what the ledger counts, a policy checks, a key signs, a file holds and a network carries. What a
method wants to say goes into a tensor group with a name of its own, so that it can be counted and refused; the record
only says where the bundle belongs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

from torch import Tensor

from wardround import tensorfile
from wardround.errors import BadInput

Kind = Literal["request", "answer", "delivery"]
KINDS: tuple[Kind, ...] = ("request", "answer", "delivery")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# Groups with a fixed meaning. Batch-norm is explicit: parameters, running statistics and integer counters are three.
PARAMETERS = "parameters"
STATISTICS = "statistics"
COUNTERS = "counters"
SIZE = "size"  # how many images the site trained on
LABEL_COUNTS = "label_counts"  # and how many of each class; policies and privacy have rules for it


@dataclass(frozen=True)
class Envelope:
    """Where a bundle belongs. Closed: a parser refuses any other field."""

    kind: Kind
    study: str
    method: str
    site: str
    round: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"a bundle is one of {', '.join(KINDS)}, not {self.kind!r}")
        for field, value in (("study", self.study), ("method", self.method), ("site", self.site)):
            if not (isinstance(value, str) and NAME.fullmatch(value)):
                raise BadInput(f"{field} {value!r} is no name; use letters, digits, '.', '_' and '-', at most 64")
        if not isinstance(self.round, int) or isinstance(self.round, bool) or self.round < 0:
            raise BadInput(f"round {self.round!r} is not a whole number from 0")

    def __str__(self) -> str:
        """Whose bundle and of which round, to begin a message with."""
        return f"the {self.kind} of {self.site} in round {self.round + 1}"


@dataclass(frozen=True)
class Bundle:
    """Tensor groups and their envelope. Treat the tensors as read-only: in-process they are handed over uncopied."""

    envelope: Envelope
    groups: Mapping[str, Mapping[str, Tensor]]

    def group(self, name: str) -> Mapping[str, Tensor]:
        """The tensors of a group; an absent group is empty."""
        return self.groups.get(name, {})

    @cached_property
    def bytes_by_group(self) -> dict[str, int]:
        """Tensor bytes of each group."""
        return tensorfile.tensor_bytes(self.groups)

    @cached_property
    def overhead(self) -> int:
        """Bytes beyond the tensors when serialised: names, shapes, envelope."""
        return tensorfile.overhead_bytes(self.groups, asdict(self.envelope))

    def to_bytes(self) -> bytes:
        """Identical for identical content."""
        return tensorfile.to_bytes(self.groups, asdict(self.envelope))

    def write(self, path: Path) -> None:
        """The same bytes as a file."""
        tensorfile.write(path, self.groups, asdict(self.envelope))

    def sha256(self) -> str:
        """The hash of the serialised bundle."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @staticmethod
    def from_bytes(data: bytes) -> Bundle:
        """Parse and validate; whatever does not fit is refused with a reason."""
        groups, record = tensorfile.from_bytes(data)
        expected = {field.name for field in fields(Envelope)}
        if set(record) != expected:
            raise BadInput(f"a bundle's record has the fields {sorted(expected)}, not {sorted(map(str, record))}")
        return Bundle(Envelope(**record), groups)
