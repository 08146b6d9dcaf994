"""The panel's tally as a lesson: by hand, against the panel's own rule, and what the head makes of it."""

import math

import pytest
import torch
from torch import Tensor, nn

from synthesis.test_panel import COUNTS, teachers
from wardround.learn.pairs import Tally, decided, pair_scores, tallied
from wardround.models import NetSpec, fresh
from wardround.synthesis.student import Student
from wardround.synthesis.tally import TallyLayer

SPEC = NetSpec("small", 3, 3, 8, width=2)


def layer(momentum: float = 0.0) -> TallyLayer:
    student = Student(SPEC, fresh(SPEC, torch.Generator().manual_seed(0)), torch.device("cpu"), 0.9, 0.0)
    student.set_rate(0.5)
    return TallyLayer(student, teachers(), momentum, torch.Generator().manual_seed(1))


def saying(of: TallyLayer, *said: float) -> Tensor:
    """Features, of two images alike, of which the layer says this."""
    of.trained["weight"].data.zero_()
    of.trained["bias"].data.copy_(torch.tensor(said))
    return torch.zeros(2, of.trained["weight"].shape[1])


def test_a_tally_is_all_that_the_rule_needs() -> None:
    """Σ_k h_k·σ by hand: with 30 and 10 images h is 15; odds of 3:1 of an even prior at T = 1."""
    logits = torch.tensor([[[3.0, 1.0]]], dtype=torch.float64).log()
    counts, prior = torch.tensor([[30.0, 10.0]], dtype=torch.float64), torch.full((1, 2), 0.5).double().log()
    tally = tallied(logits, counts, prior, 1.0, 100.0)
    assert tally.won[0, 0, 1].item() == pytest.approx(15 * 0.75)
    assert tally.known[0, 1].item() == 15
    assert tally.claims[0].tolist() == pytest.approx([0.75, 0.25])
    assert decided(tally, 100.0)[0].tolist() == pytest.approx([0.75, 0.25])
    assert torch.equal(decided(tally, 100.0), pair_scores(logits, counts, prior, 1.0, 100.0))


def test_the_gap_by_hand() -> None:
    """Of teachers with (30, 10, 0) and (0, 10, 5) images the pairs 01 and 12 are known (h = 15, 20/3), 02 is not.

    The layer says a half of everything: a cross-entropy of log 2 whatever is true. With logits 1 and −1 on the votes it
    is log(1 + e) less the truth's share of each.
    """
    of = layer()
    assert COUNTS.tolist() == [[30, 10, 0], [0, 10, 5]]
    assert of.asked.tolist() == [1, 0, 1]
    won = torch.zeros(2, 3, 3)
    won[:, 0, 1], won[:, 1, 2] = 15 * 0.8, 20 / 3 * 0.4
    tally = Tally(won, of.known, torch.tensor([[0.2, 0.5, 0.9]] * 2))
    assert of.gap(saying(of, *[0.0] * 6), tally).item() == pytest.approx(2 * math.log(2))
    votes = (math.log(1 + math.e) - 0.8 + math.log(1 + math.exp(-1)) + 0.4) / 2
    found = of.gap(saying(of, 1.0, 7.0, -1.0, 0.0, 0.0, 0.0), tally)  # what is said of 02 is not heard
    assert found.item() == pytest.approx(votes + math.log(2), rel=1e-5)


def test_a_layer_that_says_what_the_panel_does_decides_as_the_panel() -> None:
    of, panel = layer(), teachers()
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    _, tally = panel.outputs(pixels)
    share = (tally.won / of.known.clamp_min(1e-9))[:, of.pairs[0], of.pairs[1]].clamp(0.01, 0.99)
    for row, expected in enumerate(panel.decided(tally)):
        features = saying(of, *torch.cat([share[row], tally.claims[row]]).logit().tolist())
        torch.testing.assert_close(of.scores(features)[0], expected, rtol=1e-4, atol=1e-4)


def test_a_pair_that_nobody_knows_teaches_nothing() -> None:
    of = layer()
    of.asked.zero_()
    tally = Tally(torch.zeros(2, 3, 3), of.known, torch.full((2, 3), 0.5))
    assert of.gap(saying(of, *[0.0] * 6), tally).item() == pytest.approx(math.log(2))


def test_the_head_learns_what_the_rule_makes_of_the_layer() -> None:
    """Also between images; the layer stays, and no gradient is left on the head."""
    of = layer()
    draw = torch.Generator().manual_seed(5)
    width = of.trained["weight"].shape[1]
    of.trained["weight"].data.copy_(0.3 * torch.randn(of.trained["weight"].shape, generator=draw))
    kept = of.state()
    head, features = nn.Linear(width, 3), torch.randn(40, width, generator=draw)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    mixed = 0.5 * (features[:20] + features[20:])

    def away() -> float:
        """How far the head's probabilities are from the rule's between images."""
        with torch.no_grad():
            return float((head(mixed).softmax(dim=1) - of.scores(mixed).softmax(dim=1)).abs().mean())

    before = away()
    of.teach(head, features, torch.Generator().manual_seed(6))
    assert away() < before / 2
    assert all(parameter.grad is None for parameter in head.parameters())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in of.state().items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_is_kept_is_all_that_a_step_needs(momentum: float) -> None:
    one, other = layer(momentum), layer(momentum)
    draw = torch.Generator().manual_seed(4)
    width = one.trained["weight"].shape[1]
    tally = Tally(torch.zeros(2, 3, 3), one.known, torch.full((2, 3), 0.3))
    batches = [torch.randn(2, width, generator=draw) for _ in "123"]

    def step(of: TallyLayer, features: Tensor) -> None:
        of.gap(features, tally).backward()
        of.step()

    step(one, batches[0])
    step(one, batches[1])
    other.restore(one.state())
    for of in (one, other):
        step(of, batches[2])
    assert all(torch.equal(tensor, other.trained[name]) for name, tensor in one.trained.items())
    assert len(one.state()) == (4 if momentum else 2)
