"""What a tool that keeps runs must be able to take, and which tools there are."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from wardround.errors import BadInput

TOOLS = ("tensorboard", "mlflow")
MISSING = "{} is not installed; install it with: pip install 'wardround[tracking]'"


class Sink(Protocol):
    """One run in one tool.

    `seen` holds every figure that the tool already has of this run, by name and step. It is read from the tool itself,
    so that no figure is logged twice, however often the run or its tracking was stopped.
    """

    place: str  # where to look, in words
    seen: set[tuple[str, int]]

    def settings(self, values: Mapping[str, object]) -> None:
        """What the run was asked for, by dotted key."""

    def figure(self, name: str, step: int, value: float) -> None:
        """One figure."""

    def texts(self, values: Mapping[str, str]) -> None:
        """Texts by title, in full each time: what is under a title already may be replaced."""

    def flush(self) -> None:
        """Hand everything over."""

    def close(self, is_finished: bool) -> None:
        """Nothing more comes now; the run may be finished, or go on another day."""


def plain_name(name: str) -> str:
    """A name with nothing in it but what every tool allows."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)


def check(tools: Sequence[str]) -> None:
    """`BadInput` where a tool is unknown or not installed; asked before work begins."""
    for tool in tools:
        if tool not in TOOLS:
            raise BadInput(f"runs cannot be tracked with {tool!r}; use {' or '.join(TOOLS)}")
        if importlib.util.find_spec(tool) is None:
            raise BadInput(MISSING.format(tool))


def open_sink(tool: str, run: Path, name: str) -> Sink:
    """The run in a tool, begun or gone on with; `name` is what it is called there."""
    try:
        if tool == "tensorboard":
            from wardround.tracking.tensorboard_sink import TensorBoardSink

            return TensorBoardSink(run)
        from wardround.tracking.mlflow_sink import MlflowSink

        return MlflowSink(run, name)
    except ImportError as error:  # installed in part, such as MLflow without what its database needs
        raise BadInput(MISSING.format(error.name or tool)) from error
