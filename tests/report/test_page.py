import base64
import copy
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from report.example import compare_result, run_result
from wardround.errors import BadInput
from wardround.report import render, write_report

VOID = {"meta", "link", "br", "img", "input"}
HOSTILE = "<script>alert(1)</script>\"'&\x00\x1b\u202e\ud800"


class Page(HTMLParser):
    """The page as a flat list of elements; fails where a tag is not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.found if name == tag]


def rows_of(html: str, caption: str) -> list[list[str]]:
    """The cells of the table with this caption, head included."""
    table = html.split(f"<caption>{caption}</caption>")[1].split("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [[re.sub(r"<[^>]+>", "", c).strip() for c in re.findall(r"<t[hd].*?</t[hd]>", x, re.DOTALL)] for x in lines]


def row(**changes: Any) -> dict[str, Any]:
    base = {"method": "fedavg", "seed": 0, "site": "", "round": 1, "split": "global", "model": "shared"}
    return {**base, "metric": "accuracy", "value": 0.5, "n": 10, **changes}


def small(**parts: Any) -> dict[str, Any]:
    return {"schema_version": 1, "methods": ["fedavg"], **parts}


def test_headline_figures_are_shown_with_the_best_in_bold() -> None:
    html = render(compare_result())
    table = rows_of(html, "Headline figures")
    assert table[0] == ["Figure", "fedavg", "fedprox", "local"]
    assert table[1] == ["Local accuracy", "90.3%", "91.6%", "70.0%"]
    assert table[6] == ["Shared model", "90.9%", "92.2%", "–"]
    assert table[8] == ["Macro-AUC", "0.955", "0.961", "–"]
    assert table[9] == ["Time", "41 s", "45 s", "48 s"]
    assert "<strong>91.6%</strong>" in html
    assert html.count("<strong>") == 8


def test_a_run_of_one_method_shows_its_three_figures_large_and_none_in_bold() -> None:
    html = render(run_result())
    assert "<dt>Balance</dt><dd>86.8%</dd>" in html
    assert "<strong>" not in html
    assert "wardround · Run" in html


def test_each_definition_is_printed_once_where_methods_agree_and_by_method_where_not() -> None:
    result = compare_result()
    html = render(result)
    assert html.count("Mean of local and global accuracy, as FedKPer defines it.") == 1
    for headline in result["headlines"]:
        if headline["method"] == "local" and headline["key"] == "balance":
            headline["definition"] = "Something else."
    html = render(result)
    assert "<b>fedavg, fedprox</b>: Mean of local and global accuracy" in html
    assert "<b>local</b>: Something else." in html


def test_notes_stand_before_the_results_and_long_lists_unfold() -> None:
    html = render(small(notes=[{"method": "fedavg", "text": f"note {i}"} for i in range(10)]))
    assert html.index("note 0") < html.index('<h2 id="results">')
    assert "<summary>6 more</summary>" in html
    notes = [{"method": m, "text": "the same"} for m in ("fedavg", "moon", "fedavg")] + [{"text": "of nobody"}]
    html = render(small(notes=notes))
    assert html.count("the same") == 1
    assert "<li><b>fedavg, moon</b>: the same</li>" in html
    assert "<li>of nobody</li>" in html
    assert "<li><b>all methods</b>: the same</li>" in render(small(methods=["moon", "fedavg"], notes=notes))
    assert "Read this first" not in render(small())


def test_site_bars_take_the_last_round_average_seeds_and_mark_the_lowest() -> None:
    local = {"split": "local", "model": "personal"}
    rows = [
        row(site="a", round=1, value=0.1, **local),
        row(site="a", round=2, value=0.9, **local),
        row(site="b", round=2, seed=0, value=0.6, **local),
        row(site="b", round=2, seed=1, value=0.8, **local),
        row(site="c", round=2, value=math.nan, **local),
    ]
    html = render(small(rows=rows))
    assert rows_of(html, "Local accuracy at each site") == [
        ["Site", "fedavg"],
        ["a", "90.0%"],
        ["b", "70.0%"],
        ["c", "–"],
    ]
    assert "<title>b: 70.0% lowest</title>" in html
    assert html.count(">lowest</text>") == 1
    assert "One bar per site; mean 80.0%, lowest 70.0% at b." in html


def test_sites_that_are_all_alike_have_no_lowest() -> None:
    rows = [row(site=s, split="local", model="personal") for s in "ab"]
    assert ">lowest</text>" not in render(small(rows=rows))


def test_curves_average_over_the_sites_of_a_round() -> None:
    local = {"split": "local", "model": "personal"}
    rows = [row(site=s, round=r, value=v, **local) for s, r, v in (("a", 1, 0.2), ("b", 1, 0.4), ("a", 2, 0.8))]
    html = render(small(rows=rows))
    assert rows_of(html, "Personal predictors, local tests") == [["Round", "fedavg"], ["2", "30.0%"], ["3", "80.0%"]]


def test_one_round_has_no_curves() -> None:
    assert "Over the rounds" not in render(small(rows=[row(round=1), row(round=1, model="personal", site="a")]))
    assert "Over the rounds" in render(small(rows=[row(round=0), row(round=1)]))


def test_every_round_is_shown_with_its_cost() -> None:
    point = {"method": "fedavg", "round": 0, "sites": ["a"], "bytes": 1_500, "seconds": 12.34, "later": "unknown"}
    figures = {"shared_global_accuracy": 0.5, "backward_transfer": -0.25, "trained_local_accuracy": 0.75}
    found = [{**point, **figures}, {"method": "fedavg", "round": 1}]
    html = render(small(rows=[row(round=0), row(round=1)], rounds=found))
    assert rows_of(html, "Each round: seconds of work and bytes from the beginning to its end") == [
        [
            "Round",
            "Seconds",
            "Bytes",
            "Shared, global",
            "Backward transfer",
            "After training, local",
            "After training, worst",
        ],
        ["fedavg, 1", "12.3", "1.50 kB", "50.0%", "-25.0%", "75.0%", "–"],
        ["fedavg, 2", "–", "0 B", "–", "–", "–", "–"],
    ]
    assert 'title="1,500 bytes"' in html
    assert "Each round:" not in render(small(rows=[row(round=0), row(round=1)]))


def test_models_right_after_training_have_a_curve() -> None:
    rows = [row(site="a", round=r, value=v, split="local", model="trained") for r, v in ((1, 0.25), (2, 0.75))]
    assert rows_of(render(small(rows=rows)), "After training, local tests")[1:] == [["2", "25.0%"], ["3", "75.0%"]]


def test_the_ledger_shows_human_units_and_exact_bytes() -> None:
    totals = [
        {"method": "fedavg", "direction": "up", "group": group, "bytes": size}
        for group, size in (("overhead", 45), ("parameters", 36_680_000_000), ("statistics", 1_500))
    ]
    html = render(small(ledger={"totals": totals, "rows": []}))
    assert rows_of(html, "Bytes by group, over all sites and rounds") == [
        ["Direction", "parameters", "statistics", "overhead", "Total"],
        ["fedavg up", "36.68 GB", "1.50 kB", "45 B", "36.68 GB"],
    ]
    assert 'title="36,680,001,545 bytes"' in html


def test_the_ledger_of_each_site_is_exact() -> None:
    table = rows_of(render(compare_result(rounds=2)), "Bytes of each site, over all rounds")
    once = 1_117_736 + 3_840 + 120 + 2_344
    assert table[1] == ["site-1", *[f"{2 * once:,}"] * 4]
    assert "Nothing crossed for local." in render(compare_result())


def test_unknown_metrics_and_headlines_are_shown_under_their_own_name() -> None:
    headlines = [{"method": "fedavg", "key": "time_to_rest", "value": 12.5}]
    rows = [row(site=s, split="deploy", metric="calibration_error", value=v) for s, v in (("a", 0.25), ("b", None))]
    html = render(small(headlines=headlines, rows=rows))
    assert ["Time to rest", "12.5"] in rows_of(html, "Headline figures")
    assert rows_of(html, "Everything measured, after each method's last round".replace("'", "&#39;"))[1] == [
        "Calibration error",
        "deploy",
        "shared",
        "mean over sites",
        "0.25 (1 of 2)",
    ]


@pytest.mark.parametrize(("sites", "classes"), [(2, 2), (5, 11), (50, 11), (61, 3), (200, 11)])
def test_label_mix_works_from_two_sites_to_hundreds(sites: int, classes: int) -> None:
    result = compare_result(sites=sites, rounds=1, classes=classes)
    html = render(result)
    Page(html)
    table = rows_of(html, "Training images of each class")
    assert table[0][1:] == result["data"]["classes"]
    assert len(table) == sites + 1
    assert ("the number at its end" in html) == (sites <= 60)


def test_hostile_text_is_only_ever_text() -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return value + HOSTILE if isinstance(value, str) and value not in {"local", "global", "accuracy"} else value

    result = poison(compare_result(rounds=2))
    result["settings"]["key" + HOSTILE] = {HOSTILE: HOSTILE}
    html = render(result)
    page = Page(html)
    assert page.all("script") == []
    assert "&lt;script&gt;" in html
    assert not set(html) & {"\x00", "\x1b", "\u202e", "\ud800"}
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    html.encode("utf-8")


def test_the_page_is_semantic() -> None:
    page = Page(render(compare_result()))
    levels = [int(tag[1]) for tag, _ in page.found if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(th.get("scope") in {"row", "col"} for th in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.found:
        for target in attributes.get("aria-labelledby", "").split():
            assert target in ids
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids
    assert all(svg["role"] == "img" and svg["aria-labelledby"] for svg in page.all("svg"))


def test_nothing_is_loaded_and_only_the_pages_own_style_is_admitted() -> None:
    html = render(compare_result())
    page = Page(html)
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert not [a for _, a in page.found if "src" in a or "style" in a]
    assert "url(" not in html
    assert "@import" not in html
    style = html.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")


def test_fifty_sites_and_a_hundred_rounds_stay_under_a_megabyte() -> None:
    assert len(render(compare_result(sites=50, rounds=100, classes=11)).encode()) < 1_000_000


def test_ten_methods_on_five_sites_over_a_hundred_rounds_stay_under_three_megabytes() -> None:
    names = ("fedavg", "fedprox", "local", *(f"method-{i}" for i in range(7)))
    assert len(render(compare_result(names, sites=5, rounds=100, classes=11)).encode()) < 3_000_000


def test_any_part_may_be_missing_or_empty() -> None:
    whole = compare_result(rounds=2)
    for key in whole:
        if key == "schema_version":
            continue
        for absent in (None, type(whole[key])()):
            Page(render({**whole, key: absent}))
        Page(render({k: v for k, v in whole.items() if k != key}))
    Page(render({"schema_version": 1}))


def test_any_field_of_any_record_may_be_missing() -> None:
    whole = compare_result(rounds=2)
    parts = [("rows",), ("headlines",), ("notes",), ("data", "sites"), ("ledger", "totals"), ("ledger", "rows")]
    for path in parts:
        records: Any = whole
        for step in path:
            records = records[step]
        for field in list(records[0]):
            result = copy.deepcopy(whole)
            target: Any = result
            for step in path:
                target = target[step]
            for record in target:
                del record[field]
            Page(render(result))


def test_undefined_values_are_dashes_all_the_way_from_json() -> None:
    result = compare_result(rounds=3)
    for i, part in enumerate([*result["rows"], *result["headlines"]]):
        part["value"] = (math.nan, None, math.inf)[i % 3]
    html = render(json.loads(json.dumps(result)))
    assert rows_of(html, "Headline figures")[1] == ["Local accuracy", "–", "–", "–"]
    assert not re.search(r"\b(nan|inf|None)\b", html)


def test_the_command_is_printed_whole() -> None:
    html = render(small(command="wardround run --method fedavg --set a=b"))
    code = html.split("<pre><code>")[1].split("</code>")[0]
    assert re.sub(r"</?span>", "", code) == "wardround run --method fedavg --set a=b"


@pytest.mark.parametrize("number", [10**400, -(10**400), 1e308, 1e15, 2**63 - 1], ids="abcde")
def test_no_number_is_too_large_for_a_page(number: float) -> None:
    whole = compare_result(rounds=2)
    for part, field in (("rows", "value"), ("headlines", "value"), ("rounds", "bytes"), ("seconds", "local")):
        result = copy.deepcopy(whole)
        for record in [result[part]] if isinstance(result[part], dict) else result[part]:
            record[field] = number
        Page(render(result))
    for record in whole["ledger"]["totals"]:
        record["bytes"] = number
    Page(render({**whole, "created": "9999-12-31T23:59:59-23:00"}))


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_another_schema_is_refused_in_one_line(version: Any) -> None:
    with pytest.raises(BadInput, match=r"schema_version .* write its report with the version that made it") as caught:
        render({"schema_version": version})
    assert "\n" not in str(caught.value)


def test_the_page_is_written_in_one_rename(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(run_result(), path)
    assert path.read_text(encoding="utf-8") == render(run_result())
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_page_that_cannot_be_written_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(BadInput, match=r"report.html cannot be written: .*; choose another place"):
        write_report(run_result(), tmp_path / "report.html")
    assert os.listdir(tmp_path) == ["report.html"]
    with pytest.raises(BadInput, match="No such file"):
        write_report(run_result(), tmp_path / "nowhere" / "report.html")


def test_compared_features_are_a_table_and_absent_where_none_were() -> None:
    result = run_result()
    assert "features each site has" not in render(result)
    result["features"] = [
        {
            "method": "fedavg",
            "site": "site-1",
            "images": 500,
            "distance": 2.5,
            "relative": 1.25,
            "by_class": [2.5, None],
        },
        {"method": "fedavg", "site": "site-2", "images": 1200, "distance": None, "relative": None, "by_class": []},
    ]
    page = render(result)
    assert "features each site has" in page
    rows = re.findall(r'<tr><th scope="row">(fedavg, site-\d)</th>\s*((?:<td.*</td>\s*)+)</tr>', page)
    assert [(name, re.findall(r"<td[^>]*>([^<]*)</td>", cells)) for name, cells in rows] == [
        ("fedavg, site-1", ["500", "2.5", "1.25"]),
        ("fedavg, site-2", ["1,200", "–", "–"]),
    ]
