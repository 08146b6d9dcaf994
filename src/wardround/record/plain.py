"""Reading what lies in a folder that anyone may have filled: plain files only, bounded, and never past a link.

A run folder may come from another hospital. A link in it could point at any file of this machine, a pipe could keep the
board waiting, and a file of terabytes could fill its memory.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 256 * 1024 * 1024  # bytes: more than any record of a run, and still no trouble to hold
FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class Stamp(NamedTuple):
    """What changes when a file does; enough to tell whether it must be read again."""

    file: int
    changed: int
    size: int


def stamp(path: Path) -> Stamp | None:
    """The stamp of a plain file; None where there is none, or something else in its place."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return Stamp(found.st_ino, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def read(path: Path, offset: int = 0, limit: int = LIMIT) -> bytes | None:
    """A plain file from `offset` on, at most `limit` bytes; None where it cannot be had, or is too large to be ours."""
    try:
        descriptor = os.open(path, FLAGS)
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LIMIT:
            return None
        file.seek(offset)
        return file.read(limit)


def json_object(text: bytes | None) -> dict[str, Any]:
    """A JSON object, empty where it is none."""
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
