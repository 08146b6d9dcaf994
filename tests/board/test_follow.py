"""The log of a run as others may count on it."""

from __future__ import annotations

from pathlib import Path

from board.samples import Study, row
from wardround.board.index import Index
from wardround.board.live import Watch
from wardround.record.follow import Follower
from wardround.record.rundir import write_json


def test_only_what_a_checkpoint_counts_on_is_told_and_only_once(tmp_path: Path) -> None:
    study, one, two = Study(tmp_path / "a"), row(0, 0.5), row(1, 0.625)
    follower = Follower(study.path)
    study.append(one)
    assert list(follower.news()) == []
    study.commit()
    study.append(two)
    assert list(follower.news()) == [one]
    assert list(follower.news()) == []
    study.log.cut(follower.offset)  # a resume takes the second back, and another comes in its place
    study.append(row(1, 0.75))
    study.commit()
    assert list(follower.news()) == [row(1, 0.75)]
    study.append({"kind": "end", "seconds": 2.0})
    assert not follower.is_finished
    write_json(study.path / "result.json", {})
    assert list(follower.news()) == [{"kind": "end", "seconds": 2.0}]
    assert follower.is_finished


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    study = Study(tmp_path / "a")
    study.log.close()
    text = (
        b'{"kind": 3}\nnot json\n[1]\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"kind": "note", "text": "yes"}\n{"kind": "no'
    )
    (study.path / "events.jsonl").write_bytes(text)
    write_json(study.path / "checkpoint.json", {"events_bytes": 10**12})
    assert list(Follower(study.path).news()) == [{"kind": "note", "text": "yes"}]
    for broken in ("{", "[]", '{"events_bytes": "a"}', '{"events_bytes": -5}', "{}"):
        (study.path / "checkpoint.json").write_text(broken)
        assert list(Follower(study.path).news()) == []


def test_a_course_sums_up_what_was_told(tmp_path: Path) -> None:
    study = Study(tmp_path / "a", rounds=4)
    (run,) = Index(tmp_path).runs()
    watch = Watch()
    study.append({"kind": "fit", "label": "site-1, round 1"}, {"kind": "note", "text": "beware"})
    study.round(0, 0.5)
    study.round(1, 0.625)
    (course,) = watch.courses(run)
    assert (course.method, course.rounds, course.total, course.fits, course.seconds) == ("fedavg", 2, 4, 1, 3.0)
    assert list(course.notes) == ["beware"]
    assert course.curve(("global", "shared")) == [(1, 0.5), (2, 0.625)]
    study.round(2, 0.75)
    (course,) = watch.courses(run)
    assert course.curve(("global", "shared")) == [(1, 0.5), (2, 0.625), (3, 0.75)]
    assert not course.is_over
