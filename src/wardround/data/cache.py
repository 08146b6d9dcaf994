"""Pictures of many files as one tensor: in memory where they fit, else in a cache that is built once.

A cache is a folder of two files: `images.u8`, the pixels (n, channels, side, side) and nothing else, and `index.jsonl`:
a line with the format and the shape, then one for each source with the hashes of the file and of its pixels. No file
name is in it, since names may be of patients. While it is built it is called `KEY.part`; a line is written after its
pixels, so that a build that was killed goes on behind the last whole line. It becomes `KEY` in one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from wardround.data.decode import decode
from wardround.data.greys import Pixels
from wardround.data.mapped import map_file
from wardround.data.reading import Read, Source, Wish, read_all
from wardround.errors import BadInput
from wardround.files import disk_errors
from wardround.progress import NO_PROGRESS, Silent
from wardround.tensorfile import canonical

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; two builds of one cache at once are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

FORMAT = "wardround image cache 1"
IMAGES, INDEX = "images.u8", "index.jsonl"
IN_MEMORY = 2**28  # bytes of pixels up to which a set is decoded anew each time, and nothing is written


@dataclass(frozen=True)
class Entry:
    """A line of the index."""

    stamps: list[list[int]]
    source_sha256: str
    images: int
    pixels_sha256: str

    def __post_init__(self) -> None:
        pairs = all(len(stamp) == 2 and all(type(number) is int for number in stamp) for stamp in self.stamps)
        if type(self.images) is not int or self.images < 1 or not pairs:
            raise ValueError("no line that this module wrote")

    def is_of(self, source: Source) -> bool:
        """Whether the source is what it was: the same length and time, or the same content."""
        try:
            now = source.stamps()
            same_lengths = [length for length, _ in now] == [length for length, _ in self.stamps]
            return now == self.stamps or (same_lengths and source.sha256() == self.source_sha256)
        except OSError:
            return False


class _Colour(Exception):
    """A colour picture came after grey ones, so all must be colour."""


def read_images(
    name: str, sources: Sequence[Source], size: int | None, folder: Path | None, progress: Silent, most: int = IN_MEMORY
) -> tuple[Tensor, list[int]]:
    """All pictures, uint8 `(n, channels, side, side)`, and how many each source gave.

    Grey if every picture is grey, else colour. Without `size` all must be squares of one size. Where there is a
    `folder`, sets of more than `most` bytes are kept in a cache in it, and come as a mapped file; so do those that a
    check has cached.
    """
    if size is not None and size < 1:
        raise BadInput(f"pictures cannot be resized to {size} pixels; choose a size such as 28 or 64")
    cache = None if folder is None else Cache(name, sources, size, folder)
    if cache is None or not (cache.done.is_dir() or _expected(sources, size) > most):
        return _in_memory(name, sources, size, progress)
    return cache.tensor(progress)


def _expected(sources: Sequence[Source], size: int | None) -> int:
    """Bytes of pixels, if all sources are like the first."""
    return len(sources) * sum(picture.size for picture in decode(sources[0].path, sources[0].rule, size))


def _in_memory(name: str, sources: Sequence[Source], size: int | None, progress: Silent) -> tuple[Tensor, list[int]]:
    with progress.task(f"reading {name}", len(sources)) as advance:
        found = []
        for read in read_all(sources, Wish(size)):
            found.append(_sure(read).pictures)
            advance()
    counts = [len(some) for some in found]
    side = found[0][0].shape[0]
    channels = 3 if any(picture.ndim == 3 for some in found for picture in some) else 1
    stack = np.empty((sum(counts), channels, side, side), np.uint8)
    place = 0
    for source, some in zip(sources, found, strict=True):
        for picture in some:
            stack[place] = _channels_first(source, picture, side, channels)
            place += 1
        some.clear()  # or all images would be in memory twice
    return torch.from_numpy(stack), counts


def _sure(read: Read) -> Read:
    if read.error:
        raise BadInput(read.error)
    return read


def _channels_first(source: Source, picture: Pixels, side: int, channels: int) -> Pixels:
    if picture.shape[:2] != (side, side):
        height, width = picture.shape[:2]
        wanted = f"{side}x{side} as the first" if height == width else "a square"
        raise BadInput(
            f"{source.path} is {width}x{height}, not {wanted}; set data.size, such as 64, to cut and resize all to one "
            "square"
        )
    if picture.ndim == 2:
        return np.broadcast_to(picture, (channels, side, side))
    if channels == 1:
        raise _Colour
    return np.moveaxis(picture, 2, 0)


class Cache:
    """The cache of these sources at this size; which one it is follows from their paths and rules."""

    def __init__(self, name: str, sources: Sequence[Source], size: int | None, folder: Path) -> None:
        self.name, self.sources, self.size = name, sources, size
        listed = [[str(s.path.resolve()), s.rule and [s.rule.step, s.rule.plane]] for s in sources]
        key = hashlib.sha256(canonical({"sources": listed, "size": size}).encode()).hexdigest()[:24]
        self.done, self.part = folder / key, folder / f"{key}.part"

    def tensor(self, progress: Silent) -> tuple[Tensor, list[int]]:
        """The pictures as a mapped file, built or finished first where that is needed; and how many of each source."""
        with disk_errors(self.done):
            self.done.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self.done.with_suffix(".lock")):
                shape, kept = self._valid(self.done, progress)
                if len(kept) < len(self.sources):
                    shape, kept = self._build(progress)
        counts = [entry.images for entry in kept]
        return map_file(self.done / IMAGES, (sum(counts), *shape)), counts

    def _build(self, progress: Silent) -> tuple[tuple[int, ...], list[Entry]]:
        progress.say(f"{self.name} is kept as 8-bit images in {self.done}, so that it need not fit into memory")
        shape, kept = self._valid(self.part, progress)
        shape = shape or self._shape_of_first()
        wish = Wish(self.size, hashed=True)
        try:
            self._extend(shape, kept, read_all(self.sources[len(kept) :], wish), progress)
        except _Colour:
            shape, kept = (3, *shape[1:]), []
            self._extend(shape, kept, read_all(self.sources, wish), progress)
        self._finish()
        return shape, kept

    def fill(self, reads: Iterator[Read]) -> None:
        """Build it of what is read anyway, of all sources, in their order and at its size, with hashes."""
        with disk_errors(self.done):
            self.done.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self.done.with_suffix(".lock")):
                first = _sure(next(reads))
                try:
                    self._extend(_shape(first.pictures[0]), [], chain([first], reads))
                except _Colour:
                    raise BadInput("colour pictures came after grey ones; a run that reads the set builds it") from None
                self._finish()

    def _finish(self) -> None:
        shutil.rmtree(self.done, ignore_errors=True)  # out of date; whoever still has it mapped keeps it
        self.part.rename(self.done)

    def _shape_of_first(self) -> tuple[int, ...]:
        return _shape(decode(self.sources[0].path, self.sources[0].rule, self.size)[0])

    def _extend(
        self, shape: tuple[int, ...], kept: list[Entry], reads: Iterable[Read], progress: Silent = NO_PROGRESS
    ) -> None:
        """Add what is missing behind the entries that hold, to the files and to `kept`."""
        self._cut(shape, kept)
        with (
            (self.part / IMAGES).open("ab") as images,
            (self.part / INDEX).open("ab") as index,
            progress.task(f"caching {self.name}", len(self.sources), len(kept)) as advance,
        ):
            for source, read in zip(self.sources[len(kept) :], reads, strict=True):
                kept.append(self._add(source, _sure(read), shape, images, index))
                advance()
            for file in (images, index):
                os.fsync(file.fileno())

    def _add(self, source: Source, read: Read, shape: tuple[int, ...], images: BinaryIO, index: BinaryIO) -> Entry:
        digest = hashlib.sha256()
        for picture in read.pictures:
            pixels = np.ascontiguousarray(_channels_first(source, picture, shape[1], shape[0]))
            digest.update(pixels.data)
            images.write(pixels.data)
        images.flush()
        entry = Entry(read.stamps, read.sha256, len(read.pictures), digest.hexdigest())
        index.write(_line(asdict(entry)))
        index.flush()
        return entry

    def _cut(self, shape: tuple[int, ...], kept: Sequence[Entry]) -> None:
        """Only what holds stays: the index is written again, the pixels are cut off behind it."""
        self.part.mkdir(exist_ok=True, mode=0o700)
        lines = [{"format": FORMAT, "shape": list(shape)}, *map(asdict, kept)]
        with (self.part / IMAGES).open("ab") as images:
            images.truncate(sum(entry.images for entry in kept) * int(np.prod(shape)))
        (self.part / INDEX).write_bytes(b"".join(map(_line, lines)))

    def _valid(self, place: Path, progress: Silent) -> tuple[tuple[int, ...], list[Entry]]:
        """The shape and the entries from the first on whose source and whose pixels are what the index says."""
        shape, listed = _read_index(place / INDEX)
        kept: list[Entry] = []
        if listed:
            with (place / IMAGES).open("rb") as images:
                pairs = list(zip(self.sources, listed, strict=False))
                for source, entry in progress.track(pairs, f"checking {self.name}"):
                    pixels = images.read(entry.images * int(np.prod(shape)))
                    if hashlib.sha256(pixels).hexdigest() != entry.pixels_sha256 or not entry.is_of(source):
                        break
                    kept.append(entry)
        return (shape, kept) if kept else ((), [])


def _shape(picture: Pixels) -> tuple[int, ...]:
    return (3 if picture.ndim == 3 else 1, picture.shape[0], picture.shape[0])


def _read_index(path: Path) -> tuple[tuple[int, ...], list[Entry]]:
    """The shape and the entries; a line that a kill cut short ends them, another version's format is refused."""
    try:
        first, *others = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return (), []
    try:
        head = json.loads(first)
        shape = tuple(int(side) for side in head["shape"])
    except (ValueError, TypeError, KeyError):
        return (), []
    if head.get("format") != FORMAT:
        raise BadInput(
            f"{path.parent} is a cache of another version ({head.get('format')!r}); delete it to build it anew"
        )
    found: list[Entry] = []
    for line in others:
        try:
            found.append(Entry(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return shape, found


def _line(record: Any) -> bytes:
    return canonical(record).encode() + b"\n"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process builds; another that needs the same cache waits, and finds it finished."""
    with path.open("a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
