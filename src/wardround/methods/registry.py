"""Methods by name.

A file in `wardround.methods` that defines a `Method` with a `name` is found; there is nothing else to register.
A method of one's own needs no change to the package: `--method path/to/file.py` runs it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from wardround import methods as package
from wardround.errors import BadInput
from wardround.methods.base import Method
from wardround.settings import checked


@cache
def known() -> dict[str, type[Method]]:
    """Every built-in method, by name in alphabetical order."""
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        for method in _defined_in(importlib.import_module(f"{package.__name__}.{info.name}")):
            found[method.name] = method
    return dict(sorted(found.items()))


def find(name: str) -> type[Method]:
    """A method by name, or the one method in a Python file of the user's own."""
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in known():
        close = difflib.get_close_matches(name, known(), 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known())}"
        raise BadInput(f"there is no method {name!r}; {hint} (`wardround methods` describes them)")
    return known()[name]


def make(name: str, own: Mapping[str, Any]) -> Method:
    """A method with its own settings, validated."""
    method = find(name)
    return method(checked(method.Settings, own, prefix=method.name))


def own_settings(tree: Mapping[str, Any], method: str, compared: Sequence[str] = ()) -> dict[str, Any]:
    """Of a study's table `set`, what is meant for a method: under its name, or under no method's name.

    What is there for methods that are not run is checked as well: a slip should not wait for the day that they are.
    """
    mine = {*known(), *compared, method}
    tables = {name: _table(name, tree[name]) for name in tree if name in mine}
    for name, table in tables.items():
        if name in known():
            make(name, table)
    bare = {key: value for key, value in tree.items() if key not in mine}
    for key, value in bare.items():
        if isinstance(value, dict) and method in known():  # none of these has a table as a setting
            find(key)
    return {**bare, **tables.get(method, {})}


def _table(method: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise BadInput(f"set.{method} = {found!r} cannot be used: it should be a table of {method}'s settings")
    return found


def _defined_in(module: ModuleType) -> Iterator[type[Method]]:
    for value in vars(module).values():
        is_method = isinstance(value, type) and issubclass(value, Method) and hasattr(value, "name")
        if is_method and value.__module__ == module.__name__:
            yield value


@cache
def _from_file(path: Path) -> type[Method]:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; give the path of a Python file or a name from `wardround methods`")
    name = f"wardround_user_method_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(
            f"{path} cannot be loaded as Python: {_what_and_where(error, spec.origin)}; correct it"
        ) from error
    found = list(_defined_in(module))
    if len(found) != 1:
        raise BadInput(f"{path} must define exactly one Method with a name, it defines {len(found)}")
    if inspect.isabstract(found[0]):
        missing = ", ".join(sorted(found[0].__abstractmethods__))
        raise BadInput(f"{found[0].__name__} in {path} does not answer every question of a Method; add {missing}")
    return found[0]


def _what_and_where(error: Exception, file: str | None) -> str:
    """An exception in one line, with the line of the user's file that it came out of."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {error}" + (f" in line {lines[-1]}" if lines else "")
