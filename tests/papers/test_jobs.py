"""Tasks in processes: the same outcomes, a process that dies, room that is kept, and that none is left behind."""

import os
import signal
import sys
from typing import Any

import pytest

from wardround.papers import jobs

WORKER = (sys.executable, "-c", "from wardround.papers.jobs import serve; serve(eval)")
SLEEP = "__import__('time').sleep(600)"
DIE = "__import__('os')._exit(3)"
SEEN = "[__import__('os').environ.get(name) for name in ('OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES')]"


def processes(count: int, gpus: Any = ()) -> jobs.Processes[str]:
    return jobs.Processes(WORKER, str, count, gpus)


def done(crew: jobs.Crew[str], tasks: list[str]) -> dict[str, Any]:
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


def test_processes_give_what_one_gives() -> None:
    tasks = [f"{i} ** 2" for i in range(5)]
    expected = {task: i**2 for i, task in enumerate(tasks)}
    assert done(jobs.Alone(eval), tasks) == expected
    with processes(2) as crew:
        assert done(crew, tasks) == expected
        assert len(crew.hands) == 2


def test_a_process_that_dies_loses_its_task_alone() -> None:
    with processes(2) as crew:
        found = done(crew, ["1", DIE, "2", DIE + " ", "3"])
        assert found[DIE] == found[DIE + " "] == jobs.Lost("its process ended with exit code 3")
        assert [found[key] for key in "123"] == [1, 2, 3]
        # One that dies while it has nothing to do is replaced and costs nothing.
        idle = crew.hands[0].process
        idle.kill()
        idle.wait()
        assert done(crew, ["4", "5"]) == {"4": 4, "5": 5}


def test_an_error_in_a_task_ends_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    with processes(1) as crew:
        assert done(crew, ["1 / 0", "7"]) == {"1 / 0": jobs.Lost("its process ended with exit code 1"), "7": 7}
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_what_a_task_prints_does_not_get_among_the_outcomes(capfd: pytest.CaptureFixture[str]) -> None:
    with processes(1) as crew:
        assert done(crew, ["print('said') or 5"]) == {"print('said') or 5": 5}
    assert "said" in capfd.readouterr().err


def test_leaving_ends_the_processes_at_once() -> None:
    with processes(2) as crew:
        crew.start(SLEEP)
        crew.start(SLEEP)
        assert not crew.has_room
        started = [hand.process.pid for hand in crew.hands]
        assert all(map(is_alive, started))
    assert not any(map(is_alive, started))


def test_cores_and_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    assert [jobs.threads_each(n) for n in (1, 2, 3, 7, 12)] == [7, 3, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert jobs.visible_gpus(3) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert jobs.visible_gpus(2) == ["GPU-a", "GPU-b"]
    with processes(4, ["GPU-a", "GPU-b"]) as crew:
        found = done(crew, [SEEN + " " * i for i in range(4)])
        assert sorted(found.values()) == [["1", "GPU-a"], ["1", "GPU-a"], ["1", "GPU-b"], ["1", "GPU-b"]]
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_ctrl_c_is_left_to_the_process_that_began_them() -> None:
    with processes(1) as crew:
        done(crew, ["1"])
        os.kill(crew.hands[0].process.pid, signal.SIGINT)
        assert done(crew, ["2"]) == {"2": 2}
