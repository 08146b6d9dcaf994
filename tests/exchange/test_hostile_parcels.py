"""Parcels that are damaged, forged or out of place: each is refused by name, none is parsed before a signature holds.

All that it takes to make these is a file of someone else's, or none. What a site with a known key could do is in
`test_hostile_manifests.py`.
"""

import gzip
import io
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge import (
    BODY,
    ENVELOPE,
    PAYLOAD,
    SIGNERS,
    TEXT,
    WHOLE,
    around,
    assert_refused,
    bundle,
    head_of,
    kept,
    record,
    signed,
)
from wardround.errors import BadInput
from wardround.exchange import manifest, outside
from wardround.exchange.bundle import Bundle, Envelope
from wardround.exchange.keys import PrivateKey
from wardround.exchange.parcel import LARGEST, MAGIC, copy_verified, read_manifest, read_parcel

HEAD = len(WHOLE) - len(BODY) - 64
STRANGER = PrivateKey(bytes(32))
on_posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no such files")


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("parcel", bytes(10**6))
    return buffer.getvalue()


OUTSIDERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is cut off within its first line"),
    "half a first line": (MAGIC[:5], "is cut off within its first line"),
    "a line and no more": (MAGIC, "is cut off within its head"),
    "half a length": (WHOLE[: len(MAGIC) + 3], "is cut off within its head"),
    "half a manifest": (WHOLE[: HEAD - 9], "is cut off within its manifest"),
    "half a signature": (WHOLE[: HEAD + 9], "is cut off within its signature"),
    "no body": (WHOLE[: -len(BODY)], "is cut off within its body"),
    "half a body": (WHOLE[:-9], "is cut off within its body"),
    "a byte too many": (WHOLE + b"\0", "goes on after the end"),
    "two parcels": (WHOLE + WHOLE, "goes on after the end"),
    "text": (b"Dear colleague,\nplease find attached\n", "is not a parcel"),
    "a safetensors file": (BODY, "is not a parcel"),
    "a pickle": (
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94.",
        "is not a parcel",
    ),
    "a parcel of the future": (WHOLE.replace(b"parcel-1", b"parcel-2", 1), "is a parcel of another format"),
    "gzip": (gzip.compress(bytes(10**6)), "is a compressed file"),
    "zip": (zipped(), "is a compressed file"),
    "a manifest of 2**64 - 1 bytes": (MAGIC + b"\xff" * 8 + WHOLE, "its manifest would be too long"),
    "a manifest of 4 MiB and a byte": (
        MAGIC + struct.pack("<Q", 2**22 + 1) + bytes(2**22 + 100),
        "its manifest would be too long",
    ),
    "a manifest of 4 MiB that is not there": (MAGIC + struct.pack("<Q", 2**22), "is cut off within its manifest"),
    "unsigned": (head_of(TEXT) + bytes(64) + BODY, "is not signed"),
    "signed by a stranger": (
        signed(record(sender=STRANGER.public.fingerprint), key=STRANGER),
        "is signed with a key that is not expected here",
    ),
    "signed by nobody in particular": (signed(record(sender="")), "is signed with a key that is not expected here"),
    "a stranger in a known name": (signed(record(), key=STRANGER), r"the signature of .* does not hold"),
    "the signature of another parcel": (
        WHOLE[:HEAD] + signed(record(round=0))[-64 - len(BODY) : -len(BODY)] + BODY,
        "the signature of .* does not hold",
    ),
    "a changed manifest": (WHOLE.replace(b'"round":1', b'"round":2'), "the signature of .* does not hold"),
    "a changed body": (WHOLE[:-1] + b"\xff", "the body of .* is not the one that was signed"),
    "the body of another parcel": (
        WHOLE[: -len(BODY)] + Bundle(ENVELOPE, {**bundle().groups, "size": {"images": torch.tensor(8)}}).to_bytes(),
        "the body of .* is not the one that was signed",
    ),
}

ELSEWHERE: dict[str, tuple[dict[str, Any], str]] = {
    "an older round": ({"round": 0}, "of site-1 in round 1 came in round 2"),
    "a later round": ({"round": 2}, "of site-1 in round 3 came in round 2"),
    "another site": ({"site": "site-2"}, "came in place of the answer of site-1"),
    "another kind": ({"kind": "request"}, "the request of site-1 in round 2 came in place of the answer"),
    "another study": ({"study": "fedcba9876543210"}, "belongs to fedavg in study fedcba9876543210"),
    "another method": ({"method": "fedprox"}, "belongs to fedprox in study"),
}


@pytest.mark.parametrize("case", OUTSIDERS)
def test_what_anyone_could_send_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    data, reason = OUTSIDERS[case]
    path = kept(tmp_path, data)
    assert_refused(path, reason)
    if not data.startswith(WHOLE[: HEAD + 64]):  # the signature does not hold, so the JSON parser must not be reached
        monkeypatch.setattr(manifest.json, "loads", lambda *_, **__: pytest.fail("parsed before the signature held"))
        assert_refused(path)


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_parcel_of_another_time_or_place_is_refused(tmp_path: Path, case: str) -> None:
    fields, reason = ELSEWHERE[case]
    elsewhere = Envelope(**{**vars(ENVELOPE), **fields})
    data = Bundle(elsewhere, bundle().groups).to_bytes()
    path = kept(tmp_path, around(data, **fields))
    assert read_manifest(path, SIGNERS).envelope == elsewhere
    assert_refused(path, reason)


def test_nobody_is_known_where_no_signer_is_given(tmp_path: Path) -> None:
    for read in (lambda path: read_manifest(path, {}), lambda path: copy_verified(path, tmp_path / "copy", {})):
        with pytest.raises(BadInput, match="a key that is not expected here"):
            read(kept(tmp_path, WHOLE))
    assert os.listdir(tmp_path) == ["x.parcel"]


def test_larger_than_agreed_is_refused_unread(tmp_path: Path) -> None:
    path = kept(tmp_path, WHOLE)
    assert read_manifest(path, SIGNERS, largest=len(WHOLE)).site == "site-1"
    with pytest.raises(BadInput, match=r"is larger than a parcel may be here \(\d+ bytes\)"):
        read_manifest(path, SIGNERS, largest=len(WHOLE) - 1)


def test_an_endless_file_takes_no_time_and_no_memory(tmp_path: Path) -> None:
    """A sparse file costs its maker nothing."""
    path = kept(tmp_path, WHOLE)
    os.truncate(path, LARGEST + 1)
    tracemalloc.start()
    try:
        assert_refused(path, "is larger than a parcel may be here")
        os.truncate(path, LARGEST)
        assert_refused(path, "goes on after the end")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


# Bits and pieces ------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    """Every byte once, with a bit that walks; nothing of a parcel is outside the signature or the hash."""
    for place in range(len(WHOLE)):
        flipped = bytearray(WHOLE)
        flipped[place] ^= 1 << (place % 8)
        assert_refused(kept(tmp_path, bytes(flipped)))


def test_a_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for length in range(len(WHOLE)):
        assert_refused(kept(tmp_path, WHOLE[:length]), "is cut off")


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(WHOLE)), st.integers(0, 20), st.binary(max_size=20))
def test_any_other_piece_in_its_place_is_refused(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, piece: bytes
) -> None:
    data = WHOLE[:start] + piece + WHOLE[start + length :]
    if data != WHOLE:
        assert_refused(kept(tmp_path_factory.getbasetemp(), data))


# What is not a file ---------------------------------------------------------------------------------------------------

READERS: list[Callable[[Path], object]] = [
    lambda path: read_manifest(path, SIGNERS),
    lambda path: read_parcel(path, SIGNERS, PAYLOAD, ENVELOPE),
    lambda path: copy_verified(path, path.with_name("copy"), SIGNERS),
]


def refused_by_all(path: Path, reason: str) -> None:
    before = sorted(os.listdir(path.parent))
    for read in READERS:
        with pytest.raises(BadInput, match=reason) as refusal:
            read(path)
        assert str(refusal.value).isprintable()
    assert sorted(os.listdir(path.parent)) == before


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parcel").mkdir()
    refused_by_all(tmp_path / "x.parcel", "is a folder, a pipe or a device")


@on_posix
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.parcel")
    refused_by_all(tmp_path / "x.parcel", "is a folder, a pipe or a device")


@on_posix
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", ".", "nowhere", "real.parcel"])
def test_a_link_is_refused_wherever_it_leads(tmp_path: Path, target: str) -> None:
    (tmp_path / "real.parcel").write_bytes(WHOLE)
    (tmp_path / "x.parcel").symlink_to(target)
    refused_by_all(tmp_path / "x.parcel", "is a link, which may lead anywhere")


@on_posix
def test_a_device_is_refused_unopened() -> None:
    with pytest.raises(BadInput, match="is a folder, a pipe or a device"):
        read_manifest(Path("/dev/zero"), SIGNERS)


@on_posix
@pytest.mark.parametrize(("swapped", "reason"), [("link", "cannot read"), ("pipe", "is a folder, a pipe or a device")])
def test_a_file_that_is_swapped_after_the_look_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str, reason: str
) -> None:
    path = kept(tmp_path, WHOLE)
    opened = os.open

    def swap(place: Path, flags: int) -> int:
        path.unlink()
        if swapped == "link":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path)
        return opened(place, flags)

    monkeypatch.setattr(outside.os, "open", swap)
    with pytest.raises(BadInput, match=reason):
        read_manifest(path, SIGNERS)


@pytest.mark.parametrize("name", ["nowhere", "zero\0byte", "x" * 300])
def test_what_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    refused_by_all(tmp_path / name, "cannot read .*check the path")


@on_posix
def test_a_file_name_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\n\u202eb.parcel"
    path.write_bytes(b"")
    refused_by_all(path, r"a\\x1b\[2J\\n\\u202eb.parcel is cut off")
