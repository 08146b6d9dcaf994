"""Files that came from outside: from a stick, by mail, out of another hospital.

A name in an inbox proves nothing about what is behind it. Only plain files are opened (a link could lead anywhere, a
pipe would wait for ever, a device has no end), and they are read in steps whose size the reader chose, so that neither
a name nor a length in a file can make the program hang or take memory that the file itself does not have.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from wardround.errors import BadInput

STEP = 2**20  # bytes that streaming holds at a time
# Not waiting for a pipe and not following a link guard the moment between looking and opening; Windows has neither.
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


def shown(path: Path) -> str:
    """A path that cannot steer a terminal: whatever is not printable is written as Python would escape it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path))


class OutsideFile:
    """An open plain file, read from front to back."""

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._file, self._left = file, size

    def up_to(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end of the file; never memory for more than the file has."""
        wanted = min(count, self._left)
        try:
            data = self._file.read(wanted)
        except OSError as error:
            raise unreadable(self.name, error) from error
        self._left -= len(data)
        return data

    def take(self, count: int, part: str) -> bytes:
        """Exactly `count` bytes; a file that does not have them is refused."""
        data = self.up_to(count)
        if len(data) < count:
            raise BadInput(f"{self.name} is cut off within its {part}; copy the file again")
        return data

    def stream(self, count: int, part: str) -> Iterator[bytes]:
        """Exactly `count` bytes, in steps."""
        for start in range(0, count, STEP):
            yield self.take(min(STEP, count - start), part)


@contextmanager
def open_outside(path: Path, called: Path | None = None) -> Iterator[OutsideFile]:
    """Open a plain file; anything else is refused without being opened. `called`: what complaints call it."""
    name = shown(called or path)
    try:
        _refuse_unless_plain(name, path.lstat().st_mode)
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:  # ValueError: there is a zero byte in the name
        raise unreadable(name, error) from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _refuse_unless_plain(name, found.st_mode)
        yield OutsideFile(file, name, found.st_size)


def _refuse_unless_plain(name: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise BadInput(f"{name} is a link, which may lead anywhere; give the file itself")
    if not stat.S_ISREG(mode):
        raise BadInput(f"{name} is a folder, a pipe or a device; give a plain file")


def unreadable(name: str, error: OSError | ValueError) -> BadInput:
    """The error for a file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return BadInput(f"cannot read {name}: {reason}; check the path, and that the disk or stick is in order")
