"""Answers as they arrive: in memory while they are few, on disk when they are many.

One answer of every site that was asked, of this round and no other: whatever else arrives is refused by name. A
coordinator of 500 sites must not hold 500 models. Beyond a limit each further answer becomes a file, and reading
it again gives the same tensors; a method that absorbs them one at a time needs memory for one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle, Envelope

IN_MEMORY_BYTES = 512 * 2**20


def refuse_stray(bundle: Bundle, expected: Envelope) -> None:
    """Refuse a bundle that belongs elsewhere: to another site, round, study or method, or of another kind."""
    found = bundle.envelope
    if found == expected:
        return
    if (found.kind, found.site) != (expected.kind, expected.site):
        raise BadInput(f"{found} came in place of the {expected.kind} of {expected.site}; send each where it belongs")
    if found.round != expected.round:
        raise BadInput(f"{found} came in round {expected.round + 1}; use the bundle of this round")
    other = f"not {expected.method} in {expected.study}"
    raise BadInput(f"{found} belongs to {found.method} in study {found.study}, {other}")


class Answers(Mapping[str, Bundle]):
    """The bundles of one round of a study by site, iterated in the order of site names."""

    def __init__(self, study: str, method: str, round: int, in_memory_bytes: int = IN_MEMORY_BYTES) -> None:
        self._study, self._method, self._round = study, method, round
        self._room = in_memory_bytes
        self._held: dict[str, Bundle] = {}
        self._spooled: dict[str, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, site: str, bundle: Bundle) -> None:
        """Keep one answer; a second one of the same site, or one that belongs elsewhere, is refused."""
        refuse_stray(bundle, Envelope("answer", self._study, self._method, site, self._round))
        if site in self:
            raise BadInput(f"{site} answered twice in round {self._round + 1}; its first answer stands")
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

    def __contains__(self, site: object) -> bool:
        return site in self._held or site in self._spooled

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._held, *self._spooled]))

    def __len__(self) -> int:
        return len(self._held) + len(self._spooled)
