"""Which images each teacher is shown: its own site's mix, out of no more images than are made."""

import torch

from tiny import CPU
from wardround.synthesis.deal import deal, limited, parts, rounded
from wardround.synthesis.inversion import shared_labels


def whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_a_batch_is_shared_out_by_largest_remainders() -> None:
    """Of 8: 3, 3, 2 thirds (2.67 each); of 10 in 6:3:1; what is there gets one at least, if there are more in all."""
    assert parts(whole(1, 1, 1).double(), 8).tolist() == [3, 3, 2]
    assert parts(whole(6, 3, 1).double(), 10).tolist() == [6, 3, 1]
    assert parts(whole(1, 0, 999).double(), 10).tolist() == [1, 0, 10]
    assert rounded(whole(1, 0, 999).double(), 10).tolist() == [0, 0, 10]


def test_labels_by_shares_are_mixed_evenly() -> None:
    """Six to two: the two stand at a quarter and three quarters of the way. Equal shares go around the classes."""
    assert shared_labels(8, torch.tensor([0.75, 0.25])).tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert shared_labels(6, torch.tensor([1.0, 0.0, 1.0, 1.0])).tolist() == [0, 2, 3, 0, 2, 3]
    assert shared_labels(3, torch.tensor([0.999, 0.001])).tolist() == [0, 0, 0]


def test_what_is_made_keeps_to_a_limit() -> None:
    """10, 2 and 6 are wanted, and 3 each the least: 10 + 3 + 6. Of 13 in all 4 are over: 7 and 3 get 2 and 1."""
    assert limited(whole(10, 2, 6), whole(3, 3, 3), 99).tolist() == [10, 3, 6]
    assert limited(whole(10, 2, 6), whole(3, 3, 3), 13).tolist() == [5, 3, 4]
    assert limited(whole(10, 2, 6), whole(3, 3, 3), 5).tolist() == [3, 3, 3]


def test_every_teacher_is_shown_its_own_mix() -> None:
    """Of eight images: the first has 6 + 2 of classes 0 and 1, the second 2 + 6 of 1 and 2, the student 3 + 3 + 2."""
    counts, shares = whole(75, 25, 0, 0, 25, 75).view(2, 3), torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])
    dealt = deal(counts, shares, 8, CPU)
    assert dealt.labels.tolist() == [0] * 6 + [1] * 3 + [2] * 6
    assert dealt.rows[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert dealt.rows[1].tolist() == [6, 7, 9, 10, 11, 12, 13, 14]
    torch.testing.assert_close(dealt.weights[0], torch.tensor([1 / 6] * 6 + [0.5 / 2] * 2))
    torch.testing.assert_close(dealt.weights[1], torch.tensor([0.5 / 2] * 2 + [1 / 6] * 6))
    assert dealt.even.tolist() == [0, 6, 9, 1, 7, 10, 2, 8]
    assert dealt.classes == 3


def test_a_single_image_of_a_class_stands_for_the_whole_class() -> None:
    dealt = deal(whole(3, 1).view(1, 2), torch.ones(1, 2), 4, CPU)
    torch.testing.assert_close(dealt.weights[0], torch.tensor([1 / 3] * 3 + [1.0]))


def test_beyond_the_limit_images_are_shown_again() -> None:
    """Six sites of one class each want six images: 36, where four times six are the limit: four of each class."""
    dealt = deal(100 * torch.eye(6), torch.eye(6), 6, CPU)
    assert torch.bincount(dealt.labels).tolist() == [4] * 6
    assert dealt.rows[0].tolist() == [0, 1, 2, 3, 0, 1]
    assert dealt.even.tolist() == [0, 4, 8, 12, 16, 20]


def test_of_a_class_that_nobody_has_seen_nothing_is_made() -> None:
    dealt = deal(whole(4, 0, 4).view(1, 3), torch.ones(1, 3), 4, CPU)
    assert dealt.labels.tolist() == [0, 0, 2, 2]
    assert dealt.classes == 2


def test_a_site_that_tells_nothing_is_shown_all_alike() -> None:
    """As coarse bins make of a small one; where all are such, every class there is."""
    dealt = deal(whole(0, 0, 0, 4, 0, 4).view(2, 3), torch.ones(2, 3), 4, CPU)
    assert dealt.labels[dealt.rows[0]].tolist() == [0, 0, 2, 2]
    assert deal(torch.zeros(2, 3), torch.ones(2, 3), 3, CPU).labels.tolist() == [0, 1, 2]
