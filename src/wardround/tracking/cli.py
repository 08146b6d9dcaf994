"""`wardround track`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wardround.show import printable

Run = Annotated[Path, typer.Argument(metavar="RUN", hidden=True)]
To = Annotated[list[str], typer.Option("--to", help="tensorboard or mlflow; may be repeated")]


def track_command(run: Run, to: To) -> None:
    """Log the record of RUN, finished or not, to TensorBoard or MLflow.

    May be done again at any time: nothing is logged twice. Prints how to look at it.
    """
    from wardround.tracking.follow import track
    from wardround.tracking.sink import check

    check(to)
    for tool in to:
        for place in track(run, tool):
            typer.echo(printable(place))
