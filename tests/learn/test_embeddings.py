"""Embeddings from outside: what is refused, and how some are drawn."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.errors import BadInput
from wardround.learn.embeddings import Embeddings, checked_embeddings, sample


def numbered(*sizes: int) -> list[Embeddings]:
    """Embeddings whose feature and label say which they are, counted over all parts."""
    parts, begun = [], 0
    for size in sizes:
        numbers = torch.arange(begun, begun + size)
        parts.append(Embeddings(numbers.float().unsqueeze(1), numbers))
        begun += size
    return parts


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 99))
def test_a_sample_is_without_repetition_and_keeps_labels(sizes: list[int], count: int, seed: int) -> None:
    drawn = sample(numbered(*sizes), count, torch.Generator().manual_seed(seed))
    if sum(sizes) == 0:
        assert drawn is None
        return
    assert drawn is not None
    assert len(drawn) == len(drawn.labels.unique()) == min(count, sum(sizes))
    assert torch.equal(drawn.features.squeeze(1).long(), drawn.labels)
    assert int(drawn.labels.max()) < sum(sizes)


def test_every_embedding_is_as_likely_whosever_it_is() -> None:
    """A part of one and a part of nine: the one comes in a tenth of single draws."""
    parts, draw = numbered(1, 9), torch.Generator().manual_seed(3)
    found = [sample(parts, 1, draw) for _ in range(600)]
    first = sum(int(drawn.labels) == 0 for drawn in found if drawn)
    assert 35 < first < 85


def good() -> dict[str, Any]:
    return {"features": torch.zeros(2, 3), "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"features": torch.zeros(2, 4)}, r"float32 of shape \(2, 4\), and this network's stage gives float32 of 3"),
        ({"features": torch.zeros(2, 3, dtype=torch.float64)}, "float64"),
        ({"features": torch.zeros(6)}, r"shape \(6,\)"),
        ({"features": torch.full((2, 3), torch.nan)}, "NaN or infinite"),
        ({"features": torch.full((2, 3), -torch.inf)}, "NaN or infinite"),
        ({"labels": torch.tensor([0, 2])}, "labels run from 0 to 2, and the study has classes 0 to 1"),
        ({"labels": torch.tensor([-1, 0])}, "labels run from -1 to 0"),
        ({"labels": torch.tensor([0])}, r"int64 of shape \(1,\), not one int64 for each of 2"),
        ({"labels": torch.zeros(2)}, "float32 of shape"),
        ({"names": torch.zeros(2)}, "are features and labels, not features, labels, names"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput, match=f"^the answer of a: .*{complaint}"):
        checked_embeddings({**good(), **change}, "the answer of a", 3, 2)


def test_nothing_at_all_is_refused_and_none_is_not() -> None:
    with pytest.raises(BadInput, match="not nothing"):
        checked_embeddings({}, "the answer of a", 3, 2)
    empty = {"features": torch.zeros(0, 3), "labels": torch.zeros(0, dtype=torch.int64)}
    assert len(checked_embeddings(empty, "the answer of a", 3, 2)) == 0
    assert len(checked_embeddings(good(), "the answer of a", 3, 2)) == 2
