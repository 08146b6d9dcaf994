"""Steps that recur a thousand times: on a GPU captured once in a CUDA graph and replayed.

Small networks are bound by kernel launches, not by arithmetic; a replay launches all kernels of a step at once. What is
captured must be a function of tensors that changes its state in place: no Python number that changes, no wait for the
device, always the same shapes. The first calls run as they are and are at once the warm-up that capture needs, so
no step is taken twice and none is lost. On a CPU a step is simply called.

A synthesis lets cuDNN try out algorithms (a seventh faster on an H200), so on a GPU its last bits may differ from one
process to the next. Training does not (`device.py`): the same sites send the same models whenever they are trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from wardround.learn.device import Device, worker_pool

T = TypeVar("T")
WARM_UP_CALLS = 3


class Replay(Generic[T]):
    """A step of tensors; call it as the function it was made from.

    On a GPU the result lives in the graph's memory and is overwritten by the next call.
    """

    def __init__(self, step: Callable[..., T], device: torch.device) -> None:
        self.step, self.device = step, device
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.result: T
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, *inputs: Tensor) -> T:
        """One step."""
        self.start(*inputs)
        return self.wait()

    def start(self, *inputs: Tensor) -> None:
        """Begin a step on a stream of its own; until `wait`, others may begin theirs and run beside it."""
        if self.stream is None:
            self.result = self.step(*inputs)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for given in inputs:
            given.record_stream(self.stream)  # the caller may let go of it before the step has read it
        with torch.cuda.stream(self.stream):
            self._run(inputs)

    def wait(self) -> T:
        """The result of the step that was started."""
        self.join()
        return self.result

    def join(self) -> None:
        """What follows on the caller's stream follows all steps that were started."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _run(self, inputs: tuple[Tensor, ...]) -> None:
        self.calls += 1
        if self.calls <= WARM_UP_CALLS:
            with _trying_algorithms():
                self.result = self.step(*inputs)
            return
        if self.graph is None:
            self._capture(inputs)
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()  # type: ignore[union-attr]

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(given.clone() for given in inputs)
        self.graph = torch.cuda.CUDAGraph()
        with (
            _trying_algorithms(),
            torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"),
        ):
            self.result = self.step(*self.inputs)


@contextmanager
def _trying_algorithms() -> Iterator[None]:
    """Let cuDNN try out what is fastest, and torch not warn of parameters that were made on another stream.

    They were, and every stream waits for the one before it: captured steps are tested to be the same as one by one.
    """
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        yield


def each(functions: Sequence[Callable[[], T]]) -> list[T]:
    """What independent pieces of work give: side by side in a graph that is being captured, else in turn."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return [function() for function in functions]
    main = torch.cuda.current_stream()
    streams, found = [torch.cuda.Stream() for _ in functions], []  # type: ignore[no-untyped-call]
    for function, stream in zip(functions, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            found.append(function())
    for stream in streams:
        main.wait_stream(stream)
    return found


def together(starts: Sequence[Callable[[], None]], device: Device) -> None:
    """Begin independent steps: on a GPU each on its stream, on a CPU in as many threads as the device has workers.

    On a CPU they are done when this returns, each by one thread, so that the number of workers changes no value.
    """
    if device.is_cuda or device.workers == 1 or len(starts) == 1:
        for start in starts:
            start()
    else:
        list(worker_pool(device.workers).map(lambda start: start(), starts))
