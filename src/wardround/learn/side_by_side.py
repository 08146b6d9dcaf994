"""Many fits at once: threads on a CPU, streams on a GPU. Results never depend on how many run together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed, wait
from contextlib import ExitStack, suppress

import torch

from wardround.errors import Diverged, RunFailed, SiteDiverged, SiteFailed
from wardround.learn.captured import CapturedSteps
from wardround.learn.device import Device, worker_pool
from wardround.learn.fit import Fit, Fitted, Objective
from wardround.learn.trainer import Trainer, batch_bounds, skip_reason, train_one
from wardround.models import spec_layout

Outcome = Fitted | SiteFailed


def count_steps(fit: Fit) -> int:
    """How many optimiser steps a fit takes, for progress."""
    if skip_reason(fit):
        return 0
    return fit.recipe.epochs * len(batch_bounds(len(fit.data), fit.recipe.batch, spec_layout(fit.spec).has_batch_norm))


def train_many(fits: list[Fit], device: Device, on_step: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Train every fit; a diverged one comes back as the `SiteFailed` it raised, and spoils no other."""
    if device.is_cuda:
        return [
            outcome
            for start in range(0, len(fits), device.workers)
            for outcome in _as_many_as_fit(fits[start : start + device.workers], device.torch, on_step)
        ]
    if len(fits) == 1 or device.workers == 1:
        return [_outcome(fit, device.torch, on_step) for fit in fits]
    return _on_threads(fits, device, on_step)


def all_fitted(outcomes: Iterable[Outcome]) -> list[Fitted]:
    """What training for the coordinator itself came to: there is no other site to go on with."""
    found = []
    for outcome in outcomes:
        if isinstance(outcome, SiteFailed):
            raise (Diverged if isinstance(outcome, SiteDiverged) else RunFailed)(str(outcome))
        found.append(outcome)
    return found


def _outcome(fit: Fit, device: torch.device, on_step: Callable[[], None]) -> Outcome:
    try:
        return train_one(fit, device, on_step)
    except SiteFailed as failure:
        return failure


class _Stopped(Exception):
    """The main thread was interrupted; the workers end at their next step."""


def _on_threads(fits: list[Fit], device: Device, on_step: Callable[[], None]) -> list[Outcome]:
    stop = threading.Event()

    def step() -> None:
        if stop.is_set():
            raise _Stopped
        on_step()

    # The largest first: a long fit that starts last would leave the other workers idle.
    order = sorted(range(len(fits)), key=lambda i: -count_steps(fits[i]))
    pool = worker_pool(device.workers)
    futures = {i: pool.submit(_outcome, fits[i], device.torch, step) for i in order}
    try:
        for future in as_completed(futures.values()):
            future.result()  # a fault in any fit ends the others now, not when their turn comes
        return [futures[i].result() for i in range(len(fits))]
    except BaseException:
        stop.set()
        for future in futures.values():
            future.cancel()
        wait(futures.values())
        raise


def _as_many_as_fit(fits: list[Fit], device: torch.device, on_step: Callable[[], None]) -> list[Outcome]:
    """All at once, or by halves where the GPU's memory does not hold them: then all begin anew, objectives too."""
    untouched = [_attributes(fit.objective) for fit in fits]
    with suppress(torch.OutOfMemoryError):
        return _on_streams(fits, device, on_step)
    for fit, attributes in zip(fits, untouched, strict=True):
        vars(fit.objective).clear()
        vars(fit.objective).update(attributes)
    torch.cuda.empty_cache()
    if len(fits) == 1:
        return [too_large(fits[0])]
    half = len(fits) // 2
    return [*_as_many_as_fit(fits[:half], device, on_step), *_as_many_as_fit(fits[half:], device, on_step)]


def _attributes(objective: Objective) -> dict[str, object]:
    """What an objective is before its fit; tensors that it trains are copies, but draws advance where they are."""
    return {n: v.clone_state() if isinstance(v, torch.Generator) else v for n, v in vars(objective).items()}


def too_large(fit: Fit) -> SiteFailed:
    """What a fit that the GPU's memory does not hold comes to."""
    what = "use train.checkpointing=true, a smaller train.batch or model.width"
    return SiteFailed(f"the GPU's memory is too small for {fit.label}; {what}")


def _on_streams(fits: list[Fit], device: torch.device, on_step: Callable[[], None]) -> list[Outcome]:
    """One stream per fit, one host thread that steps them in turn; the device overlaps their kernels."""
    began = time.perf_counter()
    outcomes: dict[int, Outcome] = {}
    with torch.cuda.device(device), ExitStack() as borrowed:
        runs: dict[int, tuple[Trainer, Iterator[None], torch.cuda.Stream]] = {}
        for i, fit in enumerate(fits):
            reason = skip_reason(fit)
            if reason:
                outcomes[i] = Fitted(dict(fit.start), 0, (), 0, 0.0, reason)
                continue
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                trainer = Trainer(fit, device, borrowed)
            captured = CapturedSteps(trainer) if fit.objective.capturable and trainer.is_resident else None
            runs[i] = (trainer, trainer.steps(captured), stream)
        active = dict(runs)
        while active:
            for i in list(active):
                _, steps, stream = active[i]
                with torch.cuda.stream(stream):
                    if next(steps, "end") == "end":
                        del active[i]
                    else:
                        on_step()
        torch.cuda.synchronize()
        for i, (trainer, _, _) in runs.items():
            try:
                outcomes[i] = trainer.result(time.perf_counter() - began)
            except SiteFailed as failure:
                outcomes[i] = failure
    return [outcomes[i] for i in range(len(fits))]
