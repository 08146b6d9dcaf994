"""A fit that goes on from its last epoch after a kill, and ends with the very numbers it would have had.

All that training carries from one epoch to the next is the network, what its optimiser remembers, the best epoch so far
and what an objective keeps of its own. Shuffles, augmentation and the learning rate follow from the seed and the number
of the epoch (see `trainer.py`). So these few tensors, saved between two epochs, are the whole of it.

A saved file is gone on from only if it is whole, of this very fit, and written by this version of the program and of
torch. Whatever else is found there counts as nothing: to start over is slower, and never wrong.
"""

from __future__ import annotations

import glob
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wardround import __version__, tensorfile
from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.learn import nets
from wardround.learn.captured import CapturedSteps
from wardround.learn.fit import Fit, Fitted, Objective, weights_hash
from wardround.learn.side_by_side import too_large
from wardround.learn.trainer import Steps, Trainer, optimiser_state, restore_optimiser, skip_reason, train_one

LONG_SAVING_SECONDS = 0.5  # where saving takes longer than this, it is done less often


def train_resumable(
    fit: Fit,
    device: torch.device,
    progress_file: Path,
    on_step: Callable[[], None] = lambda: None,
    every_seconds: float = 10.0,
    keep_finished: bool = False,
    steps: Steps | None = None,
    salt: Sequence[str | int] = (),
) -> Fitted:
    """Train as `train_one` does, but from where `progress_file` stands, and keep that file up to date.

    It is written after an epoch, if the last time is `every_seconds` ago (longer where writing takes long), and deleted
    when the fit is done. Whoever may be killed before the result is safe elsewhere says `keep_finished`: then the file
    holds the last epoch, a second call takes no step, and to delete it is the caller's. One process at a time.
    `steps` may stand in for the trainer's own; `salt` then says all that they depend on beside the fit.
    """
    if skip_reason(fit):
        return train_one(fit, device)  # nothing is trained, by whichever steps
    progress = _Progress(progress_file, progress_key(fit, (device.type, *salt)))
    with ExitStack() as borrowed:
        borrowed.enter_context(_stream_of_its_own(device, fit))
        began = time.monotonic()
        trainer = Trainer(fit, device, borrowed)
        untouched = _fingerprint(vars(fit.objective))
        began -= progress.take_up(trainer)

        def after_epoch() -> None:
            due = progress.due(every_seconds) if trainer.epochs_done < fit.recipe.epochs else keep_finished
            if due and _is_carried(fit.objective, untouched):
                progress.save(trainer, time.monotonic() - began)

        capturable = device.type == "cuda" and fit.objective.capturable and trainer.is_resident and steps is None
        captured = CapturedSteps(trainer) if capturable else None
        for _ in trainer.steps(captured, after_epoch) if steps is None else steps(trainer, after_epoch):
            on_step()
        try:
            return trainer.result(time.monotonic() - began)
        finally:
            if not keep_finished:
                progress_file.unlink(missing_ok=True)


def progress_key(fit: Fit, salt: Sequence[str | int] = ()) -> str:
    """A hash of everything that a fit's result depends on, whether or not other methods may reuse it.

    `salt` tells apart fits that are alike: the study, the site, the round, and which fit of the site's work it is.
    """
    objective = type(fit.objective)
    record = {
        **fit.ingredients(),
        "objective": [objective.__module__, objective.__qualname__, _fingerprint(vars(fit.objective))],
        "teachers": [[asdict(teacher.spec), weights_hash(teacher.weights)] for teacher in fit.teachers],
        "program": [__version__, torch.__version__],
        "salt": list(salt),
    }
    return hashlib.sha256(tensorfile.canonical(record).encode()).hexdigest()


# The file -------------------------------------------------------------------------------------------------------------


class _Progress:
    """How far one fit is, as a file that is written whole or not at all."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.saved_at, self.save_seconds = time.monotonic(), 0.0

    def due(self, every_seconds: float) -> bool:
        """Whether it is time to save again; a large state seldom enough to get on with the work."""
        interval = every_seconds * max(1.0, self.save_seconds / LONG_SAVING_SECONDS)
        return time.monotonic() - self.saved_at >= interval

    def save(self, trainer: Trainer, seconds: float) -> None:
        """The state between two epochs."""
        began = time.monotonic()
        live = {
            "weights": trainer.net.state_dict(),
            "optimiser": optimiser_state(trainer.optimiser),
            "losses": {"epochs": torch.stack(trainer.losses)},
            "best": trainer.best_weights or {},
            "objective": trainer.fit.objective.state(),
        }
        groups = {group: {name: _plain(tensor) for name, tensor in tensors.items()} for group, tensors in live.items()}
        record = {
            "fit": self.key,
            "best_right": int(trainer.best_right),
            "best_epoch": int(trainer.best_epoch),
            "seconds": seconds,
        }
        data = tensorfile.to_bytes(groups, {**record, "sha256": _content_hash(groups, record)})
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, data)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - began

    def take_up(self, trainer: Trainer) -> float:
        """Put a new trainer where the file stands; the seconds that led there, 0 where there is nothing to go on from.

        What a killed process had only begun to write is swept away.
        """
        for begun in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.part"):
            begun.unlink(missing_ok=True)
        found = self._read()
        if found is None:
            return 0.0
        groups, record = found
        nets.load(trainer.net, groups["weights"])
        restore_optimiser(trainer.optimiser, groups.get("optimiser", {}))
        trainer.losses = list(groups["losses"]["epochs"].to(trainer.device))
        trainer.epochs_done = len(trainer.losses)
        trainer.best_right.fill_(record["best_right"])
        trainer.best_epoch.fill_(record["best_epoch"])
        best = groups.get("best")  # in a file tensors are in another order than in the network
        trainer.best_weights = {n: best[n].to(trainer.device) for n in trainer.net.state_dict()} if best else None
        trainer.fit.objective.restore(groups.get("objective", {}))
        return float(record["seconds"])

    def _read(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
        """What is in the file; None where it is absent, damaged or another fit's."""
        try:
            groups, record = tensorfile.from_bytes(self.path.read_bytes())
            expected = record.pop("sha256")
            whole = record["fit"] == self.key and _content_hash(groups, record) == expected
        except (OSError, BadInput, KeyError, ValueError):
            return None
        return (groups, record) if whole else None


def _content_hash(groups: tensorfile.Groups, record: Mapping[str, Any]) -> str | None:
    """Over the tensors and the record: a flipped bit anywhere shows."""
    return _fingerprint([tensorfile.canonical(record), dict(sorted(tensorfile.flatten(groups).items()))])


def _plain(tensor: Tensor) -> Tensor:
    """Its numbers in order, in this machine's own memory; no copy where they already are."""
    return tensor.detach().cpu().contiguous()


# Objectives -----------------------------------------------------------------------------------------------------------


class _Opaque(Exception):
    """A value whose content cannot be told from outside: a function, a network, an optimiser."""


def _is_carried(objective: Objective, untouched: str | None) -> bool:
    """Whether a file holds all that the objective has become: by its own word, or since it has not changed at all."""
    if type(objective).state is not Objective.state:
        return True
    return untouched is not None and _fingerprint(vars(objective)) == untouched


def _fingerprint(value: object) -> str | None:
    """A hash of a value's content; None where some of it is opaque."""
    digest = hashlib.sha256()
    try:
        for part in _content(value):
            digest.update(part)
    except _Opaque:
        return None
    return digest.hexdigest()


def _content(value: object) -> Iterator[bytes | memoryview]:
    """A value as bytes that differ where it does."""
    yield f"|{type(value).__module__}.{type(value).__qualname__}|".encode()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        yield f"{value.dtype}|{tuple(value.shape)}|".encode()
        yield _plain(value).reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, torch.Generator):
        yield from _content(value.get_state())
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _content([(field.name, getattr(value, field.name)) for field in fields(value)])
    elif isinstance(value, Mapping):
        yield from _content(list(value.items()))
    elif isinstance(value, list | tuple):
        yield f"{len(value)}".encode()
        for part in value:
            yield from _content(part)
    else:
        raise _Opaque


# The device -----------------------------------------------------------------------------------------------------------


@contextmanager
def _stream_of_its_own(device: torch.device, fit: Fit) -> Iterator[None]:
    """On a GPU a step can only be captured on a stream that is not the default one."""
    if device.type != "cuda":
        yield
        return
    try:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                yield
    except torch.OutOfMemoryError as error:
        raise too_large(fit) from error
