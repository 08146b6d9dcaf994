"""From a predictor to a folder that a hospital can keep: model.safetensors, model.onnx and the model card."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wardround import __version__
from wardround.deploy import onnx_file
from wardround.deploy.about import ModelAbout
from wardround.deploy.card import Card, FileEntry, OnnxCheck, combination, markdown, tells_shares
from wardround.deploy.escape import visible
from wardround.deploy.model_file import check_fit, write_model
from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.learn.device import Device
from wardround.learn.predictor import Predictor
from wardround.streams import Streams

MODEL, ONNX, CARD, CARD_IN_WORDS = "model.safetensors", "model.onnx", "model_card.json", "model_card.md"
TOLERANCE = 1e-4  # of a probability, between the model and its ONNX file
DRAWN, GIVEN = 16, 64  # images of noise, and at most as many given ones, on which the two are compared


@dataclass(frozen=True)
class Exported:
    """What was written, and where."""

    folder: Path
    card: Card

    @property
    def lines(self) -> list[str]:
        """For a person to read: the files, and why one is missing."""
        written = [f"model: {self.folder / name} ({entry.bytes:,} bytes)" for name, entry in self.card.files.items()]
        missing = [f"{ONNX} was not written: {self.card.onnx.not_written}"] if self.card.onnx.not_written else []
        return [visible(line) for line in (*written, f"card: {self.folder / CARD_IN_WORDS}", *missing)]


def export(
    predictor: Predictor, folder: Path, about: ModelAbout, *, made: str, images: Tensor | None = None
) -> Exported:
    """Write a predictor and its card into a folder; what an earlier export left there is replaced.

    `made` is the date for the card. `images` (uint8) are the site's own, on which the ONNX file is compared with the
    model beside noise; none of them is kept. Where ONNX cannot be had, all else is written and the card says why.
    """
    check_fit(predictor, about.task)
    shown = _shown(about, images)
    written: dict[str, FileEntry] = {}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CARD).unlink(missing_ok=True)  # from here to its end this export is known not to be whole
        write_model(folder / MODEL, predictor, about.record)
        written[MODEL] = _entry((folder / MODEL).read_bytes())
        data, check = _as_onnx(predictor, about, shown)
        if data is None:
            (folder / ONNX).unlink(missing_ok=True)
        else:
            write_atomically(folder / ONNX, data)
            written[ONNX] = _entry(data)
        card = Card(
            made=made,
            about=about,
            networks=tuple(member.spec.describe() for member in predictor.members),
            combination=combination(predictor),
            marks=predictor.least_familiar is not None,
            shares=tells_shares(predictor),
            versions=_versions(data is not None),
            files=written,
            onnx=check,
        )
        write_atomically(folder / CARD_IN_WORDS, markdown(card).encode())
        write_atomically(folder / CARD, (card.model_dump_json(indent=1) + "\n").encode())
    return Exported(folder, card)


def _as_onnx(predictor: Predictor, about: ModelAbout, shown: Tensor) -> tuple[bytes | None, OnnxCheck]:
    """The ONNX file's bytes, if it can be made and gives the model's own answers."""
    try:
        data = onnx_file.make_onnx(predictor, about.record)
        expected = predictor.scores(shown, Device(torch.device("cpu"), 1)).softmax(dim=1)
        difference = onnx_file.largest_difference(onnx_file.OnnxModel(data, ONNX), expected, shown)
    except BadInput as error:
        return None, OnnxCheck(not_written=str(error))
    if not difference <= TOLERANCE:
        words = f"its probabilities differ from the model's by {difference:.1e}, more than {TOLERANCE:.0e}"
        return None, OnnxCheck(not_written=words)
    return data, OnnxCheck(difference=difference, images=len(shown))


def _shown(about: ModelAbout, given: Tensor | None) -> Tensor:
    """Noise, black, white, and the first of the given images."""
    shape = (about.task.channels, about.task.size, about.task.size)
    draw = Streams(about.origin.seed).torch("onnx check")
    noise = torch.randint(0, 256, (DRAWN, *shape), generator=draw, dtype=torch.uint8)
    plain = torch.stack([torch.zeros(shape, dtype=torch.uint8), torch.full(shape, 255, dtype=torch.uint8)])
    own = [] if given is None else [given[:GIVEN].cpu()]
    if own and (own[0].dtype != torch.uint8 or tuple(own[0].shape[1:]) != shape):
        raise BadInput(f"images to compare the ONNX file on must be uint8 (n, {', '.join(map(str, shape))})")
    return torch.cat([noise, plain, *own])


def _versions(with_onnx: bool) -> dict[str, str]:
    own = {"wardround": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**own, **(onnx_file.versions() if with_onnx else {})}


def _entry(data: bytes) -> FileEntry:
    return FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
