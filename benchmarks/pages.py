"""Pages of the documentation with figures between marks, which scripts fill from stored results."""

from __future__ import annotations

from pathlib import Path

from wardround.errors import BadInput

END = "<!-- end of figures -->"


def begin(script: str) -> str:
    """The mark before the figures of a script, or of one part of it."""
    return f"<!-- figures: {script} -->"


def filled(page: str, script: str, text: str, path: Path) -> str:
    """A page with new text between the marks of a script."""
    before, opened, rest = page.partition(begin(script))
    _, closed, after = rest.partition(END)
    if not opened or not closed:
        raise BadInput(f"{path} has no {begin(script)} and {END} after it; add them where the figures should stand")
    return f"{before}{opened}\n{text}\n{closed}{after}"
