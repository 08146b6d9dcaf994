"""What the hub's one JSON file says: the round that is open, the one before it, and who has withdrawn."""

from __future__ import annotations

from pydantic import Field

from wardround.remote.register import Valid
from wardround.settings import Frozen


class Receipt(Frozen):
    """One upload that was verified and stored. Kept as a line of history when the upload itself is gone."""

    site: str
    round: int
    id: str  # of the parcel's manifest
    sha256: str  # of its body
    bytes: int
    sender: str
    program: str
    made: str
    arrived: str
    metrics: dict[str, float]
    file: str
    images: int | None = None  # that it was trained on, in the site's own words: averages weigh by them


class Round(Frozen):
    """A round: the state before it, whom it asks for what, and what came.

    `asked` holds the hash of each request, empty in round 0, whose requests the sites work out themselves; `parcels`
    the requests that were written.
    """

    number: int
    state: str
    since: str
    asked: dict[str, str]
    parcels: dict[str, str] = Field(default_factory=dict)
    received: dict[str, Receipt] = Field(default_factory=dict)

    def files(self) -> set[str]:
        """The files that this round needs."""
        return {self.state, *self.parcels.values(), *(receipt.file for receipt in self.received.values())}

    def without(self, site: str) -> Round:
        """The round as if the site had never been asked."""
        return self.model_copy(
            update={
                name: {who: value for who, value in getattr(self, name).items() if who != site}
                for name in ("asked", "parcels", "received")
            }
        )


class HubRecord(Valid):
    """Where a study stands. `current` is None when it is over: then there are deliveries, and a final state.

    `absorbing` is a state on the way through `current`'s answers; it is dropped when any of them changes. `previous`
    is kept whole until the next round is closed, so that it can be opened again.
    """

    study: str
    current: Round | None
    previous: Round | None = None
    absorbing: str = ""
    final: str = ""
    deliveries: dict[str, str] = Field(default_factory=dict)
    withdrawn: dict[str, str] = Field(default_factory=dict)  # site to date
    history: tuple[Receipt, ...] = ()
    notes: tuple[str, ...] = ()
    saved: int = 0  # states written so far, so that each has a name of its own

    def files(self) -> set[str]:
        """The files that this record needs."""
        rounds = [open_round.files() for open_round in (self.current, self.previous) if open_round is not None]
        return {self.absorbing, self.final, *self.deliveries.values()}.union(*rounds) - {""}
