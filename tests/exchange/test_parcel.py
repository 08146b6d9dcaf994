"""Parcels: what was signed comes out again, to the bit, and only whole files are left behind."""

import hashlib
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge import BODY, ENVELOPE, KEY, MADE, PAYLOAD, SIGNERS, around, bundle, data_of, head_of, record, signed
from wardround import __version__, tensorfile
from wardround.errors import BadInput, RunFailed
from wardround.exchange import outside, parcel
from wardround.exchange.bundle import Bundle, Envelope, Kind
from wardround.exchange.keys import PrivateKey
from wardround.exchange.manifest import TYPES, Manifest, pack, unpack
from wardround.exchange.parcel import copy_verified, read_manifest, read_parcel, write_parcel
from wardround.exchange.payload import Group, Payload


def write(path: Path, **more: Any) -> Manifest:
    return write_parcel(path, bundle(), KEY, **{"made": MADE, **more})


def same(one: Bundle, other: Bundle) -> bool:
    return one.envelope == other.envelope and one.to_bytes() == other.to_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.parcel"
    sent = write(path, metrics={"accuracy": 0.75}, answers="ab" * 32, privacy={"epsilon": 3})
    found, read = read_parcel(path, SIGNERS, PAYLOAD, ENVELOPE)
    assert same(read, bundle())
    assert found == sent == read_manifest(path, SIGNERS)
    assert os.listdir(tmp_path) == ["x.parcel"]


def test_a_manifest_says_all_there_is_to_say(tmp_path: Path) -> None:
    found = write(tmp_path / "x.parcel", metrics={"accuracy": 1}, answers="ab" * 32, privacy={"epsilon": 3})
    assert found == Manifest(
        kind="answer",
        study="0123456789abcdef",
        method="fedavg",
        site="site-1",
        round=1,
        program=__version__,
        sender="N838-RAXF-X8JR-89HP-94T7-QD85",
        groups={
            "parameters": {"w": ((2, 3), "float32"), "b": ((2,), "float32")},
            "size": {"images": ((), "int64")},
        },
        bytes=len(BODY),
        sha256=bundle().sha256(),
        metrics={"accuracy": 1.0},
        answers="ab" * 32,
        privacy={"epsilon": 3.0},
        made=MADE,
    )
    assert found.envelope == ENVELOPE
    assert found.id == hashlib.sha256(pack(found)).hexdigest()[:16]


def test_the_format_of_the_file_is_what_the_page_says(tmp_path: Path) -> None:
    """A file of version 1 stays readable: line, length, manifest, signature of all before it, body."""
    manifest = write(tmp_path / "x.parcel")
    text = tensorfile.canonical(record()).encode()
    assert text == pack(manifest)
    head = b"wardround-parcel-1\n" + len(text).to_bytes(8, "little") + text
    assert head == head_of(text)
    assert (tmp_path / "x.parcel").read_bytes() == head + KEY.sign(head) + BODY


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parcel", metrics={"a": 1.0, "b": 2.0})
    write(tmp_path / "b.parcel", metrics={"b": 2.0, "a": 1.0})
    assert (tmp_path / "a.parcel").read_bytes() == (tmp_path / "b.parcel").read_bytes()
    other = write(tmp_path / "b.parcel", made="2026-03-04T05:06:08Z")
    assert other.id != read_manifest(tmp_path / "a.parcel", SIGNERS).id


@pytest.mark.parametrize("made", ["2026-03-04T05:06:07Z", "2026-03-04T05:06:07+00:00", "2026-03-04T05:06:07.123456Z"])
def test_takes_a_time_in_utc(tmp_path: Path, made: str) -> None:
    assert write(tmp_path / "x.parcel", made=made).made == made


@pytest.mark.parametrize(
    "more",
    [
        {"made": "yesterday"},
        {"made": "2026-03-04T05:06:07"},
        {"made": "2026-03-04T05:06:07+01:00"},
        {"made": "2026-13-04T05:06:07Z"},
        {"answers": "abc"},
        {"metrics": {"a\nb": 1.0}},
        {"metrics": {"accuracy": float("nan")}},
        {"privacy": {"epsilon": float("inf")}},
    ],
)
def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"the manifest's (key in )?(made|answers|metrics|privacy)"):
        write(tmp_path / "x.parcel", **more)
    assert os.listdir(tmp_path) == []


def test_a_bundle_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    broken = Bundle(ENVELOPE, {"parameters": {"w": torch.tensor([1.0, float("nan")])}})
    with pytest.raises(
        BadInput, match=r"answer of site-1 in round 2: parameters/w holds NaN .*; lower the learning rate"
    ):
        write_parcel(tmp_path / "x.parcel", broken, KEY, made=MADE)
    request = Bundle(replace(ENVELOPE, kind="request"), broken.groups)  # whose numbers are not the coordinator's fault
    with pytest.raises(BadInput, match=r"request of site-1 in round 2: .* take one out with: wardround hub withdraw"):
        write_parcel(tmp_path / "x.parcel", request, KEY, made=MADE)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("limit", ["MOST_MANIFEST_BYTES", "LARGEST"])
def test_what_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(parcel, limit, 100)
    with pytest.raises(BadInput, match="the answer of site-1 is too large for a parcel"):
        write(tmp_path / "x.parcel")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_leaves_the_earlier_parcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parcel"
    write(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match="the disk is full"):
        write(path, metrics={"a": 1.0})
    with pytest.raises(RunFailed, match="the disk is full"):
        copy_verified(path, tmp_path / "copy.parcel", SIGNERS)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.parcel"]


kinds = st.sampled_from(["request", "answer", "delivery"])
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
tensor_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9 ._/+-]{0,12}", fullmatch=True)
forms = st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(sorted(TYPES)))
plans = st.dictionaries(names, st.dictionaries(tensor_names, forms, max_size=4), max_size=3)


def drawn(plan: dict[str, dict[str, tuple[list[int], str]]]) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return {
        group: {
            name: torch.randint(0, 9, shape, generator=draw).to(getattr(torch, dtype))
            for name, (shape, dtype) in tensors.items()
        }
        for group, tensors in plan.items()
    }


@settings(deadline=None, max_examples=50)
@given(kinds, names, st.integers(0, 2**31), plans)
def test_any_bundle_makes_the_way(
    tmp_path_factory: pytest.TempPathFactory, kind: Kind, site: str, round: int, plan: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parcel"
    sent = Bundle(Envelope(kind, "study", "method", site, round), drawn(plan))
    manifest = write_parcel(path, sent, KEY, made=MADE)
    assert unpack(pack(manifest)) == manifest
    groups = tuple(Group(name, "", 10**6) for name in plan)
    found, read = read_parcel(path, SIGNERS, Payload(up=groups, down=groups, home=groups), sent.envelope)
    assert found == manifest
    assert same(read, sent)


def test_every_type_of_tensor_makes_the_way(tmp_path: Path) -> None:
    every = {str(dtype).removeprefix("torch."): torch.ones(3, dtype=dtype) for dtype in tensorfile.DTYPE_NAMES}
    assert list(TYPES) == sorted(every)
    sent = Bundle(ENVELOPE, {"features": every})
    write_parcel(tmp_path / "x.parcel", sent, KEY, made=MADE)
    free = Payload(up=(Group("features", "", 1000),))
    assert same(read_parcel(tmp_path / "x.parcel", SIGNERS, free, ENVELOPE)[1], sent)


def test_a_copy_is_the_same_file(tmp_path: Path) -> None:
    sent = write(tmp_path / "x.parcel")
    assert copy_verified(tmp_path / "x.parcel", tmp_path / "copy.parcel", SIGNERS) == sent
    assert (tmp_path / "copy.parcel").read_bytes() == (tmp_path / "x.parcel").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["copy.parcel", "x.parcel"]


def large(path: Path) -> Bundle:
    sent = Bundle(ENVELOPE, {"features": {"f": torch.zeros(2**22)}})  # 16 MiB
    write_parcel(path, sent, KEY, made=MADE)
    return sent


def test_a_copy_takes_memory_for_a_piece(tmp_path: Path) -> None:
    large(tmp_path / "x.parcel")
    tracemalloc.start()
    try:
        copy_verified(tmp_path / "x.parcel", tmp_path / "copy.parcel", SIGNERS)
        assert tracemalloc.get_traced_memory()[1] < 3 * outside.STEP
        read_manifest(tmp_path / "x.parcel", SIGNERS)
    finally:
        tracemalloc.stop()
    assert (tmp_path / "copy.parcel").read_bytes() == (tmp_path / "x.parcel").read_bytes()


def test_a_damaged_body_is_not_copied_and_what_was_there_stays(tmp_path: Path) -> None:
    path, target = tmp_path / "x.parcel", tmp_path / "copy.parcel"
    write(path)
    copy_verified(path, target, SIGNERS)
    before = target.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert read_manifest(path, SIGNERS).site == "site-1"  # a manifest's reader does not look at the body
    with pytest.raises(BadInput, match=r"the body of .*x\.parcel is not the one that was signed"):
        copy_verified(path, target, SIGNERS)
    assert target.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["copy.parcel", "x.parcel"]


def test_a_file_that_shrinks_while_it_is_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large(tmp_path / "x.parcel")

    def shrinking(file: outside.OutsideFile, count: int) -> bytes:
        os.truncate(tmp_path / "x.parcel", 5 * outside.STEP)
        return up_to(file, count)

    up_to = outside.OutsideFile.up_to
    monkeypatch.setattr(outside.OutsideFile, "up_to", shrinking)
    with pytest.raises(BadInput, match="is cut off within its body"):
        copy_verified(tmp_path / "x.parcel", tmp_path / "copy.parcel", SIGNERS)
    assert os.listdir(tmp_path) == ["x.parcel"]


def test_a_bad_stick_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.parcel")
    with outside.open_outside(tmp_path / "x.parcel") as file:

        class Broken:
            def read(self, _: int) -> bytes:
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(file, "_file", Broken())
        with pytest.raises(BadInput, match=r"cannot read .*x\.parcel: Input/output error"):
            file.take(1, "head")


def test_any_of_several_signers_may_have_signed(tmp_path: Path) -> None:
    other = PrivateKey.generate()
    write_parcel(tmp_path / "x.parcel", bundle(), other, made=MADE)
    both = {**SIGNERS, other.public.fingerprint: other.public}
    assert read_manifest(tmp_path / "x.parcel", both).sender == other.public.fingerprint


def test_an_outline_has_the_forms_and_no_numbers() -> None:
    outline = unpack(tensorfile.canonical(record()).encode()).outline()
    assert outline.envelope == ENVELOPE
    assert outline.bytes_by_group == bundle().bytes_by_group
    assert all(t.device.type == "meta" for group in outline.groups.values() for t in group.values())


def test_the_hand_made_parcels_of_these_tests_are_right_ones(tmp_path: Path) -> None:
    """Otherwise the refusals of the hostile ones would prove nothing."""
    write(tmp_path / "x.parcel")
    assert signed(record()) == around(BODY) == (tmp_path / "x.parcel").read_bytes()
    assert len(data_of()) == sum(bundle().bytes_by_group.values())
