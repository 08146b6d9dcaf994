r"""Text from outside (class names, file names, a study's words), made harmless for where it goes.

Characters that do not print become their code, such as `\x1b`, so that none can steer a terminal or turn text around.
"""

import re

FORMULA = "=+-@＝＋－＠"  # what a spreadsheet takes for the beginning of a formula, in both widths


def visible(text: str) -> str:
    """All of the text, with nothing in it that does not print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped(text: str) -> str:
    r"""For Markdown: shown as it is, in one line, without markup, HTML or links; `\` is Markdown's own escape."""
    marked = re.sub(r"([\\`*_\[\]<>|&~#!@$])", r"\\\1", visible(text))
    return re.sub(r"(?i)(www)\.", r"\1\.", marked.replace("://", r":\//"))


def cell(text: str) -> str:
    """For a table that a spreadsheet may open: a cell that would be run as a formula gets an apostrophe in front."""
    shown = visible(text)
    return f"'{shown}" if shown.lstrip(" '").startswith(tuple(FORMULA)) else shown
