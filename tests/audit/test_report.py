"""The record of an audit: there and back, and averaged over sites."""

import json
from dataclasses import replace
from typing import Any

import pytest

from wardround.audit.report import Attack, Audit, Figure, GroupAudit, averaged
from wardround.errors import BadInput


def audit(site: str = "north", max_ssim: float | None = 0.5, n: int = 10) -> Audit:
    figures = (Figure("max_ssim", max_ssim, "the highest SSIM", n), Figure("min_l2", 0.25, "the smallest L2", n))
    decoder = Attack("decoder", "words", 3, figures, ("a finding",))
    auc = Attack("lira-offline", "words", 3, (Figure("auc", 0.75, "chance", n),), (), ((0.0, 0.0), (1.0, 1.0)))
    groups = (GroupAudit("embeddings", (decoder,)), GroupAudit("parameters", (auc,)))
    return Audit("study", "fedmp", site, 3, n, groups)


def test_there_and_back() -> None:
    one = audit(max_ssim=None)
    assert Audit.from_json(one.to_json()) == one
    assert json.loads(one.to_json())["groups"][1]["attacks"][0]["roc"] == [[0.0, 0.0], [1.0, 1.0]]
    assert one.groups[0].attacks[0].figure("min_l2").value == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(seed="3"), "seed: "),
        (lambda record: record.pop("site"), "site: Field required"),
        (lambda record: record["groups"][0].update(attacks=4), "groups.0.attacks: "),
        (lambda record: record["groups"][0]["attacks"][0]["figures"][0].update(value=1e999), "groups.0"),
    ],
)
def test_what_is_no_record_is_refused(change: Any, message: str) -> None:
    record = json.loads(audit().to_json())
    change(record)
    with pytest.raises(BadInput, match="no record of an audit") as caught:
        Audit.from_json(json.dumps(record))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(BadInput, match=r"no record of an audit: .*; run the audit again"):
        Audit.from_json("nothing")


def test_a_figure_is_finite() -> None:
    with pytest.raises(ValueError, match="no record can hold"):
        Figure("x", float("nan"), "words", 1)


def test_sites_count_alike_and_missing_figures_are_said() -> None:
    sites = [audit("north", 0.5, 10), audit("south", 0.75, 30), audit("west", None, 5)]
    embeddings, parameters = averaged(sites)
    ssim, l2 = embeddings.attacks[0].figures
    assert (ssim.value, ssim.n) == (0.625, 40)
    assert ssim.definition == "the highest SSIM; mean over 2 of 3 sites, each counting alike"
    assert (l2.value, l2.n) == (0.25, 45)
    assert embeddings.attacks[0].findings == parameters.attacks[0].roc == ()
    assert parameters.group == "parameters"


def test_a_figure_that_no_site_has_stays_unknown() -> None:
    assert averaged([audit(max_ssim=None)])[0].attacks[0].figures[0].value is None
    assert averaged([]) == ()


def test_a_group_that_one_site_sends_is_there() -> None:
    alone = replace(audit("south"), groups=(GroupAudit("label_counts", ()),))
    assert [group.group for group in averaged([audit(), alone])] == ["embeddings", "parameters"]
