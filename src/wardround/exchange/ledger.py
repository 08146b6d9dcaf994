"""What went up and down, per site and round, to the byte.

Groups and overhead are kept apart: papers count parameters alone (FedMP's Table 4 counts neither batch-norm statistics
nor headers), a hospital's firewall sees the whole file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wardround.exchange.bundle import Bundle

OVERHEAD = "overhead"


@dataclass(frozen=True)
class Entry:
    """One bundle that crossed a site's boundary. `direction` is seen from the site: up leaves it, down reaches it."""

    round: int
    site: str
    direction: str
    kind: str
    groups: dict[str, int]
    overhead: int

    @staticmethod
    def of(bundle: Bundle) -> Entry:
        """The entry of a bundle."""
        envelope = bundle.envelope
        direction = "up" if envelope.kind == "answer" else "down"
        groups = dict(bundle.bytes_by_group)
        return Entry(envelope.round, envelope.site, direction, envelope.kind, groups, bundle.overhead)

    def as_row(self) -> dict[str, Any]:
        """The entry as JSON."""
        return asdict(self)


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], int]:
    """Bytes by (direction, group), with the overhead as a group of its own."""
    sums: dict[tuple[str, str], int] = {}
    for row in rows:
        for group, count in [*row["groups"].items(), (OVERHEAD, row["overhead"])]:
            key = (row["direction"], group)
            sums[key] = sums.get(key, 0) + count
    return dict(sorted(sums.items()))
