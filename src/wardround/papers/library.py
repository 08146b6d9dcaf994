"""The tables that come with the package, found by their ids."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from pydantic import ValidationError

from wardround.errors import BadInput
from wardround.papers.schema import Table
from wardround.settings import hint

FOLDER = "tables"


@cache
def ids() -> tuple[str, ...]:
    """Every table and figure, paper by paper, tables first and in the order of their numbers."""
    names = (file.name for file in _folder().iterdir())
    return tuple(sorted((name.removesuffix(".toml") for name in names if name.endswith(".toml")), key=_order))


@cache
def table(id: str) -> Table:
    """The table of an id."""
    if id not in ids():
        raise BadInput(f"there is no table {id!r}; {hint(id, ids()) or '`wardround papers list` shows all'}")
    return read_table(_folder() / f"{id}.toml")


def tables() -> list[Table]:
    """All of them."""
    return [table(id) for id in ids()]


def read_table(path: Traversable) -> Table:
    """A table from its file, or one line that says what is wrong with it."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path.name} is no table of a paper: {error}; correct it") from error
    try:
        found = Table.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        words = first["msg"].removeprefix("Value error, ")
        raise BadInput(f"{path.name} is no table of a paper: {f'{where}: ' if where else ''}{words}") from error
    if path.name != f"{found.id}.toml":
        raise BadInput(f"{path.name} is no table of a paper: its id is {found.id!r}; name the file {found.id}.toml")
    return found


def _folder() -> Traversable:
    return resources.files("wardround.papers") / FOLDER


def _order(id: str) -> tuple[str, bool, int]:
    paper, _, number = id.rpartition("-")
    return paper, number.startswith("fig"), int(number.removeprefix("fig"))
