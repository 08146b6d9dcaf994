r"""A parcel: a signed bundle in a single file, for a stick, a mail or any other way between two machines.

    wardround-parcel-1\n   the first line
    length                 of the manifest, 8 bytes, little-endian
    manifest               canonical JSON, see `manifest.py`
    signature              64 bytes: Ed25519 over everything before it
    body                   the bundle as safetensors bytes; its size, SHA-256 and tensors stand in the manifest

Whatever reads one goes from front to back and stops at the first thing that is wrong. Nothing is parsed before a key
that is known here has signed it, nothing is decompressed at all, and a tensor is made last.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from wardround import __version__
from wardround.errors import BadInput
from wardround.exchange.answers import refuse_stray
from wardround.exchange.body import refuse_impossible, unpack_body
from wardround.exchange.bundle import Bundle, Envelope
from wardround.exchange.keys import FINGERPRINT, SIGNATURE_BYTES, PrivateKey, PublicKey
from wardround.exchange.manifest import Manifest, pack, table_of, tensor_bytes, unpack
from wardround.exchange.outside import OutsideFile, open_outside
from wardround.exchange.payload import Payload
from wardround.files import disk_errors, whole_or_not

__all__ = ["LARGEST", "Manifest", "check_whole", "copy_verified", "read_manifest", "read_parcel", "write_parcel"]

FORMAT = b"wardround-parcel-"
MAGIC = FORMAT + b"1\n"
LENGTH_BYTES = 8
MOST_MANIFEST_BYTES = 4 * 2**20
LARGEST = 4 * 2**30 - 2**24  # bytes of a file: what fits on a stick with the file system that every machine reads

_SENDER = re.compile(f'"sender":"({FINGERPRINT.pattern})"'.encode())
_COMPRESSED = (b"\x1f\x8b", b"PK", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
_TOO_LARGE_HERE = "; lower the learning rate (train.lr)"
_TOO_LARGE_SENT = (
    "; an answer of this round has numbers far too large: ask the sites for their losses, and take one out with: "
    "wardround hub withdraw"
)
_ASK = "; ask its sender for a correct parcel"
_NONE: Mapping[str, float] = MappingProxyType({})


def write_parcel(
    path: Path,
    bundle: Bundle,
    key: PrivateKey,
    *,
    made: str,
    metrics: Mapping[str, float] = _NONE,
    answers: str = "",
    privacy: Mapping[str, float] = _NONE,
) -> Manifest:
    """Sign a bundle into a file, whole or not at all; the same bytes for the same arguments."""
    body = bundle.to_bytes()
    with _refusing("no parcel is written", _TOO_LARGE_HERE if bundle.envelope.kind == "answer" else _TOO_LARGE_SENT):
        refuse_impossible(bundle)
    manifest = Manifest(
        **asdict(bundle.envelope),
        program=__version__,
        sender=key.public.fingerprint,
        groups=table_of(bundle),
        bytes=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
        metrics={name: float(value) for name, value in metrics.items()},
        answers=answers,
        privacy={name: float(value) for name, value in privacy.items()},
        made=made,
    )
    text = pack(manifest)
    head = MAGIC + len(text).to_bytes(LENGTH_BYTES, "little") + text
    if len(text) > MOST_MANIFEST_BYTES or len(head) + SIGNATURE_BYTES + len(body) > LARGEST:
        raise BadInput(f"the {manifest.kind} of {manifest.site} is too large for a parcel; use a smaller model")
    with disk_errors(path), whole_or_not(path) as part, part.open("wb") as file:
        file.write(head + key.sign(head))
        file.write(body)
    return manifest


def read_manifest(path: Path, signers: Mapping[str, PublicKey], *, largest: int = LARGEST) -> Manifest:
    """What a parcel says, once a known key is seen to have signed it and the file is as long as it says.

    `signers` are those who may have signed *this* parcel, by fingerprint. Where several may, it is for the caller to
    see that `sender` is the key of the `site` it speaks for.
    """
    with open_outside(path) as file:
        return _verified_head(file, signers, largest)[1]


def read_parcel(
    path: Path,
    signers: Mapping[str, PublicKey],
    payload: Payload,
    expect: Envelope,
    *,
    largest: int = LARGEST,
    called: Path | None = None,
) -> tuple[Manifest, Bundle]:
    """A parcel's bundle, once everything holds: signature, where it belongs, what was declared, hash, and every number.

    The hash is taken of the bytes that are then used, so a file that changes meanwhile changes nothing. `called` is
    what complaints call it: somebody who gave a file knows nothing of the copy that is looked into.
    """
    with open_outside(path, called) as file:
        _, manifest = _verified_head(file, signers, largest)
        outline = manifest.outline()
        with _refusing(file.name):
            refuse_stray(outline, expect)
        with _refusing(file.name, _ASK):
            payload.check(outline)
        body = file.take(manifest.bytes, "body")
        _check_hash(file, hashlib.sha256(body).hexdigest(), manifest)
        with _refusing(file.name, _ASK):
            return manifest, unpack_body(body, manifest)


def check_whole(path: Path, signers: Mapping[str, PublicKey], *, largest: int = LARGEST) -> None:
    """Refuse a file unless it is a parcel from its first byte to its last; with memory for a piece of it."""
    with open_outside(path) as file:
        _, manifest = _verified_head(file, signers, largest)
        for _ in _verified_body(file, manifest):
            pass


def copy_verified(path: Path, target: Path, signers: Mapping[str, PublicKey], *, largest: int = LARGEST) -> Manifest:
    """Copy a parcel, byte for byte, if signature, size and hash hold; with memory for a piece of it."""
    with open_outside(path) as file:
        head, manifest = _verified_head(file, signers, largest)
        with disk_errors(target), whole_or_not(target) as part, part.open("wb") as copy:
            copy.write(head)
            for piece in _verified_body(file, manifest):
                copy.write(piece)
    return manifest


def _verified_head(file: OutsideFile, signers: Mapping[str, PublicKey], largest: int) -> tuple[bytes, Manifest]:
    """Everything before the body, and the manifest in it."""
    _check_first_line(file)
    if file.size > largest:
        raise BadInput(f"{file.name} is larger than a parcel may be here ({largest} bytes); ask its sender about it")
    length = file.take(LENGTH_BYTES, "head")
    size = int.from_bytes(length, "little")
    if size > MOST_MANIFEST_BYTES:
        raise BadInput(f"{file.name} is no parcel, or is damaged: its manifest would be too long; copy it again")
    text = file.take(size, "manifest")
    signed = MAGIC + length + text
    signature = file.take(SIGNATURE_BYTES, "signature")
    signer = _verified_signer(file, text, signed, signature, signers)
    with _refusing(file.name, _ASK):
        manifest = unpack(text)
        _check_claims(manifest, signer)
    head = signed + signature
    _check_size(file, len(head) + manifest.bytes)
    return head, manifest


def _verified_body(file: OutsideFile, manifest: Manifest) -> Iterator[bytes]:
    """The body in pieces; whoever has taken the last one knows that its hash holds."""
    body = hashlib.sha256()
    for piece in file.stream(manifest.bytes, "body"):
        body.update(piece)
        yield piece
    _check_hash(file, body.hexdigest(), manifest)


def _check_first_line(file: OutsideFile) -> None:
    found = file.up_to(len(MAGIC))
    if found == MAGIC:
        return
    if MAGIC.startswith(found):
        raise BadInput(f"{file.name} is cut off within its first line; copy the file again")
    if found.startswith(FORMAT):
        raise BadInput(
            f"{file.name} is a parcel of another format; install the version of wardround that its sender has"
        )
    if found.startswith(_COMPRESSED):
        raise BadInput(f"{file.name} is a compressed file, which is never unpacked here; give the parcel itself")
    raise BadInput(f"{file.name} is not a parcel; give a file that wardround made")


def _verified_signer(
    file: OutsideFile, text: bytes, signed: bytes, signature: bytes, signers: Mapping[str, PublicKey]
) -> PublicKey:
    """The key that signed it.

    Which key to try is looked up by its spelling alone: a manifest is not parsed before its signature holds.
    """
    if not any(signature):
        raise BadInput(f"{file.name} is not signed; ask its sender to make it with their key")
    hint = _SENDER.search(text)
    key = signers.get(hint[1].decode()) if hint else None
    if key is None:
        raise BadInput(
            f"{file.name} is signed with a key that is not expected here; make sure who sent it, and that the study "
            "names their key"
        )
    if not key.verify(signature, signed):
        raise BadInput(f"the signature of {file.name} does not hold: it was changed after signing, or is a forgery")
    return key


def _check_claims(manifest: Manifest, signer: PublicKey) -> None:
    if manifest.sender != signer.fingerprint:
        raise BadInput("the manifest names another sender than the one who signed it")
    if sum(tensor_bytes(form) for group in manifest.groups.values() for form in group.values()) > manifest.bytes:
        raise BadInput("the manifest lists more tensors than its body has bytes for")


def _check_size(file: OutsideFile, expected: int) -> None:
    if file.size != expected:
        what = "is cut off within its body" if file.size < expected else "goes on after the end that its manifest names"
        raise BadInput(f"{file.name} {what}; copy the file again, and if it stays so, ask its sender for another")


def _check_hash(file: OutsideFile, found: str, manifest: Manifest) -> None:
    if found != manifest.sha256:
        raise BadInput(f"the body of {file.name} is not the one that was signed: damaged or replaced; copy it again")


@contextmanager
def _refusing(name: str, advice: str = "") -> Iterator[None]:
    """Complaints about what is in a file, with the file's name in front and what to do behind."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{name}: {error}{advice}") from error
