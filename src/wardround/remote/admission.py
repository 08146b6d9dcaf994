"""Which parcels the hub and a site's desk take, beyond the signature: every rule for a parcel that comes in.

Each refusal begins with the name of its rule (`rules.py`). Only manifests are looked at, which are small and signed;
what a parcel holds is verified when it is read.
"""

from __future__ import annotations

from collections.abc import Callable

from wardround.agreement import COORDINATOR
from wardround.exchange.manifest import Manifest
from wardround.remote.deskrecord import Arrived, DeskRecord
from wardround.remote.hubrecord import HubRecord, Round
from wardround.remote.rules import refusal
from wardround.remote.trust import Trust, refuse_other_version

SECONDS = len("2026-01-01T00:00:00")  # of a manifest's `made`, which is always in UTC


def admit_upload(manifest: Manifest, record: HubRecord, trust: Trust, replace: bool) -> tuple[Round, str]:
    """The open round, to which this answer belongs, and a remark or nothing; at the hub."""
    agreement, site, number, current = trust.agreement, manifest.site, manifest.round, record.current
    if manifest.study != agreement.id:
        raise refusal(
            "another study",
            f"the parcel belongs to study {manifest.study}, and this is {agreement.id}; send the site the study file "
            "that holds",
        )
    if manifest.kind != "answer":
        raise refusal("wrong way", f"this parcel is a {manifest.kind} for {site}; give it to the site")
    if site not in agreement.sites:
        raise refusal("another study", f"{site} is no site of study {agreement.name}; check the study file")
    trust.check_sender(site, manifest.sender)
    remark = refuse_other_version(manifest.program, site)
    if site in record.withdrawn:
        raise refusal("withdrawn", f"{site} withdrew on {record.withdrawn[site]}; nothing of it is taken any more")
    if current is None or number < current.number:
        raise refusal(
            "late parcel",
            f"round {number + 1} is closed; where it is the last one that was closed, it can be opened again with: "
            "wardround hub reopen",
        )
    if number > current.number:
        raise refusal(
            "early parcel", f"it is of round {number + 1}, and round {current.number + 1} is open; keep it until then"
        )
    if site not in current.asked:
        raise refusal("not asked", f"round {number + 1} does not ask {site}; wait for the next round")
    if manifest.answers != current.asked[site]:
        raise refusal(
            "stale answer",
            f"{site} answered another request of round {number + 1} than the one that holds; have it receive the "
            "parcel in the outbox and train again",
        )
    if site in current.received and not replace:
        raise refusal(
            "second answer",
            f"{site} has answered round {number + 1} otherwise; where it asks for that, collect this parcel with "
            "--replace",
        )
    return current, remark


def admit_parcel(
    manifest: Manifest, record: DeskRecord, trust: Trust, rounds: int, made: Callable[[Arrived], str]
) -> str:
    """A remark on a request or a delivery that may come in, or nothing; at a site.

    `rounds` is how many the study has: whoever agreed to two must not be asked a third time. `made` tells when a
    parcel that is here was made.
    """
    if manifest.kind == "answer":
        raise refusal(
            "wrong way", "this parcel is a site's answer; it goes to the coordinator, who runs: wardround hub collect"
        )
    if manifest.study != record.study:
        raise refusal(
            "another study",
            f"the parcel belongs to study {manifest.study}, and this is {record.study}; ask the coordinator which "
            "study file holds",
        )
    trust.check_sender(COORDINATOR, manifest.sender)
    remark = refuse_other_version(manifest.program, "the coordinator")
    if manifest.site != record.site:
        raise refusal("another site", f"the parcel is for {manifest.site}, and this is {record.site}; take your own")
    if manifest.kind == "request" and manifest.round >= rounds:
        raise refusal(
            "beyond the study",
            f"it asks for round {manifest.round + 1}, and the study has {rounds}; ask the coordinator why",
        )
    latest = max((answer.round for answer in record.answered), default=0)
    if manifest.round < latest:
        raise refusal(
            "old parcel",
            f"it belongs to round {manifest.round + 1}, and round {latest + 1} was answered here; ask the coordinator "
            "for the latest",
        )
    here = record.request if manifest.kind == "request" else record.delivery
    if here is not None and here.round == manifest.round and made(here)[:SECONDS] > manifest.made[:SECONDS]:
        raise refusal(
            "old parcel",
            f"the {manifest.kind} of round {manifest.round + 1} that is here was made later; ask the coordinator which "
            "one holds",
        )
    return remark
