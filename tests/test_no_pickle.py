"""Nothing that arrives is ever run: no pickle, no `torch.load`, no `eval` anywhere in the package.

One place may run Python that is not ours: a method file that the user names on the command line, in
`methods/registry.py`. It is listed here, and this test finds every other.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import wardround

PACKAGE = Path(wardround.__file__).parent
MODULES = {  # importing one is enough
    "_pickle", "cloudpickle", "code", "dill", "joblib", "marshal", "multiprocessing", "pickle", "pickletools", "runpy",
    "shelve", "torch.multiprocessing", "torch.package",
}  # fmt: skip
CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.export.load",
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile",
    "concurrent.futures.ProcessPoolExecutor",
    "importlib.import_module", "importlib.util.spec_from_file_location", "importlib.util.module_from_spec",
}  # fmt: skip
METHODS = {"exec_module", "load_module", "read_pickle", "to_pickle"}  # of whatever object
ALLOWED = {
    ("deploy/onnx_file.py", "importlib.import_module"),  # optional packages, whose names are written there
    ("methods/registry.py", "importlib.import_module"),  # the built-in methods, found in our own package
    ("methods/registry.py", "importlib.util.spec_from_file_location"),  # the user's own method file
    ("methods/registry.py", "importlib.util.module_from_spec"),
    ("methods/registry.py", ".exec_module"),
}


def findings(source: str) -> Iterator[str]:
    """What a module imports, names or calls that could run what it reads."""
    tree = ast.parse(source)
    real: dict[str, str] = {}  # what a name in this module stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for found in node.names:
                top = found.name.partition(".")[0]
                real[found.asname or top] = found.name if found.asname else top
                yield from _modules(found.name)
        elif isinstance(node, ast.ImportFrom):
            for found in node.names:
                real[found.asname or found.name] = f"{node.module}.{found.name}"
                yield from _modules(f"{node.module}.{found.name}")
    for node in ast.walk(tree):
        name = _dotted(node, real)
        if name in CALLS:
            yield name
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield f".{node.attr}"
        if isinstance(node, ast.Call):
            yield from _unsafe_arguments(_dotted(node.func, real), node)


def _modules(name: str) -> Iterator[str]:
    parts = name.split(".")
    starts = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    yield from sorted(starts & MODULES)


def _dotted(node: ast.AST, real: dict[str, str]) -> str | None:
    """`np.load` as `numpy.load`, where it is a chain of names."""
    if isinstance(node, ast.Name):
        return real.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        of = _dotted(node.value, real)
        return of and f"{of}.{node.attr}"
    return None


def _unsafe_arguments(name: str | None, call: ast.Call) -> Iterator[str]:
    """numpy reads pickles unless it is told not to; a later version may change what it does by default."""
    pickles = [word.value for word in call.keywords if word.arg == "allow_pickle"]
    forbidden = [isinstance(value, ast.Constant) and value.value is False for value in pickles]
    if not all(forbidden) or (name == "numpy.load" and not pickles):
        yield "allow_pickle"


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), finding)
        for path in PACKAGE.rglob("*.py")
        for finding in findings(path.read_text(encoding="utf-8"))
    }
    assert sorted(found - ALLOWED) == []
    assert ("methods/registry.py", ".exec_module") in found  # the search does search


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("import pickle", "pickle"),
        ("import torch, pickle as p", "pickle"),
        ("from pickle import loads", "pickle"),
        ("def f():\n    from joblib import load", "joblib"),
        ("import torch.multiprocessing as mp", "torch.multiprocessing"),
        ("from torch import multiprocessing", "torch.multiprocessing"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch\ntorch.load(path, weights_only=True)", "torch.load"),
        ("import torch as t\nread = t.load", "torch.load"),
        ("from torch import load\nload(path)", "torch.load"),
        ("from torch import load as read\nread(path)", "torch.load"),
        ("import torch.jit\ntorch.jit.load(path)", "torch.jit.load"),
        ("eval(text)", "eval"),
        ("list(map(eval, texts))", "eval"),
        ("exec(text)", "exec"),
        ("compile(text, 'x', 'exec')", "compile"),
        ("__import__(name)", "__import__"),
        ("import importlib\nimportlib.import_module(name)", "importlib.import_module"),
        ("spec.loader.exec_module(module)", ".exec_module"),
        ("frame.to_pickle(path)", ".to_pickle"),
        ("import numpy as np\nnp.load(path)", "allow_pickle"),
        ("import numpy\nnumpy.load(path, allow_pickle=True)", "allow_pickle"),
        ("from numpy import load\nload(path, allow_pickle=flag)", "allow_pickle"),
    ],
)
def test_it_would_be_found(source: str, finding: str) -> None:
    assert finding in list(findings(source))


@pytest.mark.parametrize(
    "source",
    [
        "net.eval()",
        "import torch\ntorch.compile(net)",
        "import re\nre.compile('x')",
        "from safetensors.torch import load\nload(data)",
        "import json\njson.load(file)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "from importlib import resources",
    ],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert list(findings(source)) == []
