"""Tasks in processes: the same outcomes, a process that dies, room that is kept, and that none is left behind."""

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SLEEP = "__import__('time').sleep(600)"
DIE = "__import__('os')._exit(3)"
THREADS = "(__import__('torch').get_num_threads(), __import__('os').environ['OMP_NUM_THREADS'])"


@pytest.fixture(scope="module")
def jobs() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("jobs")


def done(crew: Any, tasks: list[str]) -> dict[str, Any]:
    """Every task's outcome, as many at once as there is room for."""
    todo, found = list(tasks), {}
    while todo or crew.busy:
        while todo and crew.has_room:
            crew.start(todo.pop(0))
        task, outcome = crew.wait()
        found[task] = outcome
    return found


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_give_what_one_gives(jobs: Any) -> None:
    tasks = [f"{i} ** 2" for i in range(5)]
    expected = {task: i**2 for i, task in enumerate(tasks)}
    assert done(jobs.Alone(eval), tasks) == expected
    with jobs.Processes(eval, 2) as crew:
        assert done(crew, tasks) == expected
        assert len(crew.hands) == 2


def test_a_process_that_dies_loses_its_task_alone(jobs: Any) -> None:
    with jobs.Processes(eval, 2) as crew:
        found = done(crew, ["1", DIE, "2", DIE + " ", "3"])
        assert found[DIE] == found[DIE + " "] == jobs.Lost("its process ended with exit code 3")
        assert [found[key] for key in "123"] == [1, 2, 3]
        # One that dies while it has nothing to do is replaced and costs nothing.
        idle = crew.hands[0].process
        idle.kill()
        idle.join()
        assert done(crew, ["4", "5"]) == {"4": 4, "5": 5}


def test_an_error_in_a_task_ends_its_process(jobs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with jobs.Processes(eval, 1) as crew:
        assert done(crew, ["1 / 0", "7"]) == {"1 / 0": jobs.Lost("its process ended with exit code 1"), "7": 7}
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_leaving_ends_the_processes_at_once(jobs: Any) -> None:
    with jobs.Processes(eval, 2) as crew:
        crew.start(SLEEP)
        crew.start(SLEEP)
        assert not crew.has_room
        processes = [hand.process.pid for hand in crew.hands]
        assert all(map(is_alive, processes))
    assert not any(map(is_alive, processes))


def test_cores_are_shared_out(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    assert [jobs.threads_each(n) for n in (1, 2, 3, 7, 12)] == [7, 3, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with jobs.Processes(eval, 4) as crew:
        assert done(crew, [THREADS]) == {THREADS: (1, "1")}
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_ctrl_c_is_left_to_the_process_that_began_them(jobs: Any) -> None:
    with jobs.Processes(eval, 1) as crew:
        done(crew, ["1"])
        os.kill(crew.hands[0].process.pid, signal.SIGINT)
        assert done(crew, ["2"]) == {"2": 2}
