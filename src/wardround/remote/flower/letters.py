"""What crosses Flower: a call from the hub to a node, and the node's reply, each with at most one parcel.

A node says who it is in every reply, by signing the call's nonce together with its study's id and its own node's
number; so a reply can neither be replayed, nor passed on by another node, nor shown to another study's hub. What is
signed begins otherwise than a parcel does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wardround.errors import BadInput
from wardround.exchange.keys import SIGNATURE_BYTES, PrivateKey, PublicKey

if TYPE_CHECKING:
    from flwr.app import RecordDict

HELLO, ANSWER, TAKE_HOME = "hello", "answer", "take home"
CALLS = (HELLO, ANSWER, TAKE_HOME)
NONCE_BYTES = 32
MOST_WORDS = 200
_LETTER, _PARCEL = "letter", "parcel"
_RAW = "wardround.parcel"  # Flower's name for how an array is packed: not at all, so nothing needs unpacking


@dataclass(frozen=True)
class Call:
    """What the hub asks of a node. An answer of the first round needs no parcel."""

    do: str
    study: str
    nonce: bytes
    parcel: bytes = b""


@dataclass(frozen=True)
class Reply:
    """Who the node speaks for, and the parcel it was asked for, or in a few words why there is none."""

    key: str
    proof: bytes
    parcel: bytes = b""
    words: str = ""

    @staticmethod
    def signed(call: Call, node: int, key: PrivateKey, parcel: bytes = b"", words: str = "") -> Reply:
        """A reply that proves who gave it."""
        return Reply(key.public.text(), key.sign(_identity(call, node)), parcel, words[:MOST_WORDS])

    def sender(self, call: Call, node: int) -> PublicKey:
        """The key that gave this reply to this call at this node."""
        key = PublicKey.parse(self.key)
        if not key.verify(self.proof, _identity(call, node)):
            raise BadInput("the node's reply is not signed for this study by the key that it names")
        return key


def _identity(call: Call, node: int) -> bytes:
    return b"\n".join((b"wardround-node-1", call.study.encode(), str(node).encode(), call.nonce))


def pack_call(call: Call) -> RecordDict:
    """The call as Flower carries it."""
    return _pack({"do": call.do, "study": call.study, "nonce": call.nonce}, call.parcel)


def unpack_call(content: RecordDict) -> Call:
    """The inverse of `pack_call`."""
    fields, parcel = _unpack(content, {"do": str, "study": str, "nonce": bytes})
    if fields["do"] not in CALLS or len(fields["nonce"]) != NONCE_BYTES:
        raise BadInput("the call is none of this program's; check that both sides run the same version")
    return Call(fields["do"], fields["study"], fields["nonce"], parcel)


def pack_reply(reply: Reply) -> RecordDict:
    """The reply as Flower carries it."""
    return _pack({"key": reply.key, "proof": reply.proof, "words": reply.words}, reply.parcel)


def unpack_reply(content: RecordDict) -> Reply:
    """The inverse of `pack_reply`."""
    fields, parcel = _unpack(content, {"key": str, "proof": bytes, "words": str})
    if len(fields["proof"]) != SIGNATURE_BYTES or len(fields["words"]) > MOST_WORDS:
        raise BadInput("the node's reply is none of this program's; check that both sides run the same version")
    return Reply(fields["key"], fields["proof"], parcel, fields["words"])


def _pack(fields: dict[str, str | bytes], parcel: bytes) -> RecordDict:
    """As an array and not as a setting: Flower cuts arrays into chunks, and sends each chunk once."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    records = RecordDict({_LETTER: ConfigRecord({**fields})})
    if parcel:
        array = Array(dtype="uint8", shape=(len(parcel),), stype=_RAW, data=parcel)
        records[_PARCEL] = ArrayRecord({_PARCEL: array})
    return records


def _unpack(content: RecordDict, types: dict[str, type]) -> tuple[dict[str, Any], bytes]:
    """The fields, each of its type, and the parcel's bytes, which nothing has looked into."""
    letter = content.config_records.get(_LETTER)
    found = {} if letter is None else dict(letter)
    if found.keys() != types.keys() or not all(isinstance(found[name], kind) for name, kind in types.items()):
        raise BadInput("the message is none of this program's; check that both sides run the same version")
    arrays = content.array_records.get(_PARCEL)
    if arrays is None:
        return found, b""
    if list(arrays) != [_PARCEL] or arrays[_PARCEL].stype != _RAW:
        raise BadInput("the message holds something else than a parcel; check that both sides run the same version")
    return found, bytes(arrays[_PARCEL].data)
