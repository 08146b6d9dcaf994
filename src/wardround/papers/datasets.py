"""The papers' data sets: where each is looked for, how it gets there, and what may stand in for it."""

from __future__ import annotations

import hashlib
import tomllib
from importlib import resources
from pathlib import Path

from pydantic import Field

from wardround.data.download import MD5
from wardround.papers.schema import Closed
from wardround.settings import checked


class DataSet(Closed):
    """One set; `file` is its name in the data folder."""

    title: str
    file: str
    get: str
    page: str
    size: int | None = None
    places: bool = False
    stand_ins: dict[str, str] = Field(default_factory=dict)

    def missing(self, folder: Path) -> str:
        """What is missing and how to get it; nothing where it is there."""
        path = folder / self.file
        return "" if path.exists() else f"{path} is missing: {self.get} ({self.page})"


def _read() -> dict[str, DataSet]:
    text = (resources.files("wardround.papers") / "sets.toml").read_text(encoding="utf-8")
    return {name: checked(DataSet, tree, name) for name, tree in tomllib.loads(text).items()}


DATASETS = _read()
STAND_INS = {name: words for known in DATASETS.values() for name, words in known.stand_ins.items()}


def stands_for(images: str) -> str:
    """The paper's set that images are, or stand in for."""
    return next((name for name, known in DATASETS.items() if images in known.stand_ins), images)


def is_official(path: Path) -> bool | None:
    """Whether a file is the one that MedMNIST publishes under this name; None where it publishes none."""
    if path.suffix != ".npz" or path.stem not in MD5 or not path.is_file():
        return None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return found == MD5[path.stem][0]
