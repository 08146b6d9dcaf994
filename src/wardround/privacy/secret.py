"""Where privacy noise comes from: a secret of the site's, never the study's seed.

The coordinator knows the study's seed, so noise that came from it could be subtracted again. A secret is 32 bytes
that never leave the site. Streams are derived from it by purpose, site and round, as the study's are from its seed:
so a site that was stopped and goes on draws the same noise for the same training, and never two noises for one answer,
whose mean would be nearer to the truth.

The generator is Philox under a 128-bit key: 2¹²⁸ keys cannot be tried out, unlike the 2³² states that torch's CPU
generator has after any seed. It is no cipher; nobody has shown that its normal draws are beyond analysis.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wardround.errors import BadInput
from wardround.files import disk_errors

LENGTH = 32
FILE = "privacy.secret"  # the file, in a site's folder or in the directory of a run


@dataclass(frozen=True, repr=False)
class Secret:
    """A site's secret. It has no `repr`, so that no log or error shows it."""

    key: bytes

    def within(self, study: str) -> Secret:
        """The secret for one study: the same noise on two tables would leave their difference bare."""
        return Secret(hmac.digest(self.key, f"wardround study|{study}".encode(), hashlib.sha256))

    def numpy(self, purpose: str, site: str = "", round: int = 0, index: int = 0) -> np.random.Generator:
        """A generator that belongs to this purpose, site, round and index alone."""
        text = f"wardround privacy|{purpose}|{site}|{round}|{index}"
        digest = hmac.digest(self.key, text.encode(), hashlib.sha256)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def keep_secret(path: Path) -> Secret:
    """The secret in this file; where there is none, a fresh one, readable by its owner alone.

    Written whole or not at all, and never over one that is there: a second process takes the first one's.
    """
    if not path.exists():
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(os.urandom(LENGTH))
                    file.flush()
                    os.fsync(file.fileno())
                _move_unless_there(part, path)
            finally:
                part.unlink(missing_ok=True)
    try:
        key = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the privacy secret {path}: {error.strerror}; check the file") from error
    if len(key) != LENGTH:
        raise BadInput(f"{path} is no privacy secret: it has {len(key)} bytes, not {LENGTH}; restore it from a copy")
    return Secret(key)


def _move_unless_there(part: Path, path: Path) -> None:
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links: a stick, a share
        if not path.exists():
            part.replace(path)
