"""Parcels signed by a site with a known key and bad intentions: refused by name, and before a tensor is made.

The signature holds in all of these, so it is the manifest's closed form, its agreement with the body, and the method's
declaration that must refuse them.
"""

import gzip
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from forge import (
    BODY,
    ENVELOPE,
    KEY,
    PAYLOAD,
    SIGNERS,
    TEXT,
    around,
    assert_refused,
    bundle,
    data_of,
    header_of,
    kept,
    record,
    safetensors,
    signed,
)
from wardround.errors import BadInput
from wardround.exchange import body, manifest, parcel
from wardround.exchange.bundle import Bundle, Envelope
from wardround.exchange.keys import PrivateKey
from wardround.exchange.parcel import MAGIC, read_manifest
from wardround.exchange.payload import Payload

STRANGER = PrivateKey(bytes(32))


def renamed(header: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: entry for name, entry in header.items()}


def changed(path: str, **entry: Any) -> dict[str, Any]:
    header = header_of()
    return {**header, path: {**header[path], **entry}}


def table(**groups: dict[str, Any]) -> dict[str, Any]:
    return record(groups=groups)


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


FIELDS: dict[str, dict[str, Any]] = {
    "kind": {"kind": "gift"},
    "a kind that is no text": {"kind": ["answer"]},
    "study": {"study": "../study"},
    "method": {"method": "a b"},
    "site": {"site": "../x"},
    "an absolute site": {"site": "/etc/passwd"},
    "a site on a drive": {"site": "C:x"},
    "a site with a line break": {"site": "site-1\nsite-2"},
    "a site that clears the screen": {"site": "\x1b[2Jsite"},
    "a site that reads backwards": {"site": "site\u202e1"},
    "a site of a megabyte": {"site": "s" * 10**6},
    "a site that is no text": {"site": {"name": "x"}},
    "round": {"round": -1},
    "a round of many digits": {"round": 10**400},
    "a round that is no number": {"round": True},
    "a round that is not whole": {"round": 1.0},
    "program": {"program": "1.0\x07"},
    "sha256": {"sha256": "ABC"},
    "answers": {"answers": "../request"},
    "made": {"made": "2026-02-30T00:00:00Z"},
    "made with a bell": {"made": "2026-02-03T00:00:00Z\x07"},
    "bytes below zero": {"bytes": -1},
    "bytes that are no number": {"bytes": "all"},
    "metrics": {"metrics": [1.0]},
    "a metric that is no number": {"metrics": {"accuracy": "high"}},
    "a flood of metrics": {"metrics": {f"metric {number}": 0.5 for number in range(101)}},
    "a metric that is a whole number": {"metrics": {"accuracy": 1}},
    "a metric with a name of control characters": {"metrics": {"\x1b]0;title\x07": 1.0}},
    "privacy": {"privacy": {"epsilon": None}},
    "a group with a path": {"groups": {"../x": {"w": [[1], "float32"]}}},
    "a group with a bell": {"groups": {"\x07": {"w": [[1], "float32"]}}},
    "a group without tensors": {"groups": {"parameters": {}}},
    "a group that is a list": {"groups": {"parameters": []}},
    "groups that are a list": {"groups": []},
    "a tensor with a bell": {"groups": {"parameters": {"w\x07": [[1], "float32"]}}},
    "a tensor that is text": {"groups": {"parameters": {"w": "float32"}}},
    "a tensor without a type": {"groups": {"parameters": {"w": [[1]]}}},
    "a tensor of objects": {"groups": {"parameters": {"w": [[1], "object"]}}},
    "a tensor whose type is a list": {"groups": {"parameters": {"w": [[1], ["float32"]]}}},
    "a side below zero": {"groups": {"parameters": {"w": [[-1, -2], "float32"]}}},
    "a side that is true": {"groups": {"parameters": {"w": [[True], "float32"]}}},
    "a side that is not whole": {"groups": {"parameters": {"w": [[1.5], "float32"]}}},
    "a tensor of 2**80 numbers": {"groups": {"parameters": {"w": [[2**40, 2**40], "float32"]}}},
    "an empty tensor of endless width": {"groups": {"parameters": {"w": [[0, 2**40, 2**40], "float32"]}}},
    "a tensor of many sides": {"groups": {"parameters": {"w": [[1] * 17, "float32"]}}},
}

MANIFESTS: dict[str, tuple[bytes, str]] = {
    "one more field": (signed(record(patient="x")), "the manifest has an unknown field 'patient'"),
    "a field that steers the terminal": (signed(record(**{"\x1b[2J": 1})), r"has an unknown field '\\x1b\[2J'"),
    "a field less": (signed({k: v for k, v in record().items() if k != "privacy"}), "lacks field 'privacy'"),
    "a list": (signed(b'["sender",{"sender":"%s"}]' % KEY.public.fingerprint.encode()), "is not a JSON object"),
    "no JSON": (signed(b'"sender":"%s"' % KEY.public.fingerprint.encode()), "the manifest is not valid JSON"),
    "no text": (signed(b'\xff"sender":"%s"' % KEY.public.fingerprint.encode()), "the manifest is not UTF-8 text"),
    "a key twice": (
        signed(TEXT.replace(b'"round":1', b'"round":1,"round":2')),
        "the manifest has a key twice",
    ),
    "NaN": (signed(TEXT.replace(b'"metrics":{}', b'"metrics":{"a":NaN}')), "the manifest is not valid JSON"),
    "infinity": (signed(TEXT.replace(b'"metrics":{}', b'"metrics":{"a":1e999}')), "should be a finite number"),
    "a number of 5000 digits": (signed(TEXT.replace(b'"round":1', b'"round":' + b"1" * 5000)), "is not valid JSON"),
    "a spare space": (signed(TEXT + b" "), "the manifest is not in its canonical form"),
    "a number in another spelling": (
        signed(TEXT.replace(b'"metrics":{}', b'"metrics":{"a":10e-1}')),
        "the manifest is not in its canonical form",
    ),
    "letters in another spelling": (signed(TEXT.replace(b"fedavg", b"f\\u0065davg")), "not in its canonical form"),
    "too deep": (signed(nested(10**5)[:-1] + b',"sender":"%s"}' % KEY.public.fingerprint.encode()), "not valid JSON"),
    "a sender inside": (
        signed(record(sender=STRANGER.public.fingerprint, answers={"sender": KEY.public.fingerprint})),
        "the manifest's answers is not right",
    ),
    "a body smaller than its tensors": (
        signed(table(parameters={"w": [[2**38], "float32"]})),
        "the manifest lists more tensors than its body has bytes for",
    ),
    "a body larger than the file": (
        signed(record(bytes=2**62)),
        "is cut off within its body",
    ),
    "a body smaller than the file": (
        signed(record(bytes=len(BODY) - 1)),
        "goes on after the end that its manifest names",
    ),
    "another hash": (signed(record(sha256="0" * 64)), "the body of .* is not the one that was signed"),
}

W = "parameters/w"
BODIES: dict[str, tuple[bytes, str]] = {
    "no header": (b"", "the body's header is longer than it may be"),
    "half a length": (b"\0\0\0", "the body's header is longer than it may be"),
    "a header of 2**64 - 1 bytes": (b"\xff" * 8, "the body's header is longer than it may be"),
    "a header of 100 MB": (struct.pack("<Q", 10**8) + BODY[8:], "the body's header is longer than it may be"),
    "no JSON": (safetensors(b"{", data_of()), "the body's header is not valid JSON"),
    "no text": (safetensors(b"\xff\xfe", data_of()), "the body's header is not UTF-8 text"),
    "a list": (safetensors([], data_of()), "the body's header is not a JSON object"),
    "too deep": (safetensors(nested(10**5), data_of()), "the body's header is not valid JSON"),
    "a tensor twice": (
        safetensors(json.dumps(header_of()).encode()[:-1] + b',"parameters/w":{}}', data_of()),
        "the body's header has a key twice",
    ),
    "gzip": (gzip.compress(BODY), "the body's header is longer than it may be"),
    "no record": (
        safetensors({k: v for k, v in header_of().items() if k != "__metadata__"}, data_of()),
        "the body does not say where it belongs",
    ),
    "a second record": (
        safetensors({**header_of(), "__metadata__": {**header_of()["__metadata__"], "patient": "x"}}, data_of()),
        "the body does not say where it belongs",
    ),
    "a record that is no JSON": (
        safetensors({**header_of(), "__metadata__": {"wardround": "{"}}, data_of()),
        "the body's record is not valid JSON",
    ),
    "a record of lone surrogates": (
        safetensors({**header_of(), "__metadata__": {"wardround": "\udfff"}}, data_of()),
        "the body's record is not valid JSON",
    ),
    "the record of another site": (
        Bundle(Envelope("answer", "0123456789abcdef", "fedavg", "site-2", 1), bundle().groups).to_bytes(),
        "the body belongs elsewhere than its manifest says",
    ),
    "a tensor missing": (
        Bundle(ENVELOPE, {"parameters": bundle().groups["parameters"]}).to_bytes(),
        "the body lacks tensor size/images, which its manifest lists",
    ),
    "a tensor besides": (
        Bundle(ENVELOPE, {**bundle().groups, "images": {"x": torch.zeros(1)}}).to_bytes(),
        "the body holds tensor 'images/x', which its manifest does not list",
    ),
    "a tensor besides that steers the terminal": (
        safetensors({**header_of(), "\x1b[2J": header_of()[W]}, data_of()),
        r"the body holds tensor '\\x1b\[2J', which its manifest does not list",
    ),
    "another name": (
        safetensors(renamed(header_of(), W, "parameters/../../w"), data_of()),
        "the body holds tensor 'parameters/../../w'",
    ),
    "another shape": (safetensors(changed(W, shape=[3, 2]), data_of()), f"{W} has another shape or type"),
    "another type": (safetensors(changed(W, dtype="I32"), data_of()), f"{W} has another shape or type"),
    "an unknown type": (safetensors(changed(W, dtype=["F32"]), data_of()), f"{W} has another shape or type"),
    "sides that are not whole": (safetensors(changed(W, shape=[2.0, 3]), data_of()), f"{W} has another shape or type"),
    "no shape": (safetensors(changed(W, shape=None), data_of()), f"{W} has another shape or type"),
    "one more key": (safetensors(changed(W, device="cuda"), data_of()), f"does not say of tensor {W} what it should"),
    "no entry": (safetensors({**header_of(), W: None}, data_of()), f"does not say of tensor {W} what it should"),
    "no place": (safetensors(changed(W, data_offsets=None), data_of()), f"does not say where tensor {W} is"),
    "a place before the beginning": (
        safetensors(changed(W, data_offsets=[-24, 0]), data_of()),
        f"does not say where tensor {W} is",
    ),
    "a place too large": (
        safetensors(changed(W, data_offsets=[0, 2**40]), data_of()),
        f"tensor {W} has more or fewer bytes in the body than its shape needs",
    ),
    "a place beyond the end": (
        safetensors(changed(W, data_offsets=[2**40, 2**40 + 24]), data_of()),
        "the body's tensors overlap, or there are gaps between them",
    ),
    "tensors that overlap": (
        safetensors(changed(W, data_offsets=[8, 32]), data_of()),
        "the body's tensors overlap, or there are gaps between them",
    ),
    "bytes after the end": (BODY + b"patients", "the body does not end where its last tensor ends"),
    "bytes missing": (BODY[:-8], "the body does not end where its last tensor ends"),
}


def not_finite(group: str, name: str, value: float) -> bytes:
    tensors = {**bundle().groups[group]}
    tensors[name] = torch.full_like(tensors[name], value)
    return around(Bundle(ENVELOPE, {**bundle().groups, group: tensors}).to_bytes())


def other_groups(**groups: dict[str, torch.Tensor]) -> bytes:
    """A parcel that is right in itself, with other tensors than the method declared."""
    made = Bundle(ENVELOPE, groups)
    return around(made.to_bytes(), groups=manifest.table_of(made))


UNDECLARED: dict[str, tuple[bytes, str]] = {
    "NaN": (not_finite("parameters", "w", float("nan")), "parameters/w holds NaN or infinite values"),
    "infinity": (not_finite("parameters", "b", -float("inf")), "parameters/b holds NaN or infinite values"),
    "fewer images than none": (not_finite("size", "images", -5), "size/images holds numbers below 0"),
    "another shape": (
        other_groups(**{**bundle().groups, "parameters": {"w": torch.zeros(3, 2), "b": torch.zeros(2)}}),
        r"parameters/w is \(\(3, 2\), 'float32'\), declared is",
    ),
    "another type": (
        other_groups(**{**bundle().groups, "parameters": {"w": torch.zeros(2, 3).half(), "b": torch.zeros(2)}}),
        r"parameters/w is \(\(2, 3\), 'float16'\), declared is",
    ),
    "another group": (
        other_groups(**{**bundle().groups, "images": {"x": torch.zeros(1)}}),
        "holds group 'images', which fedavg did not declare",
    ),
    "a group too large": (
        other_groups(**{**bundle().groups, "features": {"x": torch.zeros(17)}}),
        "group 'features' has 68 bytes, declared are 64",
    ),
    "a tensor less": (
        other_groups(parameters={"w": torch.zeros(2, 3)}, size=bundle().groups["size"]),
        "lacks parameters/b, which fedavg declared",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_wrong_field_is_refused_by_its_name(tmp_path: Path, case: str) -> None:
    field = next(iter(FIELDS[case]))
    words = {"groups": "(groups|group|tensor)", "metrics": "(key in )?metrics"}.get(field, field)
    assert_refused(kept(tmp_path, signed(record(**FIELDS[case]))), f"the manifest's {words}.* is not right")


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    data, reason = MANIFESTS[case]
    assert_refused(kept(tmp_path, data), reason)


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_is_not_what_its_manifest_says_is_refused_before_a_tensor_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    data, reason = BODIES[case]
    few = {"groups": {}} if len(data) < 40 else {}  # otherwise its table alone gives a body too short away
    monkeypatch.setattr(body.Bundle, "from_bytes", lambda _: pytest.fail("tensors were made"))
    assert_refused(kept(tmp_path, around(data, **few)), reason, Payload() if few else PAYLOAD)


@pytest.mark.parametrize("case", UNDECLARED)
def test_what_the_method_did_not_declare_is_refused(tmp_path: Path, case: str) -> None:
    data, reason = UNDECLARED[case]
    path = kept(tmp_path, data)
    assert read_manifest(path, SIGNERS).site == "site-1"  # nothing is wrong with the parcel itself
    assert_refused(path, reason)


def test_what_was_not_declared_is_refused_before_its_body_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(tmp_path, UNDECLARED["a group too large"][0])
    monkeypatch.setattr(parcel, "unpack_body", lambda *_: pytest.fail("the body was looked at"))
    monkeypatch.setattr(parcel, "_check_hash", lambda *_: pytest.fail("the body was read"))
    assert_refused(path, "declared are 64")


def test_a_key_under_a_wrong_fingerprint_is_of_no_use(tmp_path: Path) -> None:
    path = kept(tmp_path, signed(record(sender=STRANGER.public.fingerprint)))
    with pytest.raises(BadInput, match="names another sender than the one who signed it"):
        read_manifest(path, {STRANGER.public.fingerprint: KEY.public})


def test_a_lie_about_sizes_takes_no_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        for data in (
            MAGIC + b"\xff" * 8,
            MAGIC + struct.pack("<Q", 2**22),
            MANIFESTS["a body larger than the file"][0],
            MANIFESTS["a body smaller than its tensors"][0],
            signed(record(**FIELDS["a tensor of 2**80 numbers"])),
            around(BODIES["a header of 100 MB"][0]),
            around(BODIES["a place beyond the end"][0]),
        ):
            assert_refused(kept(tmp_path, data))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
