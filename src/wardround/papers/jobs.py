"""Tasks that are done in this process one after the other, or in several processes at once.

Training a small network is bound by kernel launches, so one process leaves most of a GPU idle, and a dozen share it
well. Each process does whole tasks, one after the other; a killed one loses the task that it was at, and nothing else.
None outlives the process that started it, however that one ends: its line of tasks closes then. Tasks and outcomes
travel as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Generic, TypeVar, cast

Task = TypeVar("Task")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Lost:
    """Instead of an outcome: the process that was at the task is gone."""

    why: str


class Crew(ABC, Generic[Task]):
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
    def wait(self) -> tuple[Task, Any]:
        """The next of the busy tasks that is done, and its outcome or `Lost`."""


class Alone(Crew[Task]):
    """The process that asks."""

    def __init__(self, do: Callable[[Task], Any]) -> None:
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

    def wait(self) -> tuple[Task, Any]:
        """Do it now."""
        task = self.tasks.pop()
        return task, self.do(task)


@dataclass
class _Hand(Generic[Task]):
    """One process, what it is at, and the GPU that it sees."""

    process: subprocess.Popen[bytes]
    tasks: list[Task]
    gpu: str | None

    @property
    def lines(self) -> tuple[BinaryIO, BinaryIO]:
        """Tasks in, outcomes out."""
        return cast(BinaryIO, self.process.stdin), cast(BinaryIO, self.process.stdout)


class Processes(Crew[Task]):
    """So many processes, started when they are first needed; leaving the `with` block ends them all."""

    def __init__(
        self, command: Sequence[str], encode: Callable[[Task], Any], jobs: int, gpus: Sequence[str] = ()
    ) -> None:
        """`command` starts a process that calls `serve`; with several GPUs each process sees one of them."""
        self.command, self.encode, self.jobs, self.gpus = command, encode, jobs, gpus
        self.hands: list[_Hand[Task]] = []

    def __enter__(self) -> Processes[Task]:
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
            if hand.process.poll() is None:
                with contextlib.suppress(OSError):
                    self._send(hand, task)
                    return
            self.hands.remove(hand)
            self._bury(hand)
        hand = self._new_hand()
        self.hands.append(hand)
        with contextlib.suppress(OSError):  # it is gone already: `wait` will find that out
            self._send(hand, task)
            return
        hand.tasks.append(task)

    def wait(self) -> tuple[Task, Any]:
        """The first that is done, or whose process is gone."""
        with selectors.DefaultSelector() as selector:
            for hand in self.hands:
                if hand.tasks:
                    selector.register(hand.lines[1], selectors.EVENT_READ, hand)
            ready: _Hand[Task] = selector.select()[0][0].data
        line = ready.lines[1].readline()
        task = ready.tasks.pop()
        if line.endswith(b"\n"):
            return task, json.loads(line)
        self.hands.remove(ready)
        self._bury(ready)
        return task, Lost(f"its process ended with exit code {ready.process.returncode}")

    def _send(self, hand: _Hand[Task], task: Task) -> None:
        line, _ = hand.lines
        line.write(json.dumps(self.encode(task)).encode() + b"\n")
        line.flush()
        hand.tasks.append(task)

    def _new_hand(self) -> _Hand[Task]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads_each(self.jobs))}  # torch reads it when imported
        gpu = self._gpu()
        if gpu is not None:
            environment[VISIBLE] = gpu
        process = subprocess.Popen(  # noqa: S603 - a command of ours
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        return _Hand(process, [], gpu)

    def _gpu(self) -> str | None:
        """The one that the fewest processes have."""
        taken = Counter(hand.gpu for hand in self.hands)
        return min(self.gpus, key=lambda gpu: taken[gpu]) if self.gpus else None

    def _bury(self, hand: _Hand[Task]) -> None:
        hand.process.wait()
        for line in hand.lines:
            with contextlib.suppress(OSError):  # what was not sent goes nowhere
                line.close()


def threads_each(jobs: int) -> int:
    """The cores shared out, at least one to each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // jobs)


def visible_gpus(count: int) -> list[str]:
    """How processes are told of each GPU: as the variable of this process has them, else by number."""
    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def serve(do: Callable[[Any], Any]) -> None:
    """A process's life: a line of JSON in, one out. Ctrl-C reaches every process; the one that began it ends it.

    What is printed meanwhile goes to stderr, so that outcomes have stdout to themselves. The line of tasks closes when
    the parent ends, be it by `kill -9`: then this process ends at once, whatever it is at.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outcomes = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tasks: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    try:
        while True:
            outcomes.write(json.dumps(do(json.loads(tasks.get()))).encode() + b"\n")
            outcomes.flush()
    except BaseException:  # noqa: BLE001 - whatever it was is told; a clean end would wait for the thread that listens
        traceback.print_exc()
        os._exit(1)


def _listen(tasks: queue.Queue[bytes]) -> None:
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(1)
