"""Parcels made by hand: right ones, and what a site could send that has a known key and bad intentions."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from wardround import __version__
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope
from wardround.exchange.keys import PrivateKey
from wardround.exchange.manifest import table_of
from wardround.exchange.parcel import MAGIC, read_parcel
from wardround.exchange.payload import SIZE_GROUP, Group, Payload
from wardround.tensorfile import canonical

KEY = PrivateKey(bytes(range(32)))
SIGNERS = {KEY.public.fingerprint: KEY.public}
MADE = "2026-03-04T05:06:07Z"
ENVELOPE = Envelope("answer", "0123456789abcdef", "fedavg", "site-1", 1)
PAYLOAD = Payload(
    up=(
        Group("parameters", "weights", 100, {"w": ((2, 3), "float32"), "b": ((2,), "float32")}),
        Group("features", "anything", 64),
        SIZE_GROUP,
    )
)


def bundle() -> Bundle:
    """A small answer."""
    weights = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([0.5, -0.5])}
    return Bundle(ENVELOPE, {"parameters": weights, "size": {"images": torch.tensor(7)}})


BODY = bundle().to_bytes()


def record(body: bytes = BODY, **changes: Any) -> dict[str, Any]:
    """A manifest's fields for the small answer, with some changed."""
    fields = {
        **asdict(ENVELOPE),
        "program": __version__,
        "sender": KEY.public.fingerprint,
        "groups": table_of(bundle()),
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "metrics": {},
        "answers": "",
        "privacy": {},
        "made": MADE,
    }
    return {**fields, **changes}


def head_of(manifest: bytes) -> bytes:
    """All that is signed."""
    return MAGIC + struct.pack("<Q", len(manifest)) + manifest


def signed(manifest: bytes | dict[str, Any], body: bytes = BODY, key: PrivateKey = KEY) -> bytes:
    """A parcel's bytes around any manifest and any body, with a signature that holds."""
    text = canonical(manifest).encode() if isinstance(manifest, dict) else manifest
    head = head_of(text)
    return head + key.sign(head) + body


def around(body: bytes, **changes: Any) -> bytes:
    """A parcel whose manifest has the size and hash of this body."""
    return signed(record(body, **changes), body)


def safetensors(header: Any, data: bytes) -> bytes:
    """A body around any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_of(body: bytes = BODY) -> dict[str, Any]:
    """The header of a body."""
    found: dict[str, Any] = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return found


def data_of(body: bytes = BODY) -> bytes:
    """The tensors' bytes of a body."""
    return body[8 + int.from_bytes(body[:8], "little") :]


TEXT = canonical(record()).encode()
WHOLE = signed(TEXT)


def kept(folder: Path, data: bytes) -> Path:
    """A file with these bytes."""
    path = folder / "x.parcel"
    path.write_bytes(data)
    return path


def assert_refused(path: Path, reason: str = "", payload: Payload = PAYLOAD) -> None:
    """That a file is refused for this reason: exit code 2, one printable line that names the file."""
    with pytest.raises(BadInput) as refusal:
        read_parcel(path, SIGNERS, payload, ENVELOPE)
    said = str(refusal.value)
    assert refusal.value.exit_code == 2
    assert said.isprintable()
    assert len(said) < 400 + len(str(path))
    assert path.name in said
    assert re.search(reason, said), said
