"""Pages of the documentation with figures between marks, which scripts fill from stored results."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from wardround.errors import BadInput

END = "<!-- end of figures -->"


def begin(script: str) -> str:
    """The mark before the figures of a script, or of one part of it."""
    return f"<!-- figures: {script} -->"


def fill(page: Path, parts: Mapping[str, str], picture: str | None = None) -> int:
    """Write new text between the marks of some scripts, and a picture beside the page; the exit code."""
    text = page.read_text(encoding="utf-8")
    try:
        for script, figures in parts.items():
            text = _filled(text, script, figures, page)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    page.write_text(text, encoding="utf-8")
    if picture is not None:
        page.with_suffix(".svg").write_text(picture, encoding="utf-8")
    return 0


def _filled(page: str, script: str, text: str, path: Path) -> str:
    """A page with new text between the marks of a script."""
    before, opened, rest = page.partition(begin(script))
    _, closed, after = rest.partition(END)
    if not opened or not closed:
        raise BadInput(f"{path} has no {begin(script)} and {END} after it; add them where the figures should stand")
    return f"{before}{opened}\n{text}\n{closed}{after}"
