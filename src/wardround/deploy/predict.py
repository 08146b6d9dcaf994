"""A model on images: one row of probabilities for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wardround.deploy.about import ModelRecord
from wardround.deploy.load import Model, open_model
from wardround.deploy.pictures import Failure, Pictures, named
from wardround.progress import NO_PROGRESS, Silent

AT_ONCE = 64  # images in memory


@dataclass(frozen=True)
class Row:
    """What a model says of one image; probabilities are in the order of the model's classes.

    `unfamiliar` says that the image is unlike what the model was trained on; None where the model cannot tell.
    """

    file: str
    predicted: str
    probabilities: tuple[float, ...]
    unfamiliar: bool | None = None


@dataclass
class Predictions:
    """The rows of all images that could be read, in the order named, those that could not, and what to mind."""

    record: ModelRecord
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def predict(
    model_path: Path, images: Sequence[Path], device: str = "auto", progress: Silent = NO_PROGRESS
) -> Predictions:
    """Show images (files, folders, .npz files) to a model (a folder, a .safetensors or an .onnx file)."""
    files = named(images)
    model = open_model(model_path, device)
    found = Predictions(model.record)
    pictures = Pictures(files, model.record.task, progress)
    waiting: list[tuple[str, Tensor]] = []
    for item in pictures:
        if isinstance(item, Failure):
            found.failures.append(item)
            continue
        waiting.append(item)
        if len(waiting) == AT_ONCE:
            _answer(model, waiting, found)
            waiting = []
    _answer(model, waiting, found)
    found.notes.extend(pictures.notes())
    found.notes.extend(_unfamiliar(found))
    return found


def _answer(model: Model, waiting: list[tuple[str, Tensor]], found: Predictions) -> None:
    if not waiting:
        return
    classes = model.record.task.classes
    answers, unfamiliar = model.answer(torch.stack([image for _, image in waiting]))
    marks = [None] * len(waiting) if unfamiliar is None else unfamiliar.tolist()
    for (file, _), answer, mark in zip(waiting, answers, marks, strict=True):
        if not bool(torch.isfinite(answer).all()):
            found.failures.append(Failure(file, f"{file} gets no finite probabilities from this model"))
            continue
        found.rows.append(Row(file, classes[int(answer.argmax())], tuple(answer.tolist()), mark))


def _unfamiliar(found: Predictions) -> Iterator[str]:
    count = sum(row.unfamiliar is True for row in found.rows)
    if count:
        yield f"unfamiliar, unlike what the model was trained on, so not to be relied on: {count} of {len(found.rows)}"
