"""FedISCA's memory: batches in order, and that a file changes none of them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround.methods.state import State
from wardround.synthesis.memory import Memory
from wardround.synthesis.teachers import Precision

CPU = torch.device("cpu")
SHAPE = (2, 3, 4, 4)
PRECISIONS: list[Any] = ["fp32", "bf16"]


def batch(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(memory_format=torch.channels_last)


def memory(precision: Precision = "fp32", batches: int = 0, logits: bool = False) -> Memory:
    found = Memory(CPU, max(batches, 1), SHAPE, precision)
    for seed in range(batches):
        found.add(batch(seed), torch.full((2, 4), float(seed)) if logits else None)
    return found


def filed(of: Memory) -> State:
    """What a file makes of it."""
    return State.from_bytes(State(of.groups()).to_bytes())


def test_batches_come_back_as_they_were_put_in() -> None:
    of = memory("fp32", 3)
    for place in range(3):
        assert torch.equal(of.images(place), batch(place))
    assert of.images(1).dtype == torch.float32


def test_in_bf16_they_come_back_rounded_to_it_as_float32() -> None:
    of = memory("bf16", 3)
    for place in range(3):
        assert torch.equal(of.images(place), batch(place).bfloat16().float())
    assert of.images(0).dtype == torch.float32
    assert not torch.equal(of.images(0), batch(0))
    assert {t.dtype for t in of.groups()["memory"].values()} == {torch.bfloat16}  # half the memory, half the file


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("logits", [False, True])
@given(batches=st.integers(0, 12))
@settings(deadline=None, max_examples=6)
def test_it_goes_through_a_file(precision: Precision, logits: bool, batches: int) -> None:
    of = memory(precision, batches, logits)
    state = filed(of)
    expected = {"memory", "memory_logits"} if logits else {"memory"}
    assert set(state.groups) == (expected if batches else set())
    again = memory(precision, 2, True)  # what was in it before is forgotten
    again.restore(state.groups)
    for place in range(batches):
        assert torch.equal(again.images(place), of.images(place))
        if logits:
            assert torch.equal(again.logits(place), of.logits(place))
    with pytest.raises(IndexError):
        again.images(batches)
    with pytest.raises(IndexError):
        again.logits(batches if logits else 0)
    assert State(again.groups()).to_bytes() == State(of.groups()).to_bytes()


def test_order_is_kept_beyond_ten_batches() -> None:
    again = memory()
    again.restore(filed(memory("fp32", 12)).groups)
    assert all(torch.equal(again.images(place), batch(place)) for place in range(12))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_batch_lies_in_memory_alike_whether_it_was_made_or_read(precision: Precision) -> None:
    """Noise is drawn in another layout than synthesis has, and a file has none: a convolution could round otherwise."""
    of = Memory(CPU, 2, SHAPE, precision)
    of.add(batch(0))
    of.add(batch(1).contiguous())
    again = memory(precision)
    again.restore(filed(of).groups)
    strides = {kept.images(place).stride() for kept in (of, again) for place in (0, 1)}
    assert strides == {batch(0).stride()}
    assert batch(0).stride() != batch(0).contiguous().stride()


def test_what_was_given_out_for_a_state_outlives_what_follows() -> None:
    of = memory("fp32", 2)
    kept = State(of.groups())
    before = kept.to_bytes()
    of.add(batch(7))
    of.clear()
    of.add(batch(8))
    assert kept.to_bytes() == before


def test_cleared_it_is_empty() -> None:
    of = memory("fp32", 2, logits=True)
    of.clear()
    assert of.groups() == {}
    of.add(batch(5))
    assert torch.equal(of.images(0), batch(5))
    assert set(of.groups()) == {"memory"}


@pytest.mark.parametrize(("precision", "bytes_"), [("fp32", 4), ("bf16", 2)])
def test_what_takes_half_of_a_gpus_free_memory_is_kept_on_the_cpu(
    precision: Precision, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = 5 * 2 * 3 * 4 * 4 * bytes_
    for free, place in ((2 * wanted, "cpu"), (2 * wanted + 2, "cuda")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 10**12))
        assert Memory(torch.device("cuda"), 5, SHAPE, precision).place.type == place
