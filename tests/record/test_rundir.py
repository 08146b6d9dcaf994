"""The directory of a run: whole or not at all, owned by one, and a checkpoint that alone says what is valid."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny import give_tiny_data
from tiny import settings as tiny_settings
from wardround import run as runs
from wardround.errors import BadInput, RunFailed, WardroundError
from wardround.methods.state import State
from wardround.progress import Silent
from wardround.record.rundir import Checkpoint, Log, RunDir, lock_directory, refuse_existing, sweep, write_json

FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
FORBIDDEN = PermissionError(errno.EACCES, "Permission denied")


def nothing(part: Path) -> None:
    """Opening files of a run that has none."""


def opened(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", nothing)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


# Making it ------------------------------------------------------------------------------------------------------------


def test_a_new_directory_has_its_opening_files_and_nothing_beside_it(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "deep" / "er" / "run", lambda part: write_json(part / "a.json", {"x": 1}))
    assert json.loads((tmp_path / "deep" / "er" / "run" / "a.json").read_text()) == {"x": 1}
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file"])
def test_an_existing_one_is_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
    if kind == "folder":
        (path / "mine.txt").write_text("mine")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(BadInput, match="exists already; choose another --out, or go on with: wardround resume"):
        RunDir.create(path, nothing)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_of_two_that_make_the_same_directory_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(part: Path) -> None:
        write_json(part / "second.json", 2)
        monkeypatch.setattr(os, "getpid", lambda: 4_000_000)  # what follows happens in another process
        RunDir.create(tmp_path / "run", lambda other: write_json(other / "first.json", 1))

    with pytest.raises(BadInput, match="cannot be written"):
        RunDir.create(tmp_path / "run", fill)
    assert (tmp_path / "run" / "first.json").exists()
    assert not (tmp_path / "run" / "second.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_one_that_fails_to_make_it_does_not_spoil_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(part: Path) -> None:
        write_json(part / "second.json", 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 4_000_000)
            with pytest.raises(RunFailed):
                RunDir.create(tmp_path / "run", raising(FULL))

    RunDir.create(tmp_path / "run", fill)
    assert (tmp_path / "run" / "second.json").exists()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FULL, RunFailed, "the disk is full: .*run could not be written; free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), RunFailed, "the disk is full"),
        (READ_ONLY, BadInput, r"cannot be written \(Read-only file system\); choose a folder you may write to"),
        (FORBIDDEN, BadInput, r"cannot be written \(Permission denied\); choose a folder"),
        (OSError(errno.EIO, "Input/output error"), BadInput, "cannot be written: Input/output error; choose another"),
    ],
)
@pytest.mark.parametrize("moment", ["making", "filling", "naming"])
def test_a_place_that_cannot_be_written_is_one_line_and_nothing_is_left(
    error: OSError,
    kind: type[WardroundError],
    words: str,
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if moment != "filling":
        monkeypatch.setattr(Path, {"making": "mkdir", "naming": "rename"}[moment], raising(error))
    with pytest.raises(kind, match=words) as caught:
        RunDir.create(tmp_path / "run", raising(error) if moment == "filling" else nothing)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [BadInput("a partition that cannot be saved"), KeyboardInterrupt(), KeyError("x")])
def test_whatever_ends_the_making_nothing_is_left(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        RunDir.create(tmp_path / "run", raising(error))
    assert list(tmp_path.iterdir()) == []


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot be written"):
        RunDir.create(tmp_path / "file" / "run", nothing)


def test_a_name_that_no_disk_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        refuse_existing(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(BadInput, match="choose a folder you may write to"):
            RunDir.create(tmp_path / "run", nothing)
    finally:
        tmp_path.chmod(0o755)
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_nothing_when_its_partition_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_tiny_data(monkeypatch)
    monkeypatch.setattr("wardround.data.partition.write_atomically", raising(FULL))
    with pytest.raises(RunFailed, match="the disk is full"):
        runs.begin_run(tiny_settings(), tmp_path / "run", Silent())
    assert list(tmp_path.iterdir()) == []


# The lock -------------------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from wardround.record.rundir import lock_directory
with lock_directory(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match="is in use by another run"), lock_directory(tmp_path):
            pytest.fail("held twice")
        other.stdin.close()
        assert other.wait() == 0
    with lock_directory(tmp_path):
        pass


def test_a_lock_is_free_again_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), lock_directory(tmp_path):
        raise RuntimeError
    with lock_directory(tmp_path):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
def test_a_lock_is_free_again_though_a_child_still_has_the_file(tmp_path: Path) -> None:
    """As while another thread starts a process: between fork and exec the child has every open file."""
    held, kept = os.pipe()
    with lock_directory(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(kept)
            os.read(held, 1)
            os._exit(0)
    with lock_directory(tmp_path):
        os.close(kept)
    assert os.waitpid(child, 0)[1] == 0
    os.close(held)


def test_a_second_job_in_the_same_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiny_data(monkeypatch)
    job = runs.begin_run(tiny_settings(), tmp_path / "run", Silent())
    with lock_directory(job.path), pytest.raises(BadInput, match="in use by another run"):
        job.finish()
    assert not (job.path / "events.jsonl").exists()


def test_a_lock_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"), lock_directory(tmp_path / "gone"):
        pytest.fail("held nothing")


def test_what_a_killed_process_began_is_swept_up(tmp_path: Path) -> None:
    kept = [tmp_path / "result.json", tmp_path / ".lock", tmp_path / "predictors" / "site.part.safetensors"]
    begun = [tmp_path / ".result.json.7.part", tmp_path / "predictors" / ".shared.safetensors.7.part"]
    begun += [tmp_path / ".report.html.7.part", tmp_path / ".fedavg.7.part" / ".settings.json.7.part"]
    begun += [tmp_path / "predictors" / ".tmpPqR3xY"]
    for file in [*kept, *begun]:
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    sweep(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert not (tmp_path / ".fedavg.7.part").exists()


# Logs -----------------------------------------------------------------------------------------------------------------


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    assert list(log.rows()) == []
    log.append({"a": 1, "text": "Zürich"})
    log.append({"a": None})
    assert list(log.rows()) == [{"a": 1, "text": "Zürich"}, {"a": None}]
    assert log.flush() == (tmp_path / "log.jsonl").stat().st_size


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 60))
def test_an_unfinished_last_line_is_passed_over(length: int) -> None:
    """However many bytes a killed process managed to write, every whole line counts and no other."""
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder) / "log.jsonl")
        for number in range(4):
            log.append({"number": number})
        log.close()
        data = log.path.read_bytes()[:length]
        log.path.write_bytes(data)
        assert list(log.rows()) == [{"number": n} for n in range(data.count(b"\n"))]


def test_cut_and_go_on(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append({"n": 1})
    length = log.flush()
    log.append({"n": 2})
    log.cut(length)
    log.append({"n": 3})
    assert list(log.rows()) == [{"n": 1}, {"n": 3}]


def test_a_log_that_lost_bytes_is_damaged(tmp_path: Path) -> None:
    """To lengthen it would fill the hole with zero bytes."""
    log = Log(tmp_path / "log.jsonl")
    log.append({"n": 1})
    with pytest.raises(BadInput, match=r"log.jsonl is damaged: it has 9 of 10 bytes"):
        log.cut(10)
    assert list(log.rows()) == [{"n": 1}]
    with pytest.raises(BadInput, match=r"damaged: it has 0 of 5 bytes"):
        Log(tmp_path / "gone.jsonl").cut(5)
    Log(tmp_path / "gone.jsonl").cut(0)


def test_what_is_no_number_is_not_logged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Log(tmp_path / "log.jsonl").append({"value": float("nan")})


def full(log: Log, patch: pytest.MonkeyPatch, call: str) -> None:
    """From here on the log's file answers `call` with a full disk."""
    log.append({"n": 1})

    class Full:
        def __getattr__(self, name: str) -> Any:
            return raising(FULL) if name == call else lambda *_: None

    patch.setattr(log, "_file", Full())


@pytest.mark.parametrize(("call", "act"), [("write", "append"), ("flush", "flush"), ("close", "close")])
def test_a_full_disk_is_one_line_whenever_it_shows(
    call: str, act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small line waits in a buffer, so that the disk may complain first at a flush."""
    log = Log(tmp_path / "log.jsonl")
    full(log, monkeypatch, call)
    with pytest.raises(RunFailed, match=r"the disk is full: .* free some space and try again"):
        getattr(log, act)(*([{"n": 2}] if act == "append" else []))


# Checkpoints ----------------------------------------------------------------------------------------------------------

STATE = State({"model": {"w": torch.arange(3.0)}}, {"step": 1})


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert opened(tmp_path).checkpoint() is None


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    run = opened(tmp_path)
    one = Checkpoint(3, run.save("s", STATE), {"a": run.save("m", STATE)}, {}, 4, 0, 0, 1.5)
    run.commit(one)
    assert RunDir(run.path).checkpoint() == one
    assert run.load("s").to_bytes() == STATE.to_bytes()


def test_a_commit_deletes_what_it_does_not_name(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for name in ("old-state", "state", "memory", "answer", ".state.99.part"):
        run.save(name, STATE)
    run.commit(Checkpoint(0, "state", {"a": "memory"}, {"a": "answer"}))
    assert sorted(path.name for path in (run.path / "checkpoint").iterdir()) == ["answer", "memory", "state"]


def test_an_uncommitted_state_changes_nothing(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.commit(Checkpoint(1, run.save("one", STATE)))
    run.save("two", STATE)
    found = RunDir(run.path).checkpoint()
    assert found is not None
    assert (found.round, found.state) == (1, "one")


def test_rewinding_cuts_both_logs(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.events.append({"n": 1})
    run.ledger.append({"n": 1})
    checkpoint = Checkpoint(1, "s", events_bytes=run.events.flush(), ledger_bytes=run.ledger.flush())
    run.events.append({"n": 2})
    run.ledger.append({"n": 2})
    run.rewind(checkpoint)
    assert (list(run.events.rows()), list(run.ledger.rows())) == ([{"n": 1}], [{"n": 1}])
    run.rewind(None)
    assert (list(run.events.rows()), list(run.ledger.rows())) == ([], [])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"round": 1}', '{"round": 1, "state": "s", "x": 2}', "\x00"]
)
def test_a_damaged_checkpoint_is_said_so(text: str, tmp_path: Path) -> None:
    run = opened(tmp_path)
    (run.path / "checkpoint.json").write_text(text)
    with pytest.raises(BadInput, match=r"checkpoint.json is damaged .* start the run again in a new directory"):
        run.checkpoint()


def test_any_part_of_a_checkpoint_is_a_damaged_one(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.commit(Checkpoint(3, run.save("s", STATE)))
    file = run.path / "checkpoint.json"
    whole = file.read_bytes()
    for length in range(len(whole) - 2):  # the last two are the closing brace and the line's end
        file.write_bytes(whole[:length])
        with pytest.raises(BadInput):
            run.checkpoint()


def test_a_missing_state_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"checkpoint file gone of .* cannot be read"):
        opened(tmp_path).load("gone")


def test_a_damaged_state_file_is_said_so(tmp_path: Path) -> None:
    run = opened(tmp_path)
    (run.path / "checkpoint" / "s").write_bytes(b"nonsense")
    with pytest.raises(BadInput, match="not a wardround tensor file"):
        run.load("s")


@pytest.mark.parametrize(("error", "kind"), [(FULL, RunFailed), (READ_ONLY, BadInput)])
def test_a_disk_that_fails_while_saving_leaves_the_last_checkpoint(
    error: OSError, kind: type[WardroundError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path)
    run.commit(Checkpoint(1, run.save("one", STATE)))
    before = sorted(path.name for path in run.path.rglob("*"))
    monkeypatch.setattr(os, "fsync", raising(error))
    with pytest.raises(kind):
        run.save("two", STATE)
    with pytest.raises(kind):
        run.commit(Checkpoint(2, "two"))
    assert sorted(path.name for path in run.path.rglob("*")) == before
    found = run.checkpoint()
    assert found is not None
    assert found.round == 1
