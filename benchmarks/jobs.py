"""Tasks that are done in this process one after the other, or in several processes at once.

Training a small network is bound by kernel launches, so one process leaves most of a GPU idle, and a dozen share it
well. Processes are spawned, since CUDA cannot be forked. Each does whole tasks, one after the other; a killed one loses
the task that it was at, and nothing else. None outlives the process that started it, however that one ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Lost:
    """Instead of an outcome: the process that was at the task is gone."""

    why: str


class Crew(ABC, Generic[Task, Outcome]):
    """Who does tasks."""

    @property
    @abstractmethod
    def busy(self) -> Sequence[Task]:
        """The tasks that were begun and not yet handed back."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether one more can be begun."""

    @abstractmethod
    def start(self, task: Task) -> None:
        """Begin a task."""

    @abstractmethod
    def wait(self) -> tuple[Task, Outcome | Lost]:
        """The next of the busy tasks that is done."""


class Alone(Crew[Task, Outcome]):
    """The process that asks."""

    def __init__(self, do: Callable[[Task], Outcome]) -> None:
        self.do = do
        self.tasks: list[Task] = []

    @property
    def busy(self) -> Sequence[Task]:
        """One at most."""
        return self.tasks

    @property
    def has_room(self) -> bool:
        """Whether nothing is begun."""
        return not self.tasks

    def start(self, task: Task) -> None:
        """Keep it for `wait`."""
        self.tasks.append(task)

    def wait(self) -> tuple[Task, Outcome | Lost]:
        """Do it now."""
        task = self.tasks.pop()
        return task, self.do(task)


@dataclass
class _Hand(Generic[Task]):
    """One process, the line to it, and what it is at."""

    process: SpawnProcess
    line: Connection
    tasks: list[Task]


class Processes(Crew[Task, Outcome]):
    """So many processes, started when they are first needed; leaving the `with` block ends them all."""

    def __init__(self, do: Callable[[Task], Outcome], jobs: int) -> None:
        """`do`, its tasks and its outcomes travel between processes, so all must be of modules that both can import."""
        self.do, self.jobs = do, jobs
        self.hands: list[_Hand[Task]] = []

    def __enter__(self) -> Processes[Task, Outcome]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hand in self.hands:
            hand.process.terminate()
        for hand in self.hands:
            self._bury(hand)

    @property
    def busy(self) -> Sequence[Task]:
        """What the processes are at."""
        return [task for hand in self.hands for task in hand.tasks]

    @property
    def has_room(self) -> bool:
        """Whether a process is free or can be started."""
        return len(self.busy) < self.jobs

    def start(self, task: Task) -> None:
        """Give it to a free process, or to a new one; one that died while it was free is left out."""
        for hand in [hand for hand in self.hands if not hand.tasks]:
            with contextlib.suppress(OSError):
                hand.line.send(task)
                hand.tasks.append(task)
                return
            self.hands.remove(hand)
            self._bury(hand)
        hand = self._new_hand()
        self.hands.append(hand)
        hand.tasks.append(task)
        with contextlib.suppress(OSError):  # it is gone already: `wait` will find that out
            hand.line.send(task)

    def wait(self) -> tuple[Task, Outcome | Lost]:
        """The first that is done, or whose process is gone."""
        lines: Any = wait([hand.line for hand in self.hands if hand.tasks])
        hand = next(hand for hand in self.hands if hand.line is lines[0])
        task = hand.tasks.pop()
        try:
            return task, hand.line.recv()
        except (EOFError, OSError):
            self.hands.remove(hand)
            self._bury(hand)
            return task, Lost(f"its process ended with exit code {hand.process.exitcode}")

    def _new_hand(self) -> _Hand[Task]:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_serve, args=(self.do, theirs), daemon=True)
        with _environment("OMP_NUM_THREADS", str(threads_each(self.jobs))):  # torch reads it when it is imported
            process.start()
        theirs.close()  # so that the line ends when the process does
        return _Hand(process, ours, [])

    def _bury(self, hand: _Hand[Task]) -> None:
        hand.process.join()
        hand.line.close()


def threads_each(jobs: int) -> int:
    """The cores shared out, at least one to each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // jobs)


def _serve(do: Callable[[Task], Outcome], line: Connection) -> None:
    """A process's life. Ctrl-C reaches every process of a terminal; the one that began the others ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError):
        while True:
            line.send(do(line.recv()))


def _end_with_parent() -> None:
    """End at once when the process that started this one is gone, be it by `kill -9`."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable that processes started in this block see."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
