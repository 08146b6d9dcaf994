"""The lesson at the site: its targets by hand, and that what the network thinks of other classes is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.learn.fit import Outputs, Step
from wardround.methods.home_lesson import HomeLesson

SEEN = torch.tensor([True, True, False, False])


def loss(said: Tensor, before: Tensor, labels: list[int], share: float) -> Tensor:
    images = torch.zeros(len(labels), 1, 2, 2)
    teacher = Outputs(torch.zeros(len(labels), 2), before.log())
    step = Step(torch.arange(len(labels)), images, torch.tensor(labels), Outputs(teacher.features, said), (teacher,))
    return HomeLesson(SEEN, share).loss(step)


@pytest.mark.parametrize(
    ("label", "share", "target"),
    [
        (0, 0.0, [0.5, 0.0, 0.4, 0.1]),  # 0.3 and 0.2 to the right one
        (1, 0.5, [0.0, 0.75, 0.2, 0.05]),  # and half of the others' 0.5
        (3, 0.5, [0.3, 0.2, 0.4, 0.1]),  # a made image: nothing changes
    ],
)
def test_targets_by_hand(label: int, share: float, target: list[float]) -> None:
    before, said = torch.tensor([[0.3, 0.2, 0.4, 0.1]]), torch.tensor([[0.5, -1.0, 2.0, 0.1]])
    expected = -(torch.tensor(target) * F.log_softmax(said[0], dim=0)).sum()
    torch.testing.assert_close(loss(said, before, [label], share), expected)


def test_the_loss_is_least_at_the_target_and_the_mean_over_the_batch() -> None:
    before = torch.tensor([[0.3, 0.2, 0.4, 0.1], [0.1, 0.1, 0.7, 0.1]])
    said = torch.randn((2, 4), generator=torch.Generator().manual_seed(0)).requires_grad_()
    both = loss(said, before, [0, 2], 0.25)
    apart = [loss(said[i : i + 1], before[i : i + 1], [label], 0.25) for i, label in enumerate((0, 2))]
    torch.testing.assert_close(both, torch.stack(apart).mean())
    at = torch.tensor([[0.625, 1e-12, 0.3, 0.075], [0.1, 0.1, 0.7, 0.1]]).log().requires_grad_()
    (slope,) = torch.autograd.grad(loss(at, before, [0, 2], 0.25), at)
    assert float(slope.abs().max()) < 1e-6


def test_a_site_that_has_seen_everything_teaches_its_labels() -> None:
    said = torch.tensor([[0.5, -1.0, 2.0, 0.1]])
    lesson = HomeLesson(torch.ones(4, dtype=torch.bool), 0.3)
    teacher = Outputs(torch.zeros(1, 2), torch.tensor([[5.0, 0.0, 0.0, 1.0]]))
    step = Step(
        torch.arange(1), torch.zeros(1, 1, 2, 2), torch.tensor([1]), Outputs(teacher.features, said), (teacher,)
    )
    torch.testing.assert_close(lesson.loss(step), F.cross_entropy(said, torch.tensor([1])))
