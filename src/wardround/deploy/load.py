"""A model from where a user says it is: the folder of an export, or one of its two files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from wardround.deploy.about import ModelRecord, parsed
from wardround.deploy.card import Card
from wardround.deploy.export import CARD, MODEL, ONNX
from wardround.deploy.model_file import read_model
from wardround.deploy.onnx_file import OnnxModel
from wardround.errors import BadInput
from wardround.learn.device import Device, find_device
from wardround.learn.predictor import Predictor, member_logits


class Model(Protocol):
    """What can be shown images."""

    @property
    def record(self) -> ModelRecord:
        """What it takes, what it answers, and where it comes from."""

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of uint8 images `(n, channels, size, size)`: probabilities, float32 `(n, classes)`, and which are unfamiliar.

        The latter is bool `(n,)`: unlike what the model was trained on; None where it cannot tell.
        """


@dataclass(frozen=True)
class PredictorModel:
    """A predictor with its record, on a device."""

    record: ModelRecord
    predictor: Predictor
    device: Device

    def answer(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """The softmax of the scores, and what the networks say of the images."""
        logits = member_logits(self.predictor.members, images, self.device)
        scores = self.predictor.scores_of(logits, len(images))
        return scores.softmax(dim=1), self.predictor.unfamiliar(logits)


def open_model(path: Path, device: str = "auto") -> Model:
    """Read and check a model; `device` is for `model.safetensors`, an ONNX file works on the CPU.

    Of a folder the model's own file is taken, and it must be the one that the folder's card was written for: a card
    that speaks of another model is worse than none.
    """
    file = _in_folder(path) if path.is_dir() else path
    suffix = file.suffix.lower()
    if suffix not in (".safetensors", ".onnx"):
        raise BadInput(f"{path} is no model; give the folder of an export, its {MODEL} or its {ONNX}")
    data = _bytes(file)
    if path.is_dir():
        _check_against_card(path / CARD, file.name, data)
    if suffix == ".onnx":
        return OnnxModel(data, str(file))
    return PredictorModel(*read_model(data, str(file)), find_device(device))


def _in_folder(folder: Path) -> Path:
    for name in (MODEL, ONNX):
        if (folder / name).is_file():
            return folder / name
    raise BadInput(f"{folder} holds no {MODEL} and no {ONNX}; give the folder of an export")


def _check_against_card(card_file: Path, name: str, data: bytes) -> None:
    alone = f"export the model again, or give the file {card_file.with_name(name)} itself"
    try:
        tree = json.loads(_bytes(card_file))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{card_file} is not a model card ({error}); {alone}") from error
    card = parsed(Card, tree, str(card_file))
    entry = card.files.get(name)
    if entry is None or entry.sha256 != hashlib.sha256(data).hexdigest():
        raise BadInput(f"{card_file} is not the card of the {name} beside it: their hashes differ; {alone}")


def _bytes(file: Path) -> bytes:
    if file.exists() and not file.is_file():  # a pipe would be waited for without end
        raise BadInput(f"{file} is not a plain file; give the folder of an export, its {MODEL} or its {ONNX}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror}); check the path") from error
