"""What a site's one JSON file says: what has come in, what was answered, and what has left."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from wardround.deploy.about import MOST_NOTES, kept_notes
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


class Noted(Frozen):
    """What was remarked on while an answer was made, such as what of it stays here and by which rule."""

    round: int
    text: str


class DeskRecord(Valid):
    """What counts at this desk. `delivery_notes` are of what the delivery became here: what was chosen, and why."""

    study: str
    site: str
    request: Arrived | None = None
    delivery: Arrived | None = None
    answered: tuple[Answered, ...] = ()
    sent: dict[int, int] = Field(default_factory=dict)  # bytes that have left, by round
    spent: tuple[SpentRow, ...] = ()  # of differential privacy, by all that has left
    answer_notes: tuple[Noted, ...] = ()  # each text once, with the first round that has it
    delivery_notes: tuple[str, ...] = ()

    def files(self) -> set[str]:
        """The files that this record needs."""
        arrived = {parcel.file for parcel in (self.request, self.delivery) if parcel is not None}
        return arrived | {file for answer in self.answered for file in (answer.parcel, answer.memory)}

    def noting(self, round: int, notes: Iterable[str]) -> DeskRecord:
        """With the notes of a round's answer, in the place of those of answers that it replaces."""
        earlier = tuple(note for note in self.answer_notes if note.round < round)
        said = {note.text for note in earlier}
        fresh = tuple(Noted(round=round, text=text) for text in kept_notes(notes) if text not in said)
        return self.model_copy(update={"answer_notes": (*earlier, *fresh)[-MOST_NOTES:]})

    def with_request(self, request: Arrived) -> DeskRecord:
        """A request makes the study go on: what was delivered before it counts no more."""
        return self.model_copy(update={"request": request, "delivery": None, "delivery_notes": ()})

    def with_delivery(self, delivery: Arrived) -> DeskRecord:
        """Notes are of the delivery that is here; one that comes twice keeps them."""
        notes = self.delivery_notes if delivery == self.delivery else ()
        return self.model_copy(update={"delivery": delivery, "delivery_notes": notes})
