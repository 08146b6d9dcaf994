"""`wardround predict`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.progress import Bars, Silent
from wardround.show import printable

Model = Annotated[Path, typer.Argument(hidden=True)]
Images = Annotated[list[Path], typer.Argument(hidden=True)]
Out = Annotated[Path | None, typer.Option(help="file to write the table to; must not exist (default: print it)")]
DeviceName = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; ONNX: the CPU", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no notes")]
Json = Annotated[bool, typer.Option("--json", help="the table as JSON")]


def predict_command(
    model: Model,
    images: Images,
    out: Out = None,
    device: DeviceName = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Use an exported MODEL on IMAGES: a table of probabilities, as CSV.

    MODEL is the folder of an export, its model.safetensors or its model.onnx. IMAGES are pictures, DICOM files,
    folders of them or .npz files. An image that cannot be read is named, the others go on, and the exit code is then 1.
    """
    if out is not None and out.exists():
        raise BadInput(f"{out} exists already; choose another file")

    from wardround.deploy import table
    from wardround.deploy.predict import predict

    console = Console(stderr=True)
    progress = Silent() if quiet or not console.is_terminal else Bars(console)
    found = predict(model, images, device, progress)
    text = table.as_json(found) + "\n" if as_json else table.as_csv(found)
    if out is None:
        typer.echo(text, nl=False)
    else:
        with disk_errors(out):
            write_atomically(out, text.encode())
    for note in [] if quiet else found.notes:
        _tell(f"note: {note}")
    for failure in found.failures:
        _tell(f"failed: {failure.reason}")
    if found.failures:
        raise typer.Exit(1)


def _tell(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")
