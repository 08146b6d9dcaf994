"""Training on one machine, a site's or the hub's: one fit after another, none of it lost to a kill.

In-process runs train many sites side by side; here there is one party, and what counts is that a machine that is
switched off at night goes on in the morning.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from wardround.errors import SiteFailed
from wardround.exchange.inprocess import step_together
from wardround.learn.device import Device, one_thread_per_worker
from wardround.learn.fit import Fit, Fitted
from wardround.learn.resumable import train_resumable
from wardround.learn.side_by_side import Outcome, all_fitted, count_steps
from wardround.methods.base import Context, Work
from wardround.progress import NO_PROGRESS, Silent
from wardround.study import Study

SAVE_EVERY_SECONDS = 10.0
T = TypeVar("T")


class Workplace:
    """A device, and a folder that holds how far each fit of the present work is.

    The n-th fit of a work has the n-th file. It stays when the fit is done, so that a work of several fits goes on
    with the one it was stopped in; a file of another fit counts as nothing.
    """

    def __init__(self, folder: Path, device: Device, progress: Silent = NO_PROGRESS) -> None:
        self.folder, self.device, self.progress = folder, device, progress
        self.done = 0
        self.last_loss: float | None = None

    def context(
        self,
        study: Study,
        round: int,
        due: Callable[[], bool] = lambda: False,
        note: Callable[[str], None] = lambda text: None,
    ) -> Context:
        """What a method's questions come with here."""
        return Context(study, round, self.device, self._train_or_fail, self.progress, due, note)

    def do(self, who: str, work: Work[T]) -> T:
        """A site's work to its end; a `SiteFailed` says why it has none."""
        self.done = 0
        with one_thread_per_worker():
            outcome = step_together({who: work}, self._train_all)[who]
        if isinstance(outcome, SiteFailed):
            raise outcome
        return outcome

    def clear(self) -> None:
        """Forget every fit: what they were for is stored."""
        self.done = 0
        shutil.rmtree(self.folder, ignore_errors=True)

    def _train_all(self, fits: list[Fit]) -> list[Outcome]:
        return [self._train(fit) for fit in fits]

    def _train(self, fit: Fit) -> Outcome:
        file = self.folder / f"fit-{self.done}.safetensors"
        self.done += 1
        try:
            with self.progress.task(fit.label, count_steps(fit)) as advance:
                fitted = train_resumable(fit, self.device.torch, file, advance, SAVE_EVERY_SECONDS, keep_finished=True)
        except SiteFailed as failure:
            return failure
        if fitted.losses:
            self.last_loss = fitted.losses[-1]
        return fitted

    def _train_or_fail(self, fits: list[Fit]) -> list[Fitted]:
        return all_fitted(self._train_all(fits))
