"""Answers as they arrive: in memory while they are few, on disk when they are many.

A coordinator of 500 sites must not hold 500 models. Beyond a limit each further answer becomes a file, and reading it
again gives the same tensors; a method that absorbs them one at a time needs memory for one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from wardround.errors import RunFailed
from wardround.exchange.bundle import Bundle

IN_MEMORY_BYTES = 512 * 2**20


class Answers(Mapping[str, Bundle]):
    """Bundles by site, iterated in the order of site names."""

    def __init__(self, in_memory_bytes: int = IN_MEMORY_BYTES) -> None:
        self._room = in_memory_bytes
        self._held: dict[str, Bundle] = {}
        self._spooled: dict[str, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, site: str, bundle: Bundle) -> None:
        """Keep one answer."""
        size = sum(bundle.bytes_by_group.values())
        if size <= self._room:
            self._room -= size
            self._held[site] = bundle
            return
        try:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="wardround-answers-")
            path = Path(self._folder.name) / f"{len(self._spooled):06d}.safetensors"
            bundle.write(path)
        except OSError as error:
            raise RunFailed(
                f"the answer of {site} could not be kept in the temporary folder: {error.strerror}; make room there, "
                "or set TMPDIR to a folder with more"
            ) from error
        self._spooled[site] = path

    def __getitem__(self, site: str) -> Bundle:
        if site in self._held:
            return self._held[site]
        return Bundle.from_bytes(self._spooled[site].read_bytes())

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._held, *self._spooled]))

    def __len__(self) -> int:
        return len(self._held) + len(self._spooled)
