"""Sections of the page that say what happened, what was answered, what it cost and what an audit found."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from report.example import compare_result, imaging_result, run_result
from report.test_page import HOSTILE, Page, row, rows_of, small
from wardround.audit.report import Attack, Audit, AuditRecord, Figure, GroupAudit, averaged
from wardround.measure import wilson
from wardround.report import render
from wardround.report.rounds import lost_in

LOCAL = {"split": "local", "model": "personal"}
EVERYONE = {"split": "global", "model": "personal"}


def answer(**changes: Any) -> dict[str, Any]:
    """Of a predictor that takes a quarter of the second class for the first."""
    base = {"method": "fedavg", "seed": 0, "site": "a", "round": 0, "split": "global", "model": "personal"}
    bins = [[4, 1, 0.5], [16, 15, 0.9]]
    return {**base, "confusion": [[10, 0], [5, 15]], "bins": bins, "calibration_error": 0.05, **changes}


def answered(*entries: dict[str, Any]) -> str:
    return render(small(answers=list(entries), data={"classes": ["ash", "birch"]}))


# What happened --------------------------------------------------------------------------------------------------------


def test_three_sentences_say_who_how_good_and_what_to_beware_of() -> None:
    rows = [
        row(method=m, site=s, value=v, **where)
        for m, own, everyone in (("fedavg", (0.9, 0.7), 0.6), ("local", (0.8, 0.5), 0.3), ("moon", (0.7, 0.7), 0.5))
        for where, values in ((LOCAL, own), (EVERYONE, (everyone, everyone)))
        for s, v in zip("ab", values, strict=True)
    ]
    totals = [{"method": "fedavg", "direction": way, "group": "parameters", "bytes": 1500} for way in ("up", "down")]
    sites = [{"name": "a", "train": 20}, {"name": "b", "train": 300}]
    data = {"sites": sites, "classes": ["ash", "birch"]}
    html = render(small(methods=["fedavg", "local", "moon"], rows=rows, data=data, ledger={"totals": totals}))
    said = html.split('<h2 id="overview">')[1].split("<figure>")[0]
    assert [line for line in said.splitlines() if line.startswith("<p>")] == [
        "<p>2 sites, holding 20 to 300 training images each, learned to tell 2 classes apart in 3 ways, and no site’s "
        "images were shown to another.</p>",
        "<p>With fedavg, the model that a site would use is right on 80 of 100 images like its own and on 60 of 100 "
        "from all sites together; a site that trains alone is right on 65 of 100 like its own, and with moon, the best "
        "of the others, on 70.</p>",
        "<p>The site served worst is b, with 70 of 100 images right; with fedavg 1.50 kB of model data left all "
        "sites together; this is one draw, so small differences mean nothing.</p>",
    ]
    assert rows_of(html, "Local accuracy by method")[1:] == [
        ["fedavg", "80.0%", "70.0%", "90.0%", "2"],
        ["local", "65.0%", "50.0%", "80.0%", "2"],
        ["moon", "70.0%", "70.0%", "70.0%", "2"],
    ]
    assert html.count('class="ring low"') == 2  # moon's sites are alike


@pytest.mark.parametrize(
    ("methods", "sent", "said"),
    [
        (["majority"], {}, "; nothing left a site; "),
        (
            ["majority", "fedavg"],
            {"fedavg": 1500},
            "; with majority nothing left a site, with fedavg 1.50 kB of model data; ",
        ),
        (
            ["majority", "moon"],
            {"majority": 2, "moon": 1},
            "; with majority 2 B of model data left all sites together; ",
        ),
        (
            ["majority", "fedavg", "centralised"],
            {"fedavg": 1500, "centralised": 9000},
            "; with majority nothing left a site, with centralised 9.00 kB of images; ",
        ),
    ],
)
def test_what_left_is_told_of_the_method_that_is_spoken_of(methods: list[str], sent: dict[str, int], said: str) -> None:
    """The best method for sites may be one that sends nothing beside others that do."""
    rows = [row(method=m, site=s, value=0.9 if m == "majority" else 0.5, **LOCAL) for m in methods for s in "ab"]
    totals = [{"method": m, "direction": "up", "group": "g", "bytes": n} for m, n in sent.items()]
    html = render(small(methods=methods, rows=rows, ledger={"totals": totals}))
    assert said in html.split('<h2 id="overview">')[1].split("<figure>")[0]


def test_sites_of_one_size_hold_that_many() -> None:
    data = {"sites": [{"name": name, "train": 68} for name in "ab"], "classes": ["ash"]}
    html = render(small(rows=[row(site=s, value=0.5, **LOCAL) for s in "ab"], data=data))
    assert "<p>2 sites, holding 68 training images each, learned" in html


def test_pooled_images_are_not_said_to_have_stayed() -> None:
    html = render(small(methods=["centralised"], rows=[row(method="centralised", site="a", **LOCAL)]))
    assert "were shown to another" not in html
    assert "only centralised, which is there to compare with, took the images of all sites together" in html
    rows = [row(method=m, site="a", value=v, **LOCAL) for m, v in (("centralised", 0.9), ("moon", 0.7), ("local", 0.6))]
    html = render(small(methods=["centralised", "moon", "local"], rows=rows))
    assert (
        "With moon, the model that a site would use is right on 70 of 100 images like its own; a site that trains "
        "alone is right on 60 of 100 like its own; with all images in one place (centralised) it would be 90." in html
    )


def test_a_model_that_says_the_same_of_every_image_is_told_at_once() -> None:
    rows = [row(method="fedavg", site=site, value=0.9, **LOCAL) for site in "ab"]
    said = "Beware: at 1 site its model gives every image the same answer, whatever it shows."
    constant, fair = answer(confusion=[[10, 0], [20, 0]]), answer(site="b")
    data = {"classes": ["ash", "birch"]}
    assert said in render(small(methods=["fedavg"], rows=rows, answers=[constant, fair], data=data))
    assert "Beware" not in render(small(methods=["fedavg"], rows=rows, answers=[fair], data=data))


def test_one_method_is_shown_on_both_tests_and_nothing_measured_says_nothing() -> None:
    assert [line[0] for line in rows_of(render(run_result()), "Accuracy by test")] == [
        "Test",
        "own images",
        "all images",
    ]
    assert "What happened" not in render(small())


# Results --------------------------------------------------------------------------------------------------------------


def test_methods_on_the_plane_of_local_and_global_accuracy() -> None:
    html = render(compare_result())
    assert rows_of(html, "Local against global accuracy")[1] == ["fedavg", "90.3%", "83.3%", "86.8%"]
    assert "The highest balance, 88.1%, has fedprox." in html
    assert [line[:2] for line in rows_of(html, "Global accuracy for bytes")][3] == ["local", "0 B"]
    assert rows_of(html, "Global accuracy for time")[1][1] == "41 s"
    assert "Local against global accuracy" not in render(run_result())


def test_confusion_sensitivity_and_calibration_by_hand() -> None:
    html = answered(answer(), answer(site="b", confusion=[[8, 2], [0, 20]], calibration_error=0.15))
    assert rows_of(html, "Shares of answers, fedavg")[1:] == [["ash", "90.0%", "10.0%"], ["birch", "12.5%", "87.5%"]]
    assert rows_of(html, "Answers counted: fedavg, b")[1:] == [["ash", "8", "2"], ["birch", "0", "20"]]
    assert "Most often mistaken: birch for ash, 12.5% of its images." in html
    low, high = wilson(0.875, 20)  # of the test's 20 images, though two sites answered them
    assert rows_of(html, "Sensitivity by class, fedavg")[2] == [
        *("birch", "87.5%", f"{100 * low:.1f}%", f"{100 * high:.1f}%", "20")
    ]
    assert "Calibration error 10.0% on the global test." in html
    assert rows_of(html, "Reliability, fedavg")[1:] == [["50.0%", "25.0%", "8"], ["90.0%", "93.8%", "32"]]


def test_calibration_is_also_told_for_each_sites_own_mix() -> None:
    errors = ({"local_calibration_error": 0.02}, {"local_calibration_error": 0.04, "site": "b"})
    html = answered(*(answer(**each) for each in errors))
    assert "Calibration error 5.0% on the global test, 3.0% as each site&#39;s own patients are mixed." in html


def test_own_tests_of_the_sites_are_pooled_and_the_shared_model_stands_in() -> None:
    html = answered(answer(split="local"), answer(split="local", site="b"), answer(model="shared", site=""))
    assert rows_of(html, "Sensitivity by class, fedavg, the sites&#39; own tests")[1][-1] == "20"
    assert rows_of(html, "Answers counted: fedavg, shared model")[2] == ["birch", "5", "15"]


def test_a_site_with_few_images_of_a_class_widens_the_interval_of_its_mean() -> None:
    few, many = answer(split="local", confusion=[[1, 0], [0, 9]]), answer(split="local", confusion=[[50, 49], [0, 9]])
    found = rows_of(answered(few, {**many, "site": "b"}), "Sensitivity by class, fedavg, the sites&#39; own tests")
    low, high = wilson((1 + 50 / 99) / 2, 4 / (1 / 1 + 1 / 99))  # worth four images, not a hundred
    assert found[1] == ["ash", "75.3%", f"{100 * low:.1f}%", f"{100 * high:.1f}%", "100"]
    assert found[2][1:] == [
        "100.0%",
        f"{100 * wilson(1.0, 18)[0]:.1f}%",
        "100.0%",
        "18",
    ]  # sites of one size: all count


def test_a_class_without_test_images_has_no_sensitivity() -> None:
    html = answered(answer(confusion=[[0, 0], [5, 15]]))
    assert rows_of(html, "Sensitivity by class, fedavg")[1] == ["ash", "–", "–", "–", "0"]
    assert rows_of(html, "Shares of answers, fedavg")[1] == ["ash", "–", "–"]


@pytest.mark.parametrize(
    "nonsense", [None, [], "x", [[1]], [[1, 2], [3]], [[0, 0], [0, 0]], [[-1, 2], [3, 4]], {"a": 1}]
)
def test_a_matrix_that_does_not_fit_is_left_out(nonsense: Any) -> None:
    assert "Confusion matrices" not in answered(answer(confusion=nonsense))


def test_any_field_of_any_new_record_may_be_missing_or_nonsense(tmp_path: Path) -> None:
    whole = imaging_result(tmp_path, classes=2, size=4)
    for key in ("answers", "projections", "rounds"):
        for nonsense in (None, [], {}, [3], "x"):
            Page(render({**whole, key: nonsense}))
        for field in whole[key][0]:
            for nonsense in (None, [], "x", {"x": "y"}, [["x"]], -1, HOSTILE):
                result = copy.deepcopy(whole)
                result[key][0][field] = nonsense
                Page(render(json.loads(json.dumps(result))))


# Over the rounds ------------------------------------------------------------------------------------------------------


def test_what_was_lost_between_records_is_shaded_and_listed() -> None:
    course = [0.3, 0.5, 0.4, 0.45, 0.6, 0.55]
    assert lost_in(dict(enumerate(course))) == [(1, 4)]
    html = render(small(rows=[row(round=r, value=v) for r, v in enumerate(course)]))
    assert rows_of(html, "Forgetting intervals: Shared model, global test")[1:] == [
        ["fedavg", "2", "5", "50.0%", "10.0%"]
    ]
    assert html.count('class="lost s1"') == 1
    steady = render(small(rows=[row(round=r, value=r / 10) for r in range(5)]))
    assert "Shaded:" not in steady


def test_accuracy_against_bytes_and_seconds() -> None:
    points = [
        {
            "method": "fedavg",
            "round": r,
            "bytes": 1000 * (r + 1),
            "seconds": 2.0 * r,
            "shared_global_accuracy": 0.5 + r / 10,
        }
        for r in range(3)
    ]
    html = render(small(rows=[row(round=r) for r in range(3)], rounds=points))
    assert rows_of(html, "Accuracy against bytes")[1:] == [
        ["fedavg", "1.00 kB", "50.0%"],
        ["fedavg", "2.00 kB", "60.0%"],
        ["fedavg", "3.00 kB", "70.0%"],
    ]
    assert rows_of(html, "Accuracy against seconds")[3] == ["fedavg", "4.0 s", "70.0%"]


# Clusters and features ------------------------------------------------------------------------------------------------


def test_similarity_puts_the_sites_of_a_cluster_side_by_side(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path))
    table = rows_of(html, "Similarity of the sites, fedbicross")
    assert table[0] == ["Site", "site-1", "site-3", "site-5", "site-2", "site-4"]
    assert table[4] == ["site-2", "0.830", "0.830", "0.490", "1.000", "0.660"]
    assert "Cosine between what two models answer to the same noise" in html


def test_weights_over_time_are_lines_and_a_table(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path))
    table = rows_of(html, "Cross-cluster weights over time, fedbicross")
    assert table[0] == ["Trajectory", "1 from 1", "1 from 2", "2 from 1", "2 from 2"]
    assert (table[1], table[-1]) == (["0", *["0.500"] * 4], ["20", "0.700", "0.300", "0.300", "0.700"])
    (tmp_path / "many").mkdir()
    many = render(imaging_result(tmp_path / "many", clusters=4))
    assert "Drawn are the shares of a cluster’s own images" in many
    assert len(rows_of(many, "Cross-cluster weights over time, fedbicross")[0]) == 17


def test_features_in_the_plane_by_site_and_by_class(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path, classes=2))
    table = rows_of(html, "fedisca: Principal components, by class: centres")
    assert [line[:2] for line in table] == [["Class", "Images"], ["basophil", "20"], ["eosinophil", "20"]]
    assert "They hold 41.0% and 20.0% of the variance." in html
    assert html.count('class="cloud ') == 2 * (5 + 2)


def test_every_row_of_the_results_has_its_definition(tmp_path: Path) -> None:
    html = render(imaging_result(tmp_path, classes=2))
    rows = [head for head, *_ in rows_of(html, "Headline figures")[1:]]
    defined = re.findall(r"<div><dt>(.*?)</dt>\s*<dd>", html.split("What the figures mean")[1].split("</dl>")[0])
    assert rows == defined
    assert rows[-1] == "Time"


# The audit ------------------------------------------------------------------------------------------------------------


def audited(folder: Path, *sites: str, method: str = "fedavg") -> None:
    figures = (Figure("AUC", 0.625, "chance that a member outranks another", 40), Figure("TPR", None, "at 1 %", 3))
    attack = Attack("membership", "guesses who was trained on", 0, figures, ("image 3 <stands out>",))
    audits = [Audit("blood", method, site, 0, 40, (GroupAudit("parameters", (attack,)),)) for site in sites]
    record = AuditRecord(1, "0.1", "run", {}, tuple(audits), averaged(audits), {}, {})
    (folder / "audit").mkdir(parents=True)
    (folder / "audit" / "audit.json").write_text(record.to_json(), encoding="utf-8")


def test_the_commands_audit_of_one_site_is_shown(tmp_path: Path) -> None:
    audited(tmp_path, "site-1")
    html = render(run_result(), tmp_path)
    assert rows_of(html, "Attacks on parameters")[1:] == [
        ["membership: AUC", "0.625", "40", "chance that a member outranks another"],
        ["membership: TPR", "–", "3", "at 1 %"],
    ]
    assert "site-1, membership: image 3 &lt;stands out&gt;" in html
    Page(html)


def test_an_audit_of_several_sites_is_shown_as_its_means_and_every_finding(tmp_path: Path) -> None:
    audited(tmp_path, "site-1", "site-2")
    html = render(run_result(), tmp_path)
    (first, _) = rows_of(html, "Attacks on parameters")[1:]
    assert first[:3] == ["membership: AUC", "0.625", "80"]
    assert "mean over 2 of 2 sites" in first[3]
    assert "site-2, membership: image 3 &lt;stands out&gt;" in html
    assert "site-1, site-2 sent was attacked with 80 training images; figures are means" in html


def test_a_comparison_shows_the_audits_of_its_runs(tmp_path: Path) -> None:
    methods = ("fedavg", "fedprox", "local")
    assert "runs them, on the run of one method at a time;" in render(compare_result(methods), tmp_path)
    audited(tmp_path / "fedavg", "site-1")
    audited(tmp_path / "local", "site-1", method="local")
    (tmp_path / "fedprox" / "audit").mkdir(parents=True)
    (tmp_path / "fedprox" / "audit" / "audit.json").write_text("{}")
    html = render(compare_result(methods), tmp_path)
    for method in ("fedavg", "local"):
        assert f"What site-1 sent for {method} was attacked with 40 training images." in html
        assert rows_of(html, f"Attacks on parameters of {method}")[1][:2] == ["membership: AUC", "0.625"]
    assert "fedprox/audit/audit.json cannot be shown: no record of an audit" in html
    assert "No attack on what leaves" not in html


@pytest.mark.parametrize("name", ["..", "../elsewhere", "a/b", "", ".", "nul\x00l", "linked"])
def test_no_audit_outside_a_comparison_is_read(name: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    for place in (tmp_path, tmp_path / "elsewhere", inner / "a" / "b"):
        audited(place, "site-1")
    (inner / "linked").symlink_to(tmp_path / "elsewhere")
    html = render({**compare_result(("fedavg", "fedprox")), "methods": [name, "fedprox"]}, inner)
    assert "No attack on what leaves the sites was run." in html


def test_without_an_audit_the_page_says_so_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert "No attack on what leaves the sites was run." in render(run_result(), tmp_path)
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "audit.json").write_text("{}")
    assert "audit.json cannot be shown: no record of an audit" in render(run_result(), tmp_path)


def test_what_was_spent_of_privacy() -> None:
    spent = [{"method": "fedavg", "site": "site-1", "epsilon": 2.5, "delta": 1e-5}]
    assert rows_of(render(small(privacy=spent)), "Differential privacy spent")[1] == ["fedavg, site-1", "2.5", "1e-05"]
    assert "Differential privacy" not in render(small())


def test_noise_on_the_counts_alone_promises_nothing_of_the_model() -> None:
    """Two tables at ε = ½ are 1; the site whose policy left them out sent none, whatever came down to it."""
    sites = ("site-1", "site-2")
    spent = [{"method": "fedmr", "site": site, "epsilon": None, "delta": None} for site in sites]
    ledger = [
        {"method": "fedmr", "site": site, "round": number, "direction": way, "groups": {group: 8}}
        for site, way, group in (
            ("site-1", "up", "label_counts"),
            ("site-1", "down", "label_counts"),
            ("site-2", "up", "size"),
            ("site-2", "down", "label_counts"),
        )
        for number in (0, 1)
    ]
    settings = {"privacy": {"epsilon": None, "counts_epsilon": 0.5}}
    html = render(small(privacy=spent, settings=settings, ledger={"rows": ledger}))
    assert rows_of(html, "Differential privacy of the label counts alone") == [
        ["Site", "Tables of counts that left", "Epsilon", "Delta"],
        ["fedmr, site-1", "2", "1", "0"],
        ["fedmr, site-2", "0", "0", "0"],
    ]
    assert "the model was trained without noise, and nothing is promised of it" in html
    assert "Noise was added before anything left" not in html
    assert "Differential privacy spent" not in html


def test_counts_that_had_noise_beside_private_training_are_in_its_epsilon() -> None:
    spent = [{"method": "consult", "site": "site-1", "epsilon": 2.5, "delta": 1e-5}]
    html = render(small(privacy=spent, settings={"privacy": {"epsilon": 3.0, "counts_epsilon": 0.5}}))
    assert "Noise was added before anything left" in html
    assert "label counts alone" not in html


def test_noised_counts_of_a_strength_that_nobody_wrote_down() -> None:
    html = render(small(privacy=[{"method": "consult", "site": "site-1", "epsilon": None, "delta": None}]))
    assert rows_of(html, "Differential privacy of the label counts alone")[1] == ["consult, site-1", "0", "–", "0"]
