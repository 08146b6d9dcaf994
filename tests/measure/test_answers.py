import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny import coordinate, deployed, federation
from wardround.errors import RunFailed
from wardround.learn.device import find_device
from wardround.measure import BINS, Bin, calibration_error, calibration_gap_in_mix, count_answers, wilson
from wardround.methods.fedavg import FedAvg
from wardround.methods.registry import make


def sure(*pairs: tuple[int, float]) -> Tensor:
    """Scores of two classes: each answers a class with a probability."""
    rows = []
    for answer, share in pairs:
        row = [math.log(1 - share)] * 2
        row[answer] = math.log(share)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def test_answers_are_counted_by_class_and_by_confidence() -> None:
    found = count_answers(sure((0, 0.95), (1, 0.95), (1, 0.6), (0, 0.6), (0, 0.99)), torch.tensor([0, 0, 1, 1, 0]), 2)
    assert found.confusion == ((2, 1), (1, 1))
    assert len(found.bins) == BINS
    assert {i: b for i, b in enumerate(found.bins) if b.images} == {
        8: Bin(2, 1, 0.6),  # 0.6 is the upper end of its bin
        14: Bin(3, 2, round((0.95 + 0.95 + 0.99) / 3, 6)),
    }


def test_calibration_error_where_classes_weigh_otherwise() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    # Right with 0.9, right with 0.6, wrong with 0.9, right with 0.6: two bins.
    scores = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.9, 0.1], [0.4, 0.6]]).log()
    plain = count_answers(scores, labels, 2)
    error = calibration_gap_in_mix(scores, labels, torch.tensor([0.5, 0.5]))
    assert error == pytest.approx(abs(0.5 - 0.9) * 0.5 + (1 - 0.6) * 0.5)
    assert error == pytest.approx(calibration_error(plain.bins))
    # Nine of ten patients of the first class: 0.45 and 0.05 in each bin.
    error = calibration_gap_in_mix(scores, labels, torch.tensor([0.9, 0.1]))
    assert error == pytest.approx(abs(0.45 * 0.1 - 0.05 * 0.9) + 0.4 * 0.5)


def test_a_slow_count_agrees() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn((200, 5), generator=draw) * 2, torch.randint(0, 5, (200,), generator=draw)
    found = count_answers(scores, labels, 5)
    confusion = [[0] * 5 for _ in range(5)]
    bins = [[0, 0, 0.0] for _ in range(BINS)]
    for row, label in zip(scores.double().softmax(dim=1).tolist(), labels.tolist(), strict=True):
        answer = row.index(max(row))
        confusion[label][answer] += 1
        place = next(b for b in range(BINS) if max(row) <= (b + 1) / BINS)
        bins[place] = [bins[place][0] + 1, bins[place][1] + (answer == label), bins[place][2] + max(row)]
    assert found.confusion == tuple(map(tuple, confusion))
    for got, (images, right, total) in zip(found.bins, bins, strict=True):
        assert (got.images, got.right) == (images, right)
        assert got.confidence == pytest.approx(total / images if images else 0.0, abs=1e-6)
    gaps = sum(abs(right - total) for _, right, total in bins) / 200
    assert calibration_error(found.bins) == pytest.approx(gaps, abs=1e-6)


def test_a_predictor_that_is_right_as_often_as_it_says_has_no_calibration_error() -> None:
    assert calibration_error([Bin(10, 6, 0.6), Bin(0, 0, 0.0), Bin(4, 4, 1.0)]) == 0.0
    assert calibration_error([Bin(10, 6, 0.9), Bin(10, 10, 0.9)]) == pytest.approx((3 + 1) / 20)
    assert calibration_error([Bin(0, 0, 0.0)]) is None


def test_scores_of_a_diverged_training_are_refused() -> None:
    with pytest.raises(RunFailed, match="diverged"):
        count_answers(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]), 2)


@pytest.mark.parametrize(  # the interval's own equation: (p − x)² = z² x (1 − x) / n at both ends
    ("share", "n"), [(0.5, 10), (0.9, 40), (0.03, 125), (0.37, 1)]
)
def test_wilsons_interval_solves_its_equation(share: float, n: int) -> None:
    for end in wilson(share, n):
        assert (share - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / n)


def test_wilsons_interval_of_none_and_of_all() -> None:
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    with pytest.raises(ValueError, match="at least one trial"):
        wilson(0.5, 0)


def test_a_result_holds_the_answers_of_the_last_predictors(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", FedAvg())
    assert [(a["model"], a["site"], a["split"], a["round"]) for a in result["answers"]] == [
        ("shared", "", "global", 1),
        *(("personal", f"site-{k}", "global", 1) for k in (1, 2, 3)),
    ]
    test = federation().test
    accuracy = {
        (r["model"], r["site"]): r["value"]
        for r in result["rows"]
        if (r["split"], r["round"]) == ("global", 1) and r["metric"] == "accuracy"
    }
    for entry in result["answers"]:
        assert [sum(row) for row in entry["confusion"]] == test.counts().tolist()
        right = sum(entry["confusion"][c][c] for c in range(4))
        assert right / len(test) == accuracy[entry["model"], entry["site"]]
        assert sum(images for images, _, _ in entry["bins"]) == len(test)
        assert sum(r for _, r, _ in entry["bins"]) == right
        assert entry["calibration_error"] == calibration_error([Bin(*b) for b in entry["bins"]])
        assert (entry["local_calibration_error"] is None) == (entry["model"] == "shared")
    home = deployed(tmp_path / "run", "site-2")
    shares = federation().sites[1].test.class_weights
    assert shares is not None
    logits = home.scores(test.images, find_device("cpu"))
    expected = calibration_gap_in_mix(logits, test.labels, shares)
    assert result["answers"][2]["local_calibration_error"] == pytest.approx(expected, abs=1e-6)


def test_a_method_without_a_shared_model_has_the_sites_answers_alone(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", make("local", {}))
    assert {a["model"] for a in result["answers"]} == {"personal"}
