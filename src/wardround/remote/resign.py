"""A parcel signed again, after the key that it was signed with was revoked: the same body under the owner's new key."""

from __future__ import annotations

from pathlib import Path

from wardround.exchange.keys import PrivateKey
from wardround.exchange.parcel import read_manifest, read_parcel, write_parcel
from wardround.exchange.payload import Payload
from wardround.remote.trust import Trust


def under_this_key(path: Path, owner: str, trust: Trust, payload: Payload, key: PrivateKey, made: str) -> Path:
    """The parcel itself where `key` signed it, else a new one beside it; a file that is not `owner`'s is refused."""
    once_valid = trust.signers(owner)
    manifest = read_manifest(path, once_valid)
    if manifest.sender == key.public.fingerprint:
        return path
    _, bundle = read_parcel(path, once_valid, payload, manifest.envelope)
    new = path.with_name(f"{path.stem}-{key.public.fingerprint[:4].lower()}{path.suffix}")
    write_parcel(
        new, bundle, key, made=made, metrics=manifest.metrics, answers=manifest.answers, privacy=manifest.privacy
    )
    return new
