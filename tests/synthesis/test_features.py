"""Maps from a student's features to its teachers', by hand."""

import pytest
import torch

from wardround.models import NetSpec, fresh
from wardround.synthesis.features import FeatureMaps, standardised
from wardround.synthesis.student import Student

SPEC = NetSpec("small", 3, 4, 8, width=2)


def maps(widths: list[int], momentum: float = 0.0) -> FeatureMaps:
    student = Student(SPEC, fresh(SPEC, torch.Generator().manual_seed(0)), torch.device("cpu"), 0.9, 0.0)
    student.set_rate(0.5)
    return FeatureMaps(student, widths, momentum, torch.Generator().manual_seed(1))


def test_features_count_alike_however_large_they_are() -> None:
    """Two images, two features: less their means ±3 and ±4, mean square 12.5."""
    found = standardised(torch.tensor([[13.0, 0.0], [7.0, 8.0]]))
    torch.testing.assert_close(found, torch.tensor([[3.0, -4.0], [-3.0, 4.0]]) / 12.5**0.5)
    assert standardised(torch.full((3, 2), 7.0)).tolist() == [[0, 0]] * 3


def test_the_gap_by_hand() -> None:
    """Teachers of one feature (±1) and of two; the student's features less their means are ±1, and maps are 2, 0."""
    of = maps([1, 2])
    width = of.maps[0].shape[0]
    for tensor, value in zip(of.maps, (2.0, 0.0), strict=True):
        tensor.data.zero_()[0] = value
    mine = torch.zeros(2, width)
    mine[:, 0] = torch.tensor([5.0, 3.0])
    theirs = [torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])]
    # (2 - 1)² = 1 of the first; of the second 0 against ±√2 and 0: a mean of 1.
    assert of.gap(mine, theirs).item() == pytest.approx(1.0)
    of.gap(mine, theirs).backward()
    before = of.maps[0].detach().clone()
    of.step()
    # The slope of the first map's first row: half of it (two teachers) of the mean over images of 2·(2 − 1)·1.
    assert (before - of.maps[0].detach())[0].item() == pytest.approx(0.5 * 1.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_is_kept_is_all_that_a_step_needs(momentum: float) -> None:
    one, other = maps([3], momentum), maps([3], momentum)
    draw = torch.Generator().manual_seed(4)
    batches = [(torch.randn(5, one.maps[0].shape[0], generator=draw), torch.randn(5, 3, generator=draw)) for _ in "123"]

    def step(of: FeatureMaps, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        of.gap(batch[0], [batch[1]]).backward()
        of.step()

    step(one, batches[0])
    step(one, batches[1])
    other.restore(one.state())
    for of in (one, other):
        step(of, batches[2])
    assert torch.equal(one.maps[0], other.maps[0])
    assert len(one.state()) == (2 if momentum else 1)
