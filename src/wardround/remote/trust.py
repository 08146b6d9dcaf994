"""Whose signature counts: the keys in the agreement, less those that were revoked, and the versions that may talk.

A lost or stolen key cannot be changed in the agreement, whose hash would change under everyone's parcels. So each party
keeps a list of revoked keys beside its own copy of the study, and enters a new key when it has heard the fingerprint
from the person who made it. The coordinator's list decides what the hub takes, a site's list what the site takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from wardround import __version__
from wardround.agreement import COORDINATOR, Agreement, key_of_another
from wardround.errors import BadInput
from wardround.exchange.keys import PublicKey
from wardround.files import disk_errors
from wardround.record.rundir import write_json
from wardround.remote.rules import refusal


@dataclass(frozen=True)
class Revocation:
    """A key that no longer counts, and the one in its place (empty: none yet)."""

    who: str
    fingerprint: str
    replacement: str
    on: str


@dataclass(frozen=True)
class Trust:
    """An agreement's keys as they stand on this machine."""

    agreement: Agreement
    revoked: tuple[Revocation, ...] = ()

    @staticmethod
    def beside(study: Path, agreement: Agreement) -> Trust:
        """With the revocations that lie beside the study file."""
        path = revocations_file(study)
        if not os.path.lexists(path):  # a link that leads nowhere must not let revoked keys count again
            return Trust(agreement)
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            return Trust(agreement, tuple(Revocation(**row) for row in rows))
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"{path} cannot be read ({error}); mend it, or enter the revoked keys again") from error

    def key_of(self, who: str) -> PublicKey:
        """The key of a site or of the coordinator that counts now."""
        text = self._agreed(who)
        for revocation in self.revoked:
            if revocation.who == who:
                text = revocation.replacement
        if not text:
            raise refusal(
                "revoked key",
                f"the key of {who} was revoked and none replaces it; enter the new one with: "
                f"wardround study revoke-key STUDY {who} NEWKEY",
            )
        return PublicKey.parse(text)

    def signers(self, *who: str) -> Mapping[str, PublicKey]:
        """Every key that these parties ever had, by fingerprint; `check_sender` tells those that count from the rest.

        A parcel under a revoked key is read as far as its manifest, so that it can be refused by its sender's name.
        """
        keys = [PublicKey.parse(text) for name in who for text in self._once_valid(name)]
        return {key.fingerprint: key for key in keys}

    def now(self, who: str) -> Mapping[str, PublicKey]:
        """The one key that counts now, as readers of parcels take it."""
        key = self.key_of(who)
        return {key.fingerprint: key}

    def check_sender(self, who: str, fingerprint: str) -> None:
        """Refuse a signature that is not of this party, or of a key of its that no longer counts."""
        if any(r.who == who and r.fingerprint == fingerprint for r in self.revoked):
            raise refusal("revoked key", f"the key {fingerprint} of {who} was revoked; it must sign with its new key")
        if self.key_of(who).fingerprint != fingerprint:
            raise refusal(
                "another signer", f"the parcel speaks for {who}, whose key did not sign it; ask {who} about it"
            )

    def site_of(self, key: PublicKey) -> str:
        """The site whose key this is."""
        for name in self.agreement.sites:
            if not self._is_without(name) and self.key_of(name) == key:
                return name
        self.refuse_revoked(key)
        raise BadInput(
            f"no site of study {self.agreement.name} has the key {key.fingerprint}; check the key file, or have the "
            "coordinator add it with: wardround study add-site"
        )

    def refuse_revoked(self, key: PublicKey) -> None:
        """Refuse a key that was revoked on this machine by saying so: whoever still works with it needs the new one."""
        for old in self.revoked:
            if old.fingerprint == key.fingerprint:
                raise refusal(
                    "revoked key",
                    f"the key {old.fingerprint} of {old.who} was revoked here on {old.on}; its owner names the new one "
                    "with --key",
                )

    def with_site(self, name: str, key: str) -> Agreement:
        """The agreement with one more site; its key may not be one that replaces another's revoked key either."""
        agreement = self.agreement.with_site(name, key)
        for revocation in self.revoked:
            if revocation.replacement == key:
                raise key_of_another(revocation.who, name)
        return agreement

    def replace(self, who: str, new_key: str, today: str) -> Trust:
        """Revoke the key of a party, and let another one (or, with an empty text, none) take its place."""
        old = PublicKey.parse(self._agreed(who)) if self._is_without(who) else self.key_of(who)
        if new_key and PublicKey.parse(new_key) in {old, *map(PublicKey.parse, self._once_valid(who))}:
            raise BadInput(f"the new key of {who} is one that it had before; make another with: wardround key new")
        with_keys = [COORDINATOR, *(name for name, party in self.agreement.sites.items() if party.key)]
        for other in with_keys:
            theirs = map(PublicKey.parse, self._once_valid(other))
            if new_key and other != who and PublicKey.parse(new_key) in set(theirs):
                raise key_of_another(other, who)
        return Trust(self.agreement, (*self.revoked, Revocation(who, old.fingerprint, new_key, today)))

    def save(self, study: Path) -> Path:
        """Write the revocations beside the study file."""
        path = revocations_file(study)
        with disk_errors(path):
            write_json(path, [asdict(revocation) for revocation in self.revoked])
        return path

    def _agreed(self, who: str) -> str:
        if who == COORDINATOR:
            return self.agreement.coordinator
        if who not in self.agreement.sites:
            known = ", ".join([*self.agreement.sites, COORDINATOR])
            raise BadInput(f"there is no {who!r} in study {self.agreement.name}; there are {known}")
        if not self.agreement.sites[who].key:
            raise BadInput(
                f"{who} has no key in study {self.agreement.name} yet; add it with: wardround study add-site"
            )
        return self.agreement.sites[who].key

    def _once_valid(self, who: str) -> list[str]:
        return [self._agreed(who), *(r.replacement for r in self.revoked if r.who == who and r.replacement)]

    def _is_without(self, who: str) -> bool:
        mine = [revocation for revocation in self.revoked if revocation.who == who]
        return bool(mine) and not mine[-1].replacement


def revocations_file(study: Path) -> Path:
    """`study.revoked.json` for `study.toml`."""
    return study.with_name(f"{study.stem}.revoked.json")


def refuse_other_version(program: str, sender: str) -> str:
    """The rule for two versions of the program: the same first two numbers. A note where only the third differs."""
    if program == __version__:
        return ""
    if program.split(".")[:2] != __version__.split(".")[:2]:
        raise refusal(
            "other version",
            f"{sender} runs wardround {program} and this machine {__version__}; install versions with "
            "the same first two numbers on both sides and make the parcel again",
        )
    return f"{sender} runs wardround {program}, this machine {__version__}; they work together"
