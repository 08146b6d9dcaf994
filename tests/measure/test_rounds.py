"""The course of a run: its points, and the figures over rounds with their definitions."""

from typing import Any

import pytest

from wardround.measure import OVER_ROUNDS, course

SITES = ["north", "south", "west"]
LOCAL, GLOBAL = "On the site's own images.", "On the official test set"


def row(model: str, split: str, site: str, round: int, value: float, metric: str = "accuracy") -> dict[str, Any]:
    place = {"method": "fedavg", "seed": 0, "site": site, "round": round, "split": split}
    return {**place, "model": model, "metric": metric, "value": value, "n": 10}


def crossed(round: int, site: str, kind: str) -> dict[str, Any]:
    way = "up" if kind == "answer" else "down"
    entry = {"round": round, "site": site, "direction": way, "kind": kind}
    return {**entry, "groups": {"parameters": 90}, "overhead": 10}


SHARED = {0: 0.25, 1: 0.75, 2: 0.5}
SHARED_LOCAL = {0: (0.5, 0.0, 0.0), 1: (0.25, 0.5, 0.0), 2: (0.5, 0.25, 1.0)}
TRAINED = {0: {"north": 1.0}, 1: {"south": 0.5, "west": 0.25}, 2: {"north": 0.75, "west": 0.5}}
SHARED_ROWS = [
    *(row("shared", "global", "", r, value) for r, value in SHARED.items()),
    *(row("shared", "local", site, r, v) for r, vs in SHARED_LOCAL.items() for site, v in zip(SITES, vs, strict=True)),
    row("shared", "global", "", 0, 0.9, "macro_auc"),
    row("personal", "local", "north", 2, 0.1),
]
ROWS = [
    *SHARED_ROWS,
    *(row("trained", "local", site, r, value) for r, values in TRAINED.items() for site, value in values.items()),
    row("trained", "local", "north", 0, 0.1, "balanced_accuracy"),
]
LEDGER = [
    *(crossed(r, site, kind) for r, values in TRAINED.items() for kind in ("request", "answer") for site in values),
    *(crossed(2, site, "delivery") for site in SITES),
]


def drawn(rows: list[dict[str, Any]] = ROWS, ledger: list[dict[str, Any]] = LEDGER) -> dict[str, dict[str, Any]]:
    figures = course(rows, ledger, "fedavg", SITES).headlines(LOCAL, GLOBAL)
    assert [figure["key"] for figure in figures] == [
        key for key in OVER_ROUNDS if key in {figure["key"] for figure in figures}
    ]
    return {figure["key"]: figure for figure in figures}


def test_the_figures_by_hand() -> None:
    values = {key: figure["value"] for key, figure in drawn().items()}
    assert list(values) == list(OVER_ROUNDS)
    assert values == pytest.approx(
        {
            "mean_shared_global_accuracy": 0.5,
            "deviation_shared_global": (2 * 0.0625 / 3) ** 0.5,
            "shared_global_consistency": 1.0,  # the peak in round 1 is never reached again
            "rounds_to_convergence": None,
            # Round 1: north .25 − .5. Round 2: north .5 − .5, south .25 − .5, west 1 − 0: .75 / 3.
            "backward_transfer": (0 - 0.25 + 0.25) / 3,
            "deviation_backward_transfer": (2 * 0.0625 / 3) ** 0.5,
            "mean_trained_local_accuracy": (1 + 0.375 + 0.625) / 3,
            "deviation_trained_local": (((1 / 3) ** 2 + (7 / 24) ** 2 + (1 / 24) ** 2) / 3) ** 0.5,
            "last_trained_local_accuracy": 0.625,
            "worst_trained_local_accuracy": (1 + 0.25 + 0.5) / 3,
            "bottom_decile_trained_local_accuracy": 0.375,  # west: (.25 + .5) / 2
            "trained_local_consistency": 1.0,
            "balance_over_rounds": (0.5 + 2 / 3) / 2,
        }
    )


def test_worst_is_of_each_round_and_not_of_the_site_with_the_lowest_mean() -> None:
    """FedKPer's "worst client": the other two readings would give 0.375 here, the lowest mean of a site."""
    worst = drawn()["worst_trained_local_accuracy"]
    assert worst["value"] == pytest.approx(1.75 / 3)
    assert worst["value"] != pytest.approx(0.375)


def test_a_point_for_every_round_with_bytes_and_seconds_so_far() -> None:
    points = course(ROWS, LEDGER, "fedavg", SITES).points({0: 1.5, 1: 3.5, 2: 7.0})
    assert [(p["round"], p["bytes"], p["seconds"]) for p in points] == [(0, 200, 1.5), (1, 600, 3.5), (2, 1000, 7.0)]
    assert points[1] == {
        "method": "fedavg",
        "round": 1,
        "sites": ["south", "west"],
        "bytes": 600,
        "seconds": 3.5,
        "shared_global_accuracy": 0.75,
        "backward_transfer": -0.25,
        "trained_local_accuracy": 0.375,
        "worst_trained_local_accuracy": 0.25,
    }


def test_definitions_name_test_model_and_rounds() -> None:
    figures = drawn()
    for key, figure in figures.items():
        words = figure["definition"]
        assert ("Global test: On the official test set." in words) == ("global" in key or "rounds" in key), key
        local = "global" not in key and key != "rounds_to_convergence"
        assert ("Local test: On the site's own images." in words) == local, key
        assert figure["label"] == OVER_ROUNDS[key]
        assert words.startswith(figure["meaning"])
        assert words[0].isupper()
        assert ".." not in words
    assert "over the 3 measured rounds" in figures["mean_shared_global_accuracy"]["meaning"]
    assert "not of a sample" in figures["deviation_shared_global"]["meaning"]
    assert "negative is forgetting" in figures["backward_transfer"]["meaning"]
    assert "(1 of the 3 that took part, of 3)" in figures["bottom_decile_trained_local_accuracy"]["meaning"]
    assert "no value, since" in figures["rounds_to_convergence"]["meaning"]


def test_convergence_counts_from_one() -> None:
    rows = [row("shared", "global", "", r, 0.0 if r == 0 else 0.5) for r in range(10)]
    figure = drawn(rows, [])["rounds_to_convergence"]
    assert figure["value"] == 6
    assert "running mean over 5 measured rounds" in figure["meaning"]
    assert "within 1 point of its final value" in figure["meaning"]


def test_only_what_has_rows() -> None:
    shared = [key for key in OVER_ROUNDS if key in drawn(SHARED_ROWS)]
    assert shared == list(OVER_ROUNDS)[:6]
    without_a_shared_model = [r for r in ROWS if r["model"] == "trained"]
    assert list(drawn(without_a_shared_model)) == list(OVER_ROUNDS)[6:12]
    assert drawn([r for r in ROWS if r["round"] == 0]) == {}
    assert drawn([], []) == {}


def test_transfer_needs_every_round_measured() -> None:
    """A site's last round may have been one that nobody measured."""
    some = [r for r in ROWS if r["round"] != 1]
    assert "backward_transfer" not in drawn(some)
    assert "mean_shared_global_accuracy" in drawn(some)
    assert [p["backward_transfer"] for p in course(some, LEDGER, "fedavg", SITES).points({})] == [None, None]


def test_other_methods_and_sites_have_no_say() -> None:
    stray = [{**r, "method": "fedprox", "value": 0.0} for r in ROWS]
    stranger = [row("trained", "local", "elsewhere", 1, 0.0), row("shared", "local", "elsewhere", 1, 0.0)]
    assert drawn([*stray, *ROWS, *stranger]) == drawn()
