"""State as a value: groups of tensors and a few plain facts, saved and loaded as one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround import tensorfile
from wardround.errors import BadInput


@dataclass(frozen=True)
class State:
    """What a coordinator or a site remembers. `facts` must be plain JSON; tensors are treated as read-only."""

    groups: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Identical for identical content."""
        return tensorfile.to_bytes(self.groups, self._record())

    def write(self, path: Path) -> None:
        """The same bytes as a file."""
        tensorfile.write(path, self.groups, self._record())

    def _record(self) -> dict[str, Any]:
        empty = sorted(name for name, tensors in self.groups.items() if not tensors)  # a file has tensors only
        return {"facts": dict(self.facts), "empty": empty}

    @staticmethod
    def from_bytes(data: bytes) -> State:
        """The inverse of `to_bytes`."""
        groups, record = tensorfile.from_bytes(data)
        if set(record) != {"facts", "empty"}:
            raise BadInput("this file is not a saved state of wardround")
        return State({**groups, **{name: {} for name in record["empty"]}}, record["facts"])
