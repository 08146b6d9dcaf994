"""Summaries over sites and rounds, and the headline figures with their definitions."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.measure import balance, bottom_decile, headlines, last_and_best, mean, worst

LOCAL = "The official test set, weighted to the site's label mix."
GLOBAL = "The official test set, 800 images"
KEYS = [
    "local_accuracy",
    "global_accuracy",
    "balance",
    "worst_site_accuracy",
    "bottom_decile_accuracy",
    "local_balanced_accuracy",
    "global_balanced_accuracy",
    "macro_auc",
    "shared_global_accuracy",
    "shared_local_accuracy",
    "best_round_shared_global_accuracy",
]
site_values = st.dictionaries(st.text(min_size=1, max_size=4), st.floats(0, 1), min_size=1, max_size=40)


def row(model: str, split: str, site: str, round: int, value: float | None, metric: str = "accuracy") -> dict[str, Any]:
    return {
        "method": "fedavg",
        "seed": 0,
        "site": site,
        "round": round,
        "split": split,
        "model": model,
        "metric": metric,
        "value": value,
        "n": 10,
    }


# Three sites, two rounds: the shared model peaks in the first, the personal predictors are measured after the second.
ROWS = [
    row("shared", "global", "", 0, 0.75),
    row("shared", "global", "", 1, 0.5),
    row("shared", "global", "", 1, 0.9, "macro_auc"),
    row("shared", "local", "north", 1, 0.5),
    row("shared", "local", "south", 1, 0.75),
    row("shared", "local", "west", 1, 1.0),
    row("personal", "local", "north", 0, 0.0),
    row("personal", "local", "north", 1, 1.0),
    row("personal", "local", "south", 1, 0.25),
    row("personal", "local", "west", 1, 0.625),
    row("personal", "global", "north", 1, 0.25),
    row("personal", "global", "south", 1, 0.5),
    row("personal", "global", "west", 1, 0.375),
    row("personal", "local", "north", 1, 0.5, "balanced_accuracy"),
    row("personal", "local", "south", 1, 0.25, "balanced_accuracy"),
    row("personal", "local", "west", 1, 0.75, "balanced_accuracy"),
    row("personal", "global", "north", 1, 0.125, "balanced_accuracy"),
    row("personal", "global", "south", 1, 0.25, "balanced_accuracy"),
    row("personal", "global", "west", 1, 0.375, "balanced_accuracy"),
    row("personal", "global", "north", 1, 0.75, "macro_auc"),
    row("personal", "global", "south", 1, 0.875, "macro_auc"),
    row("personal", "global", "west", 1, 1.0, "macro_auc"),
]


def draw(rows: list[dict[str, Any]], sites: tuple[str, ...] = ("north", "south", "west")) -> dict[str, dict[str, Any]]:
    figures = headlines(rows, "fedavg", sites, LOCAL, GLOBAL)
    assert [figure["key"] for figure in figures] == KEYS
    assert {figure["method"] for figure in figures} == {"fedavg"}
    return {figure["key"]: figure for figure in figures}


def test_site_summaries_by_hand() -> None:
    values = {"north": 0.5, "south": 0.25, "west": 0.75}
    assert mean(values) == 0.5
    assert worst(values) == (0.25, "south")
    assert bottom_decile(values) == 0.25
    assert balance(0.5, 0.75) == 0.625


def test_equally_bad_sites_give_the_first_by_name() -> None:
    assert worst({"b": 0.5, "a": 0.5, "c": 1.0}) == (0.5, "a")


@pytest.mark.parametrize(("sites", "lowest"), [(1, [0]), (10, [0]), (11, [0, 1]), (20, [0, 1]), (30, [0, 1, 2])])
def test_the_bottom_decile_is_rounded_up(sites: int, lowest: list[int]) -> None:
    values = {f"site-{i}": float(i) for i in reversed(range(sites))}
    assert bottom_decile(values) == sum(lowest) / len(lowest)


@given(site_values)
@settings(deadline=None, max_examples=25)
def test_site_summaries_are_ordered(values: dict[str, float]) -> None:
    value, site = worst(values)
    assert values[site] == value
    assert value <= bottom_decile(values) + 1e-12
    assert bottom_decile(values) <= mean(values) + 1e-12
    reordered = dict(reversed(values.items()))
    assert (mean(reordered), worst(reordered), bottom_decile(reordered)) == (
        mean(values),
        (value, site),
        bottom_decile(values),
    )


def test_no_site_is_an_error() -> None:
    for summary in (mean, worst, bottom_decile):
        with pytest.raises(ValueError, match="no site"):
            summary({})


def test_last_and_best_round() -> None:
    assert last_and_best({4: 0.5, 0: 0.25, 2: 0.75, 1: 0.75}) == (4, 0.5, 1, 0.75)
    assert last_and_best({0: 0.5}) == (0, 0.5, 0, 0.5)


def test_headline_values_by_hand() -> None:
    values = {key: figure["value"] for key, figure in draw(ROWS).items()}
    assert values == {
        "local_accuracy": 0.625,  # (1 + 0.25 + 0.625) / 3, round 1's 0 of north left behind
        "global_accuracy": 0.375,
        "balance": 0.5,
        "worst_site_accuracy": 0.25,
        "bottom_decile_accuracy": 0.25,
        "local_balanced_accuracy": 0.5,
        "global_balanced_accuracy": 0.25,
        "macro_auc": 0.875,
        "shared_global_accuracy": 0.5,
        "shared_local_accuracy": 0.75,
        "best_round_shared_global_accuracy": 0.75,
    }


def test_every_definition_says_which_test_which_sites_and_which_round() -> None:
    for key, figure in draw(ROWS).items():
        words = figure["definition"]
        local = key == "balance" or ("global" not in key and key != "macro_auc")
        assert (LOCAL in words) == local
        assert (GLOBAL in words) == (key == "balance" or not local)
        assert "3 sites" in words
        assert ("in round 1;" if key.startswith("best_round") else "in round 2, the last one") in words
        assert ("shared model" in words or "model shared" in words) == ("shared" in key)
        assert words[0].isupper()
        assert words.endswith(".")
        assert ".." not in words
        assert "  " not in words


def test_definitions_name_the_worst_site_and_warn_of_the_best_round() -> None:
    figures = draw(ROWS)
    assert "that of south," in figures["worst_site_accuracy"]["definition"]
    assert "(1 site)" in figures["bottom_decile_accuracy"]["definition"]
    assert (
        "chosen on the test set, so the figure is optimistic"
        in figures["best_round_shared_global_accuracy"]["definition"]
    )


def test_one_definition_in_full() -> None:
    assert draw(ROWS)["global_accuracy"]["definition"] == (
        "The accuracy of each site's personal predictor, the one of local accuracy, on the global test, averaged over "
        "all 3 sites, in round 2, the last one with results. Global test: The official test set, 800 images."
    )


def test_missing_sites_are_said() -> None:
    rows = [r for r in ROWS if (r["model"], r["split"], r["site"]) != ("personal", "local", "north")]
    figures = draw(rows)
    assert figures["local_accuracy"]["value"] == 0.4375
    assert figures["balance"]["value"] == pytest.approx((0.4375 + 0.375) / 2)
    for key in ("local_accuracy", "worst_site_accuracy", "bottom_decile_accuracy", "local_balanced_accuracy"):
        assert "over 2 of 3 sites" in figures[key]["definition"]
    assert (
        "local accuracy (over 2 of 3 sites) and global accuracy (over all 3 sites)" in figures["balance"]["definition"]
    )
    assert "over all 3 sites" in figures["global_accuracy"]["definition"]


def test_only_the_studys_sites_and_method_count() -> None:
    stranger = row("personal", "local", "elsewhere", 7, 0.0)
    other = {**row("personal", "local", "north", 7, 0.0), "method": "fedprox"}
    assert draw([*ROWS, stranger, other]) == draw(ROWS)
    two = draw(ROWS, ("north", "west"))
    assert two["local_accuracy"]["value"] == 0.8125
    assert "over all 2 sites" in two["local_accuracy"]["definition"]
    assert two["worst_site_accuracy"]["value"] == 0.625


def test_a_method_without_a_shared_model() -> None:
    figures = draw([r for r in ROWS if r["model"] == "personal"])
    assert figures["local_accuracy"]["value"] == 0.625
    for key in KEYS[-3:]:
        assert figures[key]["value"] is None
        assert "this method has no shared model" in figures[key]["definition"]


def test_a_method_without_personal_predictors() -> None:
    figures = draw([r for r in ROWS if r["model"] == "shared"])
    assert figures["shared_global_accuracy"]["value"] == 0.5
    for key in KEYS[:8]:
        assert figures[key]["value"] is None
        assert "no personal predictor was measured" in figures[key]["definition"]


def test_an_undefined_auc_is_no_value() -> None:
    rows = [{**r, "value": None} if r["metric"] == "macro_auc" and r["site"] else r for r in ROWS]
    figure = draw(rows)["macro_auc"]
    assert figure["value"] is None
    assert (
        "Macro-AUC: no value, since it was not measured in round 2, the last one with results." in figure["definition"]
    )


def test_rows_of_two_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="one run and one seed"):
        draw([*ROWS, {**ROWS[-1], "seed": 1}])


def test_the_order_of_rows_does_not_matter() -> None:
    assert draw(ROWS[::-1]) == draw(ROWS)
