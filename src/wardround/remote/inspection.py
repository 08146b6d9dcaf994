"""A parcel of a study that somebody wants to look into: verified as whoever it is meant for would verify it."""

from __future__ import annotations

from pathlib import Path

from wardround.agreement import COORDINATOR
from wardround.exchange.bundle import Bundle
from wardround.exchange.manifest import Manifest
from wardround.exchange.parcel import read_manifest, read_parcel
from wardround.remote.rules import refusal
from wardround.remote.trust import Trust


def read_any(path: Path, trust: Trust) -> tuple[Manifest, Bundle]:
    """What is in an answer of any site, or in a request or delivery, once everything about it holds."""
    agreement = trust.agreement
    agreement.complete()
    manifest = read_manifest(path, trust.signers(COORDINATOR, *agreement.sites))
    sender = manifest.site if manifest.kind == "answer" else COORDINATOR
    trust.check_sender(sender, manifest.sender)
    if manifest.study != agreement.id or manifest.site not in agreement.sites:
        raise refusal(
            "another study", f"the parcel belongs to study {manifest.study}, and this is {agreement.id}; use --study"
        )
    payload = agreement.method().payload(agreement.study(), manifest.site)
    return read_parcel(path, trust.now(sender), payload, manifest.envelope)
