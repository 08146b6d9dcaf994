"""`result.json`: a version, closed rows, figures with definitions, and a ledger that adds up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiny import CLASSES, QUICK, SIZES, federation, give_tiny_data, partition, settings
from wardround import run
from wardround.errors import BadInput
from wardround.measure import OVER_ROUNDS
from wardround.methods.registry import known
from wardround.progress import Silent
from wardround.record.result import ROW_FIELDS, SCHEMA_VERSION, describe_data, is_of
from wardround.record.rundir import Log, write_json

SITES = ["site-1", "site-2", "site-3"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiny_data(monkeypatch)


def finished(path: Path, **changes: Any) -> dict[str, Any]:
    own = {"set": QUICK.get(str(changes.get("method")), {})}
    run.begin_run(settings(**{**own, **changes}), path, Silent()).finish()
    read: dict[str, Any] = json.loads((path / "result.json").read_text())
    return read


def test_what_a_result_holds(tmp_path: Path) -> None:
    result = finished(tmp_path / "out", method="fedprox", set={"mu": 0.5}, seed=3)
    assert result["schema_version"] == SCHEMA_VERSION == 1
    assert (result["kind"], result["name"], result["methods"]) == ("run", "out", ["fedprox"])
    assert result["settings"]["set"] == {"mu": 0.5}
    assert result["settings"]["seed"] == 3
    assert result["data"]["partition_hash"] == federation().partition_hash
    assert result["data"]["classes"] == list(CLASSES)
    assert [site["train"] for site in result["data"]["sites"]] == list(SIZES)
    assert result["environment"]["device"].startswith("cpu")
    assert result["seconds"]["fedprox"] > 0


def test_rows_are_closed_and_typed(tmp_path: Path) -> None:
    for name in known():
        rows = finished(tmp_path / name, method=name)["rows"]
        assert rows
        for row in rows:
            assert (
                tuple(row)
                == ROW_FIELDS
                == ("method", "seed", "site", "round", "split", "model", "metric", "value", "n")
            )
            assert (row["method"], row["seed"], row["n"]) == (name, 0, 16)
            assert row["site"] in ["", *SITES]
            assert row["split"] in ("local", "global")
            assert row["model"] in ("shared", "personal")
            assert row["metric"] in ("accuracy", "balanced_accuracy", "macro_auc")
            assert 0 <= row["value"] <= 1
            assert isinstance(row["round"], int)


@pytest.mark.parametrize("name", list(known()))
def test_every_sites_personal_predictor_is_measured_on_both_tests(name: str, tmp_path: Path) -> None:
    rows = [row for row in finished(tmp_path / "out", method=name)["rows"] if row["model"] == "personal"]
    for split, metrics in (
        ("local", ["accuracy", "balanced_accuracy"]),
        ("global", ["accuracy", "balanced_accuracy", "macro_auc"]),
    ):
        found = sorted((row["site"], row["metric"]) for row in rows if row["split"] == split)
        assert found == sorted((site, metric) for site in SITES for metric in metrics)


def test_the_shared_model_has_rows_of_its_own_in_every_round(tmp_path: Path) -> None:
    rows = [row for row in finished(tmp_path / "out", rounds=3)["rows"] if row["model"] == "shared"]
    globally = [(row["round"], row["site"]) for row in rows if (row["split"], row["metric"]) == ("global", "accuracy")]
    locally = [(row["round"], row["site"]) for row in rows if (row["split"], row["metric"]) == ("local", "accuracy")]
    assert globally == [(0, ""), (1, ""), (2, "")]
    assert locally == [(round, site) for round in range(3) for site in SITES]


@pytest.mark.parametrize(("every", "measured"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (5, [4]), (9, [4])])
def test_the_last_round_is_always_measured_and_once(every: int, measured: list[int], tmp_path: Path) -> None:
    rows = finished(tmp_path / "out", rounds=5, evaluate_every=every)["rows"]
    shared = [row["round"] for row in rows if (row["model"], row["site"], row["metric"]) == ("shared", "", "accuracy")]
    assert shared == measured


def test_rounds_are_points_and_figures_over_them(tmp_path: Path) -> None:
    result = finished(tmp_path / "out", rounds=3, participants=0.34, evaluate_trained=True)
    points = result["rounds"]
    assert [point["round"] for point in points] == [0, 1, 2]
    assert [len(point["sites"]) for point in points] == [1, 1, 1]
    per_round = [
        sum(sum(row["groups"].values()) + row["overhead"] for row in result["ledger"]["rows"] if row["round"] == r)
        for r in (0, 1)
    ]
    assert [point["bytes"] for point in points[:2]] == [per_round[0], sum(per_round)]
    assert 0 < points[0]["seconds"] < points[1]["seconds"] < points[2]["seconds"] < result["seconds"]["fedavg"]
    values = {headline["key"]: headline["value"] for headline in result["headlines"]}
    assert values["mean_shared_global_accuracy"] == pytest.approx(sum(p["shared_global_accuracy"] for p in points) / 3)
    assert values["mean_trained_local_accuracy"] == pytest.approx(sum(p["trained_local_accuracy"] for p in points) / 3)
    assert values["backward_transfer"] == pytest.approx(sum(p["backward_transfer"] for p in points) / 3)


@pytest.mark.parametrize(("method", "rounds"), [("local", 3), ("ensemble", None), ("fedavg", 1)])
def test_one_round_has_no_figures_over_rounds(method: str, rounds: int | None, tmp_path: Path) -> None:
    result = finished(tmp_path / "out", method=method, rounds=rounds)
    assert not {headline["key"] for headline in result["headlines"]} & set(OVER_ROUNDS)


def test_headlines_have_definitions_and_are_of_the_personal_predictor(tmp_path: Path) -> None:
    result = finished(tmp_path / "out", method="local")
    headlines = {headline["key"]: headline for headline in result["headlines"]}
    assert all(
        headline["method"] == "local" and headline["definition"].endswith(".") for headline in headlines.values()
    )
    for split in ("local", "global"):
        values = [
            row["value"]
            for row in result["rows"]
            if (row["model"], row["split"], row["metric"]) == ("personal", split, "accuracy")
        ]
        assert len(values) == 3
        assert headlines[f"{split}_accuracy"]["value"] == pytest.approx(sum(values) / 3)
    assert headlines["shared_global_accuracy"]["value"] is None
    protocol = result["data"]["local_protocol"]
    assert protocol in headlines["local_accuracy"]["definition"]


@pytest.mark.parametrize("name", list(known()))
def test_the_ledger_adds_up(name: str, tmp_path: Path) -> None:
    ledger = finished(tmp_path / "out", method=name)["ledger"]
    sums: dict[tuple[str, str], int] = {}
    for row in ledger["rows"]:
        assert row["method"] == name
        for group, count in [*row["groups"].items(), ("overhead", row["overhead"])]:
            sums[row["direction"], group] = sums.get((row["direction"], group), 0) + count
    assert {(t["direction"], t["group"]): t["bytes"] for t in ledger["totals"]} == sums


def test_the_ledger_is_in_the_order_of_rounds_whatever_the_workers(tmp_path: Path) -> None:
    one, two = (finished(tmp_path / str(n), workers=n)["ledger"] for n in (1, 2))
    assert one == two
    kinds = ["request"] * 3 + ["answer"] * 3
    assert [(row["round"], row["kind"]) for row in one["rows"]] == [
        *((0, kind) for kind in kinds),
        *((1, kind) for kind in kinds),
        *[(1, "delivery")] * 3,
    ]


def test_a_comparison_is_its_runs_together(tmp_path: Path) -> None:
    names = ["majority", "local", "single", "fedavg"]
    job = run.begin_comparison(settings(), [(name, {}) for name in names], tmp_path / "both", Silent())
    result = job.finish()
    assert (result["kind"], result["methods"]) == ("compare", names)
    for name in names:
        alone = finished(tmp_path / name, method=name)
        inner = run.read_result(tmp_path / "both" / name)
        for found in (inner, {key: _of(result[key], name) for key in ("rows", "headlines", "notes")}):
            for key in ("rows", "headlines", "notes"):
                assert found[key] == alone[key]
        assert _of(result["ledger"]["rows"], name) == inner["ledger"]["rows"]
    assert set(result["seconds"]) == set(names)


def _of(entries: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["method"] == method]


def test_a_comparison_trains_no_site_model_twice(tmp_path: Path) -> None:
    names = ["local", "ensemble", "single"]
    run.begin_comparison(settings(), [(name, {}) for name in names], tmp_path / "out", Silent()).finish()
    reused = {
        name: [
            event["reused"] for event in Log(tmp_path / "out" / name / "events.jsonl").rows() if event["kind"] == "fit"
        ]
        for name in names
    }
    assert reused == {"local": [False] * 3, "ensemble": [True] * 3, "single": [True] * 3}


def test_a_method_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="named twice"):
        run.begin_comparison(settings(), [("local", {}), ("local", {})], tmp_path / "out", Silent())
    assert list(tmp_path.iterdir()) == []


# Around it ------------------------------------------------------------------------------------------------------------


def test_a_directory_holds_what_a_reader_needs(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    opening = {"settings.json", "partition.json", "data.json", "environment.json"}
    assert names >= opening | {"events.jsonl", "ledger.jsonl", "checkpoint.json", "result.json", "report.html"}
    assert not [name for name in names if name.endswith((".part", ".tmp"))]


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    run.reopen(tmp_path / "out", Silent()).finish()
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


def test_the_result_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    job = run.begin_run(settings(), tmp_path / "out", Silent())
    with pytest.raises(BadInput, match=r"has no result.json; .* go on with: wardround resume"):
        run.read_result(job.path)


@pytest.mark.parametrize("found", [{"schema_version": 2}, {}, [], 3])
def test_a_result_of_another_version_is_refused(found: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", found)
    with pytest.raises(BadInput, match=r"result.json"):
        run.read_result(tmp_path)


def test_a_result_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match=r"result\.json cannot be read: .*; give the directory of a run"):
        run.read_result(tmp_path)


def test_the_report_can_be_made_again(tmp_path: Path) -> None:
    finished(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_bytes()
    (tmp_path / "out" / "report.html").unlink()
    assert run.rewrite_report(tmp_path / "out").read_bytes() == page


@pytest.mark.parametrize("text", ["", "[]", "3", '{"rounds": 0}'])
def test_damaged_settings_are_refused(text: str, tmp_path: Path) -> None:
    job = run.begin_run(settings(), tmp_path / "out", Silent())
    (job.path / "settings.json").write_text(text)
    with pytest.raises(BadInput):
        run.reopen(job.path, Silent())


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"is not the directory of a run: it has no settings.json"):
        run.reopen(tmp_path, Silent())


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_other_images_are_refused(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pixel, in a training, a validation or a test image: the numbers would no longer be of one study."""
    job = run.begin_run(settings(), tmp_path / "out", Silent())
    changed = federation()
    owner = changed.test if part == "test" else getattr(changed.sites[1], part)
    owner.images[0, 0, 0, 0] ^= 1
    monkeypatch.setattr(run, "_federation", lambda *_: (changed, partition()))
    with pytest.raises(BadInput, match="the images or the partition have changed"):
        run.reopen(job.path, Silent())


def test_images_that_were_moved_are_still_a_runs_own() -> None:
    data = federation()
    described = json.loads(json.dumps(describe_data(data)))
    assert is_of(replace(data, provenance="elsewhere"), described)
    assert not is_of(replace(data, sites=data.sites[1:]), described)
    assert not is_of(replace(data, local_protocol="another"), described)
