"""What the board finds in a folder: good runs, broken ones, and what somebody put there on purpose."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from board.samples import Study, finished
from report.example import compare_result
from wardround.board import index as module
from wardround.board.index import Index, Run
from wardround.board.record import WANTED, part, read_summary
from wardround.errors import BadInput
from wardround.record.rundir import lock_directory, write_json


def only(folder: Path) -> Run:
    (run,) = Index(folder).runs()
    return run


def test_a_folder_that_is_not_there_or_is_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"there is no folder .*; give the folder that holds your runs"):
        Index(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="there is no folder"):
        Index(tmp_path / "file")
    with pytest.raises(BadInput, match="is itself a run; give the folder that holds it: "):
        Index(finished(tmp_path, "a"))


def test_an_empty_folder_has_no_runs(tmp_path: Path) -> None:
    assert Index(tmp_path).runs() == []


def test_a_finished_run_is_summed_up(tmp_path: Path) -> None:
    finished(tmp_path, "2026/mine", "fedavg", "local", created="2026-11-01T10:00:00Z")
    run = only(tmp_path)
    result = compare_result(("fedavg", "local"))
    values = {(h["method"], h["key"]): h["value"] for h in result["headlines"]}
    assert (run.id, run.kind, run.methods, run.state) == ("2026/mine", "compare", ("fedavg", "local"), "finished")
    assert run.when == "2026-11-01T10:00:00Z"
    assert run.sites == len(result["data"]["sites"])
    assert run.figures["fedavg"]["local_accuracy"] == values["fedavg", "local_accuracy"]
    assert run.best("balance") == max(values[m, "balance"] for m in ("fedavg", "local"))
    assert run.bytes == sum(row["bytes"] for row in result["ledger"]["totals"])
    assert run.total_seconds == sum(result["seconds"].values())
    assert run.has_report


def test_parts_of_a_record_are_those_of_the_whole(tmp_path: Path) -> None:
    path = finished(tmp_path, "a", "fedavg", "local") / "result.json"
    text = path.read_bytes()
    whole = json.loads(text)
    found = {name: json.loads(part(text, name) or b"") for name in WANTED}
    assert found == {name: whole[name] for name in WANTED}
    summary = read_summary(text)
    assert summary is not None
    assert "rows" not in summary
    assert summary["ledger"] == {"totals": whole["ledger"]["totals"]}
    for other in (json.dumps(whole), json.dumps(whole, indent=4), json.dumps(dict(reversed(whole.items())), indent=1)):
        again = read_summary(other.encode())
        assert again is not None
        assert all(again[name] == whole[name] for name in WANTED)
        assert again["ledger"]["totals"] == whole["ledger"]["totals"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema_version": 2}', "[" * 100_000, '{\n "schema_version": x']
)
def test_a_broken_result_is_shown_as_such(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/result.json").write_text(text)
    run = only(tmp_path)
    assert (run.state, run.reason) == ("unreadable", "its result.json is damaged, or another version's")


def test_a_result_of_the_right_version_and_nothing_else_is_listed(tmp_path: Path) -> None:
    for name, more in (("bare", {}), ("odd", {"methods": 3, "headlines": [1], "data": [], "seconds": {"a": "b"}})):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "result.json", {"schema_version": 1, **more})
    assert [(run.state, run.methods) for run in Index(tmp_path).runs()] == [("finished", ())] * 2


def test_a_run_is_stopped_running_failed_or_finished(tmp_path: Path) -> None:
    index = Index(tmp_path)
    study = Study(tmp_path / "a")
    assert [run.state for run in index.runs()] == ["stopped"]
    with lock_directory(study.path):
        assert [run.state for run in index.runs()] == ["running"]
    study.append({"kind": "failed", "text": "no site answered in round 1"})
    (run,) = index.runs()
    assert (run.state, run.reason) == ("failed", "no site answered in round 1")
    with lock_directory(study.path):
        assert [run.state for run in index.runs()] == ["running"]
    write_json(study.path / "result.json", compare_result())
    assert [run.state for run in index.runs()] == ["finished"]


def test_a_glance_of_the_board_keeps_no_run_from_beginning(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        ended = threading.Timer(0.1, fcntl.flock, (glance, fcntl.LOCK_UN))
        ended.start()
        with lock_directory(tmp_path):
            assert not ended.is_alive()
        ended.join()


def test_a_record_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path, "a")
    finished(tmp_path, "b")
    seen: list[Path] = []
    real = module._finished
    monkeypatch.setattr(module, "_finished", lambda name, path: (seen.append(path), real(name, path))[1])
    index = Index(tmp_path)
    assert index.runs() == index.runs()
    assert sorted(seen) == [tmp_path / "a", tmp_path / "b"]
    result = compare_result(("moon", "local"))
    write_json(tmp_path / "a/result.json", result)
    assert {run.id: run.methods for run in index.runs()}["a"] == ("moon", "local")
    assert len(seen) == 3


def test_a_run_that_is_taken_away_is_gone(tmp_path: Path) -> None:
    path = finished(tmp_path, "a")
    index = Index(tmp_path)
    assert index.run("a") is not None
    path.rename(tmp_path / "b")
    assert [run.id for run in index.runs()] == ["b"]
    assert index.run("a") is None


def test_links_pipes_and_hidden_folders_are_passed_over(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "runs"
    finished(outside, "secret")
    folder.mkdir()
    (folder / "link").symlink_to(outside / "secret")
    (folder / "all").symlink_to(outside)
    finished(folder, ".hidden")
    (folder / "linked-file").mkdir()
    (folder / "linked-file/result.json").symlink_to(outside / "secret/result.json")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe/result.json")
    assert Index(folder).runs() == []


def test_a_link_behind_a_real_run_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.html").write_text("secret")
    path = finished(tmp_path / "runs", "a", report=None)
    (path / "report.html").symlink_to(tmp_path / "secret.html")
    assert not only(tmp_path / "runs").has_report


def test_the_folders_of_a_comparison_are_not_runs_of_their_own(tmp_path: Path) -> None:
    path = Study(tmp_path / "both").path
    write_json(path / "comparison.json", [{"method": "fedavg", "set": {}}, {"method": "dir/mine.py", "set": {}}])
    Study(path / "fedavg")
    run = only(tmp_path)
    assert (run.id, run.kind, run.methods) == ("both", "compare", ("fedavg", "mine"))
