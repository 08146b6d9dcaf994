import math

import pytest

from wardround.report import values


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (1_117_736, "1.12 MB"),
        (36_680_000_000, "36.68 GB"),
        (2_500_000_000_000_000, "2,500.00 TB"),
    ],
)
def test_bytes_are_decimal(size: int, text: str) -> None:
    assert values.byte_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7_500, "2 h 5 min"),
        (None, "–"),
    ],
)
def test_durations_are_what_a_person_says(seconds: float | None, text: str) -> None:
    assert values.duration(seconds) == text


def test_moments_are_shown_in_utc_and_other_text_as_it_is() -> None:
    assert values.moment("2026-11-15T10:00:00Z") == "15 November 2026, 10:00 UTC"
    assert values.moment("2026-11-01T00:30:00+02:00") == "31 October 2026, 22:30 UTC"
    assert values.moment("2026-11-05T10:00:00") == "5 November 2026, 10:00"
    assert values.moment("yesterday") == "yesterday"
    assert values.moment("0001-01-01T00:00:00+23:59") == "0001-01-01T00:00:00+23:59"  # no such day in UTC


def test_a_figure_is_shown_as_its_name_wants() -> None:
    assert values.show("worst_site_accuracy", 0.9135) == "91.3%"
    assert values.show("balance", 1.0) == values.show("balance_over_rounds", 1.0) == "100.0%"
    assert values.show("backward_transfer", -0.25512) == "-25.5%"
    assert values.show("deviation_backward_transfer", 0.005242) == values.show("deviation_x", 0.005242) == "0.5%"
    assert values.show("shared_global_consistency", 0.868) == "86.8%"
    assert values.show("rounds_to_convergence", 42.0) == "42"
    assert values.show("macro_auc", 0.98765) == "0.988"
    assert values.show("loss", 0.123456) == "0.1235"
    assert values.show("images", 12_345.0) == "12,345"
    assert values.show("accuracy", None) == "–"


def test_more_is_better_for_some_figures_only() -> None:
    ranked = ("mean_trained_local_accuracy", "balance_over_rounds", "macro_auc", "backward_transfer", "x_consistency")
    assert all(map(values.is_ranked, ranked))
    assert not any(map(values.is_ranked, ("deviation_shared_global", "rounds_to_convergence", "loss")))


def test_only_numbers_that_can_be_shown_count() -> None:
    others = (True, "1", None, math.nan, math.inf, -math.inf, 1e300, 10**400, -(10**400))
    assert [values.as_number(v) for v in (1, 0.5, *others)] == [1.0, 0.5] + [None] * len(others)
    assert [values.as_count(v) for v in (math.nan, 10**400, 2.0)] == [0, 0, 2]
    assert values.as_count(2**63 - 1) == 2**63 - 1  # the largest seed
    assert values.mean_of([0.25, None, 0.75]) == 0.5
    assert values.mean_of([None]) is None


def test_settings_flatten_to_dotted_names() -> None:
    nested = {"training": {"model": "cnn4", "lr": 0.1, "steps": [30, 60]}, "policy": {}, "note": None}
    assert values.flat(nested) == [
        ["training.model", "cnn4"],
        ["training.lr", "0.1"],
        ["training.steps", "[30, 60]"],
        ["policy", "{}"],
        ["note", "null"],
    ]
    assert values.flat("nonsense") == []


def test_percent_marks_are_short() -> None:
    assert [values.percent_mark(v) for v in (0.0, 0.8, 0.925, 1.0)] == ["0%", "80%", "92.5%", "100%"]
