"""What crosses a boundary: the same bytes for the same content, and nothing that is not a bundle gets in."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import context, study
from wardround import tensorfile
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope, Kind
from wardround.methods.base import join_groups, split_groups

ENVELOPE = Envelope("answer", "abc123", "fedavg", "site-1", 0)
names = st.text(alphabet="abc.0", min_size=1, max_size=6)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
shapes = st.lists(st.integers(0, 3), max_size=3)
groups_of_tensors = st.dictionaries(
    names, st.dictionaries(names, st.tuples(dtypes, shapes), min_size=1, max_size=4), max_size=3
)


def drawn(plan: dict[str, dict[str, tuple[torch.dtype, list[int]]]], seed: int = 0) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return {
        group: {name: torch.randint(0, 2, shape, generator=draw).to(dtype) for name, (dtype, shape) in tensors.items()}
        for group, tensors in plan.items()
    }


def bundle(**groups: dict[str, Tensor]) -> Bundle:
    return Bundle(ENVELOPE, groups)


@settings(deadline=None, max_examples=25)
@given(groups_of_tensors)
def test_bytes_are_the_content_and_nothing_else(plan: Any) -> None:
    one = Bundle(ENVELOPE, drawn(plan))
    turned = {
        group: {name: one.groups[group][name].clone() for name in reversed(list(one.groups[group]))}
        for group in reversed(list(one.groups))
    }
    assert Bundle(ENVELOPE, turned).to_bytes() == one.to_bytes()
    assert Bundle(ENVELOPE, turned).sha256() == one.sha256()


@settings(deadline=None, max_examples=25)
@given(groups_of_tensors)
def test_round_trip(plan: Any) -> None:
    one = Bundle(ENVELOPE, drawn(plan))
    back = Bundle.from_bytes(one.to_bytes())
    assert back.envelope == one.envelope
    assert back.groups.keys() == one.groups.keys()
    for group, tensors in one.groups.items():
        assert back.groups[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = back.groups[group][name]
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found, tensor)


@settings(deadline=None, max_examples=25)
@given(groups_of_tensors)
def test_counted_bytes_are_the_real_length(plan: Any) -> None:
    one = Bundle(ENVELOPE, drawn(plan))
    assert sum(one.bytes_by_group.values()) + one.overhead == len(one.to_bytes())


def test_bytes_by_group() -> None:
    one = bundle(parameters={"w": torch.zeros(2, 3), "b": torch.zeros(2)}, size={"images": torch.tensor(7)})
    assert one.bytes_by_group == {"parameters": 32, "size": 8}


def test_any_change_of_content_changes_the_hash() -> None:
    one = bundle(parameters={"w": torch.tensor([1.0, 2.0])})
    others = [
        bundle(parameters={"w": torch.tensor([1.0, 3.0])}),
        bundle(parameters={"w": torch.tensor([[1.0, 2.0]])}),
        bundle(parameters={"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}),
        bundle(parameters={"v": torch.tensor([1.0, 2.0])}),
        bundle(statistics={"w": torch.tensor([1.0, 2.0])}),
        Bundle(Envelope("answer", "abc123", "fedavg", "site-1", 1), one.groups),
        Bundle(Envelope("request", "abc123", "fedavg", "site-1", 0), one.groups),
        Bundle(Envelope("answer", "abc123", "fedavg", "site-2", 0), one.groups),
    ]
    assert len({b.sha256() for b in [one, *others]}) == 9


def test_a_view_and_its_copy_give_the_same_bytes() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    assert bundle(p={"w": whole.t()}).to_bytes() == bundle(p={"w": whole.t().contiguous()}).to_bytes()
    assert bundle(p={"a": whole, "b": whole}).to_bytes() == bundle(p={"a": whole, "b": whole.clone()}).to_bytes()


def test_an_absent_group_is_empty() -> None:
    assert bundle(parameters={"w": torch.zeros(1)}).group("statistics") == {}


def test_a_context_leaves_empty_groups_out() -> None:
    made = context(study(), round=3).bundle("request", "site-1", {"a": {}, "b": {"w": torch.zeros(1)}})
    assert list(made.groups) == ["b"]
    assert made.envelope == Envelope("request", study().id, "fedavg", "site-1", 3)


def test_a_network_splits_into_three_groups_and_joins_again() -> None:
    ctx = context(study())
    weights = ctx.study.initial()
    groups = split_groups(ctx, "site-1", weights)
    assert set(groups) == {"parameters", "statistics", "counters"}
    assert all(name.endswith("num_batches_tracked") for name in groups["counters"])
    assert all(name.endswith(("running_mean", "running_var")) for name in groups["statistics"])
    joined = join_groups(ctx.bundle("answer", "site-1", groups))
    assert joined.keys() == weights.keys()
    assert all(joined[name] is tensor for name, tensor in weights.items())


@pytest.mark.parametrize("kind", ["Answer", "", "policy", None, 1, ["answer"]])
def test_refuses_another_kind(kind: Any) -> None:
    with pytest.raises(BadInput, match="request, answer, delivery"):
        Envelope(kind, "s", "m", "site", 0)


BAD_NAMES = ["", "a b", "a/b", "../x", ".x", "-x", "a\n", "a\x00", "a\x1b[31m", "é", "x" * 65, None, 3, ["a"]]


@pytest.mark.parametrize("field", ["study", "method", "site"])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_refuses_what_is_no_name(field: str, name: Any) -> None:
    with pytest.raises(BadInput, match=f"^{field} .* is no name"):
        Envelope(**{**asdict(ENVELOPE), field: name})


@pytest.mark.parametrize("name", ["a", "x" * 64, "site-1", "A.b_c-9", "0"])
def test_takes_names(name: str) -> None:
    assert Envelope("answer", name, name, name, 0).site == name


@pytest.mark.parametrize("round", [-1, True, False, 1.0, "0", None, [0]])
def test_refuses_what_is_no_round(round: Any) -> None:
    with pytest.raises(BadInput, match="is not a whole number from 0"):
        Envelope("answer", "s", "m", "site", round)


def with_record(record: dict[str, Any]) -> bytes:
    return tensorfile.to_bytes({"parameters": {"w": torch.zeros(2)}}, record)


@pytest.mark.parametrize("field", sorted(asdict(ENVELOPE)))
def test_refuses_a_record_without_a_field(field: str) -> None:
    record = {name: value for name, value in asdict(ENVELOPE).items() if name != field}
    with pytest.raises(BadInput, match="a bundle's record has the fields"):
        Bundle.from_bytes(with_record(record))


@pytest.mark.parametrize("field", ["patient", "Round", "round ", "__class__"])
def test_refuses_a_record_with_one_more_field(field: str) -> None:
    with pytest.raises(BadInput, match="a bundle's record has the fields"):
        Bundle.from_bytes(with_record({**asdict(ENVELOPE), field: "x"}))


@pytest.mark.parametrize(
    "change", [{"round": -1}, {"round": True}, {"round": 0.5}, {"site": "a\nb"}, {"kind": "gift"}, {"study": {}}]
)
def test_refuses_a_wrong_record_from_bytes(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Bundle.from_bytes(with_record({**asdict(ENVELOPE), **change}))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_damaged_bytes_are_refused_or_are_another_bundle(data: Any) -> None:
    """One flipped byte: a clean refusal, or a bundle that differs; never another exception."""
    one = bundle(parameters={"w": torch.arange(4.0)}, size={"images": torch.tensor(3)})
    raw = bytearray(one.to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = Bundle.from_bytes(bytes(raw))
    except BadInput:
        return
    assert found.sha256() != one.sha256()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 300))
def test_cut_off_bytes_are_refused(length: int) -> None:
    raw = bundle(parameters={"w": torch.arange(4.0)}).to_bytes()
    with pytest.raises(BadInput):
        Bundle.from_bytes(raw[: min(length, len(raw) - 1)])


def test_kinds_are_closed() -> None:
    kinds: tuple[Kind, ...] = ("request", "answer", "delivery")
    for kind in kinds:
        assert Bundle.from_bytes(Bundle(Envelope(kind, "s", "m", "x", 0), {}).to_bytes()).envelope.kind == kind
