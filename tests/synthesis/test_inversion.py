"""Images by inversion: Eq. 5 of FedISCA by hand, and a trajectory against an Adam loop written out."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.errors import RunFailed
from wardround.learn.predictor import Member
from wardround.models import NetSpec, fresh
from wardround.synthesis.inversion import (
    Inversion,
    Iterate,
    Synthesis,
    balanced_labels,
    inversion_loss,
    total_variation,
)
from wardround.synthesis.teachers import Teachers, View

CPU = torch.device("cpu")


def teachers(count: int = 2, channels: int = 3) -> Teachers:
    spec = NetSpec("small", channels, 4, 8, width=2)
    return Teachers([Member(spec, fresh(spec, torch.Generator().manual_seed(i))) for i in range(count)], CPU)


def trajectory(of: Teachers, seed: int = 0, channels: int = 3, **changes: Any) -> list[Iterate]:
    how = Inversion(**{"steps": 4, "batch": 6, **changes})
    draw = torch.Generator().manual_seed(seed)
    return list(Synthesis(of, balanced_labels(how.batch, 4), (channels, 8, 8), how).trajectory(draw))


def noise(seed: int = 0, channels: int = 3) -> Tensor:
    """The first draw of a trajectory."""
    return torch.randn(6, channels, 8, 8, generator=torch.Generator().manual_seed(seed))


# The loss -------------------------------------------------------------------------------------------------------------


def test_labels_are_balanced() -> None:
    assert balanced_labels(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_total_variation_of_two_by_two() -> None:
    """Right: 3 and −4, norm 5. Down: 4 and −3, norm 5. Falling: 0. Rising: 4 − 3 = 1."""
    assert total_variation(torch.tensor([[[[0.0, 3.0], [4.0, 0.0]]]])).item() == pytest.approx(11.0)


def test_total_variation_of_three_by_three() -> None:
    """One bright pixel in the middle differs from two neighbours in each of four directions: four times √2."""
    image = torch.zeros(1, 1, 3, 3)
    image[0, 0, 1, 1] = 1.0
    assert total_variation(image).item() == pytest.approx(4 * math.sqrt(2))


def test_total_variation_is_a_norm_over_the_whole_batch() -> None:
    """Two such images are 4·√4, not twice 4·√2; and a corner has three neighbours of the four directions."""
    image = torch.zeros(2, 1, 3, 3)
    image[:, 0, 1, 1] = 1.0
    assert total_variation(image).item() == pytest.approx(8.0)
    corner = torch.zeros(1, 1, 3, 3)
    corner[0, 0, 0, 0] = 2.0
    assert total_variation(corner).item() == pytest.approx(6.0)
    assert total_variation(torch.full((2, 3, 3, 3), 7.0)).item() == 0.0


@pytest.mark.parametrize("classify", ["together", "each"])
@pytest.mark.parametrize("bn_over", ["mean", "sum"])
def test_the_loss_by_hand(bn_over: Any, classify: Any) -> None:
    """Two teachers, one image of class 0, logits (2 ln 3, 0) and (0, 0), gaps 3 and 5, total variation 11.

    Together: the mean logits (ln 3, 0) give probability 3/4. Each: probabilities 9/10 and 1/2.
    """
    view = View((torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2)), (torch.tensor(3.0), torch.tensor(5.0)))
    images = torch.tensor([[[[0.0, 3.0], [4.0, 0.0]]]])
    how = Inversion(bn_weight=10.0, tv_weight=0.5, bn_over=bn_over, classify=classify)
    label = {"together": math.log(4 / 3), "each": (math.log(10 / 9) + math.log(2)) / 2}[classify]
    distance = {"mean": 4.0, "sum": 8.0}[bn_over]
    found = inversion_loss(view, total_variation(images), torch.tensor([0]), how)
    assert found.item() == pytest.approx(label + 10 * distance + 0.5 * 11)


# The trajectory -------------------------------------------------------------------------------------------------------


def test_a_trajectory_belongs_to_its_generator() -> None:
    one, again, other = (trajectory(teachers(), seed) for seed in (1, 1, 2))
    assert [i.step for i in one] == [0, 1, 2, 3]
    assert all(torch.equal(a.images, b.images) and torch.equal(a.loss, b.loss) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0].images, other[0].images)


def test_global_randomness_is_neither_read_nor_moved() -> None:
    before = torch.get_rng_state()
    trajectory(teachers())
    assert torch.equal(torch.get_rng_state(), before)


def test_iterates_are_copies() -> None:
    how = Inversion(steps=3, batch=6)
    walk = Synthesis(teachers(), balanced_labels(6, 4), (3, 8, 8), how).trajectory(torch.Generator().manual_seed(0))
    first = next(walk)
    kept = first.images.clone()
    second = next(walk)
    assert torch.equal(first.images, kept)
    assert not torch.equal(first.images, second.images)
    assert first.images.data_ptr() != second.images.data_ptr()
    assert not first.images.requires_grad
    assert not first.loss.requires_grad
    first.images.zero_()  # whoever has an iterate may do with it what it likes
    third = next(walk).images
    assert torch.equal(third, trajectory(teachers(), steps=3)[2].images)


def test_without_jitter_it_is_adam_written_out() -> None:
    """x ← x − lr · m̂ / (√v̂ + 1e-8), with β = 0.9 and 0.999 and both moments corrected for their start at zero."""
    of, labels = teachers(), balanced_labels(6, 4)
    found = trajectory(of, jitter=0, lr=0.05, steps=5)
    x, m, v = noise(), torch.zeros(6, 3, 8, 8), torch.zeros(6, 3, 8, 8)
    for t, iterate in enumerate(found, 1):
        x.requires_grad_(True)
        view = of.view(x)
        loss = F.cross_entropy((view.logits[0] + view.logits[1]) / 2, labels)
        loss = loss + 10 * (view.gaps[0] + view.gaps[1]) / 2 + 2.5e-5 * total_variation(x)
        (gradient,) = torch.autograd.grad(loss, x)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        x = (x - 0.05 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)).detach()
        assert iterate.loss.item() == pytest.approx(loss.item(), rel=1e-4)
        torch.testing.assert_close(iterate.images, x, rtol=1e-4, atol=2e-4)


class Watched(Teachers):
    """Remembers what it was shown."""

    seen: list[Tensor]

    def view(self, pixels: Tensor) -> View:
        self.seen.append(pixels.detach().clone())
        return super().view(pixels)


def watched() -> Watched:
    spec = NetSpec("small", 3, 4, 8, width=2)
    found = Watched([Member(spec, fresh(spec, torch.Generator().manual_seed(0)))], CPU)
    found.seen = []
    return found


def test_jitter_shifts_the_whole_batch_by_a_few_pixels() -> None:
    of = watched()
    found = trajectory(of, steps=40, jitter=2)
    shifts = []
    for before, seen in zip([noise(), *(i.images for i in found)], of.seen, strict=False):
        matches = [
            (dy, dx) for dy in range(-2, 3) for dx in range(-2, 3) if torch.equal(before.roll((dy, dx), (2, 3)), seen)
        ]
        assert len(matches) == 1
        shifts += matches
    assert len(shifts) == 40
    for axis in (0, 1):
        assert {shift[axis] for shift in shifts} == {-2, -1, 0, 1, 2}
    assert any(dy != dx for dy, dx in shifts)


def test_the_loss_falls_and_the_range_is_not_clipped() -> None:
    found = trajectory(teachers(), steps=60, jitter=0)
    losses = [i.loss.item() for i in found[::6]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.85 * losses[0]
    assert found[-1].images.abs().max() > 1


def test_one_channel() -> None:
    found = trajectory(teachers(channels=1), channels=1, steps=20, jitter=0)
    assert found[-1].images.shape == (6, 1, 8, 8)
    assert found[-1].loss < found[0].loss


@pytest.mark.parametrize(("steps", "noticed"), [(4, 4), (60, 51)])
def test_a_synthesis_that_diverges_says_what_to_do(steps: int, noticed: int) -> None:
    """At the end, and every fifty steps before it: nobody waits for the rest of a trajectory that is lost."""
    words = rf"the synthesis diverged at step {noticed}: .* use a smaller synthesis_lr"
    with pytest.raises(RunFailed, match=words) as caught:
        trajectory(teachers(), lr=1e30, steps=steps)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "last", "lost"), [(2.0, 199, False), (2.0, 201, True), (0.5, 99, False), (0.5, 101, True)]
)
def test_a_loss_a_hundred_times_the_first_is_an_explosion(
    first: float, last: float, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first loss below 1 counts as 1."""
    losses = iter([first, 1.0, last])

    def given(view: View, labels: Tensor, how: Inversion) -> Tensor:
        return 0 * view.mean.sum() + next(losses)

    monkeypatch.setattr("wardround.synthesis.inversion.label_loss", given)
    how = Inversion(steps=3, batch=6, bn_weight=0.0, tv_weight=0.0)
    walk = Synthesis(teachers(), balanced_labels(6, 4), (3, 8, 8), how).trajectory(torch.Generator())
    with pytest.raises(RunFailed, match="diverged at step 3: its loss is") if lost else nullcontext():
        assert len(list(walk)) == 3
