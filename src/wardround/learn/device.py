"""Which device works, and how many sites train at once on it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from wardround.errors import BadInput

SITES_AT_ONCE_ON_GPU = 10


@dataclass(frozen=True)
class Device:
    """A torch device and the number of sites that train side by side on it.

    On the CPU every worker computes with one thread, so a result does not depend on the number of cores: one process
    thread per site beats two threads within one small network, and gives the same numbers on any machine size.
    """

    torch: torch.device
    workers: int

    @property
    def is_cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.torch.type == "cuda"

    def release(self) -> None:
        """Give back what ended work still holds of a GPU's memory, so that the next run, or a neighbour, has it.

        A captured step and what it belongs to refer to each other, and Python looks for such rings only when it has
        made many objects of its own, however much of the GPU they hold.
        """
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def __str__(self) -> str:
        if self.is_cuda:
            return f"{self.torch} ({torch.cuda.get_device_name(self.torch)})"
        return f"cpu ({self.workers} sites at once)"


def find_device(name: str = "auto", workers: int | None = None) -> Device:
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:1`; a device that is not there is refused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    parsed = re.fullmatch(r"cpu|cuda(?::([0-9]{1,9}))?", name)  # torch reads cuda:256 as cuda:0
    if parsed is None:
        raise BadInput(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
    if name == "cpu":
        return Device(torch.device("cpu"), workers or _cores())
    index, count = int(parsed[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise BadInput(f"device {name!r} is not there ({count} CUDA devices found); use --device cpu")
    _same_every_time()
    return Device(torch.device("cuda", index), workers or SITES_AT_ONCE_ON_GPU)


def _same_every_time() -> None:
    """On a GPU one algorithm for each convolution and product, always, so that training repeats to the bit.

    Left to itself cuDNN may try out several and take what was fastest that day, and they round differently. Measured on
    an H200, training is as fast with what its rules choose, and starts sooner.
    """
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a process first multiplies matrices


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@cache
def worker_pool(workers: int) -> ThreadPoolExecutor:
    """The process's worker threads, started once: threads that come and go leave their memory arenas behind.

    Torch's number of threads belongs to the thread that asks, so each worker sets its own.
    """
    return ThreadPoolExecutor(workers, "wardround", initializer=torch.set_num_threads, initargs=(1,))


@contextlib.contextmanager
def one_thread_per_worker() -> Iterator[None]:
    """Within this block torch computes with one thread per calling thread; the caller's setting comes back after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
