"""A folder in which one JSON file says what counts.

A change writes its files under new names first, then replaces the JSON in one rename, then deletes what it no longer
names. So a process that is killed at any moment leaves the folder as it was before the change or after it, and whoever
runs the same command again goes on from there.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

from wardround.errors import BadInput
from wardround.files import disk_errors, whole_or_not
from wardround.record.rundir import lock_directory, sweep, write_json
from wardround.settings import Frozen, checked


class Valid(Frozen, ABC):
    """A record of what counts in a folder."""

    @abstractmethod
    def files(self) -> set[str]:
        """The names of the files that it needs."""


Record = TypeVar("Record", bound=Valid)


class Register(Generic[Record]):
    """The folder, its record, and the files that the record names."""

    def __init__(self, folder: Path, kind: type[Record], file: str) -> None:
        self.folder, self.kind, self.file = folder, kind, folder / file

    def read(self) -> Record | None:
        """The record as it was last committed."""
        if not self.file.exists():
            return None
        try:
            tree = json.loads(self.file.read_text(encoding="utf-8"))
            if not isinstance(tree, dict):
                raise ValueError("it holds no record")
            return checked(self.kind, tree)
        except (OSError, ValueError, BadInput) as error:
            raise BadInput(
                f"{self.file} is damaged ({error}); restore it from a copy, or begin in a new folder"
            ) from error

    def path(self, name: str) -> Path:
        """Where a file that a record names lies; make it here before the record that names it is committed."""
        return self.folder / name

    def bytes_of(self, name: str) -> bytes:
        """The content of a file that the record names."""
        try:
            return self.path(name).read_bytes()
        except OSError as error:
            raise BadInput(f"{self.path(name)} cannot be read: {error.strerror}; restore it from a copy") from error

    def commit(self, record: Record) -> None:
        """Make a record the one that counts, and delete the files that it does not name."""
        with disk_errors(self.folder):
            write_json(self.file, record.model_dump(mode="json"))
            self._prune(record)

    def _prune(self, record: Record) -> None:
        for file in self.folder.iterdir():
            if file.is_file() and file.name not in {*record.files(), self.file.name, ".lock"}:
                file.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder against other processes, without what a killed one left that does not count."""
        with ExitStack() as stack:
            with disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock_directory(self.folder))
            except BadInput as error:
                raise BadInput(f"{self.folder} is in use by another wardround command; wait for its end") from error
            sweep(self.folder)
            record = self.read()
            if record is not None:
                self._prune(record)
            yield


def hand_out(outbox: Path, files: Mapping[str, Path], stale: Collection[str]) -> list[Path]:
    """Copies for somebody to carry away, by the name each gets; parcels whose name is like one of `stale` go.

    One that is there already is left alone, so that a command that is run again changes nothing.
    """
    with disk_errors(outbox):
        outbox.mkdir(parents=True, exist_ok=True)
        sweep(outbox)
        take_back(outbox, stale, files)
        for name, source in files.items():
            target = outbox / name
            if not (target.exists() and filecmp.cmp(source, target, shallow=False)):
                with whole_or_not(target) as part:
                    shutil.copyfile(source, part)
    return [outbox / name for name in files]


def take_back(outbox: Path, stale: Collection[str], but: Collection[str] = ()) -> None:
    """Delete parcels from an outbox whose name is like one of `stale`, but those named in `but`."""
    with disk_errors(outbox):
        for old in {old for pattern in stale for old in outbox.glob(pattern)}:
            if old.name not in but:
                old.unlink()


def utc_now() -> str:
    """The time as parcels and receipts state it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
