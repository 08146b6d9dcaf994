"""Calls and replies as Flower carries them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'wardround[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from remote.parties import KEYS, SITES
from wardround.errors import BadInput
from wardround.remote.flower.letters import (
    ANSWER,
    CALLS,
    MOST_WORDS,
    NONCE_BYTES,
    Call,
    Reply,
    pack_call,
    pack_reply,
    unpack_call,
    unpack_reply,
)

CALL = Call(ANSWER, "0123456789abcdef", b"n" * NONCE_BYTES)
KEY, OTHER = KEYS[SITES[0]], KEYS[SITES[1]]


@given(st.sampled_from(CALLS), st.binary(max_size=400), st.text(max_size=300))
@settings(max_examples=25)
def test_what_is_packed_is_unpacked(do: str, parcel: bytes, words: str) -> None:
    call = replace(CALL, do=do, parcel=parcel)
    assert unpack_call(pack_call(call)) == call
    reply = Reply.signed(call, 7, KEY, parcel, words)
    assert reply.words == words[:MOST_WORDS]
    assert unpack_reply(pack_reply(reply)) == reply


def test_a_parcel_travels_as_it_is() -> None:
    parcel = bytes(range(256)) * 4000
    records = pack_call(replace(CALL, parcel=parcel))
    assert records.array_records["parcel"]["parcel"].data == parcel
    assert sum(record.count_bytes() for record in records.values()) < len(parcel) + 200


def test_a_reply_proves_who_gave_it() -> None:
    reply = Reply.signed(CALL, 7, KEY)
    assert reply.sender(CALL, 7) == KEY.public
    wrong = "is not signed for this study by the key that it names"
    for call, node in (
        (CALL, 8),
        (replace(CALL, nonce=b"m" * NONCE_BYTES), 7),
        (replace(CALL, study="f" * 16), 7),
    ):
        with pytest.raises(BadInput, match=wrong):
            reply.sender(call, node)
    with pytest.raises(BadInput, match=wrong):
        replace(reply, key=OTHER.public.text()).sender(CALL, 7)
    with pytest.raises(BadInput, match="public key"):
        replace(reply, key="\x1b[31mred").sender(CALL, 7)


def letter(**fields: Any) -> RecordDict:
    return RecordDict({"letter": ConfigRecord(fields)})


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        letter(),
        letter(do=ANSWER, study="x"),
        letter(do=ANSWER, study="x", nonce="text"),
        letter(do="dance", study="x", nonce=b"n" * NONCE_BYTES),
        letter(do=ANSWER, study="x", nonce=b"n"),
        letter(do=ANSWER, study="x", nonce=b"n" * NONCE_BYTES, more=1),
    ],
)
def test_other_calls_are_refused(content: RecordDict) -> None:
    with pytest.raises(BadInput, match="is none of this program's"):
        unpack_call(content)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        letter(key="k", proof=b"p" * 63, words=""),
        letter(key="k", proof=b"p" * 64, words="w" * 201),
        letter(key=1, proof=b"p" * 64, words=""),
    ],
)
def test_other_replies_are_refused(content: RecordDict) -> None:
    with pytest.raises(BadInput, match="is none of this program's"):
        unpack_reply(content)


def test_an_array_of_another_kind_is_not_looked_into() -> None:
    for arrays in (
        {"parcel": Array("uint8", (1,), "numpy.ndarray", b"x")},
        {"other": Array("uint8", (1,), "wardround.parcel", b"x")},
    ):
        content = pack_call(CALL)
        content["parcel"] = ArrayRecord(arrays)
        with pytest.raises(BadInput, match="something else than a parcel"):
            unpack_call(content)
