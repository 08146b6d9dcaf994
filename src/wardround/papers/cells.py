"""Where a line of a table is measured, and a line there with all its settings: what the harness works off."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.data.sources import PHANTOMS
from wardround.errors import BadInput
from wardround.settings import Settings, validate
from wardround.tensorfile import canonical

OF_AN_ENTRY = ("name", "method", "seed", "device", "workers", "set", "data.source", "data.folder")
# The settings of a study when results were first kept. One that is not among them came later.
FIRST = {
    "": "name method seed rounds participants init evaluate_every evaluate_trained evaluate_features device workers "
    "policies data model train set",
    "data": "source folder size files sites partition alpha capped classes_per_site min_size by_patient partition_seed "
    "partition_file merge_val val_share test test_share shift shift_strength",
    "model": "name width stem per_site weights",
    "train": "epochs batch optimiser lr momentum weight_decay schedule milestones gamma round_decay clip_norm augment "
    "precision keep",
}


@dataclass(frozen=True)
class Cell:
    """A set of images and whatever else a table varies. `place` is the cell as results name it; `set` is the images."""

    source: Path
    place: dict[str, Any]
    folder: str  # the cell as a folder's name


@dataclass(frozen=True)
class Plan:
    """One line in one cell, with all its settings; `recipe` is the line's without the cell, `id` everything."""

    cell: Cell
    label: str
    settings: Settings
    record: dict[str, Any]
    recipe: str
    id: str

    def as_json(self) -> dict[str, Any]:
        """For another process or another machine."""
        cell = {"source": str(self.cell.source), "place": self.cell.place, "folder": self.cell.folder}
        rest = {"label": self.label, "record": self.record, "recipe": self.recipe, "id": self.id}
        return {"cell": cell, "settings": self.settings.model_dump(mode="json"), **rest}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Plan:
        """What `as_json` gave."""
        cell = Cell(Path(tree["cell"]["source"]), tree["cell"]["place"], tree["cell"]["folder"])
        return cls(cell, tree["label"], validate(tree["settings"]), tree["record"], tree["recipe"], tree["id"])


def at(line: Mapping[str, Any], place: Mapping[str, Any]) -> bool:
    """Whether a line of the results is of this place."""
    return all(line[key] == value for key, value in place.items())


def named(where: Cell, settings: Settings, record: dict[str, Any], study: Mapping[str, Any], images: str) -> Plan:
    """A plan named by everything that its figures depend on; `images` is what the images are known by."""
    recipe = record_hash(record)
    depends = {"study": study, "recipe": recipe, "images": images, **where.place}
    return Plan(where, record["entry"], settings, record, recipe, record_hash(depends))


def study_record(settings: Settings, but: Sequence[str] = ()) -> dict[str, Any]:
    """A study's settings in full, but for what an entry or the machine decides and the keys `but`.

    A setting that came later than the first results is left out at its default, so that those still count.
    """
    found, default = settings.model_dump(mode="json"), Settings().model_dump(mode="json")
    for table, names in FIRST.items():
        here, usual = (tree[table] if table else tree for tree in (found, default))
        for key in here.keys() - names.split():
            if here[key] == usual[key]:
                del here[key]
    for key in (*OF_AN_ENTRY, *but):
        table, _, name = key.rpartition(".")
        del (found[table] if table else found)[name]
    return found


# Images ---------------------------------------------------------------------------------------------------------------


def is_drawn(source: Path) -> bool:
    """Whether images are drawn, as `phantoms` or `phantoms:N`, and not read from a file, whatever that is called."""
    return str(source).partition(":")[0] == PHANTOMS


def images_source(source: Path) -> str:
    """What a study calls the images."""
    return source.name if is_drawn(source) else str(source.resolve())


def images_hash(source: Path) -> str:
    """What the images are known by: a file's content, a folder's files and theirs, or the name of drawn ones.

    A table of files is known by its own content; the run that it begins keeps the hash of the images themselves.
    """
    if is_drawn(source):
        return source.name
    if not source.is_dir():
        return file_hash(source)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return record_hash({str(path.relative_to(source)): file_hash(path) for path in files})


def file_hash(path: Path) -> str:
    """What a file of images is known by."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; check the path") from error


def record_hash(record: Mapping[str, Any]) -> str:
    """A short name for settings."""
    return hashlib.sha256(canonical(record).encode()).hexdigest()[:12]
