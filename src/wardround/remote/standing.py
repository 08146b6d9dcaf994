"""Where the open round stands: who has answered, who is missing, and whether the coordinator may go on.

The rules are in the agreement. A round needs its quorum. Beyond that it waits for every site that was asked until the
last day of its deadline; whoever goes on earlier says so.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from wardround.agreement import Agreement
from wardround.errors import BadInput
from wardround.remote.hubrecord import HubRecord, Receipt, Round
from wardround.remote.rules import refusal


@dataclass(frozen=True)
class Standing:
    """For a person to read. `round` is None when the study is over; `refusal` is why it cannot go on, if it cannot."""

    round: int | None
    sites: Mapping[str, str]
    answers: int
    needed: int
    last_day: datetime.date | None
    is_late: bool
    refusal: BadInput | None
    notes: tuple[str, ...]


def standing(record: HubRecord, agreement: Agreement, time: str, hurry: bool) -> Standing:
    """Where a study stands at a time; `hurry` does not wait for sites beyond the quorum."""
    current = record.current
    withdrawn = {site: f"withdrew on {day}" for site, day in record.withdrawn.items()}
    if current is None:
        words = {**dict.fromkeys(agreement.sites, "has a parcel to take home"), **withdrawn}
        return Standing(None, words, 0, 0, None, False, None, record.notes)
    words = {
        **dict.fromkeys(agreement.sites, "not asked in this round"),
        **{site: _word(current.received.get(site)) for site in current.asked},
        **withdrawn,
    }
    needed = answers_needed(current, agreement)
    last_day = _last_day(agreement.deadline, current.since)
    is_late = last_day is not None and datetime.datetime.fromisoformat(time).date() > last_day
    reason = _reason_to_wait(current, needed, last_day, hurry or is_late)
    return Standing(current.number, words, len(current.received), needed, last_day, is_late, reason, record.notes)


def answers_needed(current: Round, agreement: Agreement) -> int:
    """How many answers the open round needs: all that are asked, or the quorum where they are more."""
    asked = len(current.asked)
    return asked if agreement.quorum is None else min(agreement.quorum, asked)


def _word(receipt: Receipt | None) -> str:
    return "missing" if receipt is None else f"answered, arrived {receipt.arrived}"


def _last_day(deadline: int | datetime.date | None, since: str) -> datetime.date | None:
    """The last day of a round that began at `since`: so many days after, or the one agreed date."""
    if isinstance(deadline, int):
        return datetime.datetime.fromisoformat(since).date() + datetime.timedelta(days=deadline)
    return deadline


def _reason_to_wait(current: Round, needed: int, last_day: datetime.date | None, hurry: bool) -> BadInput | None:
    round, came = current.number + 1, len(current.received)
    missing = ", ".join(site for site in current.asked if site not in current.received)
    if not current.asked:
        return refusal("quorum", f"no site is left in round {round}; make a new study with those that remain")
    if came < needed:
        return refusal("quorum", f"round {round} has {came} of the {needed} answers it needs; wait for {missing}")
    if missing and not hurry:
        until = f"until {last_day}" if last_day else "for them"
        return refusal("deadline", f"{missing} may still answer; wait {until}, or go on with: wardround hub step --now")
    return None
