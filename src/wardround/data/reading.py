"""Many files decoded in their order, several at a time where there are many.

Decoding is mostly Python, so threads would wait for each other: it is done by processes of `decoder.py`, which are told
of files by lines of JSON and answer with a line of JSON and the pixels as they are. Nothing is pickled, and a script
that reads images needs no guard around its main part. Which process decoded a file changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from wardround.data.decode import decode_whole, fitted
from wardround.data.greys import Pixels
from wardround.data.looks import Look, look_at
from wardround.data.picture import entries
from wardround.data.slices import SliceRule
from wardround.errors import BadInput

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WORTH_PROCESSES = 64  # sources: fewer are decoded sooner than a process starts
MOST_PROCESSES = 8
PIPE = 2**20  # bytes; a pipe's 64 KiB would take a picture in pieces
AHEAD = 4  # sources that each process knows of at once


@dataclass(frozen=True)
class Source:
    """A file, or the folder of a series, and which of its pictures are used."""

    path: Path
    rule: SliceRule | None = None

    def files(self) -> list[Path]:
        """What has to be the same for the pictures to be."""
        return entries(self.path) if self.path.is_dir() else [self.path]

    def stamps(self) -> list[list[int]]:
        """Length and time of each file: a quick look at whether it is still the same."""
        return [[stat.st_size, stat.st_mtime_ns] for stat in (file.stat() for file in self.files())]

    def sha256(self) -> str:
        """A hash of the files' content."""
        digest = hashlib.sha256()
        for file in self.files():
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class Wish:
    """What is wanted of each source: its pictures at a size (None: whole), a hash of its files, a look at each."""

    size: int | None = None
    hashed: bool = False
    looked_at: bool = False
    pixels: bool = True


@dataclass(frozen=True)
class Read:
    """What came of one source. Where it cannot be read, `error` says why, and the rest is empty."""

    pictures: list[Pixels]
    stamps: list[list[int]]
    sha256: str
    looks: list[Look]
    error: str = ""


def read_one(source: Source, wish: Wish) -> Read:
    """Decode one source here and now."""
    try:
        stamps = source.stamps() if source.path.exists() else []
        found = decode_whole(source.path, source.rule)
        looks = [look_at(picture, found.bits) for picture in found.pictures] if wish.looked_at else []
        kept = found.pictures if wish.pixels else []
        pictures = kept if wish.size is None else [fitted(picture, wish.size) for picture in kept]
        return Read(pictures, stamps, source.sha256() if wish.hashed else "", looks)
    except BadInput as error:
        return Read([], [], "", [], str(error))
    except OSError as error:
        return Read([], [], "", [], f"{source.path} cannot be read ({error.strerror}); check the path")


def read_all(sources: Sequence[Source], wish: Wish, processes: int | None = None) -> Iterator[Read]:
    """What comes of every source, in their order."""
    count = min(_cores(), MOST_PROCESSES) if processes is None else processes
    if len(sources) < WORTH_PROCESSES or count < 2:
        for source in sources:
            yield read_one(source, wish)
        return
    decoders = [Decoder(wish) for _ in range(count)]
    try:
        asked = iter(enumerate(sources))
        for place, source in islice(asked, count * AHEAD):
            decoders[place % count].ask(source)
        for place, source in enumerate(sources):
            yield decoders[place % count].answer(source)
            for later, waiting in islice(asked, 1):
                decoders[later % count].ask(waiting)
    finally:
        for decoder in decoders:
            decoder.end()


class Decoder:
    """A process that decodes."""

    def __init__(self, wish: Wish) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - this Python, this package
            [sys.executable, "-m", "wardround.data.decoder", json.dumps(vars(wish))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # a picture at once, where the system allows it
                fcntl.fcntl(_pipe(self.process.stdout).fileno(), fcntl.F_SETPIPE_SZ, PIPE)

    def ask(self, source: Source) -> None:
        """Name the next source; the answer comes later."""
        rule = source.rule and [source.rule.step, source.rule.plane]
        with contextlib.suppress(BrokenPipeError):  # the answer will say so
            _pipe(self.process.stdin).write(json.dumps([str(source.path), rule]).encode() + b"\n")
            _pipe(self.process.stdin).flush()

    def answer(self, source: Source) -> Read:
        """The answer to the earliest question that has none yet."""
        line = _pipe(self.process.stdout).readline()
        if not line.endswith(b"\n"):
            raise BadInput(f"{source.path} made its decoder fall over (too large, or damaged?); move it out")
        return receive(json.loads(line), _pipe(self.process.stdout))

    def end(self) -> None:
        """Let it go, whatever it is at."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _pipe(pipe).close()
        self.process.wait()


def send(read: Read, out: BinaryIO) -> None:
    """Write an answer: a line about it, then the pixels."""
    head = {
        "shapes": [picture.shape for picture in read.pictures],
        "stamps": read.stamps,
        "sha256": read.sha256,
        "looks": [look.as_json() for look in read.looks],
        "error": read.error,
    }
    out.write(json.dumps(head).encode() + b"\n")
    for picture in read.pictures:
        out.write(np.ascontiguousarray(picture).data)
    out.flush()


def receive(head: dict[str, Any], rest: BinaryIO) -> Read:
    """Read what `send` wrote behind its line."""
    pictures = []
    for shape in head["shapes"]:
        pixels = rest.read(int(np.prod(shape)))
        pictures.append(np.frombuffer(pixels, np.uint8).reshape(shape))
    looks = [Look.from_json(look) for look in head["looks"]]
    return Read(pictures, head["stamps"], head["sha256"], looks, head["error"])


def _pipe(pipe: Any) -> BinaryIO:
    return pipe  # type: ignore[no-any-return]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
