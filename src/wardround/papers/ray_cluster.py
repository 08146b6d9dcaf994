"""Cells on a Ray cluster: independent tasks, as many at once as asked, wherever there is room.

The folder of unfinished runs and the images must be at the same paths on every machine, as on a cluster's shared disk.
Only `worker.do` and JSON text travel. A machine that is lost loses the cells that it was at, and nothing else: the same
command goes on with them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wardround.errors import BadInput
from wardround.papers.cells import Plan
from wardround.papers.jobs import Crew, Lost

LOCAL = "local"  # a cluster of this machine alone, for the time of the command


class RayTasks(Crew[Plan]):
    """A cluster that was connected to."""

    def __init__(self, ray: Any, encode: Callable[[Plan], dict[str, Any]], jobs: int, gpus: float) -> None:
        """`gpus` is the share of one that a cell takes."""
        self.ray, self.encode, self.jobs = ray, encode, jobs
        self.begun: dict[Any, Plan] = {}
        self.remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_finish)

    @property
    def busy(self) -> Sequence[Plan]:
        """What the cluster is at."""
        return list(self.begun.values())

    @property
    def has_room(self) -> bool:
        """Whether fewer are begun than may be at once."""
        return len(self.begun) < self.jobs

    def start(self, task: Plan) -> None:
        """Hand it to the cluster."""
        self.begun[self.remote.remote(json.dumps(self.encode(task)))] = task

    def wait(self) -> tuple[Plan, Any]:
        """The first that is done, or that was lost."""
        (ready, *_), _ = self.ray.wait(list(self.begun), num_returns=1)
        task = self.begun.pop(ready)
        try:
            return task, json.loads(self.ray.get(ready))
        except self.ray.exceptions.RayError as error:
            return task, Lost(str(error).strip().splitlines()[-1])


def _finish(task: str) -> str:
    """On the cluster's machine."""
    from wardround.papers.worker import do

    return json.dumps(do(json.loads(task)))


def _gpus(ray: Any) -> float:
    """How many the cluster has."""
    return float(ray.cluster_resources().get("GPU", 0.0))


@contextmanager
def ray_cluster(address: str, encode: Callable[[Plan], dict[str, Any]], jobs: int, cuda: bool) -> Iterator[RayTasks]:
    """A connection for as long as the block lasts. Ray is told to report nothing about its use."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise BadInput("--ray needs Ray; install it: pip install 'wardround[ray]'") from error
    try:
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address == LOCAL else None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise BadInput(f"no Ray cluster answers at {address}: {said}; give its address, or `local`") from error
    try:
        yield RayTasks(ray, encode, jobs, min(1.0, _gpus(ray) / jobs) if cuda else 0.0)
    finally:
        ray.shutdown()
