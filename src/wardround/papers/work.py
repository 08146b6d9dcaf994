"""Working off plans: what is left of them, several at once where asked, as far as the time allows."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wardround.learn.device import find_device
from wardround.papers.cells import Plan
from wardround.papers.jobs import Alone, Crew, Lost, Processes, threads_each, visible_gpus
from wardround.papers.ray_cluster import ray_cluster
from wardround.papers.results import Results
from wardround.papers.runs import Runs
from wardround.papers.worker import COMMAND
from wardround.record.rundir import lock_directory
from wardround.report.values import duration

Say = Callable[[str], None]


@dataclass
class Work:
    """Whatever is left of some plans."""

    runs: Runs
    results: Results
    plans: Sequence[Plan]
    seconds: float | None
    began: float
    jobs: int
    say: Say

    def do(self, crew: Crew[Plan]) -> tuple[int, int]:
        """How many plans are left in the end, and how many of these failed."""
        failed = 0
        todo = [planned for planned in self.plans if not self.results.has(planned)]
        self.runs.clear(self.plans, self.results)
        while (planned := self._next(todo, crew)) is not None or crew.busy:
            if planned is not None:
                todo.remove(planned)
                crew.start(planned)
                continue
            ended, outcome = crew.wait()
            if isinstance(outcome, Lost | str):
                failed += 1
                said = f"failed: {outcome}" if isinstance(outcome, str) else f"lost: {outcome.why}"
            else:
                found, data = outcome
                self.results.add(ended, {**found, "jobs": self.jobs}, data)
                said = f"{found['seconds']:.0f} s"
            self.say(f"{ended.cell.folder}, {ended.label}: {said}{self._outlook([*todo, *crew.busy])}")
            self.runs.clear(self.plans, self.results)
        return len(todo) + failed, failed

    def _next(self, todo: Sequence[Plan], crew: Crew[Plan]) -> Plan | None:
        """The first that can begin now; none where it would not end in time."""
        if not crew.has_room:
            return None
        taken = {self.runs.apart(planned) for planned in crew.busy}
        planned = next((planned for planned in todo if self.runs.apart(planned) not in taken), None)
        if planned is None or self.seconds is None:
            return planned
        ends = time.monotonic() - self.began + self.runs.needs(planned, self.results.entries)
        return planned if ends <= self.seconds else None

    def _outlook(self, left: Sequence[Plan]) -> str:
        """What is left, and how long it may take, where earlier entries tell."""
        if not left:
            return ""
        needs = [self.runs.needs(planned, self.results.entries) for planned in left]
        known = [seconds for seconds in needs if seconds]
        if not known:
            return f"; {len(left)} left"
        unknown = f", and {len(left) - len(known)} of unknown length" if len(known) < len(left) else ""
        return f"; {len(left)} left, about {duration(sum(known) / min(self.jobs, len(left)))}{unknown}"


@dataclass(frozen=True)
class Means:
    """With what plans are worked off."""

    device: str = "auto"
    folder: Path | None = None  # of unfinished runs; None: a temporary one
    seconds: float | None = None  # start no entry that would not end within so many
    jobs: int = 1
    began: float = field(default_factory=time.monotonic)
    ray: str | None = None  # the address of a Ray cluster, or `local`

    def finish(self, runs: type[Runs], results: Results, plans: Sequence[Plan], say: Say) -> tuple[int, int]:
        """Do what is left; how many plans are left then, and how many of these failed. On a CPU, jobs share cores."""
        device = find_device(self.device)
        shared = self.jobs > 1 and not device.is_cuda and self.ray is None
        with contextlib.ExitStack() as stack:
            folder = self.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_directory(folder))
            does = runs(folder, threads_each(self.jobs) if shared else None)
            crew: Crew[Plan] = Alone(does.finish)
            if self.ray is not None:
                crew = stack.enter_context(ray_cluster(self.ray, does.task, self.jobs, device.is_cuda))
            elif self.jobs > 1:
                crew = stack.enter_context(Processes(COMMAND, does.task, self.jobs, self._gpus()))
            return Work(does, results, plans, self.seconds, self.began, self.jobs, say).do(crew)

    def _gpus(self) -> list[str]:
        """The GPUs that are shared out: all, where none is named and there are several."""
        import torch

        count = torch.cuda.device_count()
        return visible_gpus(count) if count > 1 and self.device in ("auto", "cuda") else []
