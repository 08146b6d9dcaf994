"""From a path to what is known of every image in it: the one pass over a set that a check makes.

Files (a table, a folder) are decoded once, each looked at whole and, where asked, written to the cache that training
reads. A set that is one file already (an `.npz` file, CIFAR-10, drawn cells) is looked at in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wardround.data.cache import Cache
from wardround.data.cifar import is_cifar
from wardround.data.decode import decode
from wardround.data.folder import folder_plan, folder_rows
from wardround.data.greys import Pixels
from wardround.data.imageset import Dataset
from wardround.data.listing import PARTS, Row, plan_rows
from wardround.data.looks import SIDE, Look, as_picture, look_at
from wardround.data.reading import Read, Source, Wish, read_all
from wardround.data.sources import CACHE, load, named_rows, refuse_groups, rows_name
from wardround.errors import BadInput
from wardround.progress import NO_PROGRESS, Silent


@dataclass(frozen=True)
class Item:
    """One image: what a person would call it, its class, part and patient as numbers, and how it looks."""

    name: str
    label: int
    part: int  # a place in `PARTS`
    patient: int  # -1 where nobody says
    look: Look
    source: tuple[int, int]  # file and picture in it, or part and place, for `Inspected.picture`


@dataclass
class Inspected:
    """A whole set. `refused` are files that cannot be read, with the reason; `trouble` is why no run could use it."""

    name: str
    classes: tuple[str, ...]
    how: str
    items: list[Item] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    trouble: str = ""
    cached: str = ""
    sources: Sequence[Source] = ()
    data: Dataset | None = None

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """The class of every image."""
        return np.array([item.label for item in self.items], dtype=np.int64)

    @cached_property
    def parts(self) -> NDArray[np.int64]:
        """The part of every image."""
        return np.array([item.part for item in self.items], dtype=np.int64)

    @cached_property
    def is_test(self) -> NDArray[np.bool_]:
        """Whether an image is tested on; a validation part joins the training part before sites are made."""
        found: NDArray[np.bool_] = self.parts == PARTS.index("test")
        return found

    @cached_property
    def thumbs(self) -> Pixels:
        """16×16 grey pixels of every image."""
        joined = b"".join(item.look.thumb for item in self.items)
        return np.frombuffer(joined, np.uint8).reshape(-1, SIDE, SIDE)

    def picture(self, place: int) -> Pixels:
        """The pixels of an image again, for a page that shows a few."""
        first, second = self.items[place].source
        if self.data is not None:
            part = (self.data.train, self.data.val, self.data.test)[first]
            return as_picture(part.images[second].numpy() if part is not None else np.zeros((1, 1, 1), np.uint8))
        source = self.sources[first]
        return decode(source.path, source.rule)[second]


def inspect(
    path: str,
    data_folder: Path,
    slices: str | None = None,
    size: int | None = None,
    groups: Path | None = None,
    keep: bool = False,
    progress: Silent = NO_PROGRESS,
) -> Inspected:
    """Look at everything once. With `keep` files are cached at `size` on the way, for training to read."""
    place = Path(path)
    rows = named_rows(place, slices)
    is_plain = rows is None and place.is_dir() and not is_cifar(place)
    if is_plain:
        rows = folder_rows(place)  # as rows, so that one bad picture does not hide the others
    if rows is not None:
        refuse_groups(path, groups)
        return _files(place, rows, size, data_folder if keep else None, progress, is_plain)
    if keep:
        raise BadInput(f"{path} is one file already; only folders and tables of files are cached")
    return _arrays(load(path, data_folder, size=size, groups=groups, progress=progress), progress)


def _files(
    path: Path, rows: list[Row], size: int | None, data_folder: Path | None, progress: Silent, is_plain: bool
) -> Inspected:
    name, trouble = rows_name(path), ""
    try:
        plan = folder_plan(path, rows) if is_plain else plan_rows(name, rows)
        classes, labels, parts, order = plan.classes, plan.labels, plan.parts, plan.order
        patients, how = plan.patients, plan.how
    except BadInput as error:
        classes = tuple(sorted({row.label for row in rows}))
        labels = np.array([classes.index(row.label) for row in rows])
        parts, order = np.zeros(len(rows), np.int64), np.arange(len(rows))
        patients, how, trouble = None, "all in one part", str(error)
    sources = [Source(rows[i].path, rows[i].rule) for i in order]
    found = Inspected(name, classes, how, trouble=trouble, sources=sources)
    base = path if path.is_dir() else path.parent

    def noted() -> Iterator[Read]:
        wish = Wish(size, hashed=data_folder is not None, looked_at=True, pixels=data_folder is not None)
        with progress.task(f"checking {name}", len(sources)) as advance:
            for number, read in enumerate(read_all(sources, wish)):
                row = order[number]
                shown = _relative(rows[row].path, base)
                if read.error:
                    whole = str(rows[row].path)
                    found.refused.append((shown, read.error.removeprefix(whole).strip(" :").replace(whole, shown)))
                for picture, look in enumerate(read.looks):
                    label = shown if len(read.looks) == 1 else f"{shown} [{picture + 1}]"
                    patient = -1 if patients is None else int(patients[row])
                    found.items.append(Item(label, int(labels[row]), int(parts[row]), patient, look, (number, picture)))
                yield read
                advance()

    reads = noted()
    if data_folder is not None:
        try:
            Cache(name, sources, size, data_folder / CACHE).fill(reads)
            found.cached = f"cached in {data_folder / CACHE}"
        except BadInput as error:
            found.cached = f"not cached: {error}"
    for _ in reads:
        pass
    return found


def _relative(path: Path, base: Path) -> str:
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def _arrays(data: Dataset, progress: Silent) -> Inspected:
    found = Inspected(data.name, data.train.classes, data.provenance, data=data)
    for number, part in enumerate((data.train, data.val, data.test)):
        if part is None:
            continue
        for place in progress.track(range(len(part)), f"checking {PARTS[number]}"):
            patient = -1 if part.patients is None else int(part.patients[place])
            look = look_at(as_picture(part.images[place].numpy()), 8)
            label = int(part.labels[place])
            found.items.append(Item(f"{PARTS[number]} {place}", label, number, patient, look, (number, place)))
    return found
