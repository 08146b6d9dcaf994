import json
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from wardround import tensorfile
from wardround.errors import BadInput, RunFailed
from wardround.files import disk_errors

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
Built = dict[str, dict[str, Tensor]]

names = st.text(min_size=1, max_size=12)
group_names = names.filter(lambda name: "/" not in name)
shapes = st.lists(st.integers(0, 7), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return values.to(dtype)


groups_of_tensors = st.dictionaries(group_names, st.dictionaries(names, tensors(), max_size=6), max_size=4)
records = st.dictionaries(
    st.text(max_size=8), st.recursive(st.integers() | st.text(max_size=8) | st.none(), st.lists, max_leaves=4)
)


def raw(header: Any, data: bytes = b"") -> bytes:
    """Safetensors bytes around any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def with_record(**infos: dict[str, Any]) -> dict[str, Any]:
    return {"__metadata__": {"wardround": "{}"}, **{f"g/{name}": info for name, info in infos.items()}}


def info(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# Equal content, equal bytes -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(groups_of_tensors, records)
@example({"g": {"b": torch.zeros(100, dtype=torch.int64), "a": torch.zeros(3, dtype=torch.float64)}}, {})
@example({}, {})
@example({'g\n\x00\x7f"\\é': {"\u2028/日本/😀": torch.tensor(1.0)}}, {"é": "\x00"})
def test_the_overhead_is_what_is_really_written(groups: Built, record: dict[str, Any]) -> None:
    expected = tensorfile.overhead_bytes(groups, record) + sum(tensorfile.tensor_bytes(groups).values())
    assert len(tensorfile.to_bytes(groups, record)) == expected


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 200)), min_size=2, max_size=12))
def test_the_overhead_is_right_whatever_the_mix_of_types(kinds: list[tuple[torch.dtype, int]]) -> None:
    """Tensors of one width are laid out by type before name, which moves offsets over a power of ten."""
    groups = {"g": {f"t{i}": torch.zeros(size, dtype=dtype) for i, (dtype, size) in enumerate(kinds)}}
    expected = tensorfile.overhead_bytes(groups, {}) + sum(tensorfile.tensor_bytes(groups).values())
    assert len(tensorfile.to_bytes(groups, {})) == expected


@settings(deadline=None, max_examples=25)
@given(groups_of_tensors, records)
def test_reading_gives_back_what_was_written(groups: Built, record: dict[str, Any]) -> None:
    found, found_record = tensorfile.from_bytes(tensorfile.to_bytes(groups, record))
    assert found_record == record
    assert {group: set(inner) for group, inner in found.items()} == {
        g: set(inner) for g, inner in groups.items() if inner
    }
    for group, inner in found.items():
        for name, tensor in inner.items():
            written = groups[group][name]
            assert tensor.dtype == written.dtype
            assert tensor.shape == written.shape
            assert torch.equal(tensor, written)


@settings(deadline=None, max_examples=25)
@given(groups_of_tensors, records, st.randoms(use_true_random=False))
def test_the_order_of_dictionaries_changes_no_byte(groups: Built, record: dict[str, Any], random: Any) -> None:
    def shuffled(items: dict[str, Any]) -> dict[str, Any]:
        return dict(random.sample(list(items.items()), len(items)))

    other = shuffled({group: shuffled(inner) for group, inner in groups.items()})
    assert tensorfile.to_bytes(other, shuffled(record)) == tensorfile.to_bytes(groups, record)


def test_tensor_bytes_are_counted_per_group() -> None:
    groups = {"a": {"x": torch.zeros(3), "y": torch.zeros(2, 2, dtype=torch.int64)}, "b": {"z": torch.tensor(True)}}
    assert tensorfile.tensor_bytes(groups) == {"a": 3 * 4 + 4 * 8, "b": 1}


def test_the_overhead_of_a_small_file_by_hand() -> None:
    text = '{"__metadata__":{"wardround":"{}"},"g/w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(text) == 90
    assert tensorfile.overhead_bytes({"g": {"w": torch.zeros(2)}}, {}) == 8 + 96


def test_tensors_may_share_memory() -> None:
    base = torch.arange(12.0)
    groups = {
        "g": {
            "whole": base,
            "again": base,
            "part": base[3:7],
            "turned": base.reshape(3, 4).T,
            "spread": base[:1].expand(5),
            "trained": base.clone().requires_grad_(),
        }
    }
    data = tensorfile.to_bytes(groups, {})
    found, _ = tensorfile.from_bytes(data)
    assert all(torch.equal(found["g"][name], tensor) for name, tensor in groups["g"].items())
    assert data == tensorfile.to_bytes({"g": {name: tensor.clone() for name, tensor in groups["g"].items()}}, {})


def test_what_is_read_can_be_changed_without_touching_the_bytes() -> None:
    data = tensorfile.to_bytes({"g": {"w": torch.zeros(4)}}, {})
    before = bytes(bytearray(data))
    tensorfile.from_bytes(data)[0]["g"]["w"].fill_(1.0)
    assert data == before


@pytest.mark.parametrize("groups", [{"": {"w": 1}}, {"a/b": {"w": 1}}, {"a": {"": 1}}], ids=str)
def test_names_that_could_not_be_read_back_are_refused(groups: dict[str, dict[str, int]]) -> None:
    """`a/b` + `c` and `a` + `b/c` would be one name, and one of the two tensors lost."""
    filled = {group: dict.fromkeys(inner, torch.zeros(1)) for group, inner in groups.items()}
    with pytest.raises(BadInput, match="cannot be written"):
        tensorfile.to_bytes(filled, {})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e5m2])
def test_types_that_the_ledger_cannot_count_are_refused_both_ways(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2).to(dtype)
    with pytest.raises(BadInput, match="tensor files hold"):
        tensorfile.to_bytes({"g": {"w": tensor}}, {})
    with pytest.raises(BadInput, match="tensor files hold"):
        tensorfile.from_bytes(save({"g/w": tensor}, {"wardround": "{}"}))


def test_a_record_with_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        tensorfile.to_bytes({}, {"loss": float("nan")})


def test_canonical_json_is_sorted_and_tight() -> None:
    assert tensorfile.canonical({"b": [1, 2], "a": {"d": None, "c": "é"}}) == '{"a":{"c":"\\u00e9","d":null},"b":[1,2]}'


# Bytes from anywhere --------------------------------------------------------------------------------------------------

STRANGE = {
    "nothing": b"",
    "half a length": b"\x01\x00",
    "a length and no header": struct.pack("<Q", 8),
    "a header longer than the file": struct.pack("<Q", 2**63) + b"{}",
    "a header of 2**64 - 1": b"\xff" * 8 + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe\x00\x01",
    "a list": raw([1, 2, 3]),
    "a text": raw("abc"),
    "a number of many digits": struct.pack("<Q", 9999) + b"9" * 9999,
    "deep nesting": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "deep nesting in the record": raw({"__metadata__": {"wardround": "[" * 100_000}}),
    "another project's safetensors": save({"w": torch.zeros(3)}, {"format": "pt"}),
    "safetensors without metadata": save({"w": torch.zeros(3)}),
    "metadata that is null": raw({"__metadata__": None}),
    "metadata that is a list": raw({"__metadata__": ["wardround"]}),
    "a record that is a number": raw({"__metadata__": {"wardround": 1}}),
    "a record that is a list": raw({"__metadata__": {"wardround": "[]"}}),
    "a record that is no JSON": raw({"__metadata__": {"wardround": "{"}}),
    "bytes after the end": raw(with_record()) + b"x",
    "a tensor outside the file": raw(with_record(w=info("F32", [2**40], 0, 2**42))),
    "a tensor larger than its bytes": raw(with_record(w=info("F32", [8], 0, 4)), b"\x00" * 4),
    "tensors that overlap": raw(with_record(a=info("U8", [4], 0, 4), b=info("U8", [4], 2, 6)), b"\x00" * 6),
    "a negative offset": raw(with_record(w=info("U8", [1], -1, 0))),
    "an empty tensor of endless width": raw(with_record(w=info("F32", [0, 2**40, 2**40], 0, 0))),
    "an empty tensor of 2**63 columns": raw(with_record(w=info("F32", [0, 2**63], 0, 0))),
    "an unknown type": raw(with_record(w=info("F4", [2], 0, 1)), b"\x00"),
    "a tensor without a group": raw({"__metadata__": {"wardround": "{}"}, "w": info("U8", [1], 0, 1)}, b"\x00"),
    "a tensor without a name": raw({"__metadata__": {"wardround": "{}"}, "g/": info("U8", [1], 0, 1)}, b"\x00"),
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_bytes_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(BadInput) as refusal:
        tensorfile.from_bytes(STRANGE[name])
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_a_refusal_takes_no_more_memory_than_the_bytes() -> None:
    tracemalloc.start()
    try:
        for name in ("a header longer than the file", "a header of 2**64 - 1", "a tensor outside the file"):
            with pytest.raises(BadInput):
                tensorfile.from_bytes(STRANGE[name])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_every_truncation_is_refused() -> None:
    data = tensorfile.to_bytes({"g": {"w": torch.arange(5.0), "c": torch.tensor(3)}}, {"round": 1})
    for length in range(len(data)):
        with pytest.raises(BadInput):
            tensorfile.from_bytes(data[:length])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_damaged_bytes_are_refused_or_read_and_nothing_else(data: st.DataObject) -> None:
    whole = tensorfile.to_bytes({"g": {"w": torch.arange(5.0), "c": torch.tensor(3)}}, {"round": 1})
    place = data.draw(st.integers(0, len(whole) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=8))
    try:
        groups, record = tensorfile.from_bytes(whole[:place] + patch + whole[place + len(patch) :])
    except BadInput:
        return
    assert isinstance(record, dict)
    assert len(tensorfile.to_bytes(groups, {})) > 0


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(BadInput):
        tensorfile.from_bytes(garbage)


@pytest.mark.parametrize(("said", "kind", "text"), [("(os error 28)", RunFailed, "disk is full"), ("?", BadInput, "?")])
def test_what_the_disk_refuses_comes_out_in_words(
    said: str, kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors wraps the operating system's errors in one of its own."""

    def refuse(*_: object) -> None:
        raise SafetensorError(f"Error while serializing: No space left on device {said}")

    monkeypatch.setattr(tensorfile, "save_file", refuse)
    with pytest.raises(kind, match=re.escape(text)), disk_errors(tmp_path):
        tensorfile.write(tmp_path / "x", {"a": {"b": torch.zeros(2)}}, {})
    assert list(tmp_path.iterdir()) == []
