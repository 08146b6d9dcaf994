"""Thousands of inputs to the parcel's parser: it reads or refuses, and does nothing else, in little memory and time.

Random bytes end at the signature, so most inputs here are signed with a known key *after* they were spoilt: the parsers
of manifest and body see them. `make soak` runs 100,000 inputs, `make test` about 2,000.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge import BODY, ENVELOPE, PAYLOAD, SIGNERS, TEXT, WHOLE, around, data_of, header_of, record, safetensors, signed
from soak import times
from wardround.errors import BadInput
from wardround.exchange.parcel import MAGIC, copy_verified, read_manifest, read_parcel

MOST_MEMORY, MOST_SECONDS = 64 * 2**20, 5.0
SHORT, LONG = 400, 20_000  # inputs of each of the five sorts

Damage = Callable[[bytes], bytes]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["../x", "\x1b[2J", "float32", "F32", "answer", 2**63, 2**40, -1, 10**300]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


pieces = st.sampled_from([b"", b'"', b"{", b",", b"0", b"-1", b"1e999", b"NaN", b"\\u0007", b"../"]) | st.binary(
    max_size=24
)
splices = st.tuples(st.integers(0, 2**16), st.integers(0, 2) | st.integers(0, 40), pieces)


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """A few splices: bytes cut out, put in or overwritten."""
    drawn = draw(st.lists(splices, max_size=3))

    def apply(data: bytes) -> bytes:
        for place, length, piece in drawn:
            start = place % (len(data) + 1)
            data = data[:start] + piece + data[start + length :]
        return data

    return apply


def spoilt(draw: st.DrawFn, tree: dict[str, Any]) -> dict[str, Any]:
    """A JSON tree in which up to three values, at any depth, are others, are gone or are more."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(0, 3))):
        place: Any = tree
        key = draw(st.sampled_from(sorted(place)))
        while isinstance(place[key], dict | list) and len(place[key]) and draw(st.booleans()):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        act = draw(st.sampled_from(["change", "drop", "add"]))
        if act == "drop" and isinstance(place, dict) and len(place) > 1:
            del place[key]
        elif act == "add" and isinstance(place, dict):
            place[draw(st.text(max_size=8))] = draw(json_values)
        else:
            place[key] = draw(json_values)
    return tree


def as_json(tree: Any) -> bytes:
    """Canonical where it can be; Python's NaN and infinity as they are."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode(errors="replace")


@st.composite
def random_bytes(draw: st.DrawFn) -> bytes:
    """Anything, with or without the first line and a length that fits."""
    tail = draw(st.binary(max_size=300))
    length = draw(st.sampled_from([len(tail), 0, 2**22, 2**22 + 1, 2**63, 2**64 - 1]) | st.integers(0, 400))
    return draw(st.sampled_from([b"", MAGIC, MAGIC + length.to_bytes(8, "little")])) + tail


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    return draw(damages())(WHOLE)


@st.composite
def damaged_manifests(draw: st.DrawFn) -> bytes:
    return signed(draw(damages())(TEXT))


@st.composite
def spoilt_manifests(draw: st.DrawFn) -> bytes:
    tree = json.loads(as_json(record()))
    return signed(as_json(spoilt(draw, tree)))


@st.composite
def spoilt_bodies(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return around(draw(damages())(BODY))
    return around(safetensors(as_json(spoilt(draw, header_of())), draw(damages())(data_of())))


SORTS = {  # and how many different endings the short run sees at least: how deep its inputs get
    "random bytes": (random_bytes, 4),
    "damaged files": (damaged_files, 5),
    "damaged manifests, signed": (damaged_manifests, 12),
    "spoilt manifests, signed": (spoilt_manifests, 30),
    "spoilt bodies, hashed and signed": (spoilt_bodies, 14),
}
READ = "read"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for files that need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return tmp_path


def put_through(folder: Path, data: bytes) -> str:
    """All three readers on one input: what is accepted must be a parcel, what is refused must be told in a line."""
    path, target = folder / "x.parcel", folder / "copy.parcel"
    path.write_bytes(data)
    target.unlink(missing_ok=True)
    manifest, _ = outcome(lambda: read_manifest(path, SIGNERS).site)
    copied, _ = outcome(lambda: copy_verified(path, target, SIGNERS).site)
    body, ending = outcome(lambda: read_parcel(path, SIGNERS, PAYLOAD, ENVELOPE)[1].to_bytes())
    assert manifest == copied or copied is None
    assert (target.read_bytes() == data) if copied else (not target.exists())
    assert body is None or manifest == copied == ENVELOPE.site
    assert data != WHOLE or body == BODY
    return ending.removeprefix(str(path))[:40]


def outcome(read: Callable[[], object]) -> tuple[object, str]:
    """What a reader gives, or None; and how it ended."""
    try:
        return read(), READ
    except BadInput as refusal:
        said = str(refusal)
    assert said.isprintable()
    assert len(said) < 600
    return None, said


def fuzz(folder: Path, sort: str, inputs: int) -> tuple[int, set[str]]:
    """Put this many inputs of a sort through; how many different ones there were, and all endings."""
    seen: set[bytes] = set()
    endings: set[str] = set()

    @settings(max_examples=inputs, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(SORTS[sort][0]())
    def run(data: bytes) -> None:
        seen.add(hashlib.sha256(data).digest())
        tracemalloc.start()
        began = time.process_time()
        try:
            endings.add(put_through(folder, data))
            seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < MOST_MEMORY
        assert seconds < MOST_SECONDS

    run()
    return len(seen), endings


@pytest.mark.parametrize("sort", SORTS)
def test_two_thousand_inputs(folder: Path, sort: str) -> None:
    inputs, endings = fuzz(folder, sort, SHORT)
    assert inputs > SHORT / 2
    assert len(endings) >= SORTS[sort][1], endings
    assert READ in endings or sort == "random bytes"


@pytest.mark.soak
@pytest.mark.parametrize("sort", SORTS)
def test_a_hundred_thousand_inputs(folder: Path, sort: str) -> None:
    inputs = times(LONG)
    assert fuzz(folder, sort, inputs)[0] > inputs / 2


def test_the_fuzzer_would_notice_a_crash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its silence would say nothing."""

    def careless(*_: Any) -> None:
        raise KeyError("groups")

    monkeypatch.setattr("wardround.exchange.parcel.unpack", careless)
    with pytest.raises(KeyError):
        fuzz(folder, "damaged manifests, signed", 50)
