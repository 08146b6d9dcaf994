"""Ed25519 keys: who made a parcel.

Sites and coordinator exchange public keys once, as one line of text each, and make sure of them by reading a
fingerprint out on the phone. A private key is a file that its owner alone can read; it never leaves the machine.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from wardround.errors import BadInput
from wardround.exchange.outside import shown, unreadable
from wardround.files import disk_errors, whole_or_not

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE_BYTES = 64
_PUBLIC, _PRIVATE = "wardround-key-1", "wardround-private-key-1"
_LINE = re.compile(r"(\S+) ([A-Za-z0-9_-]{43})")  # 32 bytes in base64url, without padding
_LONGEST_FILE = 1000

# Of characters that are taken for one another on paper (0 O, 1 I L, 2 Z, 5 S, 6 G, 8 B, U V) at most one is in it.
# 24 characters of 26 are 112 bits: nobody finds a second key with the same fingerprint.
_ALPHABET = "23456789ACDEFHJKMNPQRTVWXY"
_GROUPS = 6
FINGERPRINT = re.compile(rf"[{_ALPHABET}]{{4}}(-[{_ALPHABET}]{{4}}){{{_GROUPS - 1}}}")


@dataclass(frozen=True)
class PublicKey:
    """What others know a site or a coordinator by."""

    raw: bytes

    @staticmethod
    def parse(text: str) -> PublicKey:
        """The key in one line of text, as `text` gives it; spaces around it are allowed."""
        return PublicKey(_parsed(text, _PUBLIC, "a public key", "paste the whole line that the key's owner sent"))

    def text(self) -> str:
        """The key as one line of text."""
        return _line(_PUBLIC, self.raw)

    @cached_property
    def fingerprint(self) -> str:
        """Six groups of four characters that two people can compare on the phone."""
        number = int.from_bytes(hashlib.sha256(self.text().encode()).digest(), "big")
        groups = []
        for _ in range(_GROUPS):
            group = ""
            for _ in range(4):
                number, place = divmod(number, len(_ALPHABET))
                group += _ALPHABET[place]
            groups.append(group)
        return "-".join(groups)

    def verify(self, signature: bytes, data: bytes) -> bool:
        """Whether the owner of this key signed exactly this."""
        try:
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError as error:
            raise _not_installed() from error
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """What its owner signs with; its text is in the file alone, never in a message."""

    _seed: bytes = field(repr=False)

    @staticmethod
    def generate() -> PrivateKey:
        """A new key, from the operating system's randomness."""
        return PrivateKey(secrets.token_bytes(32))

    @staticmethod
    def load(path: Path) -> PrivateKey:
        """The key in a file, which nobody but its owner may be able to read."""
        name = shown(path)
        try:
            _refuse_unless_private(name, path.stat().st_mode)
            with path.open("rb") as file:
                data = file.read(_LONGEST_FILE)
        except (OSError, ValueError) as error:
            raise unreadable(name, error) from error
        advice = f"give the file that `wardround key new` wrote, not {name}"
        return PrivateKey(_parsed(data.decode("ascii", "replace"), _PRIVATE, "a private key", advice))

    def save(self, path: Path) -> None:
        """Write the key for its owner alone; a file that is there already is never replaced."""
        name = shown(path)
        if os.path.lexists(path):
            raise BadInput(f"{name} exists, and a lost private key cannot be made again; choose another name")
        with disk_errors(path), whole_or_not(path) as part:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii", newline="\n") as file:
                file.write(_line(_PRIVATE, self._seed) + "\n")

    @cached_property
    def public(self) -> PublicKey:
        """The half that others may know."""
        return PublicKey(self._signer.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """64 bytes that only this key can make of this data; the same ones every time."""
        return self._signer.sign(data)

    @cached_property
    def _signer(self) -> Ed25519PrivateKey:
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            raise _not_installed() from error
        return Ed25519PrivateKey.from_private_bytes(self._seed)


def place_for_public(private: Path) -> Path:
    """Where the public half of a new key goes: the same name with `.pub`, and never over another key's."""
    public = private.with_suffix(".pub")
    if private == public:
        raise BadInput(f"{shown(private)} would be the name of both halves; end it otherwise, such as in .key")
    if os.path.lexists(public):
        raise BadInput(f"{shown(public)} exists, and may be the half of another key; choose another name, or move it")
    return public


def _refuse_unless_private(name: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise BadInput(f"{name} is not a file; give the file of a private key")
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadInput(
            f"others on this machine may read or change the private key {name}; run chmod 600 on it "
            "(on a stick that has no effect: keep the key on this machine's own disk)"
        )


def _line(label: str, raw: bytes) -> str:
    return f"{label} {base64.urlsafe_b64encode(raw).decode().rstrip('=')}"


def _parsed(text: str, label: str, what: str, advice: str) -> bytes:
    """The 32 bytes behind a label. The text itself stays out of the message: it may be half a private key."""
    found = _LINE.fullmatch(text.strip())
    if found is None or found[1] != label:
        if found is not None and found[1] in (_PUBLIC, _PRIVATE):
            raise BadInput(f"this is not {what} but the other half of a pair; {advice}")
        raise BadInput(f"this is not {what}, which is one line that begins with {label}; {advice}")
    raw = base64.urlsafe_b64decode(f"{found[2]}=")
    if _line(label, raw) != text.strip():  # the last character has two bits to spare
        raise BadInput(f"this is not {what}: its last character is wrong; {advice}")
    return raw


def _not_installed() -> BadInput:
    return BadInput("signing and checking signatures need one more package; run pip install 'wardround[sites]'")
