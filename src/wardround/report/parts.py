"""What every part of the page is made of: tables, drawings, and figures with their numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

View = dict[str, Any]

BLANK: View = {"text": "", "title": "", "strong": False, "left": False, "shade": None, "picture": None}


def tabulate(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], real: Sequence[Sequence[Any]] = ()
) -> View:
    """A table for the template: the first cell of a row is its heading, the others are text or dicts with more.

    `real` are rows of patients' images, which the template marks.
    """
    body = _body(rows)
    left_columns = {i for row in body for i, cell in enumerate(row["cells"], start=1) if cell["left"]}
    names = [{"text": name, "left": i in left_columns} for i, name in enumerate(head)]
    return {"caption": caption, "head": names, "rows": body, "real": _body(real)}


def _body(rows: Sequence[Sequence[Any]]) -> list[View]:
    cells = [[cell if isinstance(cell, dict) else {"text": cell} for cell in row[1:]] for row in rows]
    return [{"head": row[0], "cells": [{**BLANK, **c} for c in line]} for row, line in zip(rows, cells, strict=True)]


def drawn(svg: str) -> Markup:
    """A chart as markup."""
    return Markup(svg)  # noqa: S704 - charts escape every text they are given


def figure(title: str, words: str, svg: str, table: View) -> View:
    """A chart under its title and its definition, with its numbers behind it."""
    return {"title": title, "words": words, "svg": drawn(svg) if svg else "", "table": table}
