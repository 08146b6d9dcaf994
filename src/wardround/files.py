"""Files that are written whole or not at all, and the disk's refusals in words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wardround.errors import BadInput, RunFailed, WardroundError


@contextmanager
def whole_or_not(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to; what is there at the end of the block becomes `path` in one rename.

    What lies in that place before goes: in a folder from elsewhere it may be a link to any file of this machine.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if os.path.lexists(part):
        part.unlink()
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """All of `data` at `path`, or what was there before."""
    with whole_or_not(path) as part:
        part.write_bytes(data)


def write_for_owner(path: Path, data: bytes) -> None:
    """The same, readable by its owner alone: what shows patients' images."""
    with whole_or_not(path) as part, open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one clear line."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> WardroundError:
    """The error for a place that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(f"the disk is full: {path} could not be written; free some space and try again")
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return BadInput(f"{path} cannot be written ({error.strerror}); choose a folder you may write to")
    return BadInput(f"{path} cannot be written: {error.strerror or error}; choose another place")


def read_text(path: Path, what: str) -> str:
    """The text of a file that a person wrote; `what` names it in complaints."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows' editors put a mark in front
    except OSError as error:
        raise BadInput(f"cannot read {what} {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
