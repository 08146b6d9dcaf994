"""The directory of a run: made once, owned by one process, never half-written.

    settings.json     what was asked for           events.jsonl   append-only: measures, fits, failures, notes
    partition.json    which image went where       ledger.jsonl   append-only: every bundle that crossed a boundary
    data.json         what each site holds         checkpoint.json, checkpoint/   where to go on from
    environment.json  versions and machine         predictors/    what sites deploy, as safetensors
    result.json, report.html                       gallery.safetensors   images that the method made, if it made any
                                                   networks.safetensors  those that sites deploy in common, if any

`checkpoint.json` is the only file that says what is valid: it names the state files that belong together and how long
the two logs were at that moment. It is replaced in one rename. Whatever a killed process left behind it is cut off or
ignored.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.methods.state import State

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; two runs in one directory are then the user's to avoid
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: before `round`, or (with `answers`) in the middle of absorbing that round's answers."""

    round: int
    state: str
    memories: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    saved: int = 0  # how many states were saved before, this one included
    events_bytes: int = 0
    ledger_bytes: int = 0
    seconds: float = 0.0


class RunDir:
    """A run's directory, open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = Log(path / "events.jsonl")
        self.ledger = Log(path / "ledger.jsonl")

    @staticmethod
    def create(path: Path, fill: Callable[[Path], None]) -> RunDir:
        """A new directory with the opening files that `fill` writes into it.

        Made under another name and renamed, so that it exists whole or not at all; an existing one is refused.
        """
        refuse_existing(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with disk_errors(path):
                shutil.rmtree(part, ignore_errors=True)
                (part / "checkpoint").mkdir(parents=True)
                fill(part)
                part.rename(path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return RunDir(path)

    def checkpoint(self) -> Checkpoint | None:
        """The last committed checkpoint."""
        path = self.path / "checkpoint.json"
        if not path.exists():
            return None
        try:
            return Checkpoint(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise BadInput(f"{path} is damaged ({error}); start the run again in a new directory") from error

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cut both logs back to the checkpoint: what came after it will happen again."""
        self.events.cut(checkpoint.events_bytes if checkpoint else 0)
        self.ledger.cut(checkpoint.ledger_bytes if checkpoint else 0)

    def save(self, name: str, state: State) -> str:
        """Write a state file under `checkpoint/`; valid only once a checkpoint names it."""
        with disk_errors(self.path):
            state.write(self.path / "checkpoint" / name)
        return name

    def load(self, name: str) -> State:
        """Read a state file."""
        return State.from_bytes(self.read(name))

    def read(self, name: str) -> bytes:
        """The bytes of a file under `checkpoint/`."""
        try:
            return (self.path / "checkpoint" / name).read_bytes()
        except OSError as error:
            raise BadInput(f"checkpoint file {name} of {self.path} cannot be read: {error}") from error

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make a checkpoint the valid one and delete the files that it no longer names."""
        with disk_errors(self.path):
            self.events.flush()
            self.ledger.flush()
            write_json(self.path / "checkpoint.json", asdict(checkpoint))
        wanted = {checkpoint.state, *checkpoint.memories.values(), *checkpoint.answers.values()}
        for file in (self.path / "checkpoint").iterdir():
            if file.name not in wanted:
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the logs."""
        self.events.close()
        self.ledger.close()


class Log:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def append(self, row: Mapping[str, Any]) -> None:
        """One more line."""
        with disk_errors(self.path):
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", newline="\n")
            self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def flush(self) -> int:
        """Hand everything to the operating system; the file's length in bytes."""
        if self._file is not None:
            with disk_errors(self.path):
                self._file.flush()
        return self.path.stat().st_size if self.path.exists() else 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every whole line; a last line that a killed process left unfinished is passed over."""
        self.flush()
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes; a file that has fewer lost some that a checkpoint counts on."""
        self.close()
        present = self.path.stat().st_size if self.path.exists() else 0
        if present < length:
            raise BadInput(
                f"{self.path} is damaged: it has {present} of {length} bytes; start the run again in a new directory"
            )
        if present > length:
            with disk_errors(self.path):
                os.truncate(self.path, length)

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            with disk_errors(self.path):
                self._file.close()
            self._file = None


def refuse_existing(path: Path) -> None:
    """A result is never written over."""
    with disk_errors(path):
        exists = path.exists()
    if exists:
        raise BadInput(f"{path} exists already; choose another --out, or go on with: wardround resume {path}")


def write_json(path: Path, record: Any) -> None:
    """A JSON file, whole or not at all."""
    write_atomically(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Hold a directory against other processes."""
    with disk_errors(path):
        file = (path / ".lock").open("a")
    with file:
        if fcntl is not None and not _took(file):
            raise BadInput(f"{path} is in use by another run; wait for its end or choose another --out")
        try:
            yield
        finally:
            if fcntl is not None:  # closing is not enough: a process that another thread forks just now holds it, too
                fcntl.flock(file, fcntl.LOCK_UN)


def _took(file: IO[str]) -> bool:
    """Whether the lock is ours now; asked again, since the board shares it for an instant to see if a run goes on."""
    for wait in (0.02, 0.2, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if wait is not None:
                time.sleep(wait)
        else:
            return True
    return False


def sweep(path: Path) -> None:
    """Delete what a killed process had only begun to write; for whoever holds the directory."""
    for begun in [*path.rglob(".*.part"), *path.rglob(".tmp*")]:  # the second is how safetensors writes
        if begun.is_dir():
            shutil.rmtree(begun, ignore_errors=True)
        else:
            begun.unlink(missing_ok=True)
