"""What a site's one JSON file says: what has come in, what was answered, and what has left."""

from __future__ import annotations

from pydantic import Field

from wardround.privacy.account import SpentRow
from wardround.remote.register import Valid
from wardround.settings import Frozen


class Arrived(Frozen):
    """A parcel that came in: a request or a delivery."""

    round: int
    sha256: str
    file: str


class Answered(Frozen):
    """One answer, and the site's memory after it. `request` is the hash of what it answers, empty in round 0."""

    round: int
    request: str
    parcel: str
    memory: str


class DeskRecord(Valid):
    """What counts at this desk."""

    study: str
    site: str
    request: Arrived | None = None
    delivery: Arrived | None = None
    answered: tuple[Answered, ...] = ()
    sent: dict[int, int] = Field(default_factory=dict)  # bytes that have left, by round
    spent: tuple[SpentRow, ...] = ()  # of differential privacy, by all that has left

    def files(self) -> set[str]:
        """The files that this record needs."""
        arrived = {parcel.file for parcel in (self.request, self.delivery) if parcel is not None}
        return arrived | {file for answer in self.answered for file in (answer.parcel, answer.memory)}
